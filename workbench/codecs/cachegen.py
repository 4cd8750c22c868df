"""A CacheGen-like coder (Liu et al., arXiv:2310.07240): bins by layer, finer in early layers, and an entropy coder.

Each token's keys of a layer are scaled to their largest magnitude and rounded to `bins` levels; so are its values. The
paper's token-to-token deltas are left out (on real keys they gain 0.2 bit, on values they lose), and the arithmetic
coder with a stored table a channel is replaced by rANS with fixed tables: no table is stored.
"""

from dataclasses import dataclass

import numpy as np

from kernels.floats import decode16, round_up_bf16
from kernels.symbols import from_symbols, to_symbols
from kernels.tiles import Tiles
from workbench.codecs.base import KeysAndValues, KVCodec, UnrepresentableError
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes
from workbench.codecs.symbol_coding import coded_nbytes, read_symbols, write_symbols
from workbench.errors import InvalidInputError

__all__ = ["CacheGen"]


@dataclass(frozen=True, kw_only=True, repr=False)
class CacheGen(KVCodec):
    """Args:
    key_bins: Levels of the keys in the first third of the layers, the second, and the last.
    value_bins: The same of the values.
    """

    key_bins: tuple[int, int, int] = (32, 16, 16)
    value_bins: tuple[int, int, int] = (32, 16, 16)

    def __post_init__(self):
        super().__post_init__()
        for name in ("key_bins", "value_bins"):
            bins = getattr(self, name)
            if len(bins) != 3 or not all(4 <= b <= 254 for b in bins):
                raise InvalidInputError(f"{name} is {bins}; it must be three numbers from 4 to 254")

    @property
    def tolerance(self) -> float:
        return 1 / (min(self.key_bins + self.value_bins) - 2) * (1 + 2**-6) + 2**-8

    def _parts(self, kv: KeysAndValues):
        for part, bins in ((kv.keys, self.key_bins), (kv.values, self.value_bins)):
            third = np.minimum(np.arange(len(part)) * 3 // len(part), 2)
            yield part, Tiles(part), np.array(bins, np.float32)[third] // 2 - 1

    def _write(self, kv: KeysAndValues, writer: PayloadWriter) -> None:
        blocks, dtype = np.arange(kv.num_blocks), kv.layout.dtype
        for part, tiles, levels in self._parts(kv):
            magnitude = (part & np.uint16(0x7FFF)).max((2, 4)).reshape(len(part), -1)
            largest = decode16(magnitude, dtype)
            if not np.isfinite(largest).all():
                raise UnrepresentableError(f"the chunk holds NaN or infinity; {self!r} keeps finite numbers only")
            steps = round_up_bf16(np.maximum(largest / levels[:, None], np.float32(2.0**-100)))
            symbols = np.empty((tiles.num_layers, tiles.num_heads * tiles.head_size, kv.num_tokens), np.uint8)
            numbers = {"means": _no_means(tiles), "steps": decode16(steps, "bfloat16"), "symbols": symbols}
            to_symbols(tiles, blocks, dtype=dtype, **numbers)
            writer.append(steps)
            write_symbols(symbols, writer)

    def _read(self, kv: KeysAndValues, reader: PayloadReader) -> None:
        blocks, dtype = np.arange(kv.num_blocks), kv.layout.dtype
        for _, tiles, _ in self._parts(kv):
            steps = decode16(reader.section((tiles.num_layers, kv.num_tokens), np.uint16), "bfloat16")
            symbols = np.empty((tiles.num_layers, tiles.num_heads * tiles.head_size, kv.num_tokens), np.uint8)
            read_symbols(symbols, reader)
            from_symbols(tiles, blocks, means=_no_means(tiles), steps=steps, symbols=symbols, dtype=dtype)

    def _nbytes(self, kv: KeysAndValues) -> int:
        layers, _, heads, _, size = kv.keys.shape
        part = sections_nbytes(((layers, kv.num_tokens), 2))
        return 2 * (part + coded_nbytes((layers, heads * size, kv.num_tokens)))


def _no_means(tiles: Tiles) -> np.ndarray:
    return np.zeros((tiles.num_layers, tiles.num_heads, tiles.head_size), np.float32)
