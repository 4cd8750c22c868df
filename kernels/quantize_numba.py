"""`quantize` and `dequantize` for CPUs. One kernel a form of codes and shape of vectors, compiled at first use.

A unit of work is one group of blocks of one head of one layer of one chunk. It is read twice: for the ranges of its
groups, on the integer bits, and, from the cache, to encode it. Meanwhile the next unit is fetched, or the memory would
wait for the arithmetic. The codes of a tile are made in the cache and then written past it at once: vector by vector,
such stores and the fetching disturb each other (16 instead of 19 GB/s; EPYC Zen 4, 2026-11).
"""

import functools
import math

import numpy as np
from numba import njit

from kernels.codes_numba import (
    ASYMMETRIC,
    E4M3,
    E5M2,
    SYMMETRIC,
    Form,
    decode_tile,
    encode_tile,
    measure_tile,
    scale_groups,
    shortest_run,
    widen_params,
)
from kernels.lanes_numba import LINE, copy_bytes, fence, stream_lines
from kernels.quantize import Coded, Scheme, grouping
from kernels.threads import run_units
from kernels.tiles import Tiles

__all__ = ["dequantize", "quantize"]

f32, i16, u8 = np.float32, np.int16, np.uint8
OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
# Output of this size is written past the cache: what it would overwrite there need not be read first.
_STREAM_FROM = 1 << 20
_WIDEST = 64  # lanes: a line of codes
_LOWEST, _HIGHEST = i16(-0x8000), i16(0x7FFF)


def quantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    _run(_quantize_kernel, tiles, blocks, scheme, coded)


def dequantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    _run(_dequantize_kernel, tiles, blocks, scheme, coded)


def _run(make, tiles: Tiles, blocks: np.ndarray, scheme: Scheme, coded: Coded) -> None:
    along_rows, length, _ = grouping(tiles, scheme, blocks.shape[1])
    run = shortest_run(along_rows, length, tiles.columns, scheme.bits)
    lanes = math.gcd(run, _WIDEST)
    kind = {"int8": SYMMETRIC, "e4m3": E4M3, "e5m2": E5M2}.get(scheme.code, ASYMMETRIC)
    kernel = make(Form(kind, scheme.bits, int(scheme.dtype == "float16"), int(along_rows), lanes).number)
    pointers = (tiles.addresses, tiles.strides, coded.codes.ctypes.data)
    sizes = (tiles.rows, tiles.columns, length, run)
    nbytes = coded.codes.nbytes
    units = math.prod(coded.scales.shape[:4])
    run_units(kernel, units, 3 * nbytes, pointers, blocks, sizes, coded.scales, coded.zeros, nbytes >= _STREAM_FROM)


@njit
def _locate(unit, shape, addresses, strides):
    """Where a unit of work is: (chunk, layer, first block, head, address of the head in block 0)."""
    rest, head = unit // shape[3], unit % shape[3]
    rest, group = rest // shape[2], rest % shape[2]
    chunk, layer = rest // shape[1], rest % shape[1]
    return chunk, layer, group, head, addresses[layer] + head * strides[1]


@njit
def _move_out(source, target, nbytes, stream):
    """Copy codes from the cache to memory, past the cache where that pays."""
    if not stream:
        copy_bytes(source, target, nbytes)
        return
    first = min(-target % LINE, nbytes)
    lines = (nbytes - first) // LINE * LINE
    if first:
        copy_bytes(source, target, first)
    stream_lines(source + first, target + first, lines)
    if first + lines < nbytes:
        copy_bytes(source + first + lines, target + first + lines, nbytes - first - lines)


@functools.cache
def _quantize_kernel(form: int):
    symmetric, bits = Form.of(form).kind != ASYMMETRIC, Form.of(form).bits

    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, sizes, scales, zeros, stream):
        addresses, strides, codes = pointers
        shape, span = scales.shape, blocks.shape[1] // max(scales.shape[2], 1)
        count, tile_nbytes = shape[4] * shape[5], sizes[0] * sizes[1] * bits // 8
        inverse, zero, tile = np.empty(count, f32), np.empty(count, f32), np.empty(tile_nbytes + LINE, u8)
        low, high = np.empty(count, i16), np.empty(count, i16)
        following = _locate(first, shape, addresses, strides)
        for unit in range(first, last):
            # Addresses are taken inside the loop: numba frees an array after the last use of its name.
            ranges, factors = (low.ctypes.data, high.ctypes.data), (inverse.ctypes.data, zero.ctypes.data)
            made = (tile.ctypes.data + LINE - 1) // LINE * LINE
            c, layer, group, h, head = following
            following = _locate(min(unit + 1, last - 1), shape, addresses, strides)
            ahead_c, _, ahead_group, _, ahead_head = following
            low[:], high[:] = i16(0) if symmetric else _HIGHEST, _LOWEST
            for i in range(group * span, (group + 1) * span):
                if blocks[c, i] >= 0:
                    measure_tile((head + blocks[c, i] * strides[0], strides[2]), sizes, ranges, form)
            if high[0] < low[0]:
                continue  # every block of the group is skipped
            params = (scales.ctypes.data + 2 * unit * count, zeros.ctypes.data + 2 * unit * count)
            scale_groups(ranges, params, factors, count, form)
            for i in range(group * span, (group + 1) * span):
                if blocks[c, i] >= 0:
                    ahead = ahead_head + max(blocks[ahead_c, i + (ahead_group - group) * span], 0) * strides[0]
                    page = (head + blocks[c, i] * strides[0], strides[2])
                    encode_tile(page, ahead, made, sizes, factors, form)
                    number = ((c * shape[1] + layer) * blocks.shape[1] + i) * shape[3] + h
                    _move_out(made, codes + number * tile_nbytes, tile_nbytes, stream)
        fence()

    return kernel


@functools.cache
def _dequantize_kernel(form: int):
    bits, lanes = Form.of(form).bits, Form.of(form).lanes

    @njit(**OPTIONS)
    def kernel(first, last, pointers, blocks, sizes, scales, zeros, stream):
        addresses, strides, codes = pointers
        shape, span = scales.shape, blocks.shape[1] // max(scales.shape[2], 1)
        count, tile_nbytes = shape[4] * shape[5], sizes[0] * sizes[1] * bits // 8
        scale, zero = np.empty(count, f32), np.empty(count, f32)
        for unit in range(first, last):
            factors = (scale.ctypes.data, zero.ctypes.data)  # inside the loop, as above
            c, layer, group, h, head = _locate(unit, shape, addresses, strides)
            params = (scales.ctypes.data + 2 * unit * count, zeros.ctypes.data + 2 * unit * count)
            widen_params(params, factors, count, form)
            for i in range(group * span, (group + 1) * span):
                if blocks[c, i] < 0:
                    continue
                page = (head + blocks[c, i] * strides[0], strides[2])
                number = ((c * shape[1] + layer) * blocks.shape[1] + i) * shape[3] + h
                if stream and lanes >= 32 and page[0] % LINE == 0 and strides[2] % LINE == 0:
                    decode_tile(codes + number * tile_nbytes, page, sizes, factors, form, 1)
                else:
                    decode_tile(codes + number * tile_nbytes, page, sizes, factors, form, 0)
        fence()

    return kernel
