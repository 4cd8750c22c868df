"""`gather_slots` and `scatter_slots` on a GPU: one program a token and layer, one head after the other."""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.launch_triton import paged, upload
from kernels.tiles import Tiles

__all__ = ["copy_slots", "gather_slots", "scatter_slots"]

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
):
    """Token t of one layer, HEADS x SIZE elements; steps in elements."""
    token, layer = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        base = tl.load(pointers + layer).to(plain.dtype)
        page = base + slot // BLOCK_SIZE * block_step + slot % BLOCK_SIZE * token_step
        row = plain + (layer.to(tl.int64) * tl.num_programs(0) + token) * (HEADS * SIZE)
        channel = tl.arange(0, PADDED)
        for head in tl.range(0, HEADS):
            paged_row, plain_row = page + head * head_step, row + head * SIZE
            if ALIGNED:
                paged_row = tl.multiple_of(paged_row, 16)
                plain_row = tl.multiple_of(plain_row, 16)
            paged_at, plain_at = paged_row + channel * channel_step, plain_row + channel
            if PADDED == SIZE:
                if GATHER:
                    tl.store(plain_at, tl.load(paged_at))
                else:
                    tl.store(paged_at, tl.load(plain_at))
            else:
                if GATHER:
                    tl.store(plain_at, tl.load(paged_at, mask=channel < SIZE), mask=channel < SIZE)
                else:
                    tl.store(paged_at, tl.load(plain_at, mask=channel < SIZE), mask=channel < SIZE)


def gather_slots(tiles: Tiles, slots: np.ndarray, *, plain: torch.Tensor) -> None:
    _move(tiles, slots, plain, True)


def scatter_slots(tiles: Tiles, slots: np.ndarray, *, plain: torch.Tensor) -> None:
    _move(tiles, slots, plain, False)


def _move(tiles: Tiles, slots: np.ndarray, plain: torch.Tensor, gather: bool) -> None:
    if not slots.size:
        return
    pages = paged(tiles)
    token_step, channel_step = (pages.row_step, 1) if tiles.token_major else (1, pages.row_step)
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
        PADDED=triton.next_power_of_2(tiles.head_size),
        BLOCK_SIZE=tiles.block_size,
        ALIGNED=aligned,
        GATHER=gather,
    )
