"""`rotate` and `unrotate` on a GPU: the bytes of `kernels.rotate`."""

# ruff: noqa: N803 - a Triton kernel's compile-time constants are in capitals

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.floats_triton import bits_of, value_of
from kernels.launch_triton import paged, upload
from kernels.tiles import Tiles

__all__ = ["rotate", "turn_tiles", "unrotate"]

_VALUES_AT_ONCE = 2048


@triton.jit
def turn_tiles(
    pointers,
    blocks,
    turned,
    before,
    after,
    block_step,
    head_step,
    token_step,
    channel_step,
    LAYERS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKEN_MAJOR: tl.constexpr,
    FLOAT16: tl.constexpr,
    FORWARD: tl.constexpr,
    ALIGNED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """SIZE channels of AT_ONCE tokens of one head; FORWARD reads the pages, else it writes them."""
    place, head = tl.program_id(0), tl.program_id(1) % HEADS
    layer, piece = tl.program_id(1) // HEADS, tl.program_id(2)
    block = tl.load(blocks + place)
    if block >= 0:
        token = piece // (CHANNELS // SIZE) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
        within = tl.arange(0, SIZE)
        channel = piece % (CHANNELS // SIZE) * SIZE + within[None, :]
        inside = token < TOKENS
        page = tl.load(pointers + layer).to(tl.pointer_type(tl.int16)) + block * block_step + head * head_step
        if ALIGNED:
            page = tl.multiple_of(page, 16)
        paged_at = page + token * token_step + channel * channel_step
        tile = ((place.to(tl.int64) // WIDTH * LAYERS + layer) * WIDTH + place % WIDTH) * HEADS + head
        plain_at = turned + tile * (TOKENS * CHANNELS)
        if TOKEN_MAJOR:
            plain_at += token * CHANNELS + channel
        else:
            plain_at += channel * TOKENS + token
        source = paged_at if FORWARD else plain_at
        bits = tl.load(source, mask=inside, other=0)
        value = value_of(bits, FLOAT16) * tl.load(before + within)[None, :]
        distance: tl.constexpr = SIZE
        # Each turn does the butterflies of the lowest index bit and moves that bit to the top.
        for _ in tl.static_range(distance.bit_length() - 1):
            left, right = tl.split(tl.reshape(value, (AT_ONCE, SIZE // 2, 2)))
            both = tl.join(left + right, left - right)
            value = tl.reshape(tl.permute(both, (0, 2, 1)), (AT_ONCE, SIZE))
        bits = bits_of(value * tl.load(after + within)[None, :], FLOAT16)
        if FORWARD:
            tl.store(plain_at, bits, mask=inside)
        else:
            tl.store(paged_at, bits, mask=inside)


def rotate(tiles: Tiles, blocks: np.ndarray, *, signs, turned: torch.Tensor, dtype: str = "bfloat16") -> None:
    factor = np.float32(len(signs) ** -0.5)
    _launch(tiles, blocks, (signs * factor, np.ones_like(signs)), turned, (dtype == "float16", True))


def unrotate(tiles: Tiles, blocks: np.ndarray, *, signs, turned: torch.Tensor, dtype: str = "bfloat16") -> None:
    factor = np.float32(len(signs) ** -0.5)
    _launch(tiles, blocks, (np.full_like(signs, factor), signs), turned, (dtype == "float16", False))


def _launch(tiles: Tiles, blocks: np.ndarray, factors, turned: torch.Tensor, options: tuple[bool, bool]) -> None:
    if not blocks.size:
        return
    pages, size = paged(tiles), len(factors[0])
    at_once = min(triton.next_power_of_2(tiles.block_size), max(1, _VALUES_AT_ONCE // size))
    pieces = triton.cdiv(tiles.block_size, at_once) * (tiles.head_size // size)
    token_step, channel_step = (pages.row_step, 1) if tiles.token_major else (1, pages.row_step)
    turn_tiles[(blocks.size, tiles.num_layers * tiles.num_heads, pieces)](
        pages.pointers,
        upload(blocks, pages.device),
        turned.view(torch.int16),
        *(upload(factor, pages.device) for factor in factors),
        pages.block_step,
        pages.head_step,
        token_step,
        channel_step,
        LAYERS=tiles.num_layers,
        WIDTH=blocks.shape[1],
        HEADS=tiles.num_heads,
        TOKENS=tiles.block_size,
        CHANNELS=tiles.head_size,
        SIZE=size,
        TOKEN_MAJOR=tiles.token_major,
        FLOAT16=options[0],
        FORWARD=options[1],
        ALIGNED=pages.aligned,
        AT_ONCE=at_once,
    )
