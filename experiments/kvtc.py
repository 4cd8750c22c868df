"""A KVTC-like coder (arXiv:2511.01815): principal components learned from calibration text, then ECSQ's quantiser.

    calibration text -> KV of many tokens -> components of every few layers' keys (turned back) and values -> a file
    chunk -> keys turned back -> coordinates -> one step for all -> rANS, one row a component

    codec = fit_kvtc(model, texts, folder / "kvtc.npz")
    measure_quality(model, [codec])                               as any other codec

A study: it shows what calibration is worth, and what it costs where the text is of another kind. The components are of
`layers_together` layers and all their heads, not of all layers at once; steps take the place of the paper's bits by
dynamic programming: at one step for all coordinates, an entropy coder spends on each what its spread asks for.
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from experiments.quality import Prefix, StudyModel, chunk_of_prefix, layout_of_prefix
from kernels.floats import decode16, encode16
from kernels.rope import angles_of
from workbench.codecs.base import KeysAndValues, KVCodec, UnrepresentableError
from workbench.codecs.payload import PayloadReader, PayloadWriter
from workbench.codecs.symbol_coding import coded_nbytes, read_symbols, write_symbols
from workbench.errors import InvalidInputError

__all__ = ["KVTC", "calibration_texts", "fit_kvtc"]


class _Components(NamedTuple):
    """Of keys or of values: means (groups, features), bases (groups, features, rank), rms of the features."""

    means: np.ndarray
    bases: np.ndarray
    rms: float


@dataclass(frozen=True, kw_only=True, repr=False)
class KVTC(KVCodec):
    """Args:
    basis: The file that `fit_kvtc` wrote.
    digest: Its SHA-256, so that a chunk's key names the calibration.
    step: Of the coordinates, over the RMS of all calibration features without their means.
    """

    sink_tokens: int = 4
    basis: str = ""
    digest: str = ""
    step: float = 0.5
    tolerance: ClassVar[None] = None

    def __repr__(self) -> str:
        return f"kvtc(digest={self.digest!r}, step={self.step})"  # wherever the file lies

    def _write(self, kv: KeysAndValues, writer: PayloadWriter) -> None:
        theta, parts = _load(self.basis, self.digest)
        for part, components in zip(_features(kv, theta, parts), parts, strict=True):
            step = np.float32(self.step * components.rms)
            coordinates = np.einsum("gtf,gfr->grt", part - components.means[:, None], components.bases)
            if not np.isfinite(coordinates).all():
                raise UnrepresentableError(f"the chunk holds NaN or infinity; {self!r} keeps finite numbers only")
            symbols = np.clip(np.rint(coordinates / step), -127, 127) + 128
            write_symbols(np.ascontiguousarray(symbols, np.uint8), writer)

    def _read(self, kv: KeysAndValues, reader: PayloadReader) -> None:
        theta, parts = _load(self.basis, self.digest)
        found = []
        for components in parts:
            groups, _, rank = components.bases.shape
            symbols = np.empty((groups, rank, kv.num_tokens), np.uint8)
            read_symbols(symbols, reader)
            coordinates = (symbols.astype(np.float32) - 128) * np.float32(self.step * components.rms)
            found.append(np.einsum("grt,gfr->gtf", coordinates, components.bases) + components.means[:, None])
        _put_features(kv, theta, found)

    def _nbytes(self, kv: KeysAndValues) -> int:
        _, parts = _load(self.basis, self.digest)
        shapes = [(len(c.bases), c.bases.shape[2], kv.num_tokens) for c in parts]
        return sum(coded_nbytes(shape) for shape in shapes)


def fit_kvtc(
    model: StudyModel, texts: Iterable[str], path: Path, *, tokens_each: int = 1024, layers_together: int = 6,
    rank_fraction: float = 0.6, step: float = 0.5,
) -> KVTC:  # fmt: skip
    """Learn the components from texts, write them to a file, and return the codec that reads it.

    Args:
        texts: Calibration; each at least `tokens_each` tokens.
        layers_together: Layers of one basis; a divisor of the model's layers.
        rank_fraction: Components kept, of all.
    """
    prefixes = [model.prefix(model.tokenizer(text)["input_ids"][:tokens_each], tokens_each) for text in texts]
    layers = len(prefixes[0].keys)
    if layers % layers_together:
        raise InvalidInputError(f"layers_together is {layers_together}; it must divide {layers}")
    theta = float(model.rope_theta)
    arrays: dict[str, np.ndarray] = {"theta": np.array(theta)}
    for name, features in zip(
        ("keys", "values"), _of_prefixes(prefixes, theta, layers // layers_together), strict=True
    ):
        means = features.mean(1)
        centred = features - means[:, None]
        _, vectors = np.linalg.eigh(np.einsum("gtf,gtx->gfx", centred, centred))
        rank = round(features.shape[2] * rank_fraction)
        arrays[f"{name}_means"], arrays[f"{name}_bases"] = means, vectors[:, :, : -rank - 1 : -1].astype(np.float32)
        arrays[f"{name}_rms"] = np.sqrt(np.square(centred).mean())
    np.savez(path, **arrays)
    return KVTC(basis=str(path), digest=hashlib.sha256(path.read_bytes()).hexdigest()[:16], step=step)


def calibration_texts(count: int = 9) -> list[str]:
    """Reference prose that comes with Python, none of it in `experiments.quality.sample_texts`."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    third, length = len(whole) // 3, 12000
    starts = [part * third + 20000 + n * length for n in range(-(-count // 3)) for part in range(3)]
    return [whole[start : start + length] for start in starts[:count]]


@functools.lru_cache(maxsize=4)
def _load(path: str, digest: str) -> tuple[float, tuple[_Components, _Components]]:
    data = Path(path).read_bytes()
    if (found := hashlib.sha256(data).hexdigest()[:16]) != digest:
        raise InvalidInputError(f"{path} has the digest {found}; the codec was made with {digest}")
    with np.load(path, allow_pickle=False) as arrays:
        keys, values = (
            _Components(arrays[f"{n}_means"], arrays[f"{n}_bases"], float(arrays[f"{n}_rms"]))
            for n in ("keys", "values")
        )
        return float(arrays["theta"]), (keys, values)


def _of_prefixes(prefixes: Sequence[Prefix], theta: float, groups: int) -> list[np.ndarray]:
    """Features of keys and of values, (groups, tokens, features), of all chunks of all prefixes."""
    layout, found = layout_of_prefix(prefixes[0]), []
    for prefix in prefixes:
        for start in range(0, prefix.num_tokens, layout.chunk_tokens):
            views = layout.keys_and_values(chunk_of_prefix(prefix, layout, start))
            found.append(_grouped(KeysAndValues(*views, layout), theta, groups))
    return [np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)]


def _features(kv: KeysAndValues, theta: float, parts: Sequence[_Components]) -> list[np.ndarray]:
    groups, features = parts[0].means.shape
    if groups * features != len(kv.keys) * kv.layout.num_kv_heads * kv.layout.head_size:
        raise InvalidInputError(f"the components are of {groups} x {features} features; the chunk has others")
    return _grouped(kv, theta, groups)


def _grouped(kv: KeysAndValues, theta: float, groups: int) -> list[np.ndarray]:
    """(groups, tokens, layers of a group x heads x size) float32 of keys, turned back, and of values."""
    numbers = [decode16(np.ascontiguousarray(part), kv.layout.dtype) for part in (kv.keys, kv.values)]
    numbers[0] = _turned(numbers[0], theta, -1)
    shape = (groups, len(kv.keys) // groups, kv.num_tokens, -1)
    by_token = [part.transpose(0, 1, 3, 2, 4).reshape(shape).swapaxes(1, 2) for part in numbers]
    return [part.reshape(groups, kv.num_tokens, -1) for part in by_token]


def _put_features(kv: KeysAndValues, theta: float, features: Sequence[np.ndarray]) -> None:
    """The inverse of `_grouped`, into the chunk."""
    layers, blocks, heads, tokens, size = kv.keys.shape
    for part, found, is_keys in ((kv.keys, features[0], True), (kv.values, features[1], False)):
        groups = len(found)
        by_layer = found.reshape(groups, blocks * tokens, layers // groups, heads, size).swapaxes(1, 2)
        numbers = by_layer.reshape(layers, blocks, tokens, heads, size).swapaxes(2, 3)
        part[...] = encode16(_turned(numbers, theta, 1) if is_keys else numbers, kv.layout.dtype)


def _turned(numbers: np.ndarray, theta: float, direction: int) -> np.ndarray:
    """Keys (layers, blocks, heads, tokens, size) turned by their position in the chunk."""
    _, blocks, _, tokens, size = numbers.shape
    turn = np.exp(direction * 1j * angles_of(blocks * tokens, size, theta)).reshape(blocks, 1, tokens, size // 2)
    pairs = (numbers[..., : size // 2] + 1j * numbers[..., size // 2 :]) * turn.astype(np.complex64)
    return np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float32)
