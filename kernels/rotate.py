"""Rotate keys or values by a Hadamard matrix before low-bit quantisation, gathering them; rotate back, scattering.

    rotate(tiles, blocks, signs=..., turned=out)        out = round(H (signs * x))        spreads outlier channels
    unrotate(tiles, blocks, signs=..., turned=source)   x = round(signs * (H source))     H is its own inverse

H is the Walsh-Hadamard matrix of `len(signs)` channels over its square root: a head is rotated in blocks of that size.
In float32: each input times f32(1 / sqrt(size)), then butterflies (a + b, a - b) at distances 1, 2, 4, ... size / 2.

tiles   `Tiles` of 16-bit values
blocks  (m, n) int64; -1 = skip
signs   (size,) float32 of +1 and -1; size is a power of two from 32 that divides the head size
turned  (m, L, n, H, rows, columns) uint16, contiguous, tiles in memory order
dtype   of tiles and turned: "bfloat16" or "float16"
"""

import hashlib

import numpy as np

from kernels.dispatch import dispatch
from kernels.floats import decode16, encode16
from kernels.tiles import Tiles

__all__ = ["random_signs", "rotate", "unrotate"]


def random_signs(size: int, seed: int = 0) -> np.ndarray:
    """(size,) float32 of +1 and -1 out of SHAKE-256: the same for a seed on every machine and in every version."""
    digest = hashlib.shake_256(f"kvworkbench signs {seed}".encode()).digest(-(-size // 8))
    return 1 - 2 * np.unpackbits(np.frombuffer(digest, np.uint8))[:size].astype(np.float32)


def _check(tiles: Tiles, blocks: np.ndarray, *, signs: np.ndarray, turned: np.ndarray, dtype: str = "bfloat16") -> None:
    size = len(signs)
    if size < 32 or size & (size - 1) or tiles.head_size % size:
        raise ValueError(f"{size} signs; need a power of two from 32 that divides the head size {tiles.head_size}")
    tiles.check_blocks(blocks)
    shape = (len(blocks), tiles.num_layers, blocks.shape[1], tiles.num_heads, tiles.rows, tiles.columns)
    if tuple(turned.shape) != shape:
        raise ValueError(f"the turned tiles are {tuple(turned.shape)}; they must be {shape}")
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r} is not bfloat16 or float16")


def _rotate_reference(
    tiles: Tiles, blocks: np.ndarray, *, signs: np.ndarray, turned: np.ndarray, dtype: str = "bfloat16"
) -> None:
    chunk, block = np.nonzero(blocks >= 0)
    for layer, page in enumerate(tiles.in_memory_order()):
        values = decode16(page[blocks[chunk, block]], dtype)
        turned[chunk, layer, block] = encode16(_turn(values, signs, np.ones_like(signs), tiles.token_major), dtype)


def _unrotate_reference(
    tiles: Tiles, blocks: np.ndarray, *, signs: np.ndarray, turned: np.ndarray, dtype: str = "bfloat16"
) -> None:
    chunk, block = np.nonzero(blocks >= 0)
    for layer, page in enumerate(tiles.in_memory_order()):
        values = decode16(turned[chunk, layer, block], dtype)
        page[blocks[chunk, block]] = encode16(_turn(values, np.ones_like(signs), signs, tiles.token_major), dtype)


def _turn(values: np.ndarray, before: np.ndarray, after: np.ndarray, token_major: bool) -> np.ndarray:
    """Tiles (.., rows, columns) float32 -> after * (H (before * values)) along the channels."""
    tokens_first = values if token_major else values.swapaxes(-1, -2)
    size = len(before)
    work = tokens_first.reshape(*tokens_first.shape[:-1], -1, size) * (before * np.float32(size**-0.5))
    distance = 1
    while distance < size:
        pairs = work.reshape(*work.shape[:-1], -1, 2, distance)
        top, bottom = pairs[..., 0, :], pairs[..., 1, :]
        work = np.stack([top + bottom, top - bottom], axis=-2).reshape(work.shape)
        distance *= 2
    turned = (work * after).reshape(tokens_first.shape)
    return turned if token_major else turned.swapaxes(-1, -2)


rotate = dispatch(
    _rotate_reference,
    check=_check,
    numba="kernels.rotate_numba:rotate",
    triton="kernels.rotate_triton:rotate",
)
unrotate = dispatch(
    _unrotate_reference,
    check=_check,
    numba="kernels.rotate_numba:unrotate",
    triton="kernels.rotate_triton:unrotate",
)
