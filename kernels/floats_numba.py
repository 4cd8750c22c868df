"""Small floating-point formats as integer bits, for numba kernels: one value at a time, nothing that resists SIMD.

The same definitions as `kernels.floats`. Only integer operations, comparisons, and float32 add, subtract and multiply:
no fused multiply-add, no libm call, so the bytes are those of the reference.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = [
    "bf16_bits",
    "bits_of",
    "e4m3_bits",
    "e4m3_value",
    "e5m2_bits",
    "e5m2_value",
    "f16_bits",
    "f16_value",
    "float_of",
    "round_to_int",
    "round_up_bf16_bits",
    "values_at",
]

f32, u8, u16, u32, i32 = np.float32, np.uint8, np.uint16, np.uint32, np.int32

# Adding 1.5 * 2^23 leaves a float32's nearest integer, ties to even, in its low bits.
_ROUND = f32(12582912.0)
_ROUND_BITS = i32(0x4B400000)


@intrinsic
def float_of(typing_context, bits):
    """uint32 bits -> the float32 they are."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of(typing_context, value):
    """float32 -> its uint32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def f16_value(typing_context, bits):
    """uint16 bits of float16 -> float32."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def f16_bits(typing_context, value):
    """float32 -> uint16 bits of float16, to nearest even, infinite beyond 65504."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def values_at(typing_context, address):
    """An address (int64) as a pointer to uint16, for `numba.carray`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(16).as_pointer())

    return types.CPointer(types.uint16)(types.int64), codegen


@njit
def bf16_bits(value):
    bits = bits_of(value)
    return u16((bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16))


@njit
def round_up_bf16_bits(value):
    return u16((bits_of(value) + u32(0xFFFF)) >> u32(16))


@njit
def round_to_int(value):
    return i32(bits_of(f32(value + _ROUND))) - _ROUND_BITS


@njit
def e4m3_bits(value):
    bits = bits_of(value)
    magnitude = min(abs(value), f32(448.0))
    kept = bits_of(magnitude)
    normal = ((kept + u32(0x7FFFF) + ((kept >> u32(20)) & u32(1))) >> u32(20)) - u32((127 - 7) << 3)
    # One ulp of 2^14 is 2^-9, the smallest subnormal: the addition rounds to it.
    subnormal = bits_of(f32(magnitude + f32(16384.0))) - u32(0x46800000)
    return u8((subnormal if magnitude < f32(2.0**-6) else normal) | ((bits >> u32(24)) & u32(0x80)))


@njit
def e4m3_value(code):
    bits = u32(code)
    return float_of(((bits & u32(0x7F)) << u32(20)) | ((bits & u32(0x80)) << u32(24))) * f32(2.0**120)


@njit
def e5m2_bits(value):
    bits = bits_of(value)
    magnitude = min(abs(value), f32(57344.0))
    kept = bits_of(magnitude)
    normal = ((kept + u32(0xFFFFF) + ((kept >> u32(21)) & u32(1))) >> u32(21)) - u32((127 - 15) << 2)
    # One ulp of 2^7 is 2^-16, the smallest subnormal.
    subnormal = bits_of(f32(magnitude + f32(128.0))) - u32(0x43000000)
    return u8((subnormal if magnitude < f32(2.0**-14) else normal) | ((bits >> u32(24)) & u32(0x80)))


@njit
def e5m2_value(code):
    bits = u32(code)
    return float_of(((bits & u32(0x7F)) << u32(21)) | ((bits & u32(0x80)) << u32(24))) * f32(2.0**112)
