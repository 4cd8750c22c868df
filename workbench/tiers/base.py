"""Tiers in two halves: `TierIndex` decides what stays (control plane), `Tier` keeps the bytes (data plane).

A new medium is one file with one `Tier`: read, write, erase, scan. Capacity, pins, order and eviction are here, once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.chunks import Chunk
from workbench.policies.live import LivePolicy
from workbench.tiers.breaker import CircuitBreaker

__all__ = ["Changes", "StoredChunk", "Tier", "TierIndex", "TierUse"]


class StoredChunk(NamedTuple):
    """What a tier that survives restarts finds in itself: a nomination, checked when it is read."""

    key: bytes
    parent: bytes
    start: int
    stop: int
    nbytes: int
    tokens: bytes = b""  # as in `Chunk`, of those used last; b"" if the tier does not say


class Changes(NamedTuple):
    """What came and went in a tier without its owner's doing."""

    arrived: list[StoredChunk]
    gone: list[bytes]


class Tier(ABC):
    """Keeps the bytes of chunks under their keys. Knows neither capacity nor order; never raises for a bad medium.

    Every method may be called from several threads, for different chunks at a time.
    """

    name = "tier"
    shared = False  # other engines, which do not tell each other, store here and remove from here too
    breaker: CircuitBreaker | None = None  # refuses calls while the medium is away
    survives = False  # holds its chunks over a restart: `scan` finds them, `changes` what other processes do
    exact = True  # what is read is what was written, bit by bit; a lossy codec is not

    @abstractmethod
    def read(self, chunk: Chunk, out: np.ndarray, *, at_most: bool = False) -> str:
        """Fill `out` (uint8, contiguous, exactly the payload's size) with the chunk's bytes.

        With `at_most` a shorter payload is as good: it comes to stand at the front of `out`, and says itself where it
        ends.

        Returns "" if `out` holds exactly what was written for this chunk, else a reason: "absent", "corrupt",
        "mismatch" or the system's name of the fault. After a reason, `out` may hold anything.
        """

    @abstractmethod
    def write(self, chunk: Chunk, payload: np.ndarray) -> tuple[str, int]:
        """Store the payload (uint8, contiguous): whole or not at all, visible only when whole.

        Returns (reason, bytes taken on the medium); "" stored now, "dedup" was there already, else the fault.
        """

    @abstractmethod
    def erase(self, key: bytes) -> None:
        """Remove a chunk if it is there."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys are here now, in one exchange with the medium and within its time-out.

        Asked of shared tiers only.

        A "yes" nominates, as everywhere: the bytes are checked when they are read.
        """
        return [False] * len(keys)

    def nbytes_of(self, payload_nbytes: int, tokens: int) -> int:
        """Bytes that a payload takes on the medium, headers included."""
        return payload_nbytes

    def scan(self) -> Iterator[StoredChunk]:
        """What lies here from before, oldest use first. Nothing for a tier that does not survive."""
        return iter(())

    def changes(self, resident: Collection[bytes]) -> Changes:
        """What others stored here and removed from here since the last call.

        Args:
            resident: Keys that the caller counts here. What it is about to write or erase may be told of, too.
        """
        return Changes([], [])

    def close(self) -> None:
        """Release files and connections; twice is fine."""


@dataclass(frozen=True)
class TierUse:
    """How full one tier is."""

    name: str
    chunks: int
    used_bytes: int
    capacity_bytes: int
    high_water_bytes: int
    holds: int


class TierIndex:
    """The control half of one tier: what it holds, in which order it goes, and how full it is.

    Capacity is reserved before a byte moves, so it is never exceeded. A chunk that a running request or a transfer
    holds is never a victim.

    Args:
        name: As in events and statistics.
        level: 0 for the fastest tier.
        capacity_bytes: The most that chunks here may take.
        chunk_nbytes: Bytes of one chunk on this medium; sizes the policy.
        policy: A policy class, instance or name; see `workbench.policies`.
    """

    def __init__(self, name: str, level: int, capacity_bytes: int, *, chunk_nbytes: int, policy="lru"):
        self.name, self.level = name, level
        self.capacity_bytes, self.chunk_nbytes = capacity_bytes, chunk_nbytes
        self.used_bytes = 0
        self.high_water_bytes = 0
        self.order = LivePolicy(policy, capacity_chunks=max(1, capacity_bytes // chunk_nbytes))
        self._nbytes: dict[int, int] = {}
        self._holds: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._nbytes)

    def __contains__(self, entry: int) -> bool:
        return entry in self._nbytes

    def room(self, nbytes: int, keep: Callable[[int], bool], incoming: bytes) -> Iterator[int]:
        """Evict, one at a time, until `nbytes` fit; yields each victim. Look at `fits` afterwards.

        `keep` spares chunks beyond those that are held; `incoming` is the key of the chunk that needs the room.
        """
        while not self.fits(nbytes) and nbytes <= self.capacity_bytes:
            victim = self.order.victim(keep, incoming=incoming)
            if victim < 0:
                return
            self._forget(victim)
            yield victim

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.capacity_bytes

    def reserve(self, entry: int, nbytes: int) -> None:
        """Count a chunk that is about to be written. It is held in place until `settle` puts it into the order."""
        assert self.fits(nbytes) and entry not in self._nbytes
        self._nbytes[entry] = nbytes
        self.used_bytes += nbytes
        self.high_water_bytes = max(self.high_water_bytes, self.used_bytes)

    def shrink(self, entry: int, nbytes: int) -> None:
        """A written chunk turned out smaller than what was reserved for it."""
        if 0 < nbytes < self._nbytes[entry]:
            self.used_bytes -= self._nbytes[entry] - nbytes
            self._nbytes[entry] = nbytes

    def begin(self, request: int, now: float) -> None:
        """A request's chunks are about to be settled."""
        self.order.begin(request, now)

    def settle(self, entry: int, **about) -> None:
        """Tell the policy of a chunk, prefix first: a first call inserts it, a later one is a hit.

        `about` is what an insert may know; see `LivePolicy.insert`. The policy hears of it at `end`.
        """
        if entry in self.order:
            self.order.hit(entry)
            return
        self.order.insert(entry, nbytes=self._nbytes[entry], **about)
        for _ in range(self._holds.get(entry, 0)):
            self.order.pin(entry)

    def end(self) -> None:
        """All chunks of the request are settled: they are in the order now, its last chunk the oldest."""
        self.order.settle()

    def remove(self, entry: int) -> None:
        """Take a chunk out, asked for or failed; it may be one that was only reserved."""
        if entry in self.order:
            for _ in range(self._holds.get(entry, 0)):
                self.order.unpin(entry)
            self.order.remove(entry)
        self._forget(entry)

    def hold(self, entry: int) -> None:
        """Keep a chunk here until `release`: a transfer reads it or a request counts on it."""
        self._holds[entry] = self._holds.get(entry, 0) + 1
        if entry in self.order:
            self.order.pin(entry)

    def release(self, entry: int) -> None:
        left = self._holds.get(entry, 0) - 1
        assert left >= 0, "a chunk was released more often than it was held"
        if left:
            self._holds[entry] = left
        else:
            del self._holds[entry]
        if entry in self.order:
            self.order.unpin(entry)

    @property
    def holds(self) -> int:
        return sum(self._holds.values())

    @property
    def use(self) -> TierUse:
        """How full this tier is now."""
        return TierUse(self.name, len(self), self.used_bytes, self.capacity_bytes, self.high_water_bytes, self.holds)

    def entries(self) -> Iterable[int]:
        return list(self._nbytes)

    def _forget(self, entry: int) -> None:
        self.used_bytes -= self._nbytes.pop(entry)
