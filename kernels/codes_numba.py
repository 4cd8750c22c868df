"""Tiles of 16-bit values to codes and back, for the kernels of `quantize_numba`: loops and arithmetic as intrinsics.

A tile is `rows` rows of `columns` values. A row of codes of less than 8 bits is packed in `parts` equal parts of the
row (see `kernels.quantize`), so a vector of each part is coded at once and the packed bytes are stored once.

`form` is a literal, a number known when a kernel is compiled: a `Form` packed in an integer.
"""

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.lanes_numba import LINE, Lanes, each_vector, step

__all__ = [
    "ASYMMETRIC",
    "E4M3",
    "E5M2",
    "SYMMETRIC",
    "Form",
    "decode_tile",
    "encode_tile",
    "measure_tile",
    "scale_groups",
    "shortest_run",
    "widen_params",
]

SYMMETRIC, ASYMMETRIC, E4M3, E5M2 = range(4)
_LARGEST = {SYMMETRIC: 127.0, E4M3: 448.0, E5M2: 57344.0}
_PARTS = {8: 1, 4: 2, 3: 8, 2: 4}  # of a row, by bits of a code
_TABLE = 32  # words that AVX-512 BW permutes at once
_I8, _I16, _I32, _I64, _F32 = (*(ir.IntType(n) for n in (8, 16, 32, 64)), ir.FloatType())
_PAIR = types.UniTuple(types.int64, 2)
_SIZES = types.UniTuple(types.int64, 4)


class Form(NamedTuple):
    """What a kernel is compiled for. As one number in its closure: numba could not cache it with objects there.

    Attributes:
        kind: SYMMETRIC, ASYMMETRIC, E4M3 or E5M2.
        bits: Of a code.
        float16: 1 if values are float16, 0 if bfloat16.
        along_rows: 1 if groups run along a row, 0 if down the columns.
        lanes: Values of a vector; a power of two that divides the shortest run of values with one scale in one part.
    """

    kind: int
    bits: int
    float16: int
    along_rows: int
    lanes: int

    @property
    def number(self) -> int:
        return sum(value << (8 * place) for place, value in enumerate(self))

    @classmethod
    def of(cls, number: int) -> "Form":
        return cls(*number.to_bytes(5, "little"))

    @property
    def parts(self) -> int:
        return _PARTS[self.bits]

    @property
    def decodes_split(self) -> bool:
        """Whether codes are widened in split order: not where one instruction makes bytes in memory 32 bits."""
        return self.bits < 8 or self.kind in (E4M3, E5M2)

    @property
    def param_lanes(self) -> int:
        """Of a vector of parameters: those of the columns of a vector, or of as many groups as rows often have."""
        return 16 if self.along_rows else self.lanes


def shortest_run(along_rows: bool, length: int, columns: int, bits: int) -> int:
    """Values of a row that are coded alike: of one part and, along a row, of one group."""
    part = columns // _PARTS[bits]
    return math.gcd(length, part) if along_rows else part


class _Coding(Lanes):
    """Emits the codes of vectors."""

    def __init__(self, builder, form: Form):
        super().__init__(builder, form.lanes)
        self.form = form

    def order_key(self, bits, magnitude: bool):
        """i16 bits -> i16 that sorts like the numbers, or like their magnitudes. The first is its own inverse."""
        if magnitude:
            return self.and_(bits, 0x7FFF)
        return self.builder.xor(bits, self.and_(self.shifted("ashr", bits, 15), 0x7FFF))

    def widen(self, ranges, bits):
        """Widen (lowest, highest), at two allocas, by the order keys of i16 values; only the highest if symmetric."""
        key = self.order_key(bits, self.form.kind != ASYMMETRIC)
        low, high = (self.builder.load(place) for place in ranges)
        self.builder.store(self.largest(key, high), ranges[1])
        if self.form.kind == ASYMMETRIC:
            self.builder.store(self.smallest(key, low), ranges[0])

    def scale_and_zero(self, low, high):
        """i16 (bfloat16 bits of the scale, dtype bits of the zero) of groups whose order keys span low to high."""
        builder, form = self.builder, self.form
        infinity = 0x7C00 if form.float16 else 0x7F80
        finite = builder.icmp_signed("<", high, self.constant(_I16, infinity))
        span = self.value_of(self.order_key(high, False), form.float16)
        zero = self.constant(_I16, 0)
        if form.kind == ASYMMETRIC:
            lowest = builder.icmp_signed(">", low, self.constant(_I16, ~infinity & 0xFFFF))
            finite = builder.and_(finite, lowest)
            zero = builder.select(finite, self.order_key(low, False), zero)
            span = builder.fsub(span, self.value_of(zero, form.float16))
        # Rounded to float32 first, as the reference does: a constant must not carry more digits than its type.
        largest = _LARGEST.get(form.kind) or float(2**form.bits - 1)
        scaled = builder.fmul(span, self.constant(_F32, float(np.float32(1 / largest))))
        smallest = self.constant(_F32, 2.0**-100)
        scaled = builder.select(builder.fcmp_ordered(">", scaled, smallest), scaled, smallest)
        up = self.shifted("lshr", self.plus(self.cast("bitcast", scaled, _I32), 0xFFFF), 16)
        return builder.select(finite, self.cast("trunc", up, _I16), self.constant(_I16, 0x7FC0)), zero

    def encode(self, bits, inverse, zero):
        """i16 values -> i8 codes: code((value - zero) * inverse). The parameters are in split order."""
        fp8 = self.form.kind in (E4M3, E5M2)
        value = self.value_of(self.and_(bits, 0x7FFF) if fp8 else bits, self.form.float16, split=True)
        if self.form.kind == ASYMMETRIC:
            value = self.builder.fsub(value, zero)
        value = self.builder.fmul(value, inverse)
        if not fp8:
            return self.part(self.rounded(value), _I8, 0, split=True)
        sign = self.and_(self.part(bits, _I8, 1), 0x80)
        return self.builder.or_(self.part(self.fp8_magnitude(value), _I8, 0, split=True), sign)

    def fp8_magnitude(self, value):
        """float >= 0 -> i32 whose low 8 bits are its code, to nearest even.

        The last digit of a code is worth 2^(e - mantissa bits), e the value's exponent but at least that of the
        smallest normal code. A float32 of 2^(e + 23 - mantissa bits) ends on a digit of that worth: adding it rounds
        to it, and leaves the number of digits in the low bits. The codes of the octaves below are added before. No
        value is beyond the largest code, because the scale was rounded up.
        """
        drop, smallest = (20, 121) if self.form.kind == E4M3 else (21, 113)
        exponent = self.and_(self.cast("bitcast", value, _I32), 0x7F800000)
        exponent = self.largest(exponent, self.constant(_I32, smallest << 23))
        octaves = self.shifted("lshr", exponent, drop)
        ruler = self.plus(self.builder.add(exponent, octaves), (drop << 23) - (smallest << (23 - drop)))
        return self.cast("bitcast", self.builder.fadd(value, self.cast("bitcast", ruler, _F32)), _I32)

    def pack(self, codes, place, part):
        """Store the codes of every part, each a vector, at a place in a packed row; a part is `part` values."""
        if self.form.bits == 8:
            self.store(codes[0], place)
            return
        width = 4 if self.form.bits == 4 else 2
        low = [self.and_(code, (1 << width) - 1) for code in codes]
        steps = 2 if self.form.bits == 3 else 1  # bytes of a quarter of a row are those of two eighths
        for first in range(steps):
            self.store(self._joined(low[first::steps], width), place)
            place = self.builder.add(place, part)
        if self.form.bits == 3:
            self.store(self._joined([self.and_(self.shifted("lshr", code, 2), 1) for code in codes], 1), place)

    def _joined(self, codes, width: int):
        """OR of codes, the i-th moved up by i * width."""
        joined = codes[0]
        for i, code in enumerate(codes[1:], 1):
            joined = self.builder.or_(joined, self.shifted("shl", code, i * width))
        return joined

    def unpack(self, place, part):
        """Of a place in a packed row, the codes of every part as i16: fp8 extended by the sign, others by anything."""
        bits = self.form.bits
        places = [self.builder.add(place, self.builder.mul(part, _I64(i))) for i in range(3 if bits == 3 else 1)]
        extend = "zext" if self.form.kind == ASYMMETRIC else "sext"
        words = [self.cast(extend, self.load(place, _I8), _I16) for place in places]
        if bits != 3:
            return [self.shifted("lshr", words[0], i * bits) for i in range(self.form.parts)]
        low = [self.and_(self.shifted("lshr", words[i % 2], i // 2 * 2), 3) for i in range(8)]
        third = [self.and_(self.shifted("lshr", words[2], i), 1) for i in range(8)]
        return [self.builder.or_(low[i], self.shifted("shl", third[i], 2)) for i in range(8)]

    def decode(self, code, scale, zero):
        """i16 codes -> i16 values: code * scale + zero, rounded to the dtype. The parameters are in split order."""
        number = self.fp8_value(code) if self.form.kind in (E4M3, E5M2) else self.integer(code)
        return self.bits_of(self.scaled(number, scale, zero), self.form.float16, self.form.decodes_split)

    def scaled(self, number, scale, zero):
        value = self.builder.fmul(number, scale)
        return self.builder.fadd(value, zero) if self.form.kind == ASYMMETRIC else value

    def has_tables(self, context) -> bool:
        """Whether to decode by `table` and `looked_up`: half of the operations, where the CPU can."""
        form, features = self.form, context.codegen().magic_tuple()[2]
        return bool(form.bits <= 4 and form.along_rows and form.lanes % _TABLE == 0 and "+avx512bw" in features)

    def table(self, factors, group):
        """The values of all codes of a group, of up to 4 bits, as 32 i16: for `looked_up`."""
        emit = _Coding(self.builder, self.form._replace(lanes=_TABLE))
        codes = [float(i % 2**self.form.bits) for i in range(_TABLE)]
        number = ir.Constant(ir.VectorType(_F32, _TABLE), codes)
        return emit.bits_of(emit.scaled(number, *emit.params(factors, group)), self.form.float16)

    def looked_up(self, table, code):
        """i16 codes -> i16 values by a permutation of words (AVX-512 BW), which looks at five bits of each code."""
        pieces = [self.pick(code, list(range(i, i + _TABLE))) for i in range(0, self.count, _TABLE)]
        kind = ir.FunctionType(table.type, [table.type, table.type])
        function = self.builder.module.declare_intrinsic("llvm.x86.avx512.permvar.hi.512", (), kind)
        values = [self.builder.call(function, [table, piece]) for piece in pieces]
        whole = ir.Constant(ir.VectorType(_I32, self.count), list(range(self.count)))
        return self.builder.shuffle_vector(*values, whole) if len(values) > 1 else values[0]

    def integer(self, code):
        """i16 codes -> float."""
        if not self.form.decodes_split:
            return self.cast("sitofp", self.cast("sext" if self.form.kind == SYMMETRIC else "zext", code, _I32), _F32)
        # In the last bits of a float of 2^23, which is then taken off again
        low = self.and_(self.apart(code), 2**self.form.bits - 1)
        number = self.cast("bitcast", self.builder.or_(low, self.constant(_I32, 0x4B000000)), _F32)
        return self.builder.fsub(number, self.constant(_F32, 2.0**23))

    def fp8_value(self, code):
        """i16 codes -> float."""
        up, keep, factor = (4, 0x87F0, 2.0**120) if self.form.kind == E4M3 else (5, 0x8FE0, 2.0**112)
        # Sign and magnitude where bfloat16 has them, all but the bias of the exponent
        small = self.and_(self.shifted("shl", code, up), keep)
        return self.builder.fmul(self.value_of(small, 0, split=True), self.constant(_F32, factor))

    def prefetch(self, address, nbytes: int) -> None:
        """Ask for lines to come into the second-level cache: a unit of work can exceed the first."""
        builder, pointer = self.builder, cgutils.voidptr_t
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        for offset in range(0, nbytes, LINE):
            place = builder.inttoptr(builder.add(address, _I64(offset)), pointer)
            builder.call(function, [place, _I32(0), _I32(2), _I32(1)])

    def params(self, factors, number):
        """(scale or its inverse, zero) of a vector from two addresses: one for all if along rows, else one each."""
        places = [step(self.builder, place, number, 4) for place in factors]
        if self.form.along_rows:
            pointers = [self.builder.inttoptr(place, _F32.as_pointer()) for place in places]
            return [self.splat(self.builder.load(pointer)) for pointer in pointers]
        return [self.load(place, _F32) for place in places]


def _vectors(builder, count, lanes: int):
    """Loop over `count` values, a multiple of `lanes`, vector by vector."""
    return cgutils.for_range_slice(builder, _I64(0), count, _I64(lanes), _I64)


def _offset(builder, row, stride, column, nbytes: int):
    """Emit row * stride + column * nbytes."""
    return step(builder, builder.mul(row, stride), column, nbytes)


def _each_vector_of_tile(emit: _Coding, sizes, params_of, body) -> None:
    """Emit body(row, column, params) over a tile: for every vector of the first part of a row, the row's number, the
    column, and for each part what `params_of` made of the number of its group, or of the first group of the vector if
    each lane has its own: once for as long as it holds.

    `sizes` are rows, columns, values of a group in the tile, and `shortest_run`.
    """
    builder, form = emit.builder, emit.form
    rows, columns, length, run = sizes
    part = builder.sdiv(columns, _I64(form.parts))
    offsets = [builder.mul(part, _I64(i)) for i in range(form.parts)]
    if form.along_rows:
        runs = cgutils.for_range_slice(builder, _I64(0), part, run, _I64)
        with cgutils.for_range(builder, rows) as row, runs as (start, _):
            first = _offset(builder, row.index, columns, start, 1)
            params = [params_of(builder.sdiv(builder.add(first, offset), length)) for offset in offsets]
            with _vectors(builder, run, form.lanes) as (column, _):
                body(row.index, builder.add(start, column), params)
    else:
        groups = builder.sdiv(rows, length)
        with cgutils.for_range(builder, groups) as group, _vectors(builder, part, form.lanes) as (column, _):
            first = _offset(builder, group.index, columns, column, 1)
            params = [params_of(builder.add(first, offset)) for offset in offsets]
            with cgutils.for_range(builder, length) as row:
                body(_offset(builder, group.index, length, row.index, 1), column, params)


def _packed_nbytes(builder, values, bits: int):
    return builder.sdiv(builder.mul(values, _I64(bits)), _I64(8))


@intrinsic(prefer_literal=True)
def encode_tile(typing_context, source, ahead, target, sizes, factors, form):
    """Encode a tile at source, (address, bytes to the next row), to packed rows one after the other at target.

    Every vector that is read asks for the one at its place in the tile at address `ahead`: the memory is then busy
    while the arithmetic is. `factors` are the addresses of the float32 inverse scales and zeros of the tile's groups,
    `sizes` as in `_each_vector_of_tile`.
    """

    def codegen(context, builder, signature, args):
        emit = _Coding(builder, Form.of(form.literal_value))
        (start, stride), sizes, factors = (cgutils.unpack_tuple(builder, args[i]) for i in (0, 3, 4))
        part = builder.sdiv(sizes[1], _I64(emit.form.parts))
        packed_stride = _packed_nbytes(builder, sizes[1], emit.form.bits)

        def body(row, column, params):
            offset, codes = _offset(builder, row, stride, column, 2), []
            for i, (inverse, zero) in enumerate(params):
                place = step(builder, offset, part, 2 * i)
                emit.prefetch(builder.add(args[1], place), 2 * emit.count)
                codes.append(emit.encode(emit.load(builder.add(start, place), _I16), inverse, zero))
            emit.pack(codes, builder.add(args[2], _offset(builder, row, packed_stride, column, 1)), part)

        _each_vector_of_tile(emit, sizes, lambda group: emit.params(factors, group), body)
        return context.get_dummy_value()

    return types.void(_PAIR, types.int64, types.int64, _SIZES, _PAIR, form), codegen


@intrinsic(prefer_literal=True)
def decode_tile(typing_context, source, target, sizes, factors, form, stream):
    """The inverse of `encode_tile`; `factors` are the addresses of the scales and the zeros.

    `stream` writes past the cache: every row of the target must be aligned to a vector, or to a line.
    """

    def codegen(context, builder, signature, args):
        emit = _Coding(builder, Form.of(form.literal_value))
        (start, stride), sizes, factors = (cgutils.unpack_tuple(builder, arg) for arg in args[1:4])
        part = builder.sdiv(sizes[1], _I64(emit.form.parts))
        packed_stride = _packed_nbytes(builder, sizes[1], emit.form.bits)
        tables = emit.has_tables(context)

        def body(row, column, params):
            packed = builder.add(args[0], _offset(builder, row, packed_stride, column, 1))
            place = builder.add(start, _offset(builder, row, stride, column, 2))
            for i, (code, param) in enumerate(zip(emit.unpack(packed, part), params, strict=True)):
                values = emit.looked_up(param, code) if tables else emit.decode(code, *param)
                emit.store(values, step(builder, place, part, 2 * i), stream.literal_value)

        params_of = emit.table if tables else emit.params
        _each_vector_of_tile(emit, sizes, lambda group: params_of(factors, group), body)
        return context.get_dummy_value()

    return types.void(types.int64, _PAIR, _SIZES, _PAIR, form, stream), codegen


@intrinsic(prefer_literal=True)
def measure_tile(typing_context, source, sizes, ranges, form):
    """Widen the ranges of a tile's groups, int16 (lowest, highest) order keys at two addresses, by its values."""

    def codegen(context, builder, signature, args):
        emit = _Coding(builder, Form.of(form.literal_value))
        (start, stride), sizes, ranges = (cgutils.unpack_tuple(builder, arg) for arg in args[:3])
        kept = [cgutils.alloca_once(builder, ir.VectorType(_I16, emit.count)) for _ in ranges]

        def widen(row, column):
            place = builder.add(start, _offset(builder, row, stride, column, 2))
            emit.widen(kept, emit.load(place, _I16))

        measure = _measure_rows if emit.form.along_rows else _measure_columns
        measure(emit, sizes, ranges, kept, widen)
        return context.get_dummy_value()

    return types.void(_PAIR, _SIZES, _PAIR, form), codegen


def _measure_rows(emit: _Coding, sizes, ranges, kept, widen) -> None:
    builder, (rows, columns, length, _) = emit.builder, sizes
    starts = cgutils.for_range_slice(builder, _I64(0), columns, length, _I64)
    with cgutils.for_range(builder, rows) as row, starts as (start, _):
        group = builder.sdiv(_offset(builder, row.index, columns, start, 1), length)
        places = [builder.inttoptr(step(builder, address, group, 2), _I16.as_pointer()) for address in ranges]
        for value, place in zip(kept, places, strict=True):
            builder.store(emit.splat(builder.load(place)), value)
        with _vectors(builder, length, emit.count) as (column, _):
            widen(row.index, builder.add(start, column))
        for value, place, name in zip(kept, places, ("smin", "smax"), strict=True):
            builder.store(emit.reduce(name, builder.load(value)), place)


def _measure_columns(emit: _Coding, sizes, ranges, kept, widen) -> None:
    builder, (rows, columns, length, _) = emit.builder, sizes
    groups = builder.sdiv(rows, length)
    with cgutils.for_range(builder, groups) as group, _vectors(builder, columns, emit.count) as (column, _):
        first = _offset(builder, group.index, columns, column, 1)
        places = [step(builder, address, first, 2) for address in ranges]
        for value, place in zip(kept, places, strict=True):
            builder.store(emit.load(place, _I16), value)
        with cgutils.for_range(builder, length) as row:
            widen(_offset(builder, group.index, length, row.index, 1), column)
        for value, place in zip(kept, places, strict=True):
            emit.store(builder.load(value), place)


@intrinsic(prefer_literal=True)
def scale_groups(typing_context, ranges, params, factors, count, form):
    """Scales of `count` groups from their ranges.

    `ranges` are the addresses of the lowest and highest order keys, int16; `params` of the scales (bfloat16 bits) and
    zeros (dtype bits), uint16; `factors` of the inverse scales and the zeros as numbers, float32, for `encode_tile`.
    """

    def codegen(context, builder, signature, args):
        known = Form.of(form.literal_value)
        ranges, params, factors = (cgutils.unpack_tuple(builder, arg) for arg in args[:3])

        def body(lanes, index):
            emit, split = _Coding(builder, known._replace(lanes=lanes.count)), not known.along_rows
            scale, zero = emit.scale_and_zero(*(emit.load(step(builder, a, index, 2), _I16) for a in ranges))
            inverse = builder.fdiv(emit.constant(_F32, 1.0), emit.value_of(scale, 0, split))
            number = emit.value_of(zero, known.float16, split)
            for bits, value, at, to in zip((scale, zero), (inverse, number), params, factors, strict=True):
                emit.store(value, step(builder, to, index, 4))
                if at is params[0] or known.kind == ASYMMETRIC:
                    emit.store(bits, step(builder, at, index, 2))

        each_vector(context, builder, args[3], body, known.param_lanes)
        return context.get_dummy_value()

    return types.void(_PAIR, _PAIR, _PAIR, types.int64, form), codegen


@intrinsic(prefer_literal=True)
def widen_params(typing_context, params, factors, count, form):
    """Scales and zeros of `count` groups as numbers: float32 `factors` for `decode_tile` from 16-bit `params`."""

    def codegen(context, builder, signature, args):
        known = Form.of(form.literal_value)
        params, factors = (cgutils.unpack_tuple(builder, arg) for arg in args[:2])
        split = known.decodes_split and not known.along_rows

        def body(emit, index):
            for at, to, float16 in zip(params, factors, (0, known.float16), strict=True):
                if at is params[0] or known.kind == ASYMMETRIC:
                    bits = emit.load(step(builder, at, index, 2), _I16)
                    emit.store(emit.value_of(bits, float16, split), step(builder, to, index, 4))

        each_vector(context, builder, args[2], body, known.param_lanes)
        return context.get_dummy_value()

    return types.void(_PAIR, _PAIR, types.int64, form), codegen
