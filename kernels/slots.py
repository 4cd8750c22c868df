"""Move single tokens between paged KV and plain arrays, through a slot mapping.

    gather_slots(tiles, slots, plain=out)       out[l, t, h] = K of token t               store path, canonical form
    scatter_slots(tiles, slots, plain=source)   K of token t = source[l, t, h]            retrieve path

tiles   `Tiles` of L layers, any element width; whatever the page layout, `plain` is in the canonical order
slots   (T,) int64; slot = block id x block size + offset in the block; -1 = skip (page and array are left as they are)
plain   (L, T, H, D), contiguous, elements as wide as the tiles'
"""

import numpy as np

from kernels.dispatch import dispatch
from kernels.tiles import Tiles

__all__ = ["gather_slots", "scatter_slots"]


def _check(tiles: Tiles, slots: np.ndarray, *, plain: np.ndarray) -> None:
    shape = (tiles.num_layers, len(slots), tiles.num_heads, tiles.head_size)
    if tuple(plain.shape) != shape:
        raise ValueError(f"the plain array is {tuple(plain.shape)}; it must be {shape}")
    if slots.ndim != 1 or slots.dtype != np.int64:
        raise ValueError(f"slots are {slots.dtype} {slots.shape}; they must be int64 (tokens,)")
    last = tiles.num_blocks * tiles.block_size - 1
    if slots.size and not -1 <= slots.min() <= slots.max() <= last:
        raise ValueError(f"slots {slots.min()}..{slots.max()}; allowed are -1 (skip) to {last}")


def _gather_slots_reference(tiles: Tiles, slots: np.ndarray, *, plain: np.ndarray) -> None:
    (token,) = np.nonzero(slots >= 0)
    block, offset = np.divmod(slots[token], tiles.block_size)
    for layer, page in enumerate(tiles.pages):
        plain[layer, token] = page[block, :, offset]


def _scatter_slots_reference(tiles: Tiles, slots: np.ndarray, *, plain: np.ndarray) -> None:
    (token,) = np.nonzero(slots >= 0)
    block, offset = np.divmod(slots[token], tiles.block_size)
    for layer, page in enumerate(tiles.pages):
        page[block, :, offset] = plain[layer, token]


gather_slots = dispatch(
    _gather_slots_reference,
    check=_check,
    numba="kernels.slots_numba:gather_slots",
    triton="kernels.slots_triton:gather_slots",
)
scatter_slots = dispatch(
    _scatter_slots_reference,
    check=_check,
    numba="kernels.slots_numba:scatter_slots",
    triton="kernels.slots_triton:scatter_slots",
)
