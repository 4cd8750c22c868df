"""Every bit kept, in two thirds of the space: the exponents of 16-bit floats are coded, the rest is stored.

    chunk -> each exponent's difference to its channel's mean -> levels of two bits (`kernels.exponents`)

Exponents of keys and values hold under 3 bits of information, mantissas and signs nearly all of theirs; that bounds any
coder at about 1.5. Pages without a view of single tokens have one mean a layer. Elements of one byte are coded whole,
with rANS; wider ones go through zstandard, byte by byte.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kernels.byteplanes import join_planes, split_planes
from kernels.entropy import SCALE, capacity_words, count_symbols, normalize
from kernels.exponents import LEVELS, SYMBOLS, capacity_nbytes, coded_nbytes, decode_exponents, encode_exponents
from workbench.codecs.base import Codec, CorruptDataError
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes
from workbench.codecs.symbol_coding import read_streams, write_streams
from workbench.errors import InvalidInputError
from workbench.layout import KVLayout

__all__ = ["Lossless"]

_LEVELS = "levels"
_RANS = "rans"
_ZSTD = "zstd"
# Stands before levels: rANS, which had the plain name once, begins with two symbols in ascending order.
_MARK = np.frombuffer(b"levels 1", np.uint8)


@dataclass(frozen=True, kw_only=True, repr=False)
class Lossless(Codec):
    """Args:
    coder: Of the exponents: "levels"; "rans"; or "zstd", zstandard at level 1.
    """

    coder: str = _LEVELS
    tolerance: ClassVar[float] = 0.0

    def __post_init__(self):
        if self.coder not in (_LEVELS, _RANS, _ZSTD):
            raise InvalidInputError(f"coder is {self.coder!r}; it must be {_LEVELS!r}, {_RANS!r} or {_ZSTD!r}")

    def encode(self, chunk: np.ndarray, layout: KVLayout) -> memoryview:
        chunk = np.ascontiguousarray(chunk)
        if self._coder(layout) == _LEVELS:
            return _encode_levels(chunk, layout)
        high, low = _planes(chunk, layout)
        if low is not None:
            split_planes(chunk.reshape(-1).view(np.uint16), high=high, low=low)
        writer = PayloadWriter(self._planes_nbytes(chunk.shape, layout))
        if self._coder(layout) == _ZSTD:
            _write_zstd(high, writer)
        else:
            _write_rans(high, chunk.shape, layout, writer)
        if low is not None:
            writer.append(low)
        return writer.finish()

    def decode(self, data: bytes | memoryview, layout: KVLayout, out: np.ndarray) -> None:
        whole = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
        reader, coder = PayloadReader(data), self._coder(layout)
        if coder == _LEVELS:
            _read_levels(whole, layout, reader)
        else:
            _read_planes(whole, layout, reader, coder)
        reader.finish()
        if whole is not out:
            out[...] = whole

    def max_nbytes(self, layout: KVLayout) -> int:
        if self._coder(layout) == _LEVELS:
            return _levels_nbytes(layout.chunk_shape, layout)
        return self._planes_nbytes(layout.chunk_shape, layout)

    def _coder(self, layout: KVLayout) -> str:
        if layout.dtype_nbytes == 2:
            return self.coder
        return _RANS if layout.dtype_nbytes == 1 and self.coder != _ZSTD else _ZSTD

    def _planes_nbytes(self, shape: tuple[int, ...], layout: KVLayout) -> int:
        count = int(np.prod(shape)) // (2 if layout.dtype_nbytes == 2 else 1)
        streams, rows, columns, tables = _arrangement(shape, layout)
        # A table has at least one slot of 4096 for a symbol that occurs: twelve bits at most. zstandard needs less.
        words = streams * capacity_words(rows * columns * 12 // 16)
        coded = sections_nbytes(((tables, 2), 1), ((tables * 256,), 2), ((streams,), 4), ((words,), 2))
        return coded + count + 16


def _encode_levels(chunk: np.ndarray, layout: KVLayout) -> memoryview:
    writer = PayloadWriter(_levels_nbytes(chunk.shape, layout, while_written=True))
    writer.append(_MARK)
    rest = writer.section((*chunk.shape[:2], chunk.shape[2] // 2), np.uint8)
    places = zip(_by_channel(chunk.view(np.uint16), layout), _by_channel(rest, layout), strict=True)
    for values, low in places:
        bases, symbols, left = (writer.section(*section) for section in _head_sections(values.shape))
        codes = writer.section((capacity_nbytes(values.shape, layout.dtype),), np.uint8)
        nbytes = encode_exponents(
            values, rest=low, bases=bases, symbols=symbols, left=left, codes=codes, dtype=layout.dtype
        )
        writer.shorten(codes, nbytes)
    return writer.finish()


def _read_levels(out: np.ndarray, layout: KVLayout, reader: PayloadReader) -> None:
    if not np.array_equal(reader.section(_MARK.shape, np.uint8), _MARK):
        raise CorruptDataError("not what this coder writes: another one's, or of another version")
    rest = reader.section((*out.shape[:2], out.shape[2] // 2), np.uint8)
    places = zip(_by_channel(out.view(np.uint16), layout), _by_channel(rest, layout), strict=True)
    for values, low in places:
        bases, symbols, left = (reader.section(*section) for section in _head_sections(values.shape))
        try:
            nbytes = int(coded_nbytes(left, values.shape, layout.dtype).sum())
            codes = reader.section((nbytes,), np.uint8)
            decode_exponents(values, rest=low, bases=bases, symbols=symbols, left=left, codes=codes, dtype=layout.dtype)
        except ValueError as error:
            raise CorruptDataError(str(error)) from error


def _by_channel(elements: np.ndarray, layout: KVLayout) -> list[np.ndarray]:
    """Views of (layers, blocks, elements of a page) for `kernels.exponents`: keys and values, or all in one."""
    layers, blocks, count = elements.shape
    heads, tokens, size = layout.num_kv_heads, layout.block_size, layout.head_size
    if layout.page_format == "token-major":
        return [elements.reshape(layers, blocks, heads, tokens, 2 * size, 1).swapaxes(1, 2)]
    if layout.page_format == "vllm-cpu-vec":
        both = elements.reshape(layers, blocks, heads, 2, tokens * size).swapaxes(1, 2)
        keys, values = both[:, :, :, 0], both[:, :, :, 1]
        lines = layers, heads, blocks
        return [keys.reshape(*lines, 1, size, tokens), values.reshape(*lines, tokens, size, 1)]
    return [elements.reshape(layers, 1, blocks, 1, 1, count)]


def _head_sections(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], type]]:
    """(shape, type) of the bases, symbols and numbers left of values of that shape."""
    heads = shape[:2]
    return [((*heads, shape[4]), np.uint8), ((*heads, SYMBOLS), np.uint8), ((*heads, LEVELS), np.uint32)]


def _levels_nbytes(shape: tuple[int, ...], layout: KVLayout, *, while_written: bool = False) -> int:
    """Bytes that a chunk of that shape takes at most, done or while it is written."""
    pages = np.empty((*shape[:2], shape[2] // 2), np.uint8)  # for its shape: never touched
    total = sections_nbytes((_MARK.shape, 1), (pages.shape, 1))
    for part in _by_channel(pages, layout):
        codes = capacity_nbytes(part.shape, layout.dtype) if while_written else part.size
        sections = [(section, np.dtype(kind).itemsize) for section, kind in _head_sections(part.shape)]
        total += sections_nbytes(*sections, ((codes,), 1))
    return total


def _read_planes(out: np.ndarray, layout: KVLayout, reader: PayloadReader, coder: str) -> None:
    high, low = _planes(out, layout)
    if coder == _ZSTD:
        _read_zstd(high, reader)
    else:
        _read_rans(high, out.shape, layout, reader)
    if low is not None:
        rest = reader.section(low.shape, np.uint8)
        join_planes(out.reshape(-1).view(np.uint16), high=high, low=rest)


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
