"""`gather_slots` and `scatter_slots` on a GPU: one program a token and layer."""

# ruff: noqa: N803 - a Triton kernel's compile-time constants are in capitals

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.launch_triton import paged, upload
from kernels.tiles import Tiles

__all__ = ["copy_slots", "gather_slots", "scatter_slots"]

_VALUES_AT_ONCE = 1024
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def copy_slots(
    pointers,
    slots,
    plain,
    block_step,
    head_step,
    token_step,
    channel_step,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    GATHER: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Token t of one layer, AT_ONCE heads of SIZE elements at a time; steps in elements."""
    token, layer = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        page = tl.load(pointers + layer).to(plain.dtype)
        page += slot // BLOCK_SIZE * block_step + slot % BLOCK_SIZE * token_step
        row = plain + (layer.to(tl.int64) * tl.num_programs(0) + token) * (HEADS * SIZE)
        if ALIGNED:
            page = tl.multiple_of(page, 16)
            row = tl.multiple_of(row, 16)
        channel = tl.arange(0, PADDED)[None, :]
        for start in tl.range(0, HEADS, AT_ONCE):
            head = start + tl.arange(0, AT_ONCE)[:, None]
            paged_at = page + head * head_step + channel * channel_step
            plain_at = row + head * SIZE + channel
            inside = head < HEADS
            if PADDED != SIZE:
                inside = inside & (channel < SIZE)
            if GATHER:
                tl.store(plain_at, tl.load(paged_at, mask=inside), mask=inside)
            else:
                tl.store(paged_at, tl.load(plain_at, mask=inside), mask=inside)


def gather_slots(tiles: Tiles, slots: np.ndarray, *, plain: torch.Tensor) -> None:
    _move(tiles, slots, plain, True)


def scatter_slots(tiles: Tiles, slots: np.ndarray, *, plain: torch.Tensor) -> None:
    _move(tiles, slots, plain, False)


def _move(tiles: Tiles, slots: np.ndarray, plain: torch.Tensor, gather: bool) -> None:
    if not slots.size:
        return
    pages = paged(tiles)
    token_step, channel_step = (pages.row_step, 1) if tiles.token_major else (1, pages.row_step)
    padded = triton.next_power_of_2(tiles.head_size)
    row_nbytes = tiles.head_size * tiles.itemsize
    aligned = pages.aligned and tiles.token_major and row_nbytes % 16 == 0 and plain.data_ptr() % 16 == 0
    copy_slots[(len(slots), tiles.num_layers)](
        pages.pointers,
        upload(slots, pages.device),
        plain.view(_WORDS[tiles.itemsize]),
        pages.block_step,
        pages.head_step,
        token_step,
        channel_step,
        HEADS=tiles.num_heads,
        SIZE=tiles.head_size,
        PADDED=padded,
        BLOCK_SIZE=tiles.block_size,
        ALIGNED=aligned,
        GATHER=gather,
        AT_ONCE=min(triton.next_power_of_2(tiles.num_heads), max(1, _VALUES_AT_ONCE // padded)),
    )
