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
    decode_row,
    encode_row,
    fence,
    merge_bits,
    min_max_row,
    scale_row,
    spread_bits,
    widen_params,
    widen_row,
)
from kernels.quantize import Coded, Scheme, grouping
from kernels.threads import run_units
from kernels.tiles import Tiles

__all__ = ["dequantize", "quantize"]

f32, i16, u8 = np.float32, np.int16, np.uint8
OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
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
        count = rows * groups
        inverse, zero, line = np.empty(count, f32), np.empty(count, f32), np.empty(columns, u8)
        low, high = np.empty(count, i16), np.empty(count, i16)
        line_address = line.ctypes.data
        ranges, factors = (low.ctypes.data, high.ctypes.data), (inverse.ctypes.data, zero.ctypes.data)
        for unit in range(first, last):
            c, layer, s, h = _locate(unit, layers, spans, heads)
            head = addresses[layer] + h * strides[1]
            # Three loops over the rows, not one: their iterations do not wait for each other's reductions.
            low[:], high[:] = _HIGHEST if kind == ASYMMETRIC else i16(0), _LOWEST
            for i in range(s * span, (s + 1) * span):
                if blocks[c, i] >= 0:
                    for r in range(rows):
                        place = head + blocks[c, i] * strides[0] + r * strides[2]
                        for g in range(groups):
                            k = r * groups + g
                            low[k], high[k] = min_max_row(place + 2 * g * length, length, low[k], high[k], kind)
            if high[0] < low[0]:
                continue  # every block of the group is skipped
            params = (scales.ctypes.data + 2 * unit * count, zeros.ctypes.data + 2 * unit * count)
            scale_row(ranges, params, factors, count, kind, bits, float16)
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
                    low[j], high[j] = _HIGHEST if kind == ASYMMETRIC else i16(0), _LOWEST
                for i in range(s * span, (s + 1) * span):
                    if blocks[c, i] >= 0:
                        base = addresses[layer] + h * strides[1] + blocks[c, i] * strides[0]
                        for r in range(g * length, (g + 1) * length):
                            widen_row(base + r * strides[2], lows, highs, columns, kind)
                if high[0] < low[0]:
                    continue  # every block of the group is skipped
                place = 2 * (unit * groups + g) * columns
                params = (scales.ctypes.data + place, zeros.ctypes.data + place)
                scale_row((lows, highs), params, (inverses, offsets), columns, kind, bits, float16)
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
        count = rows * groups
        line, scale, zero = np.empty(columns, u8), np.empty(count, f32), np.zeros(count, f32)
        line_address, scale_address, zero_address = line.ctypes.data, scale.ctypes.data, zero.ctypes.data
        for unit in range(first, last):
            c, layer, s, h = _locate(unit, layers, spans, heads)
            widen_params(scales.ctypes.data + 2 * unit * count, scale_address, count, 0)
            if kind == ASYMMETRIC:
                widen_params(zeros.ctypes.data + 2 * unit * count, zero_address, count, float16)
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
                        k = r * groups + g
                        place = base + r * strides[2] + 2 * g * length
                        begin = g * length + (start if bits == 8 else line_address)
                        if stream and place % 64 == 0:
                            decode_row(begin, place, length, scale[k], zero[k], kind, float16, 1)
                        else:
                            decode_row(begin, place, length, scale[k], zero[k], kind, float16, 0)
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
                params = 2 * (unit * groups + g) * columns
                widen_params(scales.ctypes.data + params, scale_address, columns, 0)
                if kind == ASYMMETRIC:
                    widen_params(zeros.ctypes.data + params, zero_address, columns, float16)
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
