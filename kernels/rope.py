"""Turn keys back by their rotary position inside a chunk, gathering them, and forward again, scattering.

    unrope(tiles, blocks, angles=..., plain=out)       out = round(x turned by -angle)
    rope(tiles, blocks, angles=..., plain=source)      x = round(source turned by +angle)

A rotary embedding turns channel pairs (d, d + D/2) of token t by t * theta^(-2d/D) (Su et al., arXiv:2104.09864; the
half-split order is Llama's). Turned back, a channel's keys stay close to one mean, and fewer bits describe them.
Positions count from the start of the chunk: what is left is one constant turn, the same for all its tokens.

tiles   `Tiles` of 16-bit values, D even
blocks  (n,) int64, the blocks of one chunk, none skipped
angles  (n * N, D/2) float32, radians
plain   (L, n, H, rows, columns) uint16, contiguous, tiles in memory order
dtype   of both: "bfloat16" or "float16"
"""

import numpy as np

from kernels.dispatch import dispatch
from kernels.floats import decode16, encode16
from kernels.tiles import Tiles

__all__ = ["angles_of", "rope", "unrope"]


def angles_of(num_tokens: int, head_size: int, theta: float) -> np.ndarray:
    """(num_tokens, head_size / 2) float32 angles of positions 0, 1, 2, ..."""
    frequency = theta ** (-np.arange(0, head_size, 2) / head_size)
    return (np.arange(num_tokens)[:, None] * frequency).astype(np.float32)


def _check(tiles: Tiles, blocks: np.ndarray, *, angles: np.ndarray, plain: np.ndarray, dtype: str = "bfloat16") -> None:
    tiles.check_blocks(blocks[None])
    if blocks.size and blocks.min() < 0:
        raise ValueError("no block can be skipped")
    shape = (tiles.num_layers, blocks.size, tiles.num_heads, tiles.rows, tiles.columns)
    if plain.shape != shape or not plain.flags.c_contiguous:
        raise ValueError(f"the plain tiles are {plain.shape}; they must be contiguous {shape}")
    if tiles.head_size % 2 or angles.shape != (blocks.size * tiles.block_size, tiles.head_size // 2):
        raise ValueError(f"angles {angles.shape} do not fit {blocks.size} blocks of heads of {tiles.head_size}")
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r} is not bfloat16 or float16")


def _unrope_reference(
    tiles: Tiles, blocks: np.ndarray, *, angles: np.ndarray, plain: np.ndarray, dtype: str = "bfloat16"
) -> None:
    for layer, page in enumerate(tiles.pages):
        turned = encode16(_turn(decode16(page[blocks], dtype), angles, -1), dtype)
        plain[layer] = turned if tiles.token_major else turned.swapaxes(-1, -2)


def _rope_reference(
    tiles: Tiles, blocks: np.ndarray, *, angles: np.ndarray, plain: np.ndarray, dtype: str = "bfloat16"
) -> None:
    for layer, page in enumerate(tiles.pages):
        logical = plain[layer] if tiles.token_major else plain[layer].swapaxes(-1, -2)
        page[blocks] = encode16(_turn(decode16(logical, dtype), angles, 1), dtype)


def _turn(values: np.ndarray, angles: np.ndarray, direction: int) -> np.ndarray:
    """(n, H, N, D) float32, turned; each product and sum is rounded to float32."""
    cosine, sine = cosines_and_sines(angles, direction)
    blocks, _, tokens, size = values.shape
    cosine, sine = (part.reshape(blocks, 1, tokens, size // 2) for part in (cosine, sine))
    first, second = values[..., : size // 2], values[..., size // 2 :]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def cosines_and_sines(angles: np.ndarray, direction: int) -> tuple[np.ndarray, np.ndarray]:
    return np.cos(angles), direction * np.sin(angles)


unrope = dispatch(_unrope_reference, check=_check, numba="kernels.rope_numba:unrope")
rope = dispatch(_rope_reference, check=_check, numba="kernels.rope_numba:rope")
