"""Paged caches in the layouts that serving engines use, with guard bytes around, as NumPy arrays or torch tensors."""

import numpy as np

from kernels.tiles import Tiles

GUARD = 64  # values on either side of the cache that no kernel may touch
_GUARD_VALUE = 0xA5A5

LAYERS, BLOCKS, HEADS = 2, 5, 2
# name -> (axes of one layer's array, slices that give [block, head, token, channel] for K)
LAYOUTS = {
    "fused": lambda n, d: ((BLOCKS, HEADS, n, 2 * d), lambda a: a[..., :d]),
    "fused values": lambda n, d: ((BLOCKS, HEADS, n, 2 * d), lambda a: a[..., d:]),
    "fused tokens first": lambda n, d: ((BLOCKS, n, HEADS, 2 * d), lambda a: a.swapaxes(1, 2)[..., :d]),
    "cpu vec": lambda n, d: (
        (BLOCKS, HEADS, 2, n * d),
        lambda a: a[:, :, 0].reshape(BLOCKS, HEADS, d, n).swapaxes(-1, -2),
    ),
    "two then blocks": lambda n, d: ((2, BLOCKS, HEADS, n, d), lambda a: a[0]),
    "blocks then two, NHD": lambda n, d: ((BLOCKS, 2, n, HEADS, d), lambda a: a[:, 0].swapaxes(1, 2)),
    "MLA latent": lambda n, d: ((BLOCKS, n, d), lambda a: a[:, None]),
}


class Cache:
    """L layers of one layout in one guarded buffer; `library` is numpy or torch."""

    def __init__(self, layout: str, tokens: int, size: int, dtype: str = "bfloat16"):
        self.shape, self.select = LAYOUTS[layout](tokens, size)
        self.count = LAYERS * int(np.prod(self.shape))
        self.buffer = np.full(self.count + 2 * GUARD, _GUARD_VALUE, np.uint16)
        self.dtype = dtype

    def fill(self, seed: int = 0, scale: float = 3.0) -> "Cache":
        values = (np.random.default_rng(seed).standard_normal(self.count) * scale).astype(np.float32)
        bits = values.astype(np.float16).view(np.uint16) if self.dtype == "float16" else _bf16(values)
        self.buffer[GUARD:-GUARD] = bits
        return self

    def empty(self) -> "Cache":
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other.buffer = self.buffer.copy()
        other.buffer[GUARD:-GUARD] = 0
        return other

    def tiles(self) -> Tiles:
        inner = self.buffer[GUARD:-GUARD].reshape(LAYERS, *self.shape)
        return Tiles([self.select(layer) for layer in inner])

    def on_device(self, device: str):
        """(tiles of torch tensors, a function that copies the device's bytes back into this cache)."""
        import torch

        flat = torch.from_numpy(self.buffer.view(np.int16).copy()).to(device)
        inner = flat[GUARD:-GUARD].reshape(LAYERS, *self.shape)

        def fetch() -> None:
            self.buffer[:] = flat.cpu().numpy().view(np.uint16)

        return Tiles([self.select(layer) for layer in inner]), fetch

    def assert_guards(self) -> None:
        assert (self.buffer[:GUARD] == _GUARD_VALUE).all() and (self.buffer[-GUARD:] == _GUARD_VALUE).all()


def _bf16(values: np.ndarray) -> np.ndarray:
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def block_ids(width: int = 2) -> np.ndarray:
    """Two chunks of `width` blocks, one place skipped."""
    ids = np.arange(2 * width, dtype=np.int64)[::-1].reshape(2, width) % BLOCKS
    ids[0, 1] = -1
    return ids
