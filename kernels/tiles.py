"""Where the tiles of K (or of V) lie in a paged cache: one tile a (layer, block, head), tokens x channels.

A serving engine's cache, whatever its layout, is given as L arrays, each a view indexed

    [block, head, token, channel]        (num_blocks, H, N, D)

in which either channels or tokens are contiguous. Views that give this from the layouts in use:

    vLLM 0.32, fused K | V   [B, H, N, 2D] or [B, N, H, 2D] permuted     cache[..., :D] and cache[..., D:]
    vLLM's CPU pages (vec)   per (block, head) K as [D][N], V as [N][D]   the K half with its last two axes swapped
    older vLLM               [2, NB, H, N, D], [NB, 2, H, N, D]           cache[0], cache[:, 0]
    NHD                      [NB, N, H, D]                                cache.transpose(0, 2, 1, 3)
    MLA                      [NB, N, C], one latent for all heads         cache[:, None]

"Memory order" names a tile's axes as they lie: rows x columns, columns contiguous. Rows are tokens where channels are
contiguous (`token_major`), else channels.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.dispatch import on_gpu

__all__ = ["Tiles"]


class Tiles:
    """The tiles of one kind (K, V, or a latent) of all layers, with their addresses taken once.

    Args:
        pages: L arrays (NumPy or torch), or one array with a leading layer axis, each (num_blocks, H, N, D).
            The arrays are kept alive by this object.

    Raises:
        ValueError: The arrays differ in shape or strides, or neither tokens nor channels are contiguous.
    """

    def __init__(self, pages: Sequence[Any] | Any):
        if not len(pages):
            raise ValueError("tiles need at least one layer")
        first = pages[0]
        if first.ndim != 4:
            raise ValueError(f"got an array of shape {tuple(first.shape)}; need (num_blocks, heads, tokens, channels)")
        self.pages = pages
        self.num_layers = len(pages)
        self.num_blocks, self.num_heads, self.block_size, self.head_size = map(int, first.shape)
        self.itemsize = _itemsize(first)
        self.is_cuda = on_gpu(first)
        block, head, token, channel = _byte_strides(first)
        if channel == self.itemsize:
            self.token_major, row = True, token
        elif token == self.itemsize:
            self.token_major, row = False, channel
        else:
            raise ValueError(f"strides {_byte_strides(first)}: neither tokens nor channels are contiguous")
        self.strides = np.array([block, head, row], np.int64)  # bytes: next block, next head, next row
        self.addresses = self._addresses()

    def _addresses(self) -> np.ndarray:
        if isinstance(self.pages, np.ndarray):
            return self.pages.ctypes.data + np.arange(self.num_layers, dtype=np.int64) * self.pages.strides[0]
        first = self.pages[0]
        for layer, array in enumerate(self.pages):
            if array.shape != first.shape or _byte_strides(array) != _byte_strides(first):
                raise ValueError(
                    f"layer {layer} is {tuple(array.shape)} with strides {_byte_strides(array)}; "
                    f"layer 0 is {tuple(first.shape)} with strides {_byte_strides(first)}"
                )
        return np.array([_address(array) for array in self.pages], np.int64)

    @property
    def rows(self) -> int:
        return self.block_size if self.token_major else self.head_size

    @property
    def columns(self) -> int:
        return self.head_size if self.token_major else self.block_size

    def in_memory_order(self) -> list[Any]:
        """The L arrays as (num_blocks, H, rows, columns): views, columns contiguous."""
        return [page if self.token_major else page.swapaxes(-1, -2) for page in self.pages]

    def check_blocks(self, blocks: np.ndarray) -> None:
        """Raise ValueError unless blocks is int64 (m, n) of ids from -1 to num_blocks - 1."""
        if blocks.ndim != 2 or blocks.dtype != np.int64:
            raise ValueError(f"block ids are {blocks.dtype} {blocks.shape}; they must be int64 (chunks, blocks)")
        if blocks.size and not -1 <= blocks.min() <= blocks.max() < self.num_blocks:
            raise ValueError(
                f"block ids {blocks.min()}..{blocks.max()}; allowed are -1 (skip) to {self.num_blocks - 1}"
            )


def _itemsize(array: Any) -> int:
    return array.itemsize if isinstance(array, np.ndarray) else array.element_size()


def _byte_strides(array: Any) -> tuple[int, ...]:
    if isinstance(array, np.ndarray):
        return array.strides
    return tuple(stride * array.element_size() for stride in array.stride())


def _address(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
