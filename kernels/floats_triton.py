"""Small floating-point formats as integer bits, for Triton kernels: the same definitions as `kernels.floats`.

Triton's own casts differ between its interpreter, GPU generations and versions (bfloat16 truncates in the interpreter,
fp8 drops a rounding carry), so every rounding here is done on integer bits. Division is `tl.div_rn`; a plain `/` is
approximate on GPUs. Compile with `TRITON_DEFAULT_FP_FUSION=0`: a fused multiply-add would change bytes.
"""

# ruff: noqa: N803 - a Triton kernel's compile-time constants are in capitals

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

import triton
import triton.language as tl

__all__ = ["bits_of", "fp8_code", "fp8_number", "order_key", "round_to_int", "round_up_bf16", "value_of"]


@triton.jit
def value_of(bits, FLOAT16: tl.constexpr):
    """int16 bits of bfloat16 or float16 -> float32, exact."""
    if FLOAT16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    wide = bits.to(tl.int32) << 16
    return wide.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(value, FLOAT16: tl.constexpr):
    """float32 -> int16 bits of bfloat16 or float16, to nearest even; not for NaN."""
    if FLOAT16:
        return value.to(tl.float16).to(tl.int16, bitcast=True)
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def round_up_bf16(value):
    """float32 >= 0 -> int32 bits of the smallest bfloat16 that is not below it."""
    return ((value.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16).to(tl.int32)


@triton.jit
def order_key(bits, SYMMETRIC: tl.constexpr):
    """int16 bits -> int32 that sorts like the numbers; like the magnitudes if SYMMETRIC."""
    wide = bits.to(tl.int32)
    if SYMMETRIC:
        return wide & 0x7FFF
    return wide ^ ((wide >> 15) & 0x7FFF)


@triton.jit
def round_to_int(value):
    """float32 of magnitude below 2^22 -> int32, to nearest even."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def fp8_code(value, E5M2: tl.constexpr):
    """float32 -> int32 holding the code of e4m3 or e5m2, to nearest even, saturating."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    if E5M2:
        magnitude = tl.minimum(tl.abs(value), 57344.0)
        kept = magnitude.to(tl.uint32, bitcast=True)
        normal = ((kept + 0xFFFFF + ((kept >> 21) & 1)) >> 21) - (112 << 2)
        subnormal = (magnitude + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
        code = tl.where(magnitude < 0.00006103515625, subnormal, normal)
    else:
        magnitude = tl.minimum(tl.abs(value), 448.0)
        kept = magnitude.to(tl.uint32, bitcast=True)
        normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - (120 << 3)
        subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (code | sign).to(tl.int32)


@triton.jit
def fp8_number(code, E5M2: tl.constexpr):
    """int32 code of e4m3 or e5m2 -> float32, exact for every finite code."""
    sign = (code & 0x80) << 24
    if E5M2:
        bits = ((code & 0x7F) << 21) | sign
        return bits.to(tl.float32, bitcast=True) * 5.192296858534828e33
    bits = ((code & 0x7F) << 20) | sign
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
