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
_LOWEST, _HIGHEST = i16(-0x8000), i16(0x7FFF)


def quantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    _run(_quantize_along_rows, _quantize_down_columns, tiles, blocks, scheme, coded)


def dequantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    _run(_dequantize_along_rows, _dequantize_down_columns, tiles, blocks, scheme, coded)


def _run(along_rows, down_columns, tiles: Tiles, blocks: np.ndarray, scheme: Scheme, coded: Coded) -> None:
    groups = grouping(tiles, scheme, blocks.shape[1])
    kernel = (along_rows if groups.along_rows else down_columns)(*_constants(scheme))
    units = math.prod(coded.scales.shape[:4])
    row = (groups.length, tiles.rows, coded.codes.shape[-1])
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
        length, rows, packed = row
        layers, spans, heads, groups = scales.shape[1], scales.shape[2], scales.shape[3], scales.shape[5]
        span, columns = blocks.shape[1] // max(spans, 1), packed * 8 // bits
        inverse, zero, line = np.empty(groups, f32), np.empty(groups, f32), np.empty(columns, u8)
        line_address = line.ctypes.data
        for unit in range(first, last):
            c, layer, s, h = _locate(unit, layers, spans, heads)
            for r in range(rows):
                base = addresses[layer] + h * strides[1] + r * strides[2]
                for g in range(groups):
                    low, high = _HIGHEST, _LOWEST
                    for i in range(s * span, (s + 1) * span):
                        if blocks[c, i] >= 0:
                            place = base + blocks[c, i] * strides[0] + 2 * g * length
                            low, high = min_max_row(place, length, low, high, kind)
                    if high >= low:
                        scale_bits, zero_bits = _scale_and_zero(low, high, kind, bits, float16)
                        inverse[g], zero[g] = f32(1.0) / _value(scale_bits, 0), _value(zero_bits, float16)
                        scales[c, layer, s, h, r, g] = scale_bits
                        if kind == ASYMMETRIC:
                            zeros[c, layer, s, h, r, g] = zero_bits
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] >= 0:
                        place = base + blocks[c, i] * strides[0]
                        target = codes + ((((c * layers + layer) * spans * span + i) * heads + h) * rows + r) * packed
                        for g in range(groups):
                            start = g * length + (target if bits == 8 else line_address)
                            encode_row(place + 2 * g * length, start, length, inverse[g], zero[g], kind, float16)
                        if bits == 4:
                            merge_bits(line_address, target, columns // 2, 2, 4, 0)
                        elif bits < 4:
                            merge_bits(line_address, target, columns // 4, 4, 2, 0)
                        if bits == 3:
                            merge_bits(line_address, target + columns // 4, columns // 8, 8, 1, 2)

    return kernel


@functools.cache
def _quantize_down_columns(kind: int, bits: int, float16: int):
    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, row, scales, zeros):
        addresses, strides, codes = pointers
        length, rows, packed = row
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
                            encode_row(base + r * strides[2], out, columns, inverses, offsets, kind, float16)
                            if bits == 4:
                                merge_bits(line_address, start, columns // 2, 2, 4, 0)
                            elif bits < 4:
                                merge_bits(line_address, start, columns // 4, 4, 2, 0)
                            if bits == 3:
                                merge_bits(line_address, start + columns // 4, columns // 8, 8, 1, 2)

    return kernel


@functools.cache
def _dequantize_along_rows(kind: int, bits: int, float16: int):
    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, row, scales, zeros):
        addresses, strides, codes = pointers
        length, rows, packed = row
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
                        decode_row(begin, place, length, scale, zero, kind, float16)

    return kernel


@functools.cache
def _dequantize_down_columns(kind: int, bits: int, float16: int):
    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, row, scales, zeros):
        addresses, strides, codes = pointers
        length, rows, packed = row
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
                        decode_row(begin, place, columns, scale_address, zero_address, kind, float16)

    return kernel
