"""`quantize` and `dequantize` for CPUs. One kernel a (code, dtype, direction of the groups), compiled at first use.

A unit of work is one group of blocks of one head of one layer of one chunk: it is read twice, and fits the
second-level cache. Minimum and maximum are taken on the integer bits.
"""

import functools
import math

import numpy as np
from numba import njit

from kernels.lanes_numba import (
    ASYMMETRIC,
    E4M3,
    E5M2,
    SYMMETRIC,
    bits_as_float,
    decode_row,
    encode_row,
    fence,
    float16_as_float,
    float_as_bits,
    merge_bits,
    min_max_row,
    spread_bits,
    widen_row,
)
from kernels.quantize import Coded, Scheme, grouping
from kernels.threads import run_units
from kernels.tiles import Tiles

__all__ = ["dequantize", "quantize"]

f32, i16, u8, u16, u32 = np.float32, np.int16, np.uint8, np.uint16, np.uint32
OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
_SMALLEST_SCALE = f32(2.0**-100)
# Output of this size is written past the cache: what it would overwrite there need not be read first.
_STREAM_FROM = 1 << 20
_LOWEST, _HIGHEST = i16(-0x8000), i16(0x7FFF)


def quantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    _run(_quantize_along_rows, _quantize_down_columns, tiles, blocks, scheme, coded)


def dequantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    _run(_dequantize_along_rows, _dequantize_down_columns, tiles, blocks, scheme, coded)


def _run(along_rows, down_columns, tiles: Tiles, blocks: np.ndarray, scheme: Scheme, coded: Coded) -> None:
    groups = grouping(tiles, scheme, blocks.shape[1])
    kernel = (along_rows if groups.along_rows else down_columns)(*_constants(scheme))
    units = math.prod(coded.scales.shape[:4])
    stream = coded.codes.nbytes >= _STREAM_FROM
    row = (groups.length, tiles.rows, coded.codes.shape[-1], int(stream))
    addresses = (tiles.addresses, tiles.strides, coded.codes.ctypes.data)
    run_units(kernel, units, 3 * coded.codes.nbytes, addresses, blocks, row, coded.scales, coded.zeros)


def _constants(scheme: Scheme) -> tuple[int, int, int]:
    kind = {"int8": SYMMETRIC, "e4m3": E4M3, "e5m2": E5M2}.get(scheme.code, ASYMMETRIC)
    return kind, scheme.bits, int(scheme.dtype == "float16")


@njit
def _order_key(bits):
    signed = i16(bits)
    return i16(signed ^ ((signed >> i16(15)) & i16(0x7FFF)))


@njit
def _value(bits, float16):
    if float16:
        return float16_as_float(u16(bits))
    return bits_as_float(u32(bits) << u32(16))


@njit
def _scale_and_zero(low, high, kind, bits, float16):
    """bfloat16 bits of the scale and dtype bits of the zero of a group whose order keys span low to high."""
    infinity = 0x7C00 if float16 else 0x7F80
    if high >= infinity or low <= ~infinity:
        return u16(0x7FC0), u16(0)
    zero, largest = u16(0), f32(1.0 / ((1 << bits) - 1))
    if kind == ASYMMETRIC:
        zero = u16(_order_key(u16(low)))
    elif kind == SYMMETRIC:
        largest = f32(1.0 / 127.0)
    elif kind == E4M3:
        largest = f32(1.0 / 448.0)
    else:
        largest = f32(1.0 / 57344.0)
    span = _value(_order_key(u16(high)), float16) - _value(zero, float16)
    scale = max(f32(span * largest), _SMALLEST_SCALE)
    return u16((float_as_bits(scale) + u32(0xFFFF)) >> u32(16)), zero


@njit
def _locate(unit, layers, spans, heads):
    """(chunk, layer, group of blocks, head) of a unit of work."""
    rest, h = unit // heads, unit % heads
    rest, s = rest // spans, rest % spans
    return rest // layers, rest % layers, s, h


@functools.cache
def _quantize_along_rows(kind: int, bits: int, float16: int):
    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, row, scales, zeros):
        addresses, strides, codes = pointers
        length, rows, packed, stream = row
        layers, spans, heads, groups = scales.shape[1], scales.shape[2], scales.shape[3], scales.shape[5]
        span, columns = blocks.shape[1] // max(spans, 1), packed * 8 // bits
        zeros_count = rows * groups if kind == ASYMMETRIC else 0
        count = rows * groups
        inverse, zero, line = np.empty(count, f32), np.empty(count, f32), np.empty(columns, u8)
        low, high = np.empty(count, i16), np.empty(count, i16)
        line_address = line.ctypes.data
        for unit in range(first, last):
            c, layer, s, h = _locate(unit, layers, spans, heads)
            head = addresses[layer] + h * strides[1]
            # Three loops over the rows, not one: their iterations do not wait for each other's reductions.
            low[:], high[:] = _HIGHEST, _LOWEST
            for i in range(s * span, (s + 1) * span):
                if blocks[c, i] >= 0:
                    for r in range(rows):
                        place = head + blocks[c, i] * strides[0] + r * strides[2]
                        for g in range(groups):
                            k = r * groups + g
                            low[k], high[k] = min_max_row(place + 2 * g * length, length, low[k], high[k], kind)
            if high[0] < low[0]:
                continue  # every block of the group is skipped
            scale_row, zero_row = scales[c, layer, s, h].reshape(count), zeros[c, layer, s, h].reshape(zeros_count)
            for k in range(count):
                scale_bits, zero_bits = _scale_and_zero(low[k], high[k], kind, bits, float16)
                inverse[k], zero[k] = f32(1.0) / _value(scale_bits, 0), _value(zero_bits, float16)
                scale_row[k] = scale_bits
                if kind == ASYMMETRIC:
                    zero_row[k] = zero_bits
            for i in range(s * span, (s + 1) * span):
                if blocks[c, i] >= 0:
                    page = head + blocks[c, i] * strides[0]
                    base = codes + (((c * layers + layer) * spans * span + i) * heads + h) * rows * packed
                    for r in range(rows):
                        target, k = base + r * packed, r * groups
                        start = target if bits == 8 else line_address
                        past = bits == 8 and stream and start % 32 == 0 and length % 32 == 0
                        for g in range(groups):
                            place, out = page + r * strides[2] + 2 * g * length, start + g * length
                            if past:
                                encode_row(place, out, length, inverse[k + g], zero[k + g], kind, float16, 1)
                            else:
                                encode_row(place, out, length, inverse[k + g], zero[k + g], kind, float16, 0)
                        if bits == 4:
                            merge_bits(line_address, target, columns // 2, 2, 4, 0)
                        elif bits < 4:
                            merge_bits(line_address, target, columns // 4, 4, 2, 0)
                        if bits == 3:
                            merge_bits(line_address, target + columns // 4, columns // 8, 8, 1, 2)
        fence()

    return kernel


@functools.cache
def _quantize_down_columns(kind: int, bits: int, float16: int):
    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, row, scales, zeros):
        addresses, strides, codes = pointers
        length, rows, packed, stream = row
        _, layers, spans, heads, groups, columns = scales.shape
        span = blocks.shape[1] // max(spans, 1)
        inverse, zero, line = np.empty(columns, f32), np.empty(columns, f32), np.empty(columns, u8)
        low, high = np.empty(columns, i16), np.empty(columns, i16)
        lows, highs, line_address = low.ctypes.data, high.ctypes.data, line.ctypes.data
        inverses, offsets = inverse.ctypes.data, zero.ctypes.data
        for unit in range(first, last):
            c, layer, s, h = _locate(unit, layers, spans, heads)
            for g in range(groups):
                for j in range(columns):
                    low[j], high[j] = _HIGHEST, _LOWEST
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] >= 0:
                        base = addresses[layer] + h * strides[1] + blocks[c, i] * strides[0]
                        for r in range(g * length, (g + 1) * length):
                            widen_row(base + r * strides[2], lows, highs, columns, kind)
                if high[0] < low[0]:
                    continue  # every block of the group is skipped
                for j in range(columns):
                    scale_bits, zero_bits = _scale_and_zero(low[j], high[j], kind, bits, float16)
                    inverse[j], zero[j] = f32(1.0) / _value(scale_bits, 0), _value(zero_bits, float16)
                    scales[c, layer, s, h, g, j] = scale_bits
                    if kind == ASYMMETRIC:
                        zeros[c, layer, s, h, g, j] = zero_bits
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] >= 0:
                        base = addresses[layer] + h * strides[1] + blocks[c, i] * strides[0]
                        target = codes + (((c * layers + layer) * spans * span + i) * heads + h) * rows * packed
                        for r in range(g * length, (g + 1) * length):
                            start = target + r * packed
                            out = start if bits == 8 else line_address
                            if bits == 8 and stream and out % 32 == 0:
                                encode_row(base + r * strides[2], out, columns, inverses, offsets, kind, float16, 1)
                            else:
                                encode_row(base + r * strides[2], out, columns, inverses, offsets, kind, float16, 0)
                            if bits == 4:
                                merge_bits(line_address, start, columns // 2, 2, 4, 0)
                            elif bits < 4:
                                merge_bits(line_address, start, columns // 4, 4, 2, 0)
                            if bits == 3:
                                merge_bits(line_address, start + columns // 4, columns // 8, 8, 1, 2)
        fence()

    return kernel


@functools.cache
def _dequantize_along_rows(kind: int, bits: int, float16: int):
    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, row, scales, zeros):
        addresses, strides, codes = pointers
        length, rows, packed, stream = row
        layers, spans, heads, groups = scales.shape[1], scales.shape[2], scales.shape[3], scales.shape[5]
        span, columns = blocks.shape[1] // max(spans, 1), packed * 8 // bits
        line = np.empty(columns, u8)
        line_address = line.ctypes.data
        for unit in range(first, last):
            c, layer, s, h = _locate(unit, layers, spans, heads)
            for i in range(s * span, (s + 1) * span):
                if blocks[c, i] < 0:
                    continue
                base = addresses[layer] + h * strides[1] + blocks[c, i] * strides[0]
                source = codes + (((c * layers + layer) * spans * span + i) * heads + h) * rows * packed
                for r in range(rows):
                    start = source + r * packed
                    if bits == 4:
                        spread_bits(start, line_address, columns // 2, 2, 4, 0)
                    elif bits < 4:
                        spread_bits(start, line_address, columns // 4, 4, 2, 0)
                    if bits == 3:
                        spread_bits(start + columns // 4, line_address, columns // 8, 8, 1, 2)
                    for g in range(groups):
                        scale, zero = _value(scales[c, layer, s, h, r, g], 0), f32(0)
                        if kind == ASYMMETRIC:
                            zero = _value(zeros[c, layer, s, h, r, g], float16)
                        place = base + r * strides[2] + 2 * g * length
                        begin = g * length + (start if bits == 8 else line_address)
                        if stream and place % 64 == 0:
                            decode_row(begin, place, length, scale, zero, kind, float16, 1)
                        else:
                            decode_row(begin, place, length, scale, zero, kind, float16, 0)
        fence()

    return kernel


@functools.cache
def _dequantize_down_columns(kind: int, bits: int, float16: int):
    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, row, scales, zeros):
        addresses, strides, codes = pointers
        length, rows, packed, stream = row
        _, layers, spans, heads, groups, columns = scales.shape
        span = blocks.shape[1] // max(spans, 1)
        scale, zero, line = np.empty(columns, f32), np.empty(columns, f32), np.empty(columns, u8)
        scale_address, zero_address, line_address = scale.ctypes.data, zero.ctypes.data, line.ctypes.data
        for unit in range(first, last):
            c, layer, s, h = _locate(unit, layers, spans, heads)
            for g in range(groups):
                for j in range(columns):
                    scale[j] = _value(scales[c, layer, s, h, g, j], 0)
                    if kind == ASYMMETRIC:
                        zero[j] = _value(zeros[c, layer, s, h, g, j], float16)
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] < 0:
                        continue
                    base = addresses[layer] + h * strides[1] + blocks[c, i] * strides[0]
                    source = codes + (((c * layers + layer) * spans * span + i) * heads + h) * rows * packed
                    for r in range(g * length, (g + 1) * length):
                        start = source + r * packed
                        if bits == 4:
                            spread_bits(start, line_address, columns // 2, 2, 4, 0)
                        elif bits < 4:
                            spread_bits(start, line_address, columns // 4, 4, 2, 0)
                        if bits == 3:
                            spread_bits(start + columns // 4, line_address, columns // 8, 8, 1, 2)
                        begin, place = start if bits == 8 else line_address, base + r * strides[2]
                        if stream and place % 64 == 0:
                            decode_row(begin, place, columns, scale_address, zero_address, kind, float16, 1)
                        else:
                            decode_row(begin, place, columns, scale_address, zero_address, kind, float16, 0)
        fence()

    return kernel
