"""The contract of a codec, and what every codec of 16-bit values shares.

    encode   chunk -> views of keys and values -> sections (sinks whole, then the codec's own) -> bytes
    decode   the same sections in the same order, every length checked against the layout, into the chunk

A codec works on one chunk alone: independent of other chunks and of any query. Its parameters stand in its repr, and
the repr in the chunk's key. Checksums and the payload's length are the caller's: a payload that was changed may decode
to other numbers, but never reads or writes outside its buffers.
"""

from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import numpy as np

from workbench.errors import CacheError, InvalidInputError
from workbench.layout import KVLayout

__all__ = ["Codec", "CorruptDataError", "KVCodec", "KeysAndValues", "UnrepresentableError"]

_FLOATS = ("bfloat16", "float16")


class UnrepresentableError(CacheError):
    """The chunk holds NaN or infinity, or numbers near float32's end, that this codec cannot keep."""


class CorruptDataError(CacheError):
    """The data is not what this codec wrote for a chunk of this layout."""


class KeysAndValues(NamedTuple):
    """Views of one chunk, both uint16 bits indexed [layer, block, head, token, channel]."""

    keys: np.ndarray
    values: np.ndarray
    layout: KVLayout

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1] * self.keys.shape[3]

    @property
    def side_by_side(self) -> np.ndarray | None:
        """Both as one view [layer, block, head, token, 2 x channel] where a token's value follows its key in memory."""
        width = self.layout.head_size * self.keys.itemsize
        beside = self.values.ctypes.data - self.keys.ctypes.data == width == self.keys.strides[3] // 2
        if not beside or self.keys.strides != self.values.strides or self.keys.strides[4] != self.keys.itemsize:
            return None
        shape = (*self.keys.shape[:4], 2 * self.layout.head_size)
        return np.lib.stride_tricks.as_strided(self.keys, shape, self.keys.strides)


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Turns a chunk into bytes and back.

    Attributes:
        tolerance: Largest |x' - x| promised, as a fraction of the largest |x| among the keys (or values) of the same
            layer; 0.0 is lossless, None promises nothing for a single value.
    """

    tolerance: ClassVar[float | None] = 0.0

    @property
    def name(self) -> str:
        """The name it is asked for by: that of its file."""
        return type(self).__module__.rpartition(".")[2]

    def __repr__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(changed)})" if changed else self.name

    def encode(self, chunk: np.ndarray, layout: KVLayout) -> bytes | memoryview:
        """The chunk as bytes; the same chunk always gives the same.

        Args:
            chunk: uint8 (num_layers, blocks, page_nbytes): `layout.chunk_shape`, or a leading part of its blocks.

        Raises:
            UnrepresentableError: The chunk holds NaN or infinity and the codec is lossy.
            InvalidInputError: The layout has a dtype or page format that the codec cannot work on.
        """
        raise NotImplementedError

    def decode(self, data: bytes | memoryview, layout: KVLayout, out: np.ndarray) -> None:
        """Fill `out`, of the shape that was encoded.

        Raises:
            CorruptDataError: The data is not of this codec, layout and shape.
        """
        raise NotImplementedError

    def max_nbytes(self, layout: KVLayout) -> int:
        """Bytes that no encoded chunk of this layout exceeds."""
        raise NotImplementedError

    def bits_per_value(self, layout: KVLayout) -> float:
        """Bits of one key or value element, all overheads counted: exact at fixed rate, the most at variable rate."""
        return self.max_nbytes(layout) * 8 / (layout.chunk_nbytes // layout.dtype_nbytes)


@dataclass(frozen=True, kw_only=True, repr=False)
class KVCodec(Codec):
    """A lossy codec of bfloat16 or float16 keys and values. A subclass fills in `_write`, `_read` and `_nbytes`.

    Args:
        sink_tokens: So many leading tokens are kept whole in a chunk whose first token is an attention sink: one whose
            keys are far smaller or larger than the others'. Found out chunk by chunk.
    """

    sink_tokens: int = 0

    def __post_init__(self):
        if self.sink_tokens < 0:
            raise InvalidInputError(f"sink_tokens is {self.sink_tokens}; it must be at least 0")

    def encode(self, chunk: np.ndarray, layout: KVLayout) -> memoryview:
        from workbench.codecs.payload import PayloadWriter

        kv = _views(chunk, layout)
        writer = PayloadWriter(self._sinks_nbytes(kv) + self._nbytes(kv))
        if self.sink_tokens:
            count = self.sink_tokens if _has_sink(kv) else 0
            writer.append(np.array([count], np.uint8))
            for sinks in _first_tokens(kv, count):
                writer.append(sinks)
        self._write(kv, writer)
        return writer.finish()

    def decode(self, data: bytes | memoryview, layout: KVLayout, out: np.ndarray) -> None:
        from workbench.codecs.payload import PayloadReader

        kv, reader = _views(out, layout), PayloadReader(data)
        sinks = []
        if self.sink_tokens:
            count = int(reader.section((1,), np.uint8)[0])
            if count not in (0, self.sink_tokens):
                raise CorruptDataError(f"{count} sink tokens; {self.sink_tokens} or none were expected")
            sinks = [(place, reader.section(place.shape, np.uint16)) for place in _first_tokens(kv, count)]
        self._read(kv, reader)
        reader.finish()
        for place, bits in sinks:
            place[...] = bits

    def max_nbytes(self, layout: KVLayout) -> int:
        kv = _views(np.empty(layout.chunk_shape, np.uint8), layout)  # for its shape: never touched
        return self._sinks_nbytes(kv) + self._nbytes(kv)

    def _sinks_nbytes(self, kv: KeysAndValues) -> int:
        from workbench.codecs.payload import sections_nbytes

        if not self.sink_tokens:
            return 0
        parts = [(part.shape, 2) for part in _first_tokens(kv, self.sink_tokens)]
        return sections_nbytes(((1,), 1), *parts)

    def _write(self, kv: KeysAndValues, writer) -> None:
        raise NotImplementedError

    def _read(self, kv: KeysAndValues, reader) -> None:
        raise NotImplementedError

    def _nbytes(self, kv: KeysAndValues) -> int:
        """Bytes that `_write` needs at most for a chunk of this shape."""
        raise NotImplementedError


def _views(chunk: np.ndarray, layout: KVLayout) -> KeysAndValues:
    if layout.dtype not in _FLOATS:
        raise InvalidInputError(f"KV of dtype {layout.dtype}; a lossy codec takes {' or '.join(_FLOATS)}")
    return KeysAndValues(*layout.keys_and_values(chunk), layout)


def _first_tokens(kv: KeysAndValues, count: int) -> list[np.ndarray]:
    """The first tokens of keys and of values, (L, H, count, D) each; tokens of the first block only."""
    return [part[:, 0, :, :count] for part in (kv.keys, kv.values)] if count else []


def _has_sink(kv: KeysAndValues) -> bool:
    """Whether the first token's keys are below half or above twice the usual size in the median layer and head.

    The median, since a model's loudest layer would hide the others: in some, its keys are the same for all tokens.
    """
    from kernels.floats import decode16

    first = decode16(np.ascontiguousarray(kv.keys[:, 0, :, 0]), kv.layout.dtype)
    others = decode16(np.ascontiguousarray(kv.keys[:, -1, :, -8:]), kv.layout.dtype)
    with np.errstate(all="ignore"):
        usual = np.median(np.sqrt(np.square(others).sum(-1)), axis=-1)
        part = np.median(np.sqrt(np.square(first).sum(-1)) / usual)
    return not 0.5 <= part <= 2.0
