"""`gather_pages` and `scatter_pages` on a GPU: the contract of `kernels.pages`, on torch tensors.

One program copies one page. Pages and the arena are read as 64-bit words; where everything is aligned to 16 bytes the
loads and stores are 128 bits wide.
"""

# ruff: noqa: N803 - a Triton kernel's compile-time constants are in capitals

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.launch_triton import upload

__all__ = ["copy_pages", "gather_pages", "scatter_pages"]

_WORDS_AT_ONCE = 1024


@triton.jit
def copy_pages(
    pointers,
    blocks,
    arena,
    slots,
    row_words,
    WORDS: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    LAYERS: tl.constexpr,
    ALIGNED: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Page (chunk k, place i) of one layer; WORDS words of 8 bytes a page, WIDTH pages a chunk."""
    page, layer = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + page)
    if block >= 0:
        base = tl.load(pointers + layer).to(tl.pointer_type(tl.int64))
        slot = tl.load(slots + page // WIDTH)
        paged = base + block * row_words
        place = arena + ((slot * LAYERS + layer) * WIDTH + page % WIDTH) * WORDS
        if ALIGNED:
            paged = tl.multiple_of(paged, 16)
            place = tl.multiple_of(place, 16)
        for start in tl.range(0, WORDS, STEP):
            word = start + tl.arange(0, STEP)
            if WORDS % STEP == 0:
                if GATHER:
                    tl.store(place + word, tl.load(paged + word))
                else:
                    tl.store(paged + word, tl.load(place + word))
            else:
                if GATHER:
                    tl.store(place + word, tl.load(paged + word, mask=word < WORDS), mask=word < WORDS)
                else:
                    tl.store(paged + word, tl.load(place + word, mask=word < WORDS), mask=word < WORDS)


def gather_pages(pages: Sequence[torch.Tensor], blocks: np.ndarray, arena: torch.Tensor, slots: np.ndarray) -> int:
    """arena[slots[k], l, i] = pages[l][blocks[k, i]]; returns the number of pages moved."""
    return _move(pages, blocks, arena, slots, True)


def scatter_pages(arena: torch.Tensor, slots: np.ndarray, pages: Sequence[torch.Tensor], blocks: np.ndarray) -> int:
    """pages[l][blocks[k, i]] = arena[slots[k], l, i]; returns the number of pages moved."""
    return _move(pages, blocks, arena, slots, False)


def _move(
    pages: Sequence[torch.Tensor], blocks: np.ndarray, arena: torch.Tensor, slots: np.ndarray, gather: bool
) -> int:
    first = pages[0]
    page_nbytes, row_nbytes = first.shape[1], first.stride(0)
    if page_nbytes % 8 or row_nbytes % 8:
        raise ValueError(f"pages of {page_nbytes} bytes, {row_nbytes} apart; both must be multiples of 8")
    addresses = np.array([page.data_ptr() for page in pages], np.int64)
    aligned = not (addresses % 16).any() and page_nbytes % 16 == 0 and row_nbytes % 16 == 0
    words = page_nbytes // 8
    if blocks.size:
        copy_pages[(blocks.size, len(pages))](
            upload(addresses, first.device),
            upload(blocks, first.device),
            arena.view(torch.int64),
            upload(slots, first.device),
            row_nbytes // 8,
            WORDS=words,
            STEP=min(_WORDS_AT_ONCE, triton.next_power_of_2(words)),
            WIDTH=blocks.shape[1],
            LAYERS=len(pages),
            ALIGNED=aligned and arena.data_ptr() % 16 == 0,
            GATHER=gather,
        )
    return int((blocks >= 0).sum()) * len(pages)
