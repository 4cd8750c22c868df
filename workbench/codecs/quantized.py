"""What the fixed-rate codecs share: keys and values quantised in groups by `kernels.quantize`, codes in page order."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kernels.quantize import Coded, Scheme, dequantize, has_unrepresentable, quantize, shapes
from kernels.tiles import Tiles
from workbench.codecs.base import KeysAndValues, KVCodec, UnrepresentableError
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes

__all__ = ["QuantizedCodec", "channel_group", "coded_sections", "refuse_unrepresentable", "token_group"]


def channel_group(wanted: int, kv: KeysAndValues) -> int:
    """The largest group of channels that divides the head size and `wanted`."""
    return math.gcd(wanted, kv.layout.head_size)


def token_group(wanted: int, kv: KeysAndValues) -> int:
    """The largest group of tokens up to `wanted` that fits the blocks of this chunk."""
    block = kv.layout.block_size
    if wanted < 2 * block:
        return math.gcd(wanted, block)
    span = max(s for s in range(1, min(wanted // block, kv.num_blocks) + 1) if kv.num_blocks % s == 0)
    return block * span


def refuse_unrepresentable(scales: np.ndarray, codec: object) -> None:
    if has_unrepresentable(scales):
        raise UnrepresentableError(f"the chunk holds NaN or infinity; {codec!r} keeps finite numbers only")


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedCodec(KVCodec):
    """A subclass names the schemes of keys and values in `_schemes`."""

    def _schemes(self, kv: KeysAndValues) -> tuple[Scheme, Scheme]:
        raise NotImplementedError

    def _parts(self, kv: KeysAndValues) -> Iterator[tuple[Tiles, Scheme]]:
        """Keys, then values; both at once where they lie side by side and are treated alike: memory is read in turn,
        which is twice as fast as by halves of a token (AMD EPYC Zen 4, 2026-11)."""
        keys, values = self._schemes(kv)
        both = kv.side_by_side if keys == values and keys.along == "channels" else None
        if both is not None:
            yield Tiles(both), keys
        else:
            yield Tiles(kv.keys), keys
            yield Tiles(kv.values), values

    def _write(self, kv: KeysAndValues, writer: PayloadWriter) -> None:
        blocks = np.arange(kv.num_blocks)[None]
        for tiles, scheme in self._parts(kv):
            coded = coded_sections(writer, shapes(tiles, scheme, 1, kv.num_blocks))
            quantize(tiles, blocks, scheme=scheme, coded=coded)
            refuse_unrepresentable(coded.scales, self)

    def _read(self, kv: KeysAndValues, reader: PayloadReader) -> None:
        blocks = np.arange(kv.num_blocks)[None]
        for tiles, scheme in self._parts(kv):
            coded = coded_sections(reader, shapes(tiles, scheme, 1, kv.num_blocks))
            dequantize(tiles, blocks, scheme=scheme, coded=coded)

    def _nbytes(self, kv: KeysAndValues) -> int:
        total = 0
        for tiles, scheme in self._parts(kv):
            sizes = shapes(tiles, scheme, 1, kv.num_blocks)
            total += sections_nbytes((sizes["scales"], 2), (sizes["zeros"], 2), (sizes["codes"], 1))
        return total


def coded_sections(payload: PayloadWriter | PayloadReader, sizes: dict[str, tuple[int, ...]]) -> Coded:
    scales = payload.section(sizes["scales"], np.uint16)
    zeros = payload.section(sizes["zeros"], np.uint16)
    return Coded(payload.section(sizes["codes"], np.uint8), scales, zeros)
