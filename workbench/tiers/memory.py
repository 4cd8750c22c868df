"""Chunks in this process's memory, of any size: the memory tier when its chunks are encoded.

Chunks that are kept as they are lie in the arena instead (workbench/transfers.py), which needs no second copy.
"""

from collections.abc import Sequence

import numpy as np

from workbench.chunks import Chunk
from workbench.tiers.base import Tier

__all__ = ["MemoryTier"]


class MemoryTier(Tier):
    """A dictionary of payloads. Every operation on it is one step of the interpreter, so threads need no lock."""

    name = "memory"

    def __init__(self) -> None:
        self._stored: dict[bytes, tuple[Chunk, np.ndarray]] | None = {}

    def read(self, chunk: Chunk, out: np.ndarray, *, at_most: bool = False) -> str:
        if self._stored is None:
            return "closed"
        found = self._stored.get(chunk.key)
        if found is None:
            return "absent"
        stored, payload = found
        if stored != chunk or payload.nbytes > out.nbytes or (payload.nbytes < out.nbytes and not at_most):
            self.erase(chunk.key)
            return "mismatch"
        out[: payload.nbytes] = payload
        return ""

    def write(self, chunk: Chunk, payload: np.ndarray) -> tuple[str, int]:
        if self._stored is None:
            return "closed", 0
        copy = payload.copy()
        kept = self._stored.setdefault(chunk.key, (chunk, copy))
        return ("", copy.nbytes) if kept[1] is copy else ("dedup", 0)

    def erase(self, key: bytes) -> None:
        if self._stored is not None:
            self._stored.pop(key, None)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._stored is not None and key in self._stored for key in keys]

    def close(self) -> None:
        self._stored = None
