"""TurboQuant, the MSE variant (Zandieh et al., arXiv:2504.19874): rotate at random, then the best scalar quantiser.

    x -> its norm -> H (signs * x) / norm * sqrt(D): nearly standard normal -> nearest of 2^bits Lloyd-Max levels

The random rotation is a Hadamard matrix with random signs, as in DRIVE and EDEN, whose scalar case this is.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kernels.floats import decode16, encode16
from kernels.quantize import pack, unpack
from kernels.rotate import random_signs, rotate, unrotate
from kernels.tiles import Tiles
from workbench.codecs.base import KeysAndValues, KVCodec, UnrepresentableError
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes
from workbench.codecs.rotated import rotation_size, turned_tiles
from workbench.errors import InvalidInputError

__all__ = ["TurboQuant"]


@functools.cache
def _levels(bits: int) -> np.ndarray:
    """Lloyd-Max levels of a standard normal, ascending, float32."""
    grid = np.linspace(-6, 6, 48001)
    weight = np.exp(-grid * grid / 2)
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(500):
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
        levels = np.bincount(cell, weight * grid) / np.bincount(cell, weight)
    return levels.astype(np.float32)


@dataclass(frozen=True, kw_only=True, repr=False)
class TurboQuant(KVCodec):
    """A study: the levels are looked up in NumPy, far below the speed of the other codecs.

    Args:
        bits: 4, 3 or 2.
    """

    bits: int = 4
    tolerance: ClassVar[None] = None  # an error in one rotated channel is spread over all

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in (2, 3, 4):
            raise InvalidInputError(f"bits is {self.bits}; TurboQuant has 2, 3 and 4 here")

    def _parts(self, kv: KeysAndValues):
        for tiles in (Tiles(kv.keys), Tiles(kv.values)):
            turned, rotated = turned_tiles(tiles, kv.num_blocks)
            shape = (*turned.shape[:5], turned.shape[5] * self.bits // 8)
            yield tiles, turned, rotated.pages, shape

    def _write(self, kv: KeysAndValues, writer: PayloadWriter) -> None:
        blocks, dtype, signs = np.arange(kv.num_blocks)[None], kv.layout.dtype, random_signs(rotation_size(kv))
        for tiles, turned, logical, shape in self._parts(kv):
            rotate(tiles, blocks, signs=signs, turned=turned, dtype=dtype)
            values = decode16(logical, dtype)
            scale = np.sqrt(np.square(values, dtype=np.float64).mean(-1, keepdims=True))
            if not np.isfinite(scale).all():
                raise UnrepresentableError(f"the chunk holds NaN or infinity; {self!r} keeps finite numbers only")
            scales = encode16(scale.astype(np.float32), "bfloat16")
            writer.append(scales)
            normal = values / np.maximum(decode16(scales, "bfloat16"), np.float32(2.0**-100))
            levels = _levels(self.bits)
            codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, normal).astype(np.uint8)
            codes = codes if tiles.token_major else codes.swapaxes(-1, -2)
            writer.append(pack(codes[None], self.bits).reshape(shape))

    def _read(self, kv: KeysAndValues, reader: PayloadReader) -> None:
        blocks, dtype, signs = np.arange(kv.num_blocks)[None], kv.layout.dtype, random_signs(rotation_size(kv))
        for tiles, turned, logical, shape in self._parts(kv):
            scales = reader.section((*logical.shape[:4], 1), np.uint16)
            codes = unpack(reader.section(shape, np.uint8), self.bits)[0]
            codes = codes if tiles.token_major else codes.swapaxes(-1, -2)
            logical[...] = encode16(_levels(self.bits)[codes] * decode16(scales, "bfloat16"), dtype)
            unrotate(tiles, blocks, signs=signs, turned=turned, dtype=dtype)

    def _nbytes(self, kv: KeysAndValues) -> int:
        parts = [((*logical.shape[:4], 1), shape) for _, _, logical, shape in self._parts(kv)]
        return sum(sections_nbytes((scales, 2), (codes, 1)) for scales, codes in parts)
