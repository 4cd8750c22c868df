"""Small floating-point formats as integer bits, in plain NumPy: the definition the fast versions are held to.

Rounding is to nearest, ties to even. 8-bit formats saturate at their largest finite value. e4m3 is the "fn" variant
(no infinity, NaN = 0x7F); e5m2 has infinities that are never produced here.
"""

import functools

import numpy as np

__all__ = [
    "EXPONENT_MASK",
    "FP8_MAX",
    "decode16",
    "decode_fp8",
    "encode16",
    "encode_fp8",
    "order_key",
    "round_up_bf16",
]

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
# All exponent bits set: infinity or NaN.
EXPONENT_MASK = {"bfloat16": 0x7F80, "float16": 0x7C00}


def decode16(bits: np.ndarray, dtype: str) -> np.ndarray:
    """uint16 bits of bfloat16 or float16 -> float32, exact."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode16(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> uint16 bits of bfloat16 or float16; values must not be NaN."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def round_up_bf16(values: np.ndarray) -> np.ndarray:
    """float32 >= 0 -> bits of the smallest bfloat16 that is not below it."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> 16).astype(np.uint16)


def order_key(bits: np.ndarray) -> np.ndarray:
    """uint16 float bits -> int16 that sorts like the numbers (-0 before +0, NaN at the ends). Its own inverse."""
    signed = bits.view(np.int16)
    return signed ^ ((signed >> 15) & np.int16(0x7FFF))


@functools.cache
def _fp8_values(name: str) -> np.ndarray:
    """float32 value of each of the 256 codes."""
    mantissa_bits, bias = (3, 7) if name == "e4m3" else (2, 15)
    code = np.arange(256)
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias))
    if name == "e4m3":
        values[(code & 0x7F) == 0x7F] = np.nan
    else:
        values[(code & 0x7F) == 0x7C] = np.inf
        values[(code & 0x7F) > 0x7C] = np.nan
    return np.where(code & 0x80, -values, values).astype(np.float32)


def decode_fp8(codes: np.ndarray, name: str) -> np.ndarray:
    """uint8 codes of e4m3 or e5m2 -> float32, exact."""
    return _fp8_values(name)[codes]


def encode_fp8(values: np.ndarray, name: str) -> np.ndarray:
    """float32 -> uint8 codes of e4m3 or e5m2, saturating; values must not be NaN."""
    table = _fp8_values(name)
    positive = table[: int(np.nonzero(table == np.float32(FP8_MAX[name]))[0][0]) + 1]
    middles = (positive[1:] + positive[:-1]) / 2
    magnitude = np.abs(values)
    code = np.searchsorted(middles, magnitude)
    on_a_tie = (code < len(middles)) & (magnitude == middles[np.minimum(code, len(middles) - 1)])
    code = code + (on_a_tie & (code % 2 == 1))
    return (code | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)
