"""The rANS coder for CPUs: 32 lanes in LLVM vectors, with gathers for the tables and compressed stores for the words.

On a CPU with AVX-512 VBMI2 each of these is one or two instructions; elsewhere LLVM writes them out, and it is slower.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.entropy import LANES, SCALE, SCALE_BITS
from kernels.lanes_numba import Lanes, step
from kernels.threads import run_units

__all__ = ["choose_tables", "count_symbols", "decode", "encode", "table_totals"]

_I1, _I8, _I16, _I32, _I64, _F32 = (*(ir.IntType(n) for n in (1, 8, 16, 32, 64)), ir.FloatType())
_LOWEST_STATE = 1 << 16


def count_symbols(symbols: np.ndarray, choice: np.ndarray, *, counts: np.ndarray) -> None:
    # On one thread: the counts of a table are shared by many rows.
    _count(symbols, choice.astype(np.uint16), counts)


@njit(nogil=True, cache=True)
def _count(symbols, choice, counts):
    streams, rows, columns = symbols.shape
    # Four counts a symbol: equal neighbours do not wait for each other's store.
    apart = np.zeros((len(counts), 4, 256), np.int64)
    for stream in range(streams):
        for row in range(rows):
            own, line = apart[choice[stream, row]], symbols[stream, row]
            for i in range(0, columns - columns % 4, 4):
                own[0, line[i]] += 1
                own[1, line[i + 1]] += 1
                own[2, line[i + 2]] += 1
                own[3, line[i + 3]] += 1
            for i in range(columns - columns % 4, columns):
                own[0, line[i]] += 1
    for table in range(len(counts)):
        for symbol in range(256):
            for i in range(4):
                counts[table, symbol] += apart[table, i, symbol]


def choose_tables(symbols: np.ndarray, costs: np.ndarray) -> np.ndarray:
    choice = np.zeros(symbols.shape[:2], np.uint8)
    flat = symbols.reshape(-1, symbols.shape[2])
    run_units(_choose, len(flat), symbols.nbytes, flat, np.ascontiguousarray(costs.T), choice.reshape(-1))
    return choice


def table_totals(symbols: np.ndarray, costs: np.ndarray) -> np.ndarray:
    totals = np.zeros((*symbols.shape[:2], len(costs)), np.float32)
    flat = symbols.reshape(-1, symbols.shape[2])
    run_units(_totals, len(flat), symbols.nbytes, flat, np.ascontiguousarray(costs.T), totals.reshape(len(flat), -1))
    return totals


@njit(nogil=True, cache=True)
def _choose(first, last, rows, costs, choice):
    counts, total = np.empty((256, 4), np.int32), np.empty(costs.shape[1], np.float32)
    for row in range(first, last):
        _add_up(rows[row], costs, counts, total)
        choice[row] = np.argmin(total)


@njit(nogil=True, cache=True)
def _totals(first, last, rows, costs, totals):
    counts = np.empty((256, 4), np.int32)
    for row in range(first, last):
        _add_up(rows[row], costs, counts, totals[row])


@njit(nogil=True, cache=True)
def _add_up(row, costs, counts, total):
    """total <- bits of a row; costs are (256, tables): the tables are the inner loop, so that it becomes vectors.

    Four counts a symbol: equal neighbours do not wait for each other's store.
    """
    counts[:] = 0
    for i in range(len(row)):
        counts[row[i], i % 4] += 1
    total[:] = 0
    for symbol in range(256):
        count = np.float32(counts[symbol, 0] + counts[symbol, 1] + counts[symbol, 2] + counts[symbol, 3])
        if count > 0:
            for t in range(len(total)):
                total[t] += count * costs[symbol, t]


def encode(symbols: np.ndarray, choice: np.ndarray, *, frequencies: np.ndarray, words: np.ndarray) -> np.ndarray:
    starts = np.cumsum(frequencies, axis=1, dtype=np.int64) - frequencies
    entries = (starts << 16 | frequencies).astype(np.uint32)
    counts = np.zeros(len(symbols), np.int64)
    symbols = np.ascontiguousarray(symbols)
    choice = choice.astype(np.uint16)
    run_units(_encode_streams, len(symbols), symbols.nbytes * 4, symbols, choice, entries, words, counts)
    if (counts < 0).any():
        raise ValueError(f"stream {int(np.argmin(counts))}: a symbol has no frequency in its row's table")
    return counts


def decode(
    symbols: np.ndarray, choice: np.ndarray, *, frequencies: np.ndarray, words: np.ndarray, counts: np.ndarray
) -> None:
    if not symbols.flags.c_contiguous:
        raise ValueError("symbols must be contiguous")
    entries = np.empty((len(frequencies), SCALE), np.uint32)
    choice = choice.astype(np.uint16)
    used = np.zeros(len(frequencies), np.bool_)
    used[choice] = True
    _fill_entries(frequencies, used, entries)
    good = np.zeros(len(symbols), np.bool_)
    run_units(
        _decode_streams,
        -(-len(symbols) // _SIDE_BY_SIDE),
        symbols.nbytes * 4,
        symbols,
        choice,
        entries,
        words,
        counts,
        good,
    )
    if not good.all():
        raise ValueError(f"stream {int(np.argmin(good))} is not what was encoded")


@njit(nogil=True, cache=True)
def _fill_entries(frequencies, used, entries):
    """Entry of a slot: symbol | frequency << 8 | (slot - start) << 20; of the tables in use only."""
    for table in np.flatnonzero(used):
        slot = 0
        for symbol in range(256):
            for i in range(frequencies[table, symbol]):
                entries[table, slot] = symbol | np.int64(frequencies[table, symbol]) << 8 | i << 20
                slot += 1


class _Stream(Lanes):
    """Emits what both directions need on 32 lanes."""

    def __init__(self, builder):
        super().__init__(builder, LANES)

    def _call(self, name, result, *args):
        function = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(self.builder.module.declare_intrinsic(name, (), function), args)

    def gather(self, base, index):
        """The i32 at base + 4 * index, for indices i32."""
        offset = self.shifted("shl", self.cast("zext", index, _I64), 2)
        addresses = self.builder.add(self.splat(base), offset)
        pointers = self.builder.inttoptr(addresses, ir.VectorType(_I32.as_pointer(), self.count))
        vector = ir.VectorType(_I32, self.count)
        name = f"llvm.masked.gather.v{self.count}i32.v{self.count}p0"
        everything, undefined = self.constant(_I1, 1), ir.Constant(vector, ir.Undefined)
        return self._call(name, vector, pointers, ir.Constant(_I32, 4), everything, undefined)

    def active(self, left):
        """Mask of the lanes below `left` (i64)."""
        lane = ir.Constant(ir.VectorType(_I64, self.count), list(range(self.count)))
        return self.builder.icmp_signed("<", lane, self.splat(left))

    def count_set(self, mask):
        """Set lanes of a mask, as i64."""
        bits = self.builder.bitcast(mask, ir.IntType(self.count))
        return self.builder.zext(self._call(f"llvm.ctpop.i{self.count}", bits.type, bits), _I64)

    def load_symbols(self, address, mask):
        """i8 symbols of the active lanes; 0 elsewhere."""
        vector = ir.VectorType(_I8, self.count)
        pointer = self.builder.inttoptr(address, vector.as_pointer())
        name = f"llvm.masked.load.v{self.count}i8.p0"
        return self._call(name, vector, pointer, ir.Constant(_I32, 1), mask, self.constant(_I8, 0))

    def store_symbols(self, value, address, mask):
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        name = f"llvm.masked.store.v{self.count}i8.p0"
        self._call(name, ir.VoidType(), value, pointer, ir.Constant(_I32, 1), mask)

    def expand(self, address, mask):
        """Consecutive words at an address, to the set lanes in ascending order; as i32."""
        pointer = self.builder.inttoptr(address, _I16.as_pointer())
        vector = ir.VectorType(_I16, self.count)
        name = f"llvm.masked.expandload.v{self.count}i16"
        return self.cast("zext", self._call(name, vector, pointer, mask, self.constant(_I16, 0)), _I32)

    def compress(self, value, address, mask):
        """The set lanes of i32 words, in ascending order, to consecutive places at an address.

        In a register first, then a store under a mask: a compressing store is microcode on AMD.
        """
        words = self.cast("trunc", value, _I16)
        name = f"llvm.experimental.vector.compress.v{self.count}i16"
        packed = self._call(name, words.type, words, mask, self.constant(_I16, 0))
        pointer = self.builder.inttoptr(address, packed.type.as_pointer())
        store = f"llvm.masked.store.v{self.count}i16.p0"
        kept = self.active(self.count_set(mask))
        self._call(store, ir.VoidType(), packed, pointer, ir.Constant(_I32, 2), kept)

    def divide(self, state, frequency):
        """(state // frequency, state % frequency) of i32 lanes, for quotients below 2^20."""
        builder = self.builder
        ratio = builder.fdiv(self.cast("uitofp", state, _F32), self.cast("uitofp", frequency, _F32))
        quotient = self.cast("fptoui", ratio, _I32)
        rest = builder.sub(state, builder.mul(quotient, frequency))
        # A float32 has 24 bits: the quotient is right, or one too high, or one too low.
        high = builder.icmp_signed("<", rest, self.constant(_I32, 0))
        low = builder.icmp_signed(">=", rest, frequency)
        change = builder.sub(self.cast("zext", high, _I32), self.cast("zext", low, _I32))
        return builder.sub(quotient, change), builder.add(rest, builder.mul(change, frequency))

    def decode_step(self, state, place, mask, target, entries, end):
        """Decode the active lanes' symbols to `target`; `state` and `place` are stack slots and are moved on."""
        builder, lanes, word = self.builder, self.builder.load(state), self.builder.load(place)
        entry = self.gather(entries, self.and_(lanes, SCALE - 1))
        self.store_symbols(self.cast("trunc", entry, _I8), target, mask)
        frequency = self.and_(self.shifted("lshr", entry, 8), SCALE - 1)
        moved = builder.mul(frequency, self.shifted("lshr", lanes, SCALE_BITS))
        moved = builder.add(moved, self.shifted("lshr", entry, 20))
        needy = builder.and_(mask, self.below(moved, self.constant(_I32, _LOWEST_STATE)))
        after = step(builder, word, self.count_set(needy), 2)
        readable = builder.select(builder.icmp_signed(">", after, end), builder.sub(end, _I64(2 * LANES)), word)
        filled = builder.or_(self.shifted("shl", moved, 16), self.expand(readable, needy))
        builder.store(builder.select(mask, builder.select(needy, filled, moved), lanes), state)
        builder.store(after, place)

    def below(self, value, limit):
        return self.builder.icmp_unsigned("<", value, limit)


@intrinsic(prefer_literal=True)
def _decode_rows(typing_context, symbols, entries, places, ends, states, columns, streams):
    """Decode one row of each of `streams` streams side by side: their chains of dependent steps overlap.

    The first four are addresses of one address a stream; `places` (of the next word) are moved on. Past its end a
    stream goes on without reading there.
    """

    def codegen(context, builder, signature, args):
        symbols, entries, places, ends, states, columns = args[:6]
        emit, zero, width = _Stream(builder), ir.Constant(_I64, 0), ir.Constant(_I64, LANES)

        def pointers(array):
            base = builder.inttoptr(array, _I64.as_pointer())
            return [builder.load(builder.gep(base, [_I64(i)])) for i in range(streams.literal_value)]

        tables, targets, limits = pointers(entries), pointers(symbols), pointers(ends)
        place = [cgutils.alloca_once_value(builder, word) for word in pointers(places)]
        state_at = [step(builder, states, _I64(i), 4 * LANES) for i in range(streams.literal_value)]
        state = [cgutils.alloca_once_value(builder, emit.load(address, _I32)) for address in state_at]
        with cgutils.for_range_slice(builder, zero, columns, width, _I64) as (index, _):
            mask = emit.active(builder.sub(columns, index))
            for i in range(streams.literal_value):
                target = builder.add(targets[i], index)
                emit.decode_step(state[i], place[i], mask, target, tables[i], limits[i])
        for i, address in enumerate(state_at):
            emit.store(builder.load(state[i]), address)
            moved = builder.add(places, _I64(8 * i))
            builder.store(builder.load(place[i]), builder.inttoptr(moved, _I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6, streams), codegen


@intrinsic
def _encode_row(typing_context, symbols, columns, states, entries, words):
    """Encode one row backwards, writing words below an address; return the lowest written, or 0 for a bad symbol."""

    def codegen(context, builder, signature, args):
        symbols, columns, states, entries, words = args
        emit = _Stream(builder)
        place, state = (cgutils.alloca_once_value(builder, v) for v in (words, emit.load(states, _I32)))
        bad = cgutils.alloca_once_value(builder, emit.constant(_I1, 0))
        steps = builder.sdiv(builder.add(columns, _I64(LANES - 1)), _I64(LANES))
        with cgutils.for_range(builder, steps) as loop:
            last = builder.sub(steps, _I64(1))
            index = builder.mul(builder.sub(last, builder.sext(loop.index, _I64)), _I64(LANES))
            mask, lanes = emit.active(builder.sub(columns, index)), builder.load(state)
            symbol = emit.cast("zext", emit.load_symbols(builder.add(symbols, index), mask), _I32)
            entry = emit.gather(entries, symbol)
            frequency = emit.and_(entry, 0xFFFF)
            missing = builder.and_(mask, builder.icmp_unsigned("==", frequency, emit.constant(_I32, 0)))
            builder.store(builder.or_(builder.load(bad), missing), bad)
            limit = emit.shifted("shl", frequency, 32 - SCALE_BITS)
            full = builder.and_(mask, builder.icmp_unsigned(">=", lanes, limit))
            word = step(builder, builder.load(place), emit.count_set(full), -2)
            emit.compress(lanes, word, full)
            kept = builder.select(full, emit.shifted("lshr", lanes, 16), lanes)
            quotient, rest = emit.divide(kept, frequency)
            moved = builder.add(emit.shifted("shl", quotient, SCALE_BITS), rest)
            moved = builder.add(moved, emit.shifted("lshr", entry, 16))
            builder.store(builder.select(mask, moved, lanes), state)
            builder.store(word, place)
        emit.store(builder.load(state), states)
        any_bad = builder.icmp_unsigned(
            "!=", builder.bitcast(builder.load(bad), ir.IntType(LANES)), ir.IntType(LANES)(0)
        )
        return builder.select(any_bad, _I64(0), builder.load(place))

    return types.int64(*(types.int64,) * 5), codegen


@njit(nogil=True, cache=True)
def _encode_streams(first, last, symbols, choice, entries, words, counts):
    _, rows, columns = symbols.shape
    state = np.empty(LANES, np.uint32)
    states, end = state.ctypes.data, words.shape[1]
    for stream in range(first, last):
        state[:] = _LOWEST_STATE
        base = words.ctypes.data + 2 * stream * end
        place = base + 2 * end
        for row in range(rows - 1, -1, -1):
            if place > 0:
                table, source = choice[stream, row], symbols.ctypes.data + (stream * rows + row) * columns
                place = _encode_row(source, columns, states, entries.ctypes.data + 1024 * np.int64(table), place)
        if place == 0:
            counts[stream] = -1
            continue
        begin = (place - base) // 2 - 2 * LANES
        for lane in range(LANES):
            words[stream, begin + 2 * lane] = state[lane] & 0xFFFF
            words[stream, begin + 2 * lane + 1] = state[lane] >> 16
        counts[stream] = end - begin
        for i in range(end - begin):
            words[stream, i] = words[stream, begin + i]


_SIDE_BY_SIDE = 2


@njit(nogil=True, cache=True)
def _decode_streams(first, last, symbols, choice, entries, words, counts, good):
    """Units are groups of _SIDE_BY_SIDE streams."""
    _, rows, columns = symbols.shape
    state = np.empty(LANES * _SIDE_BY_SIDE, np.uint32)
    target, entry = np.empty(_SIDE_BY_SIDE, np.int64), np.empty(_SIDE_BY_SIDE, np.int64)
    place, end = np.empty(_SIDE_BY_SIDE, np.int64), np.empty(_SIDE_BY_SIDE, np.int64)
    for start in range(first * _SIDE_BY_SIDE, min(last * _SIDE_BY_SIDE, len(symbols)), _SIDE_BY_SIDE):
        streams = min(_SIDE_BY_SIDE, len(symbols) - start)
        for i in range(streams):
            stream = start + i
            for lane in range(LANES):
                high = np.uint32(words[stream, 2 * lane + 1]) << np.uint32(16)
                state[i * LANES + lane] = words[stream, 2 * lane] | high
            place[i] = words.ctypes.data + 2 * (stream * words.shape[1] + 2 * LANES)
            end[i] = place[i] + 2 * (counts[stream] - 2 * LANES)
        for row in range(rows):
            for i in range(streams):
                entry[i] = entries.ctypes.data + 4 * SCALE * np.int64(choice[start + i, row])
                target[i] = symbols.ctypes.data + ((start + i) * rows + row) * columns
            a, b, c, d = target.ctypes.data, entry.ctypes.data, place.ctypes.data, end.ctypes.data
            if streams == _SIDE_BY_SIDE:
                _decode_rows(a, b, c, d, state.ctypes.data, columns, _SIDE_BY_SIDE)
                continue
            for i in range(streams):
                states = state.ctypes.data + 4 * LANES * i
                _decode_rows(a + 8 * i, b + 8 * i, c + 8 * i, d + 8 * i, states, columns, 1)
        for i in range(streams):
            good[start + i] = place[i] == end[i] and (state[i * LANES : (i + 1) * LANES] == _LOWEST_STATE).all()
