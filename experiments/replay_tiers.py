"""A trace through several tiers, each with its own policy: demotion, promotion, exclusive or inclusive.

    hit in tier k -> promoted to tier 0 -> tier 0's victim falls to tier 1 -> ... -> the last tier's victim is dropped

The tiers are the live engine's orders (LivePolicy), driven chunk by chunk from Python: some ten thousand chunks a
second, for traces of up to a million. Two exclusive LRU tiers of any size come at once from curves.lru_curve().
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl

from experiments.replay_costs import ReuseCosts
from experiments.traces import Trace
from workbench.errors import InvalidInputError
from workbench.policies.live import LivePolicy, TouchOrder

__all__ = ["TierResult", "replay_tiers"]


@dataclass(frozen=True, eq=False)
class TierResult:
    """What each tier did.

    Attributes:
        trace: The trace, with ids that name prefixes.
        kind: "exclusive" or "inclusive".
        hit_chunks: int64[tiers, requests], hits by the tier that held the chunk, the fastest if several did.
        demoted: Chunks that fell out of each tier into the next.
        dropped: Chunks that left the last tier, or under "inclusive" any tier that was the last to hold them.
        promoted: Chunks found in each tier and put into the first.
    """

    trace: Trace
    kind: str
    hit_chunks: np.ndarray
    demoted: list[int]
    dropped: int
    promoted: list[int]

    def frame(self) -> pl.DataFrame:
        """One row a tier: hit rate by chunks, demotions, promotions."""
        hits = self.hit_chunks.sum(axis=1) / max(1, self.trace.accesses)
        return pl.DataFrame(
            {"tier": range(len(hits)), "hit_rate_by_chunks": hits, "demoted": self.demoted, "promoted": self.promoted}
        )


def replay_tiers(
    trace: Trace,
    tiers: Sequence[tuple[Any, int]],
    *,
    kind: Literal["exclusive", "inclusive"] = "exclusive",
    touch_order: TouchOrder = "tail_first",
    costs: ReuseCosts | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TierResult:
    """Replay a trace through tiers, fastest first.

    Args:
        trace: From experiments.traces.
        tiers: (policy, capacity in chunks) of each tier.
        kind: "exclusive": a chunk is in one tier. "inclusive": it is written to all and stays below when promoted.
        touch_order: As in replay().
        costs: What policies that weigh costs are told.
        progress: Called with (requests done, requests in all).

    Raises:
        InvalidInputError: No tiers, or another kind.
    """
    if not tiers or kind not in ("exclusive", "inclusive"):
        raise InvalidInputError(f"tiers must not be empty and kind 'exclusive' or 'inclusive', got {tiers!r}, {kind!r}")
    run = _Run(trace.as_prefixes(), tiers, kind == "inclusive", touch_order, costs or ReuseCosts())
    for q in range(trace.requests):
        run.request(q)
        if progress and q % 256 == 0:
            progress(q, trace.requests)
    return TierResult(run.trace, kind, run.hits, run.demoted, run.dropped, run.promoted)


class _Run:
    """State of one replay; chunk ids serve as indices, since no index is reused for another chunk."""

    def __init__(
        self, trace: Trace, tiers: Sequence[tuple[Any, int]], inclusive: bool, order: TouchOrder, costs: ReuseCosts
    ):
        self.trace, self.inclusive = trace, inclusive
        self.orders = [LivePolicy(spec, capacity_chunks=room, touch_order=order) for spec, room in tiers]
        self.room = [room for _, room in tiers]
        self.hits = np.zeros((len(tiers), trace.requests), np.int64)
        self.demoted, self.promoted, self.dropped = [0] * len(tiers), [0] * len(tiers), 0
        tokens = trace.chunk_tokens().astype(np.int64)
        self.about = {
            "tokens": tokens,
            "nbytes": costs.nbytes(tokens),
            "load_seconds": costs.load_seconds(tokens),
            "depth": trace.depth,
            "recompute_seconds": costs.recompute_seconds(
                trace.depth * trace.block_tokens, trace.depth * trace.block_tokens + tokens
            ),
        }

    def request(self, q: int) -> None:
        """Hits are promoted head first, misses stored; the request's chunks are pinned in the first tier meanwhile."""
        first = self.orders[0]
        chain = self.trace.ids[self.trace.offsets[q] : self.trace.offsets[q + 1]].tolist()
        for order in self.orders:
            order.begin(q, float(self.trace.timestamps[q]))
        places = [self.find(b) for b in chain]
        found = next((i for i, place in enumerate(places) if place < 0), len(chain))
        pinned = []
        for b, place in zip(chain[:found], places[:found], strict=True):
            self.hits[place, q] += 1
            for order in self.orders[place:]:
                if b in order:
                    order.hit(b)
                    if order is first:
                        order.pin(b)
                        pinned.append(b)
        for i, b in enumerate(chain[: self.room[0]]):
            if b in first:
                continue
            if not self.store(0, b):
                break
            if i < found:
                self.promoted[places[i]] += 1
            first.pin(b)
            pinned.append(b)
        for b in pinned:
            first.unpin(b)

    def find(self, b: int) -> int:
        """The fastest tier that holds the chunk, -1 if none does."""
        return next((k for k, order in enumerate(self.orders) if b in order), -1)

    def store(self, k: int, b: int) -> bool:
        """Put a chunk into tier k and, if inclusive, into those below; false if nothing may make room for it."""
        order = self.orders[k]
        if not self.inclusive:
            for other in self.orders[k + 1 :]:
                if b in other:
                    other.remove(b)
        if b not in order:
            if len(order) >= self.room[k] and not self.make_room(k, b):
                return False
            parent = int(self.trace.parent[b])
            about = {name: values[b] for name, values in self.about.items()}
            order.insert(b, parent=parent if parent in order else -1, key=b, **about)
        if self.inclusive and k + 1 < len(self.orders):
            self.store(k + 1, b)
        return True

    def make_room(self, k: int, incoming: int) -> bool:
        """Evict one chunk from tier k; if exclusive it falls one tier down."""
        victim = self.orders[k].victim(incoming=incoming)
        if victim < 0:
            return False
        if not self.inclusive and k + 1 < len(self.orders):
            self.demoted[k] += self.store(k + 1, victim)
        elif self.find(victim) < 0:
            self.dropped += 1
        return True
