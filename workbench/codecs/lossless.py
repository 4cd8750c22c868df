"""Every bit kept, in two thirds of the space: the exponents of 16-bit floats are entropy-coded, the rest is stored.

    chunk -> exponent plane, rest plane -> rANS of the exponents, one table a (layer, head, keys or values)

Exponents of keys and values hold under 3 bits of information, mantissas and signs nearly all of theirs; that bounds any
coder at about 1.5. Pages without a view of single tokens share one table a layer. Elements of one byte are coded
whole; wider ones go through zstandard.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kernels.byteplanes import join_planes, split_planes
from kernels.entropy import SCALE, capacity_words, count_symbols, normalize
from workbench.codecs.base import Codec, CorruptDataError
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes
from workbench.codecs.symbol_coding import read_streams, write_streams
from workbench.errors import InvalidInputError
from workbench.layout import KVLayout

__all__ = ["Lossless"]

_ZSTD = "zstd"
_RANS = "rans"


@dataclass(frozen=True, kw_only=True, repr=False)
class Lossless(Codec):
    """Args:
    coder: "rans", or "zstd" for zstandard at level 1 over the byte planes.
    """

    coder: str = _RANS
    tolerance: ClassVar[float] = 0.0

    def __post_init__(self):
        if self.coder not in (_RANS, _ZSTD):
            raise InvalidInputError(f"coder is {self.coder!r}; it must be 'rans' or 'zstd'")

    def encode(self, chunk: np.ndarray, layout: KVLayout) -> memoryview:
        chunk = np.ascontiguousarray(chunk)
        high, low = _planes(chunk, layout)
        if low is not None:
            split_planes(chunk.reshape(-1).view(np.uint16), high=high, low=low)
        writer = PayloadWriter(self._max_nbytes(chunk.shape, layout))
        if self._coder(layout) == _ZSTD:
            _write_zstd(high, writer)
        else:
            _write_rans(high, chunk.shape, layout, writer)
        if low is not None:
            writer.append(low)
        return writer.finish()

    def decode(self, data: bytes | memoryview, layout: KVLayout, out: np.ndarray) -> None:
        whole = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        high, low = _planes(whole, layout)
        reader = PayloadReader(data)
        if self._coder(layout) == _ZSTD:
            _read_zstd(high, reader)
        else:
            _read_rans(high, out.shape, layout, reader)
        if low is not None:
            rest = reader.section(low.shape, np.uint8)
            join_planes(whole.reshape(-1).view(np.uint16), high=high, low=rest)
        reader.finish()
        if whole is not out:
            out[...] = whole

    def max_nbytes(self, layout: KVLayout) -> int:
        return self._max_nbytes(layout.chunk_shape, layout)

    def _coder(self, layout: KVLayout) -> str:
        return _ZSTD if layout.dtype_nbytes > 2 else self.coder

    def _max_nbytes(self, shape: tuple[int, ...], layout: KVLayout) -> int:
        count = int(np.prod(shape)) // (2 if layout.dtype_nbytes == 2 else 1)
        streams, rows, columns, tables = _arrangement(shape, layout)
        # A table has at least one slot of 4096 for a symbol that occurs: twelve bits at most. zstandard needs less.
        words = streams * capacity_words(rows * columns * 12 // 16)
        coded = sections_nbytes(((tables, 2), 1), ((tables * 256,), 2), ((streams,), 4), ((words,), 2))
        return coded + count + 16


def _planes(chunk: np.ndarray, layout: KVLayout) -> tuple[np.ndarray, np.ndarray | None]:
    """(memory of the plane to code, memory of the rest); a chunk of one-byte or wide elements is one plane, itself."""
    if layout.dtype_nbytes != 2:
        return chunk.reshape(-1), None
    count = chunk.size // 2
    return np.empty(count, np.uint8), np.empty(count, np.uint8)


def _arrangement(shape: tuple[int, ...], layout: KVLayout) -> tuple[int, int, int, int]:
    """(streams, rows of a stream, columns of a row, tables) of the coded plane."""
    layers, blocks, page_nbytes = shape
    heads, tokens, size = layout.num_kv_heads, layout.block_size, layout.head_size
    values = page_nbytes // layout.dtype_nbytes if layout.dtype_nbytes <= 2 else page_nbytes
    if layout.page_format == "token-major":
        return layers, blocks * heads * tokens * 2, size, layers * heads * 2
    if layout.page_format == "vllm-cpu-vec":
        return layers, blocks * heads * 2, tokens * size, layers * heads * 2
    return layers, blocks, values, layers


def _table_of_rows(shape: tuple[int, ...], layout: KVLayout) -> np.ndarray:
    """(streams, rows) uint16: rows are (block, head, [token,] keys or values), tables (layer, head, keys or values)."""
    streams, rows, _, tables = _arrangement(shape, layout)
    if tables == streams:
        return np.repeat(np.arange(streams, dtype=np.uint16)[:, None], rows, axis=1)
    heads, blocks = layout.num_kv_heads, shape[1]
    own = np.arange(tables, dtype=np.uint16).reshape(streams, 1, heads, 1, 2)
    return np.broadcast_to(own, (streams, blocks, heads, rows // (blocks * heads * 2), 2)).reshape(streams, rows)


def _write_rans(plane: np.ndarray, shape: tuple[int, ...], layout: KVLayout, writer: PayloadWriter) -> None:
    streams, rows, columns, tables = _arrangement(shape, layout)
    symbols, choice = plane.reshape(streams, rows, columns), _table_of_rows(shape, layout)
    counts = np.zeros((tables, 256), np.int64)
    count_symbols(symbols, choice, counts=counts)
    frequencies = normalize(counts)
    used = frequencies > 0
    ends = np.stack([used.argmax(1), 255 - used[:, ::-1].argmax(1)], axis=1).astype(np.uint8)
    inside = _between(ends)
    writer.append(ends)
    writer.append(frequencies[inside])
    write_streams(symbols, choice, frequencies, writer)


def _read_rans(plane: np.ndarray, shape: tuple[int, ...], layout: KVLayout, reader: PayloadReader) -> None:
    streams, rows, columns, tables = _arrangement(shape, layout)
    inside = _between(reader.section((tables, 2), np.uint8))
    frequencies = np.zeros((tables, 256), np.uint16)
    frequencies[inside] = reader.section((int(inside.sum()),), np.uint16)
    if (frequencies.sum(1, dtype=np.int64) != SCALE).any() or frequencies.max() >= SCALE:
        raise CorruptDataError("a table of frequencies does not sum to its scale")
    symbols = plane.reshape(streams, rows, columns)
    read_streams(symbols, _table_of_rows(shape, layout), frequencies, reader)


def _between(ends: np.ndarray) -> np.ndarray:
    """(tables, 256) mask of the symbols from first to last of each table."""
    symbol = np.arange(256)
    return (symbol >= ends[:, :1]) & (symbol <= ends[:, 1:])


def _write_zstd(plane: np.ndarray, writer: PayloadWriter) -> None:
    import zstandard

    compressed = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(plane.data)
    writer.append(np.array([len(compressed)], np.uint64))
    writer.append(np.frombuffer(compressed, np.uint8))


def _read_zstd(plane: np.ndarray, reader: PayloadReader) -> None:
    import zstandard

    (nbytes,) = reader.section((1,), np.uint64)
    frame = reader.section((int(nbytes),), np.uint8).tobytes()
    try:
        # The frame's own size is not to be trusted: it must be the plane's before anything is allocated.
        if zstandard.frame_content_size(frame) != plane.size:
            raise CorruptDataError(f"a frame that is not of {plane.size} bytes")
        plane[:] = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"zstandard: {error}") from error
