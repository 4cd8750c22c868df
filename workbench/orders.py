"""What the two planes say to each other. Plain tuples: under vLLM they cross a process border every step.

The control plane sends orders, to be carried out in the order of the list; the data plane answers with one `Done` for
each tier that an order concerned. Only what is done becomes visible to lookups.
"""

from typing import NamedTuple

from workbench.chunks import Chunk

__all__ = ["Done", "Erase", "Load", "Order", "Store", "Write"]

STAGING = -1  # in place of an arena slot: the chunk only passes through on its way


class Store(NamedTuple):
    """Gather a chunk from pages into the arena, then write it through to slower tiers.

    `attempt` counts how often the request's loads have failed: what a failed attempt computed is never stored.
    """

    request: str
    attempt: int
    chunk: Chunk
    blocks: tuple[int, ...]
    slot: int
    write_to: tuple[int, ...]

    @property
    def first_level(self) -> int:
        """The fastest tier that takes the chunk."""
        return 0 if self.slot != STAGING else self.write_to[0]


class Load(NamedTuple):
    """Bring a chunk from a tier into pages. A slower tier's chunk passes through `slot`, and stays if that is one."""

    request: str
    attempt: int
    chunk: Chunk
    blocks: tuple[int, ...]  # -1: this block is not wanted
    level: int
    slot: int


class Write(NamedTuple):
    """Copy a chunk from the arena one or more tiers down. Only the chunk's key counts.

    A chunk that does not stay is copied aside first, for its slot is used anew; one that stays is held in its slot
    until the write is reported, and is not worth waiting for a full queue.
    """

    chunk: Chunk
    slot: int
    level: int
    stays: bool = False


class Erase(NamedTuple):
    """Remove a chunk from a slower tier."""

    key: bytes
    level: int


Order = Store | Load | Write | Erase


class Done(NamedTuple):
    """The outcome of an order in one tier. `reason` is "" where the bytes are there, whole and right."""

    kind: str  # "store" | "load" | "write"
    request: str
    attempt: int
    key: bytes
    level: int
    nbytes: int
    seconds: float
    reason: str
