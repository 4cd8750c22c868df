"""`quantize` and `dequantize` on a GPU, gather and scatter fused: the bytes of `kernels.quantize`.

Tiles and coded arrays are torch tensors on one device; block ids stay on the host. Rows and groups along them must be
powers of two: a head of another size (MLA's 576) is given as several heads of one (9 of 64).
"""

# ruff: noqa: N803, N806 - a Triton kernel's compile-time constants are in capitals

import math

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.floats_triton import bits_of, fp8_code, fp8_number, order_key, round_to_int, round_up_bf16, value_of
from kernels.launch_triton import paged, upload
from kernels.quantize import Coded, Scheme, grouping
from kernels.tiles import Tiles

__all__ = ["dequantize", "dequantize_tiles", "quantize", "quantize_along_rows", "quantize_down_columns"]

# Values that a program of 4 warps holds: 16 a thread, or 4 where a range a column is held besides: no spills.
_ROW_VALUES = 2048
_COLUMN_VALUES = 512


@triton.jit
def _scale_and_zero(low, high, KIND: tl.constexpr, BITS: tl.constexpr, FLOAT16: tl.constexpr):
    """int32 (bfloat16 bits of the scale, dtype bits of the zero) of groups whose order keys span low to high."""
    infinity: tl.constexpr = 0x7C00 if FLOAT16 else 0x7F80
    if KIND == 1:
        finite = (high < infinity) & (low > ~infinity)
        zero = tl.where(finite, low ^ ((low >> 15) & 0x7FFF), 0)
        top = high ^ ((high >> 15) & 0x7FFF)
        span = value_of(top.to(tl.int16), FLOAT16) - value_of(zero.to(tl.int16), FLOAT16)
        scaled = span * (1.0 / ((1 << BITS) - 1))
    else:
        finite = high < infinity
        zero = tl.zeros_like(high)
        span = value_of(high.to(tl.int16), FLOAT16)
        if KIND == 0:
            scaled = span * (1.0 / 127.0)
        elif KIND == 2:
            scaled = span * (1.0 / 448.0)
        else:
            scaled = span * (1.0 / 57344.0)
    scale = round_up_bf16(tl.maximum(scaled, 7.888609052210118e-31))
    return tl.where(finite, scale, 0x7FC0), zero


@triton.jit
def _encode(value, inverse, zero, KIND: tl.constexpr):
    """float32 -> int32 code in the low 8 bits."""
    if KIND == 1:
        return round_to_int((value - zero) * inverse)
    if KIND == 0:
        return round_to_int(value * inverse) & 0xFF
    return fp8_code(value * inverse, KIND == 3)


@triton.jit
def _halves(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) -> its left and right half."""
    return tl.split(tl.permute(tl.reshape(codes, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _store_packed(target, row, mask, codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Pack (ROWS, COLUMNS) int32 codes and store them at `target` + row * bytes of a row; `mask` by row."""
    place = target + row[:, None] * (COLUMNS * BITS // 8)
    if BITS == 8:
        tl.store(place + tl.arange(0, COLUMNS)[None, :], codes.to(tl.uint8), mask=mask[:, None])
    else:
        left, right = _halves(codes, ROWS, COLUMNS)
        half = tl.arange(0, COLUMNS // 2)[None, :]
        if BITS == 4:
            tl.store(place + half, (left | (right << 4)).to(tl.uint8), mask=mask[:, None])
        else:
            q0, q1 = _halves(left & 3, ROWS, COLUMNS // 2)
            q2, q3 = _halves(right & 3, ROWS, COLUMNS // 2)
            packed = q0 | (q1 << 2) | (q2 << 4) | (q3 << 6)
            quarter = tl.arange(0, COLUMNS // 4)[None, :]
            tl.store(place + quarter, packed.to(tl.uint8), mask=mask[:, None])
            if BITS == 3:
                # Eighth i of a row has its third bit at bit i; quarter k holds eighths 2k and 2k + 1.
                left, right = left >> 2, right >> 2
                q0, q1 = _halves(left, ROWS, COLUMNS // 2)
                q2, q3 = _halves(right, ROWS, COLUMNS // 2)
                low, high = _halves(q0 | (q1 << 2) | (q2 << 4) | (q3 << 6), ROWS, COLUMNS // 4)
                eighth = COLUMNS // 4 + tl.arange(0, COLUMNS // 8)[None, :]
                tl.store(place + eighth, (low | (high << 1)).to(tl.uint8), mask=mask[:, None])


@triton.jit
def _locate(LAYERS: tl.constexpr, SPANS: tl.constexpr, HEADS: tl.constexpr):
    """(chunk, layer, group of blocks, head) of program 0."""
    unit = tl.program_id(0)
    head = unit % HEADS
    span = unit // HEADS % SPANS
    layer = unit // (HEADS * SPANS) % LAYERS
    return unit // (HEADS * SPANS * LAYERS), layer, span, head


@triton.jit
def _page(pointers, layer, block, head, block_step, head_step, ALIGNED: tl.constexpr):
    """Pointer to the tile of one block and head."""
    base = tl.load(pointers + layer).to(tl.pointer_type(tl.int16))
    page = base + block * block_step + head * head_step
    if ALIGNED:
        page = tl.multiple_of(page, 16)
    return page


@triton.jit
def quantize_along_rows(
    pointers,
    blocks,
    codes,
    scales,
    zeros,
    block_step,
    head_step,
    row_step,
    LAYERS: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT16: tl.constexpr,
    ALIGNED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """AT_ONCE rows of one head, in SPAN consecutive blocks of one chunk; groups of LENGTH along the rows."""
    chunk, layer, span, head = _locate(LAYERS, SPANS, HEADS)
    GROUPS: tl.constexpr = COLUMNS // LENGTH
    row = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = tl.arange(0, COLUMNS)
    inside = row < ROWS
    offset = row[:, None] * row_step + column[None, :]
    first = (chunk * SPANS + span) * SPAN
    low = tl.full((AT_ONCE, GROUPS), 0x7FFF, tl.int32)
    high = tl.full((AT_ONCE, GROUPS), -0x8000, tl.int32)
    for i in tl.range(0, SPAN):
        block = tl.load(blocks + first + i)
        if block >= 0:
            page = _page(pointers, layer, block, head, block_step, head_step, ALIGNED)
            bits = tl.load(page + offset, mask=inside[:, None], other=0)
            key = tl.reshape(order_key(bits, KIND != 1), (AT_ONCE, GROUPS, LENGTH))
            low = tl.minimum(low, tl.min(key, axis=2))
            high = tl.maximum(high, tl.max(key, axis=2))
    scale, zero = _scale_and_zero(low, high, KIND, BITS, FLOAT16)
    held = inside[:, None] & (high >= low)
    unit = tl.program_id(0).to(tl.int64)
    param = (unit * ROWS + row[:, None]) * GROUPS + tl.arange(0, GROUPS)[None, :]
    tl.store(scales + param, scale.to(tl.int16), mask=held)
    if KIND == 1:
        tl.store(zeros + param, zero.to(tl.int16), mask=held)
    inverse = tl.div_rn(1.0, value_of(scale.to(tl.int16), False))[:, :, None]
    zero_value = value_of(zero.to(tl.int16), FLOAT16)[:, :, None]
    for i in tl.range(0, SPAN):
        block = tl.load(blocks + first + i)
        if block >= 0:
            page = _page(pointers, layer, block, head, block_step, head_step, ALIGNED)
            bits = tl.load(page + offset, mask=inside[:, None], other=0)
            value = tl.reshape(value_of(bits, FLOAT16), (AT_ONCE, GROUPS, LENGTH))
            code = tl.reshape(_encode(value, inverse, zero_value, KIND), (AT_ONCE, COLUMNS))
            place = ((chunk.to(tl.int64) * LAYERS + layer) * (SPANS * SPAN) + span * SPAN + i) * HEADS + head
            _store_packed(codes + place * (ROWS * COLUMNS * BITS // 8), row, inside, code, AT_ONCE, COLUMNS, BITS)


@triton.jit
def quantize_down_columns(
    pointers,
    blocks,
    codes,
    scales,
    zeros,
    block_step,
    head_step,
    row_step,
    LAYERS: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT16: tl.constexpr,
    ALIGNED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One group of LENGTH rows of one head, in SPAN consecutive blocks of one chunk: a scale for every column."""
    chunk, layer, span, head = _locate(LAYERS, SPANS, HEADS)
    group = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    first = (chunk * SPANS + span) * SPAN
    low = tl.full((COLUMNS,), 0x7FFF, tl.int32)
    high = tl.full((COLUMNS,), -0x8000, tl.int32)
    for i in tl.range(0, SPAN):
        block = tl.load(blocks + first + i)
        if block >= 0:
            page = _page(pointers, layer, block, head, block_step, head_step, ALIGNED)
            for start in tl.range(0, LENGTH, AT_ONCE):
                inner = start + tl.arange(0, AT_ONCE)
                row = group * LENGTH + inner
                inside = inner[:, None] < LENGTH
                bits = tl.load(page + row[:, None] * row_step + column[None, :], mask=inside, other=0)
                key = order_key(bits, KIND != 1)
                low = tl.minimum(low, tl.min(tl.where(inside, key, 0x7FFF), axis=0))
                high = tl.maximum(high, tl.max(tl.where(inside, key, -0x8000), axis=0))
    scale, zero = _scale_and_zero(low, high, KIND, BITS, FLOAT16)
    unit = tl.program_id(0).to(tl.int64)
    param = (unit * (ROWS // LENGTH) + group) * COLUMNS + column
    tl.store(scales + param, scale.to(tl.int16), mask=high >= low)
    if KIND == 1:
        tl.store(zeros + param, zero.to(tl.int16), mask=high >= low)
    inverse = tl.div_rn(1.0, value_of(scale.to(tl.int16), False))[None, :]
    zero_value = value_of(zero.to(tl.int16), FLOAT16)[None, :]
    for i in tl.range(0, SPAN):
        block = tl.load(blocks + first + i)
        if block >= 0:
            page = _page(pointers, layer, block, head, block_step, head_step, ALIGNED)
            place = ((chunk.to(tl.int64) * LAYERS + layer) * (SPANS * SPAN) + span * SPAN + i) * HEADS + head
            for start in tl.range(0, LENGTH, AT_ONCE):
                inner = start + tl.arange(0, AT_ONCE)
                row = group * LENGTH + inner
                bits = tl.load(page + row[:, None] * row_step + column[None, :], mask=inner[:, None] < LENGTH, other=0)
                code = _encode(value_of(bits, FLOAT16), inverse, zero_value, KIND)
                target = codes + place * (ROWS * COLUMNS * BITS // 8)
                _store_packed(target, row, inner < LENGTH, code, AT_ONCE, COLUMNS, BITS)


@triton.jit
def dequantize_tiles(
    pointers,
    blocks,
    codes,
    scales,
    zeros,
    block_step,
    head_step,
    row_step,
    LAYERS: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT16: tl.constexpr,
    ALIGNED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """AT_ONCE rows of one head, in SPAN consecutive blocks of one chunk; one part of the packed row after the other."""
    chunk, layer, span, head = _locate(LAYERS, SPANS, HEADS)
    PARTS: tl.constexpr = 1 if BITS == 8 else (2 if BITS == 4 else (4 if BITS == 2 else 8))
    WIDTH: tl.constexpr = COLUMNS // PARTS
    GROUPS: tl.constexpr = COLUMNS // LENGTH
    row = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = row[:, None] < ROWS
    unit = tl.program_id(0).to(tl.int64)
    for i in tl.range(0, SPAN):
        block = tl.load(blocks + (chunk * SPANS + span) * SPAN + i)
        if block >= 0:
            page = _page(pointers, layer, block, head, block_step, head_step, ALIGNED)
            place = ((chunk.to(tl.int64) * LAYERS + layer) * (SPANS * SPAN) + span * SPAN + i) * HEADS + head
            packed_row = codes + (place * ROWS + row[:, None]) * (COLUMNS * BITS // 8)
            for part in tl.static_range(PARTS):
                inner = tl.arange(0, WIDTH)[None, :]
                if BITS == 3:
                    low = tl.load(packed_row + (part % 2) * WIDTH + inner, mask=inside, other=0).to(tl.int32)
                    third = tl.load(packed_row + COLUMNS // 4 + inner, mask=inside, other=0).to(tl.int32)
                    code = ((low >> (part // 2 * 2)) & 3) | (((third >> part) & 1) << 2)
                else:
                    packed = tl.load(packed_row + inner, mask=inside, other=0).to(tl.int32)
                    code = (packed >> (part * BITS)) & ((1 << BITS) - 1)
                column = part * WIDTH + inner
                if ALONG_ROWS:
                    param = (unit * ROWS + row[:, None]) * GROUPS + column // LENGTH
                else:
                    param = (unit * (ROWS // LENGTH) + row[:, None] // LENGTH) * COLUMNS + column
                scale = value_of(tl.load(scales + param, mask=inside, other=0), False)
                if KIND == 0:
                    value = ((code ^ 0x80) - 0x80).to(tl.float32) * scale
                elif KIND == 1:
                    zero = value_of(tl.load(zeros + param, mask=inside, other=0), FLOAT16)
                    value = code.to(tl.float32) * scale + zero
                else:
                    value = fp8_number(code, KIND == 3) * scale
                tl.store(page + row[:, None] * row_step + column, bits_of(value, FLOAT16), mask=inside)


def quantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    groups = grouping(tiles, scheme, blocks.shape[1])
    constants, rows = _constants(tiles, blocks, scheme)
    if groups.along_rows:
        at_once = min(rows, max(1, _ROW_VALUES // tiles.columns))
        grid = (math.prod(coded.scales.shape[:4]), triton.cdiv(tiles.rows, at_once))
        _launch(quantize_along_rows, grid, tiles, blocks, coded, constants | {"AT_ONCE": at_once})
    else:
        length = triton.next_power_of_2(groups.length)
        at_once = min(length, max(1, _COLUMN_VALUES // tiles.columns))
        grid = (math.prod(coded.scales.shape[:4]), tiles.rows // groups.length)
        _launch(quantize_down_columns, grid, tiles, blocks, coded, constants | {"AT_ONCE": at_once})


def dequantize(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    groups = grouping(tiles, scheme, blocks.shape[1])
    constants, rows = _constants(tiles, blocks, scheme)
    at_once = min(rows, max(1, _ROW_VALUES // tiles.columns))
    grid = (math.prod(coded.scales.shape[:4]), triton.cdiv(tiles.rows, at_once))
    constants |= {"AT_ONCE": at_once, "ALONG_ROWS": groups.along_rows}
    _launch(dequantize_tiles, grid, tiles, blocks, coded, constants)


def _constants(tiles: Tiles, blocks: np.ndarray, scheme: Scheme) -> tuple[dict[str, object], int]:
    groups = grouping(tiles, scheme, blocks.shape[1])
    for name, count in (("columns", tiles.columns), ("values along a row", groups.length if groups.along_rows else 1)):
        if count & (count - 1):
            raise ValueError(f"{count} {name}: the GPU kernels need a power of two")
    constants = {
        "LAYERS": tiles.num_layers,
        "SPANS": blocks.shape[1] // groups.span,
        "SPAN": groups.span,
        "HEADS": tiles.num_heads,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "LENGTH": groups.length,
        "KIND": {"int8": 0, "e4m3": 2, "e5m2": 3}.get(scheme.code, 1),
        "BITS": scheme.bits,
        "FLOAT16": scheme.dtype == "float16",
    }
    return constants, triton.next_power_of_2(tiles.rows)


def _launch(kernel, grid, tiles: Tiles, blocks: np.ndarray, coded: Coded, constants: dict[str, object]) -> None:
    if not all(grid):
        return
    pages = paged(tiles)
    kernel[grid](
        pages.pointers,
        upload(blocks, pages.device),
        coded.codes,
        coded.scales.view(torch.int16),
        coded.zeros.view(torch.int16),
        pages.block_step,
        pages.head_step,
        pages.row_step,
        ALIGNED=pages.aligned,
        **constants,
    )
