"""What the entropy-coded codecs share: a fixed set of tables, one chosen a row, and rANS streams in a payload.

The tables are generalised Gaussians of many widths and three shapes, computed here in integers that every machine
agrees on, so that no table is stored: one byte a row names the cheapest.
"""

import functools
import math

import numpy as np

from kernels.entropy import (
    LANES,
    SCALE,
    capacity_words,
    choose_tables,
    decode,
    encode,
    normalize,
    table_costs,
    table_totals,
)
from workbench.codecs.base import CorruptDataError
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes

__all__ = [
    "classed_nbytes",
    "coded_nbytes",
    "read_classed",
    "read_streams",
    "read_symbols",
    "write_classed",
    "write_streams",
    "write_symbols",
]

_WIDTHS = tuple(2.0 ** (k / 4) for k in range(-12, 26))  # standard deviations, in steps
_SHAPES = (2.0, 1.4, 1.0)  # exponents: a Gaussian, one between, and a Laplacian


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """(frequencies, costs) of every (shape, width), and a uniform table, which bounds the cost of any row."""
    counts = [_generalized_gaussian(width, shape) for shape in _SHAPES for width in _WIDTHS]
    frequencies = normalize(np.stack([*counts, np.ones(256)]))
    return frequencies, table_costs(frequencies)


def _generalized_gaussian(width: float, shape: float) -> np.ndarray:
    """Weights of symbols 0 to 255 around 128, in whole 2^-30: tails that round to nothing are left out."""
    scale = width * math.sqrt(math.gamma(1 / shape) / math.gamma(3 / shape))
    points = [(symbol - 128 + (i + 0.5) / 16 - 0.5) / scale for symbol in range(256) for i in range(16)]
    density = np.array([math.exp(-(abs(p) ** shape)) for p in points]).reshape(256, 16).sum(1)
    share = np.rint(density / density.sum() * 2**30)
    # A symbol rarer than half a slot would still take one: better another table for the row that holds it.
    return np.where(share >= 2**30 / (2 * SCALE), share, 0)


def coded_nbytes(shape: tuple[int, int, int]) -> int:
    """Bytes of symbols (streams, rows, columns) at most: twelve bits a symbol, and the states."""
    streams, rows, columns = shape
    words = streams * capacity_words(rows * columns * 12 // 16)
    return sections_nbytes(((streams, rows), 1), ((streams,), 4), ((words,), 2))


def write_symbols(symbols: np.ndarray, writer: PayloadWriter) -> None:
    """Append (streams, rows, columns) uint8 symbols, coded with the cheapest of the fixed tables for each row."""
    frequencies, costs = _tables()
    choice = choose_tables(symbols, costs)
    writer.append(choice)
    write_streams(symbols, choice, frequencies, writer)


def read_symbols(symbols: np.ndarray, reader: PayloadReader) -> None:
    """Fill (streams, rows, columns) uint8 symbols; CorruptDataError if they are not what was written."""
    frequencies, _ = _tables()
    choice = reader.section(symbols.shape[:2], np.uint8)
    if choice.size and choice.max() >= len(frequencies):
        raise CorruptDataError(f"table {choice.max()} of {len(frequencies)}")
    read_streams(symbols, choice, frequencies, reader)


def classed_nbytes(shape: tuple[int, int, int, int]) -> int:
    """Bytes of symbols (streams, rows, classes, columns) at most."""
    streams, rows, classes, columns = shape
    words = streams * capacity_words(rows * classes * columns * 12 // 16)
    return sections_nbytes(((streams, rows), 1), ((streams, classes), 1), ((streams,), 4), ((words,), 2))


def write_classed(symbols: np.ndarray, writer: PayloadWriter) -> None:
    """Append (streams, rows, classes, columns) symbols: a table a row, so many widths to the side for each class.

    What is louder or quieter in a class is so in every row of a stream, so that a table a row and class, which four
    classes would make four times as dear, is said by one shift a stream and class.
    """
    streams, rows, classes, columns = symbols.shape
    (frequencies, costs), moves = _tables(), _moves()
    choice, shifts = np.zeros((streams, rows), np.uint8), np.zeros((streams, classes), np.int8)
    for stream in range(streams):  # one at a time: the totals of all are larger than the chunk
        totals = table_totals(symbols[stream], costs)  # (rows, classes, tables)
        power = _SQUARES[symbols[stream]].mean((0, 2)) + 1e-2
        places = np.rint(2 * np.log2(power / power.mean())).astype(int) - _SHIFTS[0]
        for _ in range(2):
            moved = [totals[:, c, moves[place]] for c, place in enumerate(np.clip(places, 0, len(moves) - 1))]
            choice[stream] = np.sum(moved, axis=0).argmin(1)
            every = [np.take_along_axis(totals[:, c], moves[:, choice[stream]].T, 1) for c in range(classes)]
            places = np.sum(every, axis=1).argmin(1)
        shifts[stream] = _SHIFTS[places]
    writer.append(choice)
    writer.append(shifts)
    flat = symbols.reshape(streams, rows * classes, columns)
    write_streams(flat, _table_of_class(choice, shifts), frequencies, writer)


def read_classed(symbols: np.ndarray, reader: PayloadReader) -> None:
    """Fill (streams, rows, classes, columns) symbols from what `write_classed` appended."""
    streams, rows, classes, columns = symbols.shape
    frequencies, _ = _tables()
    choice = reader.section((streams, rows), np.uint8)
    shifts = reader.section((streams, classes), np.int8)
    if choice.size and choice.max() >= len(frequencies):
        raise CorruptDataError(f"table {choice.max()} of {len(frequencies)}")
    if shifts.size and not _SHIFTS[0] <= shifts.min() <= shifts.max() <= _SHIFTS[-1]:
        raise CorruptDataError(f"shifts from {shifts.min()} to {shifts.max()}")
    flat = symbols.reshape(streams, rows * classes, columns)
    read_streams(flat, _table_of_class(choice, shifts), frequencies, reader)


_SHIFTS = np.arange(-16, 13)
_SQUARES = np.square(np.arange(256, dtype=np.float32) - 128)


@functools.cache
def _moves() -> np.ndarray:
    """(shifts, tables): the table so many widths wider, of the same shape; the last, which is uniform, stays."""
    tables = np.arange(len(_SHAPES) * len(_WIDTHS))
    width = np.clip(tables % len(_WIDTHS) + _SHIFTS[:, None], 0, len(_WIDTHS) - 1)
    moved = tables // len(_WIDTHS) * len(_WIDTHS) + width
    return np.append(moved, np.full((len(_SHIFTS), 1), len(tables)), axis=1)


def _table_of_class(choice: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """(streams, rows * classes) tables."""
    tables = _moves()[shifts[:, None] - _SHIFTS[0], choice[:, :, None]]
    return tables.astype(np.uint8).reshape(len(choice), -1)


def write_streams(symbols: np.ndarray, choice: np.ndarray, frequencies: np.ndarray, writer: PayloadWriter) -> None:
    """Append coded symbols: how many words each stream has, then the words."""
    words = np.empty((len(symbols), capacity_words(symbols[0].size)), np.uint16)
    counts = encode(symbols, choice, frequencies=frequencies, words=words)
    writer.append(counts.astype(np.uint32))
    section, end = writer.section((int(counts.sum()),), np.uint16), 0
    for stream, count in zip(words, counts, strict=True):
        section[end : end + count] = stream[:count]
        end += count


def read_streams(symbols: np.ndarray, choice: np.ndarray, frequencies: np.ndarray, reader: PayloadReader) -> None:
    """Fill symbols from what `write_streams` appended."""
    counts = reader.section((len(symbols),), np.uint32).astype(np.int64)
    if (counts > capacity_words(symbols[0].size)).any() or (counts < 2 * LANES).any():
        raise CorruptDataError(f"streams of {counts.min()} to {counts.max()} words for {symbols[0].size} symbols")
    section, end = reader.section((int(counts.sum()),), np.uint16), 0
    words = np.zeros((len(symbols), int(counts.max())), np.uint16)
    for stream, count in zip(words, counts, strict=True):
        stream[:count] = section[end : end + count]
        end += count
    try:
        decode(symbols, choice, frequencies=frequencies, words=words, counts=counts)
    except ValueError as error:
        raise CorruptDataError(str(error)) from error
