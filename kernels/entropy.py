"""An entropy coder for small alphabets: rANS with static tables, 32 interleaved lanes, on byte symbols.

    count_symbols(symbols, choice, counts=out)                        counts[choice[s, r], symbol] += 1
    choose_tables(symbols, costs) -> choice                           the cheapest table for each row
    table_totals(symbols, costs) -> totals                            bits of each row with each table
    encode(symbols, choice, frequencies=..., words=out) -> counts     words[s, :counts[s]] = stream s
    decode(symbols, choice, frequencies=..., words=..., counts=...)   symbols <- words

symbols      (streams, rows, columns) uint8
choice       (streams, rows) unsigned: the table of each row
frequencies  (tables, 256) uint16; each row sums to 4096; a symbol that occurs has a frequency from 1 to 4095
costs        (tables, 256) float32, bits of each symbol: `table_costs`
totals       (streams, rows, tables) float32
words        (streams, capacity) uint16; `capacity_words` of a stream's symbols always suffices
counts       (streams,) int64: words of each stream

Symbol i of a row is coded by lane i % 32, rows in order, so any column count is allowed. A lane's state x starts at
2^16 and stays in [2^16, 2^32); the encoder walks backwards. With f the symbol's frequency and c the sum of those
before it:

    encode   if x >= f * 2^20: emit x mod 2^16, x = x >> 16       then x = (x // f) * 4096 + x % f + c
    decode   s = symbol whose [c, c + f) holds x mod 4096          x = f * (x >> 12) + x mod 4096 - c
             if x < 2^16: x = x * 2^16 + next word

A stream is the 32 final states (low word, then high word), then the words in the order the decoder reads them: by row,
by column, lanes that need one in ascending order. A decoder that does not end at state 2^16 in every lane and at the
last word raises ValueError: the words are not what was encoded.

Method: J. Duda, "Asymmetric numeral systems" (arXiv:1311.2540); interleaving: F. Giesen (arXiv:1402.3392).
"""

import numpy as np

from kernels.dispatch import dispatch

__all__ = [
    "LANES",
    "SCALE",
    "capacity_words",
    "choose_tables",
    "count_symbols",
    "decode",
    "encode",
    "normalize",
    "table_costs",
    "table_totals",
]

LANES = 32
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
_LOWEST_STATE = 1 << 16


def capacity_words(num_symbols: int) -> int:
    """Words that a stream of that many symbols needs at most: one a symbol, and the states (with room for a vector)."""
    return num_symbols + 4 * LANES


def normalize(counts: np.ndarray) -> np.ndarray:
    """(.., 256) counts -> frequencies that sum to 4096; what occurs gets at least 1, nothing gets all of it.

    A table without counts becomes uniform. A symbol alone in its table gets 4095: the state would not move at 4096.
    """
    counts = np.asarray(counts, np.float64)
    total = counts.sum(-1, keepdims=True)
    counts = np.where(total > 0, counts, 1.0)
    share = counts / counts.sum(-1, keepdims=True)
    frequencies = np.where(counts > 0, np.maximum(1, np.rint(share * SCALE)), 0).astype(np.int64)
    frequencies = np.minimum(frequencies, SCALE - 1)
    tables = frequencies.reshape(-1, 256)
    largest = tables.argmax(1)
    missing = SCALE - tables.sum(1)
    # The largest entry makes up for rounding, where that hardly changes it.
    simple = (np.abs(missing) * 8 <= tables.max(1)) & (tables.max(1) + missing < SCALE)
    tables[np.arange(len(tables)), largest] += np.where(simple, missing, 0)
    for place in np.flatnonzero(~simple):
        _settle(tables[place], largest[place])
    return frequencies.astype(np.uint16)


def _settle(table: np.ndarray, largest: int) -> None:
    """Make a table sum to the scale where its largest entry alone should not make up the difference."""
    while table.sum() > SCALE:
        table[table.argmax()] -= 1
    table[largest] += min(SCALE - table.sum(), SCALE - 1 - table[largest])
    table[(largest + 1) % 256] += SCALE - table.sum()


def table_costs(frequencies: np.ndarray) -> np.ndarray:
    """(tables, 256) float32: bits that each symbol takes; a symbol that a table does not have costs 10^6."""
    with np.errstate(divide="ignore"):
        bits = SCALE_BITS - np.log2(frequencies.astype(np.float64))
    return np.where(frequencies > 0, bits, 1e6).astype(np.float32)


def _check_counts(symbols: np.ndarray, choice: np.ndarray, *, counts: np.ndarray) -> None:
    if choice.shape != symbols.shape[:2] or not symbols.flags.c_contiguous:
        raise ValueError(f"choice {choice.shape} and contiguous symbols {symbols.shape} must agree")
    if counts.ndim != 2 or counts.shape[1] != 256 or (choice.size and choice.max() >= len(counts)):
        raise ValueError(f"counts are {counts.shape}; they must be (tables, 256) for every table in choice")


def _count_symbols_reference(symbols: np.ndarray, choice: np.ndarray, *, counts: np.ndarray) -> None:
    for table in np.unique(choice):
        counts[table] += np.bincount(symbols[choice == table].reshape(-1), minlength=256)


def _check_choice(symbols: np.ndarray, costs: np.ndarray) -> None:
    if symbols.ndim != 3 or symbols.dtype != np.uint8 or not symbols.flags.c_contiguous:
        raise ValueError(f"symbols are {symbols.dtype} {symbols.shape}; they must be contiguous uint8, 3-dimensional")
    if costs.ndim != 2 or costs.shape[1] != 256 or not 1 <= len(costs) <= 256 or costs.dtype != np.float32:
        raise ValueError(f"costs are {costs.dtype} {costs.shape}; they must be float32 (1 to 256, 256)")


def _table_totals_reference(symbols: np.ndarray, costs: np.ndarray) -> np.ndarray:
    rows = symbols.reshape(-1, symbols.shape[2])
    counts = np.stack([np.bincount(row, minlength=256) for row in rows]) if len(rows) else np.zeros((0, 256))
    totals = counts @ costs.T.astype(np.float64)
    return totals.astype(np.float32).reshape(*symbols.shape[:2], len(costs))


def _choose_tables_reference(symbols: np.ndarray, costs: np.ndarray) -> np.ndarray:
    return _table_totals_reference(symbols, costs).argmin(2).astype(np.uint8)


def _check(symbols: np.ndarray, choice: np.ndarray, *, frequencies: np.ndarray, words: np.ndarray, counts=None) -> None:
    streams, rows, columns = symbols.shape
    if choice.shape != (streams, rows):
        raise ValueError(f"choice is {choice.shape}; it must be {(streams, rows)}")
    if frequencies.ndim != 2 or frequencies.shape[1] != 256 or not (frequencies.sum(1, dtype=np.int64) == SCALE).all():
        raise ValueError(f"frequencies must be (tables, 256), each table summing to {SCALE}")
    if frequencies.max() >= SCALE:
        raise ValueError(f"no symbol may have the frequency {SCALE}")
    if choice.size and choice.max() >= len(frequencies):
        raise ValueError(f"choice names table {choice.max()} of {len(frequencies)}")
    if words.ndim != 2 or len(words) != streams or not words.flags.c_contiguous:
        raise ValueError(f"words are {words.shape}; they must be contiguous ({streams}, capacity)")
    if counts is None and words.shape[1] < capacity_words(rows * columns):
        raise ValueError(f"words have room for {words.shape[1]}; {capacity_words(rows * columns)} are needed")
    if counts is not None and (counts.shape != (streams,) or ((counts < 2 * LANES) | (counts > words.shape[1])).any()):
        raise ValueError(f"counts must be {streams} numbers from {2 * LANES} to {words.shape[1]}")


def _starts(frequencies: np.ndarray) -> np.ndarray:
    return np.cumsum(frequencies, axis=1, dtype=np.int64) - frequencies


def _encode_reference(
    symbols: np.ndarray, choice: np.ndarray, *, frequencies: np.ndarray, words: np.ndarray
) -> np.ndarray:
    streams, rows, columns = symbols.shape
    starts, counts = _starts(frequencies), np.zeros(streams, np.int64)
    for stream in range(streams):
        state, emitted = np.full(LANES, _LOWEST_STATE, np.int64), []
        for row in range(rows - 1, -1, -1):
            table = choice[stream, row]
            for begin in range((columns - 1) // LANES * LANES, -1, -LANES):
                symbol = symbols[stream, row, begin : begin + LANES]
                lanes = state[: len(symbol)]
                frequency = frequencies[table, symbol].astype(np.int64)
                if not frequency.all():
                    raise ValueError(f"stream {stream}, row {row}: a symbol has no frequency in table {table}")
                full = lanes >= frequency << (32 - SCALE_BITS)
                emitted.append(lanes[full] & 0xFFFF)
                lanes = np.where(full, lanes >> 16, lanes)
                state[: len(symbol)] = (lanes // frequency << SCALE_BITS) + lanes % frequency + starts[table, symbol]
        head = np.stack([state & 0xFFFF, state >> 16], axis=1).reshape(-1)
        whole = np.concatenate([head, *emitted[::-1]])
        words[stream, : len(whole)] = whole
        counts[stream] = len(whole)
    return counts


def _decode_reference(
    symbols: np.ndarray, choice: np.ndarray, *, frequencies: np.ndarray, words: np.ndarray, counts: np.ndarray
) -> None:
    streams, rows, columns = symbols.shape
    starts = _starts(frequencies)
    symbol_of = np.stack([np.repeat(np.arange(256), table) for table in frequencies])
    for stream in range(streams):
        given = words[stream, : counts[stream]].astype(np.int64)
        state, place = given[0 : 2 * LANES : 2] | given[1 : 2 * LANES : 2] << 16, 2 * LANES
        for row in range(rows):
            table = choice[stream, row]
            for begin in range(0, columns, LANES):
                lanes = state[: min(LANES, columns - begin)]
                slot = lanes & (SCALE - 1)
                symbol = symbol_of[table, slot]
                symbols[stream, row, begin : begin + len(lanes)] = symbol
                lanes = frequencies[table, symbol] * (lanes >> SCALE_BITS) + slot - starts[table, symbol]
                empty = lanes < _LOWEST_STATE
                needed = int(empty.sum())
                if place + needed > len(given):
                    raise ValueError(f"stream {stream} ends early: it is not what was encoded")
                lanes[empty] = lanes[empty] << 16 | given[place : place + needed]
                state[: len(lanes)], place = lanes, place + needed
        if place != len(given) or (state != _LOWEST_STATE).any():
            raise ValueError(f"stream {stream} does not end as it began: it is not what was encoded")


count_symbols = dispatch(_count_symbols_reference, check=_check_counts, numba="kernels.entropy_numba:count_symbols")
choose_tables = dispatch(_choose_tables_reference, check=_check_choice, numba="kernels.entropy_numba:choose_tables")
table_totals = dispatch(_table_totals_reference, check=_check_choice, numba="kernels.entropy_numba:table_totals")
encode = dispatch(_encode_reference, check=_check, numba="kernels.entropy_numba:encode")
decode = dispatch(_decode_reference, check=_check, numba="kernels.entropy_numba:decode")
