"""Uniform quantisation of paged KV into byte symbols for an entropy coder, and back. One row of symbols a channel.

    channel_moments(tiles, blocks, sums=..., squares=...)               sums and sums of squares over the tokens
    to_symbols(tiles, blocks, means=..., steps=..., symbols=out)        rows <- tiles
    from_symbols(tiles, blocks, means=..., steps=..., symbols=source)   tiles <- rows

With x a value of token t, mu the mean of its channel and s the step of its token, float32, one rounding each:

    symbol = rne((x - mu) * (1 / s)) + 128, between 1 and 255         x' = (symbol - 128) * s + mu, rounded to the dtype

tiles    `Tiles` of 16-bit values
blocks   (n,) int64, the blocks of one chunk, none skipped
means    (L, H, D) float32; sums, squares the same (accumulated in float32, in the order of the implementation)
steps    (L, n * N) float32, positive
symbols  (L, H * D, n * N) uint8, contiguous: the tokens of one channel of one head side by side
dtype    of the tiles: "bfloat16" or "float16"
"""

import numpy as np

from kernels.dispatch import dispatch
from kernels.floats import decode16, encode16
from kernels.tiles import Tiles

__all__ = ["channel_moments", "from_symbols", "to_symbols"]


def _check(
    tiles: Tiles,
    blocks: np.ndarray,
    *,
    means: np.ndarray,
    steps: np.ndarray,
    symbols: np.ndarray,
    dtype: str = "bfloat16",
) -> None:
    tiles.check_blocks(blocks[None])
    if blocks.size and blocks.min() < 0:
        raise ValueError("no block of a chunk of symbols can be skipped")
    layers, channels, tokens = tiles.num_layers, tiles.num_heads * tiles.head_size, blocks.size * tiles.block_size
    if means.shape != (layers, tiles.num_heads, tiles.head_size) or means.dtype != np.float32:
        raise ValueError(f"means are {means.dtype} {means.shape}; they must be float32, one a channel")
    if steps.shape != (layers, tokens) or steps.dtype != np.float32:
        raise ValueError(f"steps are {steps.dtype} {steps.shape}; they must be float32 {(layers, tokens)}")
    if symbols.shape != (layers, channels, tokens) or not symbols.flags.c_contiguous:
        raise ValueError(f"symbols are {symbols.shape}; they must be contiguous {(layers, channels, tokens)}")
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r} is not bfloat16 or float16")


def _check_moments(
    tiles: Tiles, blocks: np.ndarray, *, sums: np.ndarray, squares: np.ndarray, dtype: str = "bfloat16"
) -> None:
    tiles.check_blocks(blocks[None])
    shape = (tiles.num_layers, tiles.num_heads, tiles.head_size)
    for name, array in (("sums", sums), ("squares", squares)):
        if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError(f"{name} are {array.dtype} {array.shape}; they must be contiguous float32 {shape}")


def _channel_moments_reference(
    tiles: Tiles, blocks: np.ndarray, *, sums: np.ndarray, squares: np.ndarray, dtype: str = "bfloat16"
) -> None:
    for layer, page in enumerate(tiles.pages):
        values = decode16(page[blocks], dtype)
        with np.errstate(all="ignore"):
            sums[layer] = values.sum((0, 2))
            squares[layer] = np.square(values).sum((0, 2))


def _to_symbols_reference(
    tiles: Tiles,
    blocks: np.ndarray,
    *,
    means: np.ndarray,
    steps: np.ndarray,
    symbols: np.ndarray,
    dtype: str = "bfloat16",
) -> None:
    for layer, page in enumerate(tiles.pages):
        values = decode16(page[blocks], dtype).transpose(1, 3, 0, 2).reshape(*means.shape[1:], -1)
        scaled = (values - means[layer, :, :, None]) * (np.float32(1) / steps[layer])
        symbols[layer] = (np.clip(np.rint(scaled), -127, 127) + 128).reshape(symbols.shape[1:])


def _from_symbols_reference(
    tiles: Tiles,
    blocks: np.ndarray,
    *,
    means: np.ndarray,
    steps: np.ndarray,
    symbols: np.ndarray,
    dtype: str = "bfloat16",
) -> None:
    heads, size = tiles.num_heads, tiles.head_size
    for layer, page in enumerate(tiles.pages):
        numbers = symbols[layer].astype(np.float32) - np.float32(128)
        values = numbers.reshape(heads, size, -1) * steps[layer] + means[layer, :, :, None]
        by_block = values.reshape(heads, size, blocks.size, tiles.block_size).transpose(2, 0, 3, 1)
        page[blocks] = encode16(by_block, dtype)


channel_moments = dispatch(
    _channel_moments_reference, check=_check_moments, numba="kernels.symbols_numba:channel_moments"
)
to_symbols = dispatch(_to_symbols_reference, check=_check, numba="kernels.symbols_numba:to_symbols")
from_symbols = dispatch(_from_symbols_reference, check=_check, numba="kernels.symbols_numba:from_symbols")
