"""`quantize` and `dequantize` for CPUs. One kernel a (code, dtype, direction of the groups), compiled at first use.

A unit of parallel work is one group of blocks of one head of one layer of one chunk: it is read twice, and fits the
second-level cache. Minimum and maximum are taken on the integer bits (4 times the speed of float comparisons).
"""

import functools
import os

os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")  # "workqueue" aborts when two Python threads enter at once

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from kernels.floats_numba import (
    bf16_bits,
    e4m3_bits,
    e4m3_value,
    e5m2_bits,
    e5m2_value,
    f16_bits,
    f16_value,
    f32,
    float_of,
    i32,
    round_to_int,
    round_up_bf16_bits,
    u8,
    u16,
    u32,
    values_at,
)
from kernels.quantize import Coded, Scheme, grouping
from kernels.tiles import Tiles

__all__ = ["dequantize", "quantize"]

i16 = np.int16
OPTIONS = {"parallel": True, "nogil": True, "cache": True, "error_model": "numpy"}
# Kinds of code, as integers: a kernel's closure holds numbers only, or numba could not cache it.
SYMMETRIC, ASYMMETRIC, E4M3, E5M2 = range(4)
SMALLEST_SCALE = f32(2.0**-100)


def quantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    groups = grouping(tiles, scheme, blocks.shape[1])
    kernel = _quantize_kernel(*_constants(scheme), groups.along_rows)
    kernel(tiles.addresses, tiles.strides, blocks, groups.length, coded.codes, coded.scales, coded.zeros)


def dequantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    groups = grouping(tiles, scheme, blocks.shape[1])
    kernel = _dequantize_kernel(*_constants(scheme), groups.along_rows)
    kernel(tiles.addresses, tiles.strides, blocks, groups.length, coded.codes, coded.scales, coded.zeros)


def _constants(scheme: Scheme) -> tuple[int, int, int]:
    kind = {"int8": SYMMETRIC, "e4m3": E4M3, "e5m2": E5M2}.get(scheme.code, ASYMMETRIC)
    return kind, scheme.bits, int(scheme.dtype == "float16")


def _min_max_of(lanes: int):
    """An intrinsic: (min, max) of the order keys of `lanes` values at an address.

    Loops over a group of 32 or 64 are too short for numba's loop vectoriser; whole vectors are written out instead.
    """

    @intrinsic
    def min_max(typing_context, address, mask):
        def codegen(context, builder, signature, args):
            vector = ir.VectorType(ir.IntType(16), lanes)

            def splat(value):
                one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
                zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)

            bits = builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=2)
            bits = builder.and_(bits, splat(args[1]))
            sign = builder.ashr(bits, ir.Constant(vector, [15] * lanes))
            key = builder.xor(bits, builder.and_(sign, ir.Constant(vector, [0x7FFF] * lanes)))
            ends = [
                builder.call(
                    builder.module.declare_intrinsic(
                        f"llvm.vector.reduce.{name}.v{lanes}i16", (), ir.FunctionType(ir.IntType(16), [vector])
                    ),
                    [key],
                )
                for name in ("smin", "smax")
            ]
            return context.make_tuple(builder, signature.return_type, ends)

        return types.UniTuple(types.int16, 2)(types.int64, types.int16), codegen

    return min_max


_min_max_32, _min_max_64, _min_max_128 = _min_max_of(32), _min_max_of(64), _min_max_of(128)


@njit
def _order_key(bits):
    signed = i16(bits)
    return i16(signed ^ ((signed >> i16(15)) & i16(0x7FFF)))


@njit
def _min_max(address, count, mask, low, high):
    """Widen (low, high) by `count` values; `mask` 0x7FFF drops the signs."""
    if count % 32 == 0:
        step = 128 if count % 128 == 0 else (64 if count % 64 == 0 else 32)
        for start in range(0, count, step):
            place = address + 2 * start
            if step == 128:
                found = _min_max_128(place, mask)
            elif step == 64:
                found = _min_max_64(place, mask)
            else:
                found = _min_max_32(place, mask)
            low, high = min(low, found[0]), max(high, found[1])
        return low, high
    values = carray(values_at(address), (count,))
    for j in range(count):
        key = _order_key(values[j] & u16(mask))
        low, high = min(low, key), max(high, key)
    return low, high


@njit
def _value(bits, float16):
    if float16:
        return f16_value(u16(bits))
    return float_of(u32(bits) << u32(16))


@njit
def _bits(value, float16):
    if float16:
        return f16_bits(value)
    return bf16_bits(value)


@njit
def _scale_and_zero(low, high, kind, bits, float16):
    """bfloat16 bits of the scale and dtype bits of the zero of a group whose order keys span low to high."""
    infinity = 0x7C00 if float16 else 0x7F80
    if high >= infinity or low <= ~infinity:
        return u16(0x7FC0), u16(0)
    zero = u16(0)
    if kind == ASYMMETRIC:
        zero = u16(_order_key(u16(low)))
        largest = f32(1.0 / ((1 << bits) - 1))
    elif kind == SYMMETRIC:
        largest = f32(1.0 / 127.0)
    elif kind == E4M3:
        largest = f32(1.0 / 448.0)
    else:
        largest = f32(1.0 / 57344.0)
    span = _value(u16(_order_key(u16(high))), float16) - _value(zero, float16)
    return round_up_bf16_bits(max(f32(span * largest), SMALLEST_SCALE)), zero


@njit
def _code(value, inverse, zero, kind):
    if kind == ASYMMETRIC:
        return u8(round_to_int(f32(f32(value - zero) * inverse)))
    scaled = f32(value * inverse)
    if kind == SYMMETRIC:
        return u8(round_to_int(scaled))
    if kind == E4M3:
        return e4m3_bits(scaled)
    return e5m2_bits(scaled)


@njit
def _number(code, scale, zero, kind):
    if kind == ASYMMETRIC:
        return f32(f32(f32(i32(code)) * scale) + zero)
    if kind == SYMMETRIC:
        return f32(f32(i32(np.int8(code))) * scale)
    if kind == E4M3:
        return f32(e4m3_value(code) * scale)
    return f32(e5m2_value(code) * scale)


@njit
def _pack_row(codes, packed, bits):
    columns = codes.size
    if bits == 4:
        half = columns // 2
        for j in range(half):
            packed[j] = u8(codes[j] | u8(codes[j + half] << u8(4)))
        return
    part = columns // 4
    for j in range(part):
        low = u8(codes[j] & u8(3)) | u8(u8(codes[j + part] & u8(3)) << u8(2))
        high = u8(u8(codes[j + 2 * part] & u8(3)) << u8(4)) | u8(u8(codes[j + 3 * part] & u8(3)) << u8(6))
        packed[j] = u8(low | high)
    if bits == 3:
        eighth = columns // 8
        for j in range(eighth):
            third = u8(0)
            for i in range(8):
                third |= u8(u8(codes[j + i * eighth] >> u8(2)) << u8(i))
            packed[part + j] = third


@njit
def _unpack_row(packed, codes, bits):
    columns = codes.size
    if bits == 4:
        half = columns // 2
        for j in range(half):
            codes[j] = u8(packed[j] & u8(15))
        for j in range(half):
            codes[j + half] = u8(packed[j] >> u8(4))
        return
    part = columns // 4
    for i in range(4):
        for j in range(part):
            codes[i * part + j] = u8(u8(packed[j] >> u8(2 * i)) & u8(3))
    if bits == 3:
        eighth = columns // 8
        for i in range(8):
            for j in range(eighth):
                codes[i * eighth + j] |= u8(u8(u8(packed[part + j] >> u8(i)) & u8(1)) << u8(2))


@functools.cache
def _quantize_kernel(kind: int, bits: int, float16: int, along_rows: bool):
    @njit(**OPTIONS)
    def along(addresses, strides, blocks, length, codes, scales, zeros):
        chunks, layers, spans, heads, rows, groups = scales.shape
        span, columns = codes.shape[2] // max(spans, 1), codes.shape[5] * 8 // bits
        mask = i16(-1) if kind == ASYMMETRIC else i16(0x7FFF)
        for unit in prange(chunks * layers * spans * heads):
            h, rest = unit % heads, unit // heads
            s, rest = rest % spans, rest // spans
            layer, c = rest % layers, rest // layers
            inverse, zero, row = np.empty(columns, f32), np.empty(columns, f32), np.empty(columns, u8)
            for r in range(rows):
                base = addresses[layer] + h * strides[1] + r * strides[2]
                for g in range(groups):
                    low, high = (i16(0x7FFF), i16(-0x8000)) if kind == ASYMMETRIC else (i16(0), i16(-1))
                    for i in range(s * span, (s + 1) * span):
                        if blocks[c, i] >= 0:
                            place = base + blocks[c, i] * strides[0] + 2 * g * length
                            low, high = _min_max(place, length, mask, low, high)
                            if kind != ASYMMETRIC:
                                low = i16(0)
                    if high < low:
                        continue  # every block of the group is skipped
                    scale_bits, zero_bits = _scale_and_zero(low, high, kind, bits, float16)
                    scales[c, layer, s, h, r, g] = scale_bits
                    if kind == ASYMMETRIC:
                        zeros[c, layer, s, h, r, g] = zero_bits
                    inverse[g] = f32(1.0) / _value(scale_bits, 0)
                    zero[g] = _value(zero_bits, float16)
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] >= 0:
                        values = carray(values_at(base + blocks[c, i] * strides[0]), (columns,))
                        packed = codes[c, layer, i, h, r]
                        target = packed if bits == 8 else row
                        for g in range(groups):
                            one, offset, start = inverse[g], zero[g], g * length
                            for j in range(length):
                                target[start + j] = _code(_value(values[start + j], float16), one, offset, kind)
                        if bits < 8:
                            _pack_row(row, packed, bits)

    @njit(**OPTIONS)
    def down(addresses, strides, blocks, length, codes, scales, zeros):
        chunks, layers, spans, heads, groups, columns = scales.shape
        span = codes.shape[2] // max(spans, 1)
        mask = u16(0xFFFF) if kind == ASYMMETRIC else u16(0x7FFF)
        for unit in prange(chunks * layers * spans * heads):
            h, rest = unit % heads, unit // heads
            s, rest = rest % spans, rest // spans
            layer, c = rest % layers, rest // layers
            base = addresses[layer] + h * strides[1]
            inverse, zero, row = np.empty(columns, f32), np.empty(columns, f32), np.empty(columns, u8)
            low, high = np.empty(columns, i16), np.empty(columns, i16)
            for g in range(groups):
                low[:] = i16(0x7FFF) if kind == ASYMMETRIC else i16(0)
                high[:] = i16(-0x8000) if kind == ASYMMETRIC else i16(-1)
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] < 0:
                        continue
                    for r in range(g * length, (g + 1) * length):
                        place = base + blocks[c, i] * strides[0] + r * strides[2]
                        values = carray(values_at(place), (columns,))
                        for j in range(columns):
                            key = _order_key(values[j] & mask)
                            high[j] = max(high[j], key)
                            if kind == ASYMMETRIC:
                                low[j] = min(low[j], key)
                if high[0] < low[0]:
                    continue  # every block of the group is skipped
                for j in range(columns):
                    scale_bits, zero_bits = _scale_and_zero(low[j], high[j], kind, bits, float16)
                    scales[c, layer, s, h, g, j] = scale_bits
                    if kind == ASYMMETRIC:
                        zeros[c, layer, s, h, g, j] = zero_bits
                    inverse[j] = f32(1.0) / _value(scale_bits, 0)
                    zero[j] = _value(zero_bits, float16)
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] < 0:
                        continue
                    for r in range(g * length, (g + 1) * length):
                        place = base + blocks[c, i] * strides[0] + r * strides[2]
                        values = carray(values_at(place), (columns,))
                        packed = codes[c, layer, i, h, r]
                        target = packed if bits == 8 else row
                        for j in range(columns):
                            target[j] = _code(_value(values[j], float16), inverse[j], zero[j], kind)
                        if bits < 8:
                            _pack_row(row, packed, bits)

    return along if along_rows else down


@functools.cache
def _dequantize_kernel(kind: int, bits: int, float16: int, along_rows: bool):
    @njit(**OPTIONS)
    def kernel(addresses, strides, blocks, length, codes, scales, zeros):
        chunks, layers, spans, heads = scales.shape[:4]
        span, rows, columns = codes.shape[2] // max(spans, 1), codes.shape[4], codes.shape[5] * 8 // bits
        for unit in prange(chunks * layers * spans * heads):
            h, rest = unit % heads, unit // heads
            s, rest = rest % spans, rest // spans
            layer, c = rest % layers, rest // layers
            scale, zero, row = np.empty(columns, f32), np.zeros(columns, f32), np.empty(columns, u8)
            for r in range(rows):
                if along_rows:
                    for g in range(scales.shape[5]):
                        scale[g * length : (g + 1) * length] = _value(scales[c, layer, s, h, r, g], 0)
                        if kind == ASYMMETRIC:
                            zero[g * length : (g + 1) * length] = _value(zeros[c, layer, s, h, r, g], float16)
                elif r % length == 0:
                    for j in range(columns):
                        scale[j] = _value(scales[c, layer, s, h, r // length, j], 0)
                        if kind == ASYMMETRIC:
                            zero[j] = _value(zeros[c, layer, s, h, r // length, j], float16)
                base = addresses[layer] + h * strides[1] + r * strides[2]
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] < 0:
                        continue
                    values = carray(values_at(base + blocks[c, i] * strides[0]), (columns,))
                    packed = codes[c, layer, i, h, r]
                    source = packed if bits == 8 else row
                    if bits < 8:
                        _unpack_row(packed, row, bits)
                    for j in range(columns):
                        values[j] = _bits(_number(source[j], scale[j], zero[j], kind), float16)

    return kernel
