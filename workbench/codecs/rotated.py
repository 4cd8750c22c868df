"""A Hadamard rotation, which spreads loud channels over all, then a few bits in groups (QuaRot, arXiv:2404.00456)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kernels.quantize import Scheme, dequantize, quantize, shapes
from kernels.rotate import rotate, unrotate
from kernels.tiles import Tiles
from workbench.codecs.base import KeysAndValues
from workbench.codecs.payload import PayloadReader, PayloadWriter
from workbench.codecs.quantized import QuantizedCodec, channel_group, coded_sections, refuse_unrepresentable
from workbench.errors import InvalidInputError

__all__ = ["Rotated", "rotation_size", "turned_tiles"]


def rotation_size(kv: KeysAndValues) -> int:
    """The largest power of two that divides the head size."""
    size = kv.layout.head_size & -kv.layout.head_size
    if size < 32:
        raise InvalidInputError(f"head size {kv.layout.head_size}: a rotation needs a multiple of 32")
    return size


def turned_tiles(tiles: Tiles, num_blocks: int) -> tuple[np.ndarray, Tiles]:
    """(memory for the rotated tiles of one chunk, the same as tiles)."""
    shape = (1, tiles.num_layers, num_blocks, tiles.num_heads, tiles.rows, tiles.columns)
    turned = np.empty(shape, np.uint16)
    return turned, Tiles(turned[0] if tiles.token_major else turned[0].swapaxes(-1, -2))


@dataclass(frozen=True, kw_only=True, repr=False)
class Rotated(QuantizedCodec):
    """Args:
    bits: 4, 3 or 2.
    group: Channels that share a scale and a zero; cut to a divisor of the head size.
    """

    bits: int = 4
    group: int = 64
    tolerance: ClassVar[None] = None  # an error in one rotated channel is spread over all

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in (2, 3, 4):
            raise InvalidInputError(f"bits is {self.bits}; a rotated codec has 2, 3 and 4")

    def _schemes(self, kv: KeysAndValues) -> tuple[Scheme, Scheme]:
        group = channel_group(self.group, kv)
        scheme = Scheme(code=f"uint{self.bits}", along="channels", group=group, dtype=kv.layout.dtype)
        return scheme, scheme

    def _turns(self, kv: KeysAndValues) -> Iterator[tuple[Tiles, Scheme, np.ndarray, Tiles]]:
        """(tiles, scheme, memory of the rotated, the rotated as tiles) of keys, then of values."""
        for tiles, scheme in self._parts(kv):
            yield tiles, scheme, *turned_tiles(tiles, kv.num_blocks)

    def _write(self, kv: KeysAndValues, writer: PayloadWriter) -> None:
        blocks, signs = np.arange(kv.num_blocks)[None], np.ones(rotation_size(kv), np.float32)
        for tiles, scheme, turned, rotated in self._turns(kv):
            rotate(tiles, blocks, signs=signs, turned=turned, dtype=kv.layout.dtype)
            coded = coded_sections(writer, shapes(rotated, scheme, 1, kv.num_blocks))
            quantize(rotated, blocks, scheme=scheme, coded=coded)
            refuse_unrepresentable(coded.scales, self)

    def _read(self, kv: KeysAndValues, reader: PayloadReader) -> None:
        blocks, signs = np.arange(kv.num_blocks)[None], np.ones(rotation_size(kv), np.float32)
        for tiles, scheme, turned, rotated in self._turns(kv):
            coded = coded_sections(reader, shapes(rotated, scheme, 1, kv.num_blocks))
            dequantize(rotated, blocks, scheme=scheme, coded=coded)
            unrotate(tiles, blocks, signs=signs, turned=turned, dtype=kv.layout.dtype)
