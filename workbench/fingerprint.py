"""Digests of weights on disk: the part of the identity that a model's name cannot stand for."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

__all__ = ["fingerprint_files", "weights_fingerprint"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_WHOLE_FILE_BYTES = 64 << 20  # larger files are sampled: the ends and evenly spaced pieces in between
_PIECE_BYTES = 64 << 10
_PIECES = 256


def weights_fingerprint(path: str | Path, name: str = "", revision: str = "") -> str:
    """Digest of the weight files in a model directory.

    Args:
        path: Directory, or a single file. Where it does not exist, name and revision stand in for it.
        name: The model's name, used only without files.
        revision: Its revision, used only without files.

    A file over 64 MiB is read in 256 pieces of 64 KiB spread over it: retrained, merged or requantised weights differ
    in all of them. Names and times do not count, so a copied directory has the same fingerprint.
    """
    files = _weight_files(Path(path))
    if not files:
        return "name:" + hashlib.sha256(f"{name}\0{revision}".encode()).hexdigest()
    return "files:" + fingerprint_files(files)


def fingerprint_files(files: list[Path]) -> str:
    """One digest over the contents of files, in the order of their names."""
    sha = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        status = file.stat()
        sha.update(_file_digest(str(file), status.st_size, status.st_mtime_ns))
    return sha.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    found = [file for file in sorted(path.iterdir()) if file.suffix in _WEIGHT_SUFFIXES and file.is_file()]
    safe = [file for file in found if file.suffix == ".safetensors"]
    return safe or found


@lru_cache(maxsize=256)
def _file_digest(path: str, size: int, modified_ns: int) -> bytes:
    """Digest of one file; cached as long as size and time stay the same."""
    sha = hashlib.sha256(size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            while piece := file.read(1 << 20):
                sha.update(piece)
            return sha.digest()
        for number in range(_PIECES):
            offset = (size - _PIECE_BYTES) * number // (_PIECES - 1)
            sha.update(os.pread(file.fileno(), _PIECE_BYTES, offset))
    return sha.digest()
