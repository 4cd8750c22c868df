"""`encode_exponents` and `decode_exponents` for CPUs: groups of 64 in LLVM vectors, a level's two bits as two masks.

What a level leaves is moved together, and apart again, by one instruction for 64 values on a CPU with AVX-512 VBMI2, by
a few for 8 values on one with BMI2; elsewhere LLVM writes it out value by value.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.exponents import (
    GROUP,
    LEVELS,
    SAMPLED,
    SYMBOLS,
    WHOLE,
    WORD_NBYTES,
    coded_nbytes,
    head_capacity,
    mantissa_bits,
)
from kernels.lanes_numba import Lanes, each_vector, step
from kernels.threads import run_units

__all__ = ["decode_exponents", "encode_exponents"]

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))


def encode_exponents(values: np.ndarray, *, rest, bases, symbols, left, codes, dtype: str = "bfloat16") -> int:
    units, slot = math.prod(values.shape[:2]), head_capacity(values.shape, dtype)
    if not values.size:
        bases[:], symbols[:], left[:] = 0, np.arange(SYMBOLS), 0
        return 0
    spans = np.zeros((units, 2), np.int64)
    flat = (bases.reshape(units, -1), symbols.reshape(units, -1), left.reshape(units, -1))
    source, target = (_window(values), _strides(values)), (rest.ctypes.data, _strides(rest), flat, codes, spans)
    extra, nbytes = mantissa_bits(dtype), 2 * values.nbytes
    run_units(_encode_heads, units, nbytes, source, target, values.shape[1:], slot, extra)
    return _moved_together(codes, spans)


def decode_exponents(values: np.ndarray, *, rest, bases, symbols, left, codes, dtype: str = "bfloat16") -> None:
    units = math.prod(values.shape[:2])
    if not values.size:
        return
    lengths = coded_nbytes(left, values.shape, dtype).reshape(-1)
    begins = codes.ctypes.data + np.cumsum(lengths) - lengths
    flat = (bases.reshape(units, -1), symbols.reshape(units, -1), left.reshape(units, -1))
    target, source = (values.ctypes.data, _strides(values)), (rest.ctypes.data, _strides(rest), flat, begins)
    good, extra = np.zeros(units, np.bool_), mantissa_bits(dtype)
    run_units(_decode_heads, units, 2 * values.nbytes, target, source, good, values.shape[1:], extra)
    if not good.all():
        raise ValueError(f"a level of head {int(np.argmin(good))} leaves another number: it is not what was encoded")


def _strides(array: np.ndarray) -> tuple[int, int, int]:
    """Bytes from layer to layer, head to head and block to block."""
    layer, head, block = array.strides[:3]
    return layer, head, block


def _window(values: np.ndarray) -> np.ndarray:
    """The memory from the first value to the last, as one row: compiled loops over it become vectors."""
    span = sum((n - 1) * s for n, s in zip(values.shape, values.strides, strict=True)) // values.itemsize + 1
    return np.lib.stride_tricks.as_strided(values, (span,), (values.itemsize,))


def _moved_together(codes: np.ndarray, spans: np.ndarray) -> int:
    """Close the gaps between what several threads wrote; the bytes of all."""
    begins, ends = spans[:, 0], np.cumsum(spans[:, 1])
    for head in np.flatnonzero(begins != ends - spans[:, 1]):
        nbytes = spans[head, 1]
        codes[ends[head] - nbytes : ends[head]] = codes[begins[head] : begins[head] + nbytes]
    return int(ends[-1])


def _call(builder, name, result, *args):
    function = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), function), args)


class _Group(Lanes):
    """Emits operations on the 64 values of a group."""

    def __init__(self, context, builder):
        super().__init__(builder, GROUP)
        _, cpu, features = context.codegen().magic_tuple()
        # The first two Zens have these instructions as long loops of microcode.
        fast_bits = "+bmi2" in features and cpu not in ("znver1", "znver2")
        self._by_words = fast_bits and "+avx512vbmi2" not in features

    def mask(self, word):
        return self.builder.bitcast(word, ir.VectorType(_I1, GROUP))

    def word(self, mask):
        return self.builder.bitcast(mask, _I64)

    def load_word(self, words, index: int):
        pointer = self.builder.inttoptr(step(self.builder, words, _I64(index), WORD_NBYTES), _I64.as_pointer())
        return self.builder.load(pointer, align=1)

    def store_word(self, mask, words, index: int):
        pointer = self.builder.inttoptr(step(self.builder, words, _I64(index), WORD_NBYTES), _I64.as_pointer())
        self.builder.store(self.word(mask), pointer, align=1)

    def count_set(self, mask):
        return _call(self.builder, "llvm.ctpop.i64", _I64, self.word(mask))

    def symbols(self, address):
        """The three symbols of a level, each in every lane."""
        pointer = self.builder.inttoptr(address, _I8.as_pointer())
        return [self.splat(self.builder.load(self.builder.gep(pointer, [_I64(i)]))) for i in range(3)]

    def split(self, differences, there, symbols, words, target):
        """Write one group's two words, and what it leaves to `target`; returns where the next goes."""
        builder = self.builder
        first, second, third = (builder.icmp_unsigned("==", differences, symbol) for symbol in symbols)
        others = builder.and_(there, builder.not_(builder.or_(builder.or_(first, second), third)))
        self.store_word(builder.or_(builder.and_(there, second), others), words, 0)
        self.store_word(builder.or_(builder.and_(there, third), others), words, 1)
        return self._moved_together(differences, others, target)

    def join(self, words, symbols, source):
        """(differences of a group from its two words, where the next takes what was left)."""
        builder = self.builder
        low, high = (self.mask(self.load_word(words, i)) for i in range(2))
        known = builder.select(high, symbols[2], builder.select(low, symbols[1], symbols[0]))
        return self._moved_apart(known, builder.and_(low, high), source)

    def _moved_together(self, values, mask, target):
        """Write the set bytes side by side, and up to a group in all; returns where they end."""
        builder = self.builder
        if not self._by_words:
            name = f"llvm.experimental.vector.compress.v{GROUP}i8"
            self.store(_call(builder, name, values.type, values, mask, self.constant(_I8, 0)), target)
            return builder.add(target, self.count_set(mask))
        words = builder.bitcast(values, ir.VectorType(_I64, WORD_NBYTES))
        for i in range(WORD_NBYTES):
            chosen, count = self._bytes_of(mask, i)
            packed = _call(builder, "llvm.x86.bmi.pext.64", _I64, builder.extract_element(words, _I32(i)), chosen)
            builder.store(packed, builder.inttoptr(target, _I64.as_pointer()), align=1)
            target = builder.add(target, count)
        return target

    def _moved_apart(self, values, mask, source):
        """(values with the set bytes replaced by those side by side at an address, where these end)."""
        builder = self.builder
        if not self._by_words:
            pointer, name = builder.inttoptr(source, _I8.as_pointer()), f"llvm.masked.expandload.v{GROUP}i8"
            merged = _call(builder, name, values.type, pointer, mask, values)
            return merged, builder.add(source, self.count_set(mask))
        words = builder.bitcast(values, ir.VectorType(_I64, WORD_NBYTES))
        for i in range(WORD_NBYTES):
            chosen, count = self._bytes_of(mask, i)
            packed = builder.load(builder.inttoptr(source, _I64.as_pointer()), align=1)
            kept = builder.and_(builder.extract_element(words, _I32(i)), builder.not_(chosen))
            merged = builder.or_(kept, _call(builder, "llvm.x86.bmi.pdep.64", _I64, packed, chosen))
            words = builder.insert_element(words, merged, _I32(i))
            source = builder.add(source, count)
        return builder.bitcast(words, values.type), source

    def _bytes_of(self, mask, index: int):
        """(the eight bits of a mask that belong to a word of eight values, as bytes of 0 and 255; how many are set)."""
        bits = self.builder.and_(self.builder.lshr(self.word(mask), _I64(8 * index)), _I64(0xFF))
        lowest = _call(self.builder, "llvm.x86.bmi.pdep.64", _I64, bits, _I64(0x0101010101010101))
        return self.builder.mul(lowest, _I64(0xFF)), _call(self.builder, "llvm.ctpop.i64", _I64, bits)

    def rotated(self, value, left: int):
        return self.builder.or_(self.shifted("shl", value, left), self.shifted("lshr", value, 16 - left))


@intrinsic(prefer_literal=True)
def _split_values(typing_context, places, groups, there, symbols, words, target, extra):
    """The first level of whole groups, of (values, bases, rest) at three addresses; returns the end of what it left.

    `there` is the mask of the values that a group has.
    """

    def codegen(context, builder, signature, args):
        (values, bases, rest), (groups, there, symbols, words) = cgutils.unpack_tuple(builder, args[0]), args[1:5]
        emit, bits = _Group(context, builder), extra.literal_value
        end, known, valid = cgutils.alloca_once_value(builder, args[5]), emit.symbols(symbols), emit.mask(there)
        with cgutils.for_range(builder, groups, intp=_I64) as loop:
            at = step(builder, _I64(0), loop.index, GROUP)
            own = builder.add(words, step(builder, _I64(0), loop.index, (2 + bits) * WORD_NBYTES))
            value = emit.rotated(emit.load(step(builder, values, at, 2), _I16), 1)
            emit.store(emit.cast("trunc", value, _I8), builder.add(rest, at))
            high = emit.cast("trunc", emit.shifted("lshr", value, 8), _I8)
            exponent = emit.shifted("lshr", high, bits) if bits else high
            difference = builder.sub(emit.load(builder.add(bases, at), _I8), exponent)
            builder.store(emit.split(difference, valid, known, own, builder.load(end)), end)
            for i in range(bits):
                bit = builder.icmp_unsigned("!=", emit.and_(high, 1 << i), emit.constant(_I8, 0))
                emit.store_word(builder.and_(valid, bit), own, 2 + i)
        return builder.load(end)

    three = types.UniTuple(types.int64, 3)
    return types.int64(three, types.int64, types.uint64, *(types.int64,) * 3, extra), codegen


@intrinsic
def _split_left(typing_context, source, count, symbols, words, target):
    """A further level of `count` differences (readable to the end of their group); the end of what it left."""

    def codegen(context, builder, signature, args):
        source, count, symbols, words, target = args
        emit = _Group(context, builder)
        end, known = cgutils.alloca_once_value(builder, target), emit.symbols(symbols)
        with cgutils.for_range_slice(builder, _I64(0), count, _I64(GROUP), _I64) as (at, _):
            some = builder.sub(builder.shl(_I64(1), builder.sub(count, at)), _I64(1))
            all_there = builder.icmp_signed(">=", builder.sub(count, at), _I64(GROUP))
            there = emit.mask(builder.select(all_there, _I64(-1), some))
            own = builder.add(words, builder.mul(builder.sdiv(at, _I64(GROUP)), _I64(2 * WORD_NBYTES)))
            difference = emit.load(builder.add(source, at), _I8)
            builder.store(emit.split(difference, there, known, own, builder.load(end)), end)
        return builder.load(end)

    return types.int64(*(types.int64,) * 5), codegen


@intrinsic(prefer_literal=True)
def _join_values(typing_context, places, groups, symbols, words, source, extra):
    """The inverse of `_split_values`, over all lanes of a group; returns the end of what it took."""

    def codegen(context, builder, signature, args):
        (values, bases, rest), (groups, symbols, words) = cgutils.unpack_tuple(builder, args[0]), args[1:4]
        emit, bits = _Group(context, builder), extra.literal_value
        end, known = cgutils.alloca_once_value(builder, args[4]), emit.symbols(symbols)
        with cgutils.for_range(builder, groups, intp=_I64) as loop:
            at = step(builder, _I64(0), loop.index, GROUP)
            own = builder.add(words, step(builder, _I64(0), loop.index, (2 + bits) * WORD_NBYTES))
            difference, moved = emit.join(own, known, builder.load(end))
            builder.store(moved, end)
            high = builder.sub(emit.load(builder.add(bases, at), _I8), difference)
            high = emit.shifted("shl", high, bits) if bits else high
            for i in range(bits):
                bit = builder.select(
                    emit.mask(emit.load_word(own, 2 + i)), emit.constant(_I8, 1 << i), emit.constant(_I8, 0)
                )
                high = builder.or_(high, bit)
            low = emit.cast("zext", emit.load(builder.add(rest, at), _I8), _I16)
            value = builder.or_(emit.shifted("shl", emit.cast("zext", high, _I16), 8), low)
            emit.store(emit.rotated(value, 15), step(builder, values, at, 2))
        return builder.load(end)

    three = types.UniTuple(types.int64, 3)
    return types.int64(three, *(types.int64,) * 4, extra), codegen


@intrinsic
def _join_left(typing_context, target, count, symbols, words, source):
    """The inverse of `_split_left` (writable to the end of a group); returns the end of what it took."""

    def codegen(context, builder, signature, args):
        target, count, symbols, words, source = args
        emit = _Group(context, builder)
        end, known = cgutils.alloca_once_value(builder, source), emit.symbols(symbols)
        with cgutils.for_range_slice(builder, _I64(0), count, _I64(GROUP), _I64) as (at, _):
            own = builder.add(words, builder.mul(builder.sdiv(at, _I64(GROUP)), _I64(2 * WORD_NBYTES)))
            difference, moved = emit.join(own, known, builder.load(end))
            builder.store(moved, end)
            emit.store(difference, builder.add(target, at))
        return builder.load(end)

    return types.int64(*(types.int64,) * 5), codegen


@intrinsic
def _copy_bytes(typing_context, target, source, nbytes):
    def codegen(context, builder, signature, args):
        to, of = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, to, of, args[2], context.get_constant(types.intp, 1), align=1)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), codegen


@intrinsic
def _join_bytes(typing_context, high, rest, values, count):
    """`count` values from their high and low bytes."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            high, low = (emit.cast("zext", emit.load(builder.add(a, index), _I8), _I16) for a in args[:2])
            rotated = builder.or_(emit.shifted("shl", high, 8), low)
            value = builder.or_(emit.shifted("lshr", rotated, 1), emit.shifted("shl", rotated, 15))
            emit.store(value, step(builder, args[2], index, 2))

        each_vector(context, builder, args[3], body)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def _fill_bytes(typing_context, target, value, count):
    """`count` bytes, and up to a group less one after them."""

    def codegen(context, builder, signature, args):
        emit = _Group(context, builder)
        byte = emit.splat(args[1])
        with cgutils.for_range_slice(builder, _I64(0), args[2], _I64(GROUP), _I64) as (at, _):
            emit.store(byte, builder.add(args[0], at))
        return context.get_dummy_value()

    return types.void(types.int64, types.uint8, types.int64), codegen


@intrinsic
def _add_exponents(typing_context, values, count, shift, sums):
    """uint32 sums[i] += exponent of values[i], at two addresses."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            exponent = emit.cast("zext", _exponents(emit, step(builder, args[0], index, 2), args[2]), _I32)
            place = step(builder, args[3], index, 4)
            emit.store(builder.add(emit.load(place, _I32), exponent), place)

        each_vector(context, builder, args[1], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int16, types.int64), codegen


@intrinsic
def _sum_exponents(typing_context, values, count, shift):
    """The sum of the exponents of `count` values at an address, a whole number of groups and then one by one."""

    def codegen(context, builder, signature, args):
        values, count, shift = args
        wide, total = _Group(context, builder), _I64(0)
        whole = builder.and_(count, _I64(-GROUP))
        for emit, first, last in ((wide, _I64(0), whole), (Lanes(builder, 1), whole, count)):
            sums = cgutils.alloca_once_value(builder, emit.constant(_I32, 0))
            with cgutils.for_range_slice(builder, first, last, _I64(emit.count), _I64) as (index, _):
                exponent = emit.cast("zext", _exponents(emit, step(builder, values, index, 2), shift), _I32)
                builder.store(builder.add(builder.load(sums), exponent), sums)
            name = f"llvm.vector.reduce.add.v{emit.count}i32"
            total = builder.add(total, builder.zext(_call(builder, name, _I32, builder.load(sums)), _I64))
        return total

    return types.int64(types.int64, types.int64, types.int16), codegen


def _exponents(emit, address, shift):
    """i16 exponents of the values at an address, which lie `shift` bits up."""
    values = emit.load(address, _I16)
    mask = emit.builder.lshr(ir.Constant(_I16, 0x7F80), shift)
    return emit.builder.and_(emit.builder.lshr(values, emit.splat(shift)), emit.splat(mask))


@njit(nogil=True, cache=True)
def _mean_exponents(values, step, shape, shift, means):
    """means <- the mean exponent of each channel plus 3/4, rounded down."""
    blocks, outer, channels, run = shape
    part, sums = np.empty(channels, np.uint32), np.zeros(channels, np.int64)
    for _ in range(blocks):
        part[:], at = 0, values
        for _ in range(outer):
            if run == 1:
                _add_exponents(at, channels, shift, part.ctypes.data)
            else:
                for c in range(channels):
                    part[c] += np.uint32(_sum_exponents(at + 2 * c * run, run, shift))
            at += 2 * channels * run
        sums += part
        values += step
    count = blocks * outer * run
    for c in range(channels):
        means[c] = (4 * sums[c] + 3 * count) // (4 * count)


@njit(nogil=True, cache=True)
def _spread(means, outer, run, bases):
    """bases <- the mean of each value's channel, for the values of one block; a group more must be writable."""
    channels, at = len(means), bases.ctypes.data
    if run == 1:
        _copy_bytes(at, means.ctypes.data, channels)
    else:
        for c in range(channels):
            _fill_bytes(at + c * run, means[c], run)
    done, size = channels * run, outer * channels * run
    while done < size:
        more = min(done, size - done)
        _copy_bytes(at + done, at, more)
        done += more


@njit(nogil=True, cache=True)
def _commonest(values, start, step, shape, shift, bases, symbols):
    """symbols <- the commonest differences in about `SAMPLED` groups; the smaller first of equals."""
    (blocks, size), mask = shape, np.uint16(0x7F80 >> shift)
    counts = np.zeros((2, 256), np.int32)  # two a difference: equal neighbours do not wait for each other's store
    apart = blocks * -(-size // GROUP) // SAMPLED | 1
    for block in range(blocks):
        at = start + block * step
        for group in range(0, size, apart * GROUP):
            for i in range(group, min(group + GROUP, size)):
                exponent = values[at + i] >> np.uint16(shift) & mask
                counts[i & 1, np.uint8(bases[i] - exponent)] += 1
    counts[0] += counts[1]
    for i in range(len(symbols)):
        symbols[i] = np.argmax(counts[0])
        counts[0, symbols[i]] = -1


@njit(nogil=True, cache=True)
def _split(places, groups, there, symbols, words, target, extra):
    # The number of mantissa bits must be a literal.
    if extra:
        return _split_values(places, groups, there, symbols, words, target, 3)
    return _split_values(places, groups, there, symbols, words, target, 0)


@njit(nogil=True, cache=True)
def _join(places, groups, symbols, words, source, extra):
    if extra:
        return _join_values(places, groups, symbols, words, source, 3)
    return _join_values(places, groups, symbols, words, source, 0)


@njit(nogil=True, cache=True)
def _split_blocks(places, steps, shape, coded, extra):
    """The first level of a head: (end of its words, end of what it left)."""
    (values, bases, rest), (values_step, rest_step), (blocks, size) = places, steps, shape
    (symbols, words, target), whole, short = coded, size // GROUP, size % GROUP
    done, there = whole * GROUP, (np.uint64(1) << np.uint64(short)) - np.uint64(1)
    some_values, some_rest = np.zeros(GROUP, np.uint16), np.zeros(GROUP, np.uint8)
    for _ in range(blocks):
        target = _split((values, bases, rest), whole, ~np.uint64(0), symbols, words, target, extra)
        words += whole * (2 + extra) * WORD_NBYTES
        if short:  # put together aside: a group is read and written whole
            _copy_bytes(some_values.ctypes.data, values + 2 * done, 2 * short)
            last = some_values.ctypes.data, bases + done, some_rest.ctypes.data
            target = _split(last, 1, there, symbols, words, target, extra)
            _copy_bytes(rest + done, some_rest.ctypes.data, short)
            words += (2 + extra) * WORD_NBYTES
        values, rest = values + values_step, rest + rest_step
    return words, target


@njit(nogil=True, cache=True)
def _join_blocks(places, steps, shape, coded, extra):
    """The inverse of `_split_blocks`; the end of what it took from the differences that were left."""
    (values, bases, rest), (values_step, rest_step), (blocks, size) = places, steps, shape
    (symbols, words, source), whole, short = coded, size // GROUP, size % GROUP
    done = whole * GROUP
    some_values, some_rest = np.zeros(GROUP, np.uint16), np.zeros(GROUP, np.uint8)
    for _ in range(blocks):
        source = _join((values, bases, rest), whole, symbols, words, source, extra)
        words += whole * (2 + extra) * WORD_NBYTES
        if short:
            _copy_bytes(some_rest.ctypes.data, rest + done, short)
            last = some_values.ctypes.data, bases + done, some_rest.ctypes.data
            source = _join(last, 1, symbols, words, source, extra)
            _copy_bytes(values + 2 * done, some_values.ctypes.data, 2 * short)
            words += (2 + extra) * WORD_NBYTES
        values, rest = values + values_step, rest + rest_step
    return source


@njit(nogil=True, cache=True)
def _split_levels(symbols, words, lists, left):
    """The levels after the first, which left left[0] differences in lists[0]; the end of their codes.

    What is left after the last is in the list that its number picks, as is what each level leaves for the next.
    """
    for level in range(1, LEVELS):
        source, target = lists[(level + 1) % 2].ctypes.data, lists[level % 2].ctypes.data
        count = np.int64(left[level - 1])
        left[level] = _split_left(source, count, symbols + 3 * level, words, target) - target
        words += _level_nbytes(count)
    return words


@njit(nogil=True, cache=True)
def _join_levels(symbols, words, lists, left):
    """The inverse: from the codes of the levels after the first, lists[0]; whether each level left what was said."""
    for level in range(1, LEVELS):
        words += _level_nbytes(np.int64(left[level - 1]))
    _copy_bytes(lists[(LEVELS - 1) % 2].ctypes.data, words, np.int64(left[LEVELS - 1]))
    good = True
    for level in range(LEVELS - 1, 0, -1):
        source, target = lists[level % 2].ctypes.data, lists[(level + 1) % 2].ctypes.data
        count = np.int64(left[level - 1])
        words -= _level_nbytes(count)
        good &= _join_left(target, count, symbols + 3 * level, words, source) - source == left[level]
    return good


@njit(nogil=True, cache=True)
def _level_nbytes(count):
    return -(-count // GROUP) * 2 * WORD_NBYTES


@njit(nogil=True, cache=True)
def _lists(shape):
    """Room for what two levels leave. No words, right or wrong, lead out of it: a level leaves no more than it has."""
    blocks, size = shape
    return np.zeros((2, blocks * -(-size // GROUP) * GROUP + GROUP), np.uint8)


@njit(nogil=True, cache=True)
def _encode_heads(first, last, source, target, shape, slot, extra):
    """Units are heads. The codes of one call lie side by side, from the slot of its first head on."""
    (values, steps), (rest, rest_steps, flat, codes, spans) = source, target
    (heads, blocks, outer, channels, run), (bases, symbols, left) = shape, flat
    size, shift = outer * channels * run, 7 + extra
    spread, lists, begin = np.zeros(size + GROUP, np.uint8), _lists((blocks, size)), first * slot
    for unit in range(first, last):
        at = unit // heads * steps[0] + unit % heads * steps[1]
        low = rest + unit // heads * rest_steps[0] + unit % heads * rest_steps[1]
        own, known = values.ctypes.data + at, symbols[unit].ctypes.data
        _mean_exponents(own, steps[2], (blocks, outer, channels, run), shift, bases[unit])
        _spread(bases[unit], outer, run, spread)
        _commonest(values, at // 2, steps[2] // 2, (blocks, size), shift, spread, symbols[unit])
        places, coded = (own, spread.ctypes.data, low), (known, codes.ctypes.data + begin, lists.ctypes.data)
        words, end = _split_blocks(places, (steps[2], rest_steps[2]), (blocks, size), coded, extra)
        left[unit, 0] = end - lists.ctypes.data
        words = _split_levels(known, words, lists, left[unit])
        rare = np.int64(left[unit, LEVELS - 1])
        nbytes = words + rare - codes.ctypes.data - begin
        if nbytes <= blocks * size:
            _copy_bytes(words, lists[(LEVELS - 1) % 2].ctypes.data, rare)
        else:
            nbytes, left[unit], left[unit, 0] = blocks * size, 0, WHOLE
            _write_high(values, at // 2, steps[2] // 2, (blocks, size), codes[begin : begin + nbytes])
        spans[unit, 0], spans[unit, 1] = begin, nbytes
        begin += nbytes


@njit(nogil=True, cache=True)
def _write_high(values, start, step, shape, high):
    """high <- the high byte of every value, rotated."""
    blocks, size = shape
    for block in range(blocks):
        for i in range(size):
            high[block * size + i] = np.uint8(values[start + block * step + i] >> np.uint16(7))


@njit(nogil=True, cache=True)
def _decode_heads(first, last, target, source, good, shape, extra):
    """Units are heads."""
    (values, steps), (rest, rest_steps, (bases, symbols, left), begins) = target, source
    heads, blocks, outer, channels, run = shape
    size, head_steps = outer * channels * run, (steps[2], rest_steps[2])
    spread, lists = np.zeros(size + GROUP, np.uint8), _lists((blocks, size))
    for unit in range(first, last):
        own = values + unit // heads * steps[0] + unit % heads * steps[1]
        low = rest + unit // heads * rest_steps[0] + unit % heads * rest_steps[1]
        if left[unit, 0] == WHOLE:
            for block in range(blocks):
                high = begins[unit] + block * size
                _join_bytes(high, low + block * rest_steps[2], own + block * steps[2], size)
            good[unit] = True
            continue
        _spread(bases[unit], outer, run, spread)
        known, words = symbols[unit].ctypes.data, begins[unit]
        deeper = words + blocks * -(-size // GROUP) * (2 + extra) * WORD_NBYTES
        good[unit] = _join_levels(known, deeper, lists, left[unit])
        coded = known, words, lists.ctypes.data
        end = _join_blocks((own, spread.ctypes.data, low), head_steps, (blocks, size), coded, extra)
        good[unit] &= end - lists.ctypes.data == left[unit, 0]
