"""`gather_pages` and `scatter_pages` between a GPU's pages and the host's arena: the contract of `kernels.pages`.

    gather    pages -> one launch -> chunks side by side on the GPU -> one transfer a chunk -> arena
    scatter   the same backwards

One program copies one page, 64 bits a thread where pages and addresses allow it (aligned to 16 bytes, 128), else byte
by byte. A transfer of a whole chunk runs at the speed of the bus when the arena is page-locked: see `pin`.
"""

# ruff: noqa: N803 - a Triton kernel's compile-time constants are in capitals

import warnings

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.launch_triton import upload
from kernels.pages import PageTable

__all__ = ["copy_pages", "move", "pin", "unpin"]

_WORDS_AT_ONCE = 1024
_STAGING_NBYTES = 256 << 20  # of GPU memory for chunks on their way


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
    """Page (chunk k, place i) of one layer; WORDS words of the arena's element type a page, WIDTH pages a chunk."""
    page, layer = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + page)
    if block >= 0:
        base = tl.load(pointers + layer).to(arena.dtype)
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


def move(pages: PageTable, blocks: np.ndarray, arena: np.ndarray, slots: np.ndarray, gather: bool) -> int:
    """arena[slots[k], l, i] = pages[l][blocks[k, i]], or the reverse; returns the number of pages moved.

    When it returns, the bytes are there. Then, and after a fault, neither pages nor arena are touched any more.
    """
    device = pages.pages[0].device if pages.is_cuda else torch.device("cpu")
    at_once = max(1, _STAGING_NBYTES // max(1, arena[0].nbytes))
    try:
        for at in range(0, len(slots), at_once):
            wanted = blocks[at : at + at_once]
            staged = torch.empty((len(wanted), *arena.shape[1:]), dtype=torch.uint8, device=device)
            pairs = [(staged[k], torch.from_numpy(arena[slot])) for k, slot in enumerate(slots[at : at + at_once])]
            if not gather or wanted.min() < 0:  # a page that is skipped keeps what the arena has
                for here, there in pairs:
                    here.copy_(there, non_blocking=True)
            _launch(pages, wanted, staged, gather)
            if gather:
                for here, there in pairs:
                    there.copy_(here, non_blocking=True)
    finally:  # after a fault, too: the arena goes back to its owner
        if pages.is_cuda:
            torch.cuda.current_stream(device).synchronize()
    return int((blocks >= 0).sum()) * len(pages.pages)


def _launch(pages: PageTable, blocks: np.ndarray, staged: torch.Tensor, gather: bool) -> None:
    places = np.concatenate([pages.addresses, pages.row_strides, [pages.page_nbytes, staged.data_ptr()]])
    itemsize = 1 if (places % 8).any() else 8
    words = pages.page_nbytes // itemsize
    if (pages.row_strides != pages.row_strides[0]).any():
        raise ValueError(f"rows of the layers lie {set(pages.row_strides.tolist())} bytes apart; on a GPU all alike")
    if not blocks.size:
        return
    copy_pages[(blocks.size, len(pages.pages))](
        upload(pages.addresses, staged.device),
        upload(blocks, staged.device),
        staged.view(torch.int64 if itemsize == 8 else torch.int8),
        upload(np.arange(len(blocks)), staged.device),
        int(pages.row_strides[0]) // itemsize,
        WORDS=words,
        STEP=min(_WORDS_AT_ONCE, triton.next_power_of_2(words)),
        WIDTH=blocks.shape[1],
        LAYERS=len(pages.pages),
        ALIGNED=not (places % 16).any(),
        GATHER=gather,
    )


def pin(array: np.ndarray) -> bool:
    """Lock an array's memory until `unpin`, so that the GPU's copy engines reach it directly; warns where the system
    forbids it. Returns whether it is locked now."""
    code = torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)
    if int(code):
        warnings.warn(
            f"{array.nbytes / 2**30:.1f} GiB could not be page-locked (CUDA error {int(code)}; see `ulimit -l`): "
            "transfers will be slower",
            stacklevel=2,
        )
    return not int(code)


def unpin(array: np.ndarray) -> None:
    """Undo `pin`: memory that is given back while it is locked leaves its addresses locked for whoever comes next."""
    torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)
