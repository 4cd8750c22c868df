"""Arithmetic on whole vectors of 16-bit values, for numba kernels: LLVM vectors written out, not left to chance.

numba's loop vectoriser gives up half of the speed on these loops and all of it on short groups, so each step is an
intrinsic over `lanes` values at an address (32 for the body, 1 for a tail; LLVM cuts them to the machine's width).
The same definitions as `kernels.floats`: integer operations, comparisons, and float32 add, subtract and multiply with
one rounding each. No fused multiply-add and no libm call, so the bytes are those of the reference.

Arguments named `kind`, `float16`, `parts`, `width` and `shift` are literals: numbers known when a kernel is compiled.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "ASYMMETRIC",
    "E4M3",
    "E5M2",
    "Lanes",
    "SYMMETRIC",
    "decode_row",
    "each_vector",
    "encode_row",
    "fence",
    "merge_bits",
    "min_max_row",
    "scale_row",
    "spread_bits",
    "step",
    "widen_params",
    "widen_row",
]

# Kinds of code, as integers: a kernel's closure holds numbers only, or numba could not cache it.
SYMMETRIC, ASYMMETRIC, E4M3, E5M2 = range(4)

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_LANES = 32
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits
_ROUND_BITS = 0x4B400000


class Lanes:
    """Emits operations on vectors of `count` lanes."""

    def __init__(self, builder, count: int):
        self.builder, self.count = builder, count

    def constant(self, element, value):
        return ir.Constant(ir.VectorType(element, self.count), [value] * self.count)

    def cast(self, name, value, element):
        return getattr(self.builder, name)(value, ir.VectorType(element, self.count))

    def splat(self, scalar):
        undefined = ir.Constant(ir.VectorType(scalar.type, self.count), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, self.constant(_I32, 0))

    def load(self, address, element):
        pointer = self.builder.inttoptr(address, ir.VectorType(element, self.count).as_pointer())
        return self.builder.load(pointer, align=element.width // 8 if element != _F32 else 4)

    def store(self, value, address, stream: bool = False):
        """Store at an address; past the cache if `stream`, which a whole vector must be aligned for."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        if not stream or self.count == 1:
            self.builder.store(value, pointer, align=1)
            return
        stored = self.builder.store(value, pointer, align=self.count * value.type.element.width // 8)
        stored.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(_I32, 1)]))

    def parameter(self, value):
        """A float32 for every lane, or the address of one a lane."""
        return self.splat(value) if value.type == _F32 else self.load(value, _F32)

    def and_(self, value, mask):
        return self.builder.and_(value, self.constant(value.type.element, mask))

    def shifted(self, name, value, bits):
        return getattr(self.builder, name)(value, self.constant(value.type.element, bits))

    def plus(self, value, number):
        return self.builder.add(value, self.constant(value.type.element, number & 0xFFFFFFFF))

    def value_of(self, bits, float16: int):
        """i16 bits -> float."""
        if float16:
            return self.cast("fpext", self.cast("bitcast", bits, ir.HalfType()), _F32)
        return self.cast("bitcast", self.shifted("shl", self.cast("zext", bits, _I32), 16), _F32)

    def bits_of(self, value, float16: int):
        """float -> i16 bits, to nearest even."""
        if float16:
            return self.cast("bitcast", self.cast("fptrunc", value, ir.HalfType()), _I16)
        bits = self.cast("bitcast", value, _I32)
        odd = self.and_(self.shifted("lshr", bits, 16), 1)
        rounded = self.builder.add(self.plus(bits, 0x7FFF), odd)
        return self.cast("trunc", self.shifted("lshr", rounded, 16), _I16)

    def rounded(self, value):
        """float -> i32, to nearest even."""
        shifted = self.builder.fadd(value, self.constant(_F32, _ROUND))
        return self.plus(self.cast("bitcast", shifted, _I32), -_ROUND_BITS)

    def order_key(self, bits, kind: int):
        """i16 bits -> i16 that sorts like the numbers, or like the magnitudes for a symmetric kind."""
        if kind != ASYMMETRIC:
            return self.and_(bits, 0x7FFF)
        return self.builder.xor(bits, self.and_(self.shifted("ashr", bits, 15), 0x7FFF))

    def smallest(self, left, right):
        return self.builder.select(self.builder.icmp_signed("<", left, right), left, right)

    def largest(self, left, right):
        return self.builder.select(self.builder.icmp_signed(">", left, right), left, right)

    def reduce(self, name, vector):
        """smin or smax over the lanes of i16."""
        function = self.builder.module.declare_intrinsic(
            f"llvm.vector.reduce.{name}.v{self.count}i16", (), ir.FunctionType(_I16, [vector.type])
        )
        return self.builder.call(function, [vector])

    def scale_and_zero(self, low, high, kind: int, bits: int, float16: int):
        """i16 (bfloat16 bits of the scale, dtype bits of the zero) of groups whose order keys span low to high."""
        builder, infinity = self.builder, 0x7C00 if float16 else 0x7F80
        finite = builder.icmp_signed("<", high, self.constant(_I16, infinity))
        span = self.value_of(self.order_key(high, ASYMMETRIC), float16)
        zero = self.constant(_I16, 0)
        if kind == ASYMMETRIC:
            lowest = builder.icmp_signed(">", low, self.constant(_I16, ~infinity & 0xFFFF))
            finite = builder.and_(finite, lowest)
            zero = builder.select(finite, self.order_key(low, ASYMMETRIC), zero)
            span = builder.fsub(span, self.value_of(zero, float16))
        # Rounded to float32 first, as the reference does: a constant must not carry more digits than its type.
        largest = {SYMMETRIC: 127.0, E4M3: 448.0, E5M2: 57344.0}.get(kind) or float(2**bits - 1)
        scaled = builder.fmul(span, self.constant(_F32, float(np.float32(1 / largest))))
        smallest = self.constant(_F32, 2.0**-100)
        scaled = builder.select(builder.fcmp_ordered(">", scaled, smallest), scaled, smallest)
        up = self.shifted("lshr", self.plus(self.cast("bitcast", scaled, _I32), 0xFFFF), 16)
        return builder.select(finite, self.cast("trunc", up, _I16), self.constant(_I16, 0x7FC0)), zero

    def fp8_bits(self, value, kind: int):
        """float -> i32 holding the code of e4m3 or e5m2, to nearest even, saturating."""
        # mantissa bits dropped; bias difference; largest; smallest normal; the number whose ulp is the last subnormal
        drop, rebias, largest, normal_from, ruler = (
            (20, 120 << 3, 448.0, 2.0**-6, 16384.0) if kind == E4M3 else (21, 112 << 2, 57344.0, 2.0**-14, 128.0)
        )
        builder, bits = self.builder, self.cast("bitcast", value, _I32)
        magnitude = self.cast("bitcast", self.and_(bits, 0x7FFFFFFF), _F32)
        limit = self.constant(_F32, largest)
        magnitude = builder.select(builder.fcmp_ordered("<", magnitude, limit), magnitude, limit)
        kept = self.cast("bitcast", magnitude, _I32)
        odd = self.and_(self.shifted("lshr", kept, drop), 1)
        normal = self.shifted("lshr", builder.add(self.plus(kept, (1 << (drop - 1)) - 1), odd), drop)
        ruled = builder.fadd(magnitude, self.constant(_F32, ruler))
        ruler_bits = 0x46800000 if kind == E4M3 else 0x43000000
        small = builder.fcmp_ordered("<", magnitude, self.constant(_F32, normal_from))
        subnormal = self.plus(self.cast("bitcast", ruled, _I32), -ruler_bits)
        code = builder.select(small, subnormal, self.plus(normal, -rebias))
        return builder.or_(code, self.and_(self.shifted("lshr", bits, 24), 0x80))

    def fp8_value(self, code, kind: int):
        """i8 codes -> float."""
        wide = self.cast("zext", code, _I32)
        magnitude = self.shifted("shl", self.and_(wide, 0x7F), 20 if kind == E4M3 else 21)
        bits = self.builder.or_(magnitude, self.shifted("shl", self.and_(wide, 0x80), 24))
        factor = 2.0**120 if kind == E4M3 else 2.0**112
        return self.builder.fmul(self.cast("bitcast", bits, _F32), self.constant(_F32, factor))


def each_vector(context, builder, count, body) -> None:
    """Emit body(lanes, first lane) over `count` lanes: whole vectors, then one by one."""
    width = context.get_constant(types.intp, _LANES)
    whole = builder.sub(count, builder.srem(count, width))
    zero, one = context.get_constant(types.intp, 0), context.get_constant(types.intp, 1)
    for lanes, start, stop, step in ((_LANES, zero, whole, width), (1, whole, count, one)):
        with cgutils.for_range_slice(builder, start, stop, step, count.type) as (index, _):
            body(Lanes(builder, lanes), index)


def step(builder, address, index, nbytes: int):
    """Emit address + index * nbytes."""
    return builder.add(address, builder.mul(index, ir.Constant(index.type, nbytes)))


@intrinsic(prefer_literal=True)
def encode_row(typing_context, source, target, count, inverse, zero, kind, float16, stream):
    """Encode `count` values at an address: code((value - zero) * inverse).

    `inverse` and `zero` are float32, or (both) addresses of one float32 a value. `stream` writes past the cache: the
    target must be aligned to a vector of codes.
    """
    each = isinstance(inverse, types.Integer)

    def codegen(context, builder, signature, args):
        def body(emit, index):
            inverse, zero = (step(builder, a, index, 4) if each else a for a in args[3:5])
            value = emit.value_of(emit.load(step(builder, args[0], index, 2), _I16), float16.literal_value)
            if kind.literal_value == ASYMMETRIC:
                value = builder.fsub(value, emit.parameter(zero))
            value = builder.fmul(value, emit.parameter(inverse))
            fp8 = kind.literal_value in (E4M3, E5M2)
            code = emit.fp8_bits(value, kind.literal_value) if fp8 else emit.rounded(value)
            emit.store(emit.cast("trunc", code, _I8), builder.add(args[1], index), stream.literal_value)

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, inverse, zero, kind, float16, stream), codegen


@intrinsic(prefer_literal=True)
def decode_row(typing_context, source, target, count, scale, zero, kind, float16, stream):
    """Decode `count` codes at an address: code * scale + zero, rounded to the dtype; `scale` and `zero` as above."""
    each = isinstance(scale, types.Integer)

    def codegen(context, builder, signature, args):
        def body(emit, index):
            scale, zero = (step(builder, a, index, 4) if each else a for a in args[3:5])
            code = emit.load(builder.add(args[0], index), _I8)
            if kind.literal_value in (E4M3, E5M2):
                number = emit.fp8_value(code, kind.literal_value)
            else:
                widen = "sext" if kind.literal_value == SYMMETRIC else "zext"
                number = emit.cast("sitofp", emit.cast(widen, code, _I32), _F32)
            value = builder.fmul(number, emit.parameter(scale))
            if kind.literal_value == ASYMMETRIC:
                value = builder.fadd(value, emit.parameter(zero))
            bits = emit.bits_of(value, float16.literal_value)
            emit.store(bits, step(builder, args[1], index, 2), stream.literal_value)

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, scale, zero, kind, float16, stream), codegen


@intrinsic(prefer_literal=True)
def widen_row(typing_context, source, low, high, count, kind):
    """Widen `count` ranges, int16 at two addresses, by the order key of one value each; only high if symmetric."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            source, low, high = (step(builder, a, index, 2) for a in args[:3])
            key = emit.order_key(emit.load(source, _I16), kind.literal_value)
            if kind.literal_value == ASYMMETRIC:
                emit.store(emit.smallest(key, emit.load(low, _I16)), low)
            emit.store(emit.largest(key, emit.load(high, _I16)), high)

        each_vector(context, builder, args[3], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, kind), codegen


@intrinsic(prefer_literal=True)
def min_max_row(typing_context, source, count, low, high, kind):
    """(low, high) widened by the order keys of `count` values at an address; only high, by magnitudes, if symmetric."""

    def codegen(context, builder, signature, args):
        wide = Lanes(builder, _LANES)
        ranges = [cgutils.alloca_once_value(builder, wide.splat(end)) for end in args[2:4]]

        def body(emit, index):
            key = emit.order_key(emit.load(step(builder, args[0], index, 2), _I16), kind.literal_value)
            key = key if emit.count > 1 else wide.splat(builder.extract_element(key, ir.Constant(_I32, 0)))
            builder.store(wide.largest(key, builder.load(ranges[1])), ranges[1])
            if kind.literal_value == ASYMMETRIC:
                builder.store(wide.smallest(key, builder.load(ranges[0])), ranges[0])

        each_vector(context, builder, args[1], body)
        high = wide.reduce("smax", builder.load(ranges[1]))
        low = wide.reduce("smin", builder.load(ranges[0])) if kind.literal_value == ASYMMETRIC else args[2]
        ends = [low, high]
        return context.make_tuple(builder, signature.return_type, ends)

    return types.UniTuple(types.int16, 2)(types.int64, types.int64, types.int16, types.int16, kind), codegen


@intrinsic(prefer_literal=True)
def scale_row(typing_context, ranges, params, factors, count, kind, bits, float16):
    """Scales of `count` groups from their ranges.

    `ranges` are the addresses of the lowest and highest order keys, int16; `params` of the scales (bfloat16 bits) and
    zeros (dtype bits), uint16; `factors` of the inverse scales and the zeros as numbers, float32.
    """

    def codegen(context, builder, signature, args):
        low_at, high_at = cgutils.unpack_tuple(builder, args[0])
        params, factors = (cgutils.unpack_tuple(builder, arg) for arg in args[1:3])

        def body(emit, index):
            low, high = (emit.load(step(builder, place, index, 2), _I16) for place in (low_at, high_at))
            scale, zero = emit.scale_and_zero(low, high, kind.literal_value, bits.literal_value, float16.literal_value)
            inverse = builder.fdiv(emit.constant(_F32, 1.0), emit.value_of(scale, 0))
            emit.store(scale, step(builder, params[0], index, 2))
            emit.store(inverse, step(builder, factors[0], index, 4))
            if kind.literal_value == ASYMMETRIC:
                emit.store(zero, step(builder, params[1], index, 2))
                emit.store(emit.value_of(zero, float16.literal_value), step(builder, factors[1], index, 4))

        each_vector(context, builder, args[3], body)
        return context.get_dummy_value()

    pair = types.UniTuple(types.int64, 2)
    return types.void(pair, pair, pair, types.int64, kind, bits, float16), codegen


@intrinsic(prefer_literal=True)
def widen_params(typing_context, source, target, count, float16):
    """float32 target = 16-bit source, `count` of each at two addresses."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            value = emit.value_of(emit.load(step(builder, args[0], index, 2), _I16), float16.literal_value)
            emit.store(value, step(builder, args[1], index, 4))

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, float16), codegen


@intrinsic(prefer_literal=True)
def merge_bits(typing_context, source, target, count, parts, width, shift):
    """Pack codes: byte j = OR over i of bits [shift, shift + width) of source[j + i * count], moved to i * width."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            packed = emit.constant(_I8, 0)
            for i in range(parts.literal_value):
                offset = builder.add(index, step(builder, ir.Constant(args[0].type, 0), args[2], i))
                code = emit.shifted("lshr", emit.load(builder.add(args[0], offset), _I8), shift.literal_value)
                code = emit.and_(code, (1 << width.literal_value) - 1)
                packed = builder.or_(packed, emit.shifted("shl", code, i * width.literal_value))
            emit.store(packed, builder.add(args[1], index))

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, parts, width, shift), codegen


@intrinsic(prefer_literal=True)
def spread_bits(typing_context, source, target, count, parts, width, shift):
    """The inverse of `merge_bits`: target[j + i * count] = its bits, ORed to what is there where shift > 0."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            packed = emit.load(builder.add(args[0], index), _I8)
            for i in range(parts.literal_value):
                code = emit.and_(emit.shifted("lshr", packed, i * width.literal_value), (1 << width.literal_value) - 1)
                code = emit.shifted("shl", code, shift.literal_value)
                offset = builder.add(index, step(builder, ir.Constant(args[0].type, 0), args[2], i))
                place = builder.add(args[1], offset)
                emit.store(builder.or_(code, emit.load(place, _I8)) if shift.literal_value else code, place)

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, parts, width, shift), codegen


@intrinsic
def fence(typing_context):
    """Streamed stores are weakly ordered: make them visible before another thread is told of them."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
