"""Some tokens only: those whose keys (values) lie farthest from the mean are kept, the others come back as the mean.

    symbols of ECSQ -> a layer's most distant tokens -> rANS;  the other tokens cost one bit in all

Which tokens matter is decided without any query, as a store of prefixes must: by distance from the mean, which is
KeyDiff's measure (Park et al., arXiv:2504.15364) and the least squared error that leaving tokens out can do. Nothing is
evicted: pages keep their places, so that every engine can read them. What is left out of a prefix is part of the
codec's parameters, and so of the chunk's key.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workbench.codecs.base import CorruptDataError
from workbench.codecs.ecsq import ECSQ
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes
from workbench.codecs.symbol_coding import coded_nbytes, read_symbols, write_symbols
from workbench.errors import InvalidInputError

__all__ = ["Selected"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Selected(ECSQ):
    """A study of token selection; the other args are ECSQ's.

    Args:
        kept_fraction: Share of the tokens kept in each layer, of the keys and, on their own, of the values.
    """

    kept_fraction: float = 0.75
    rope_theta: float | None = None
    tolerance: ClassVar[None] = None  # a token that is left out is as far off as it was from the mean

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.kept_fraction <= 1:
            raise InvalidInputError(f"kept_fraction is {self.kept_fraction}; it must be above 0 and at most 1")

    def _write_coded(self, symbols: np.ndarray, writer: PayloadWriter) -> None:
        layers, _, tokens = symbols.shape
        distance = np.square(symbols.astype(np.float32) - 128).sum(1)
        farthest = distance.argsort(1, kind="stable")[:, tokens - self._kept(tokens) :]
        kept = np.zeros((layers, tokens), bool)
        np.put_along_axis(kept, farthest, True, 1)
        writer.append(np.packbits(kept, axis=1))
        write_symbols(_columns(symbols, kept), writer)

    def _read_coded(self, symbols: np.ndarray, reader: PayloadReader) -> None:
        layers, channels, tokens = symbols.shape
        kept = np.unpackbits(reader.section((layers, -(-tokens // 8)), np.uint8), axis=1, count=tokens).astype(bool)
        if (kept.sum(1) != self._kept(tokens)).any():
            raise CorruptDataError(f"{kept.sum(1).min()} to {kept.sum(1).max()} tokens are kept, not as many as asked")
        found = np.empty((layers, channels, self._kept(tokens)), np.uint8)
        read_symbols(found, reader)
        symbols[...] = 128
        for layer in range(layers):
            symbols[layer][:, kept[layer]] = found[layer]

    def _coded_nbytes(self, shape: tuple[int, int, int]) -> int:
        layers, channels, tokens = shape
        return sections_nbytes(((layers, -(-tokens // 8)), 1)) + coded_nbytes((layers, channels, self._kept(tokens)))

    def _kept(self, tokens: int) -> int:
        return max(1, round(tokens * self.kept_fraction))


def _columns(symbols: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray([layer[:, own] for layer, own in zip(symbols, kept, strict=True)])
