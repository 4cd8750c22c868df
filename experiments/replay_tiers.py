"""A trace through several tiers, each with its own policy: demotion, promotion, exclusive or inclusive.

    hit in tier k -> promoted to tier 0 -> tier 0's victim falls to tier 1 -> ... -> the last tier's victim is dropped

Each tier is its policy compiled with tier_loops.py; a request is a few calls. Two exclusive LRU tiers of any size come
at once from curves.lru_curve().
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from experiments.replay import fill_state
from experiments.replay_costs import ReuseCosts
from experiments.traces import Trace
from workbench.errors import InvalidInputError
from workbench.policies import resolve_policy
from workbench.policies.base import PolicyError
from workbench.policies.compiled import State, build, make_state
from workbench.policies.live import TouchOrder

__all__ = ["TierResult", "replay_tiers"]

LOOPS = Path(__file__).with_name("tier_loops.py")


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
    if touch_order not in ("tail_first", "head_first"):
        raise InvalidInputError(f"touch_order must be 'tail_first' or 'head_first', got {touch_order!r}")
    trace = trace.as_prefixes()
    run = _Run(trace, [_Tier(k, *tier, trace, costs) for k, tier in enumerate(tiers)], touch_order == "tail_first")
    serve = run.exclusive if kind == "exclusive" else run.inclusive
    for q in range(trace.requests):
        serve(q)
        if progress and q % 256 == 0:
            progress(q, trace.requests)
    return TierResult(trace, kind, run.hits, run.demoted, run.dropped, run.promoted)


class _Tier:
    """One tier: its state, and what tier_loops.py does with it."""

    def __init__(self, number: int, spec: Any, room: int, trace: Trace, costs: ReuseCosts | None):
        if not isinstance(room, int | np.integer) or room < 1:
            raise InvalidInputError(f"a tier holds at least 1 chunk, got {room!r}")
        self.number, self.room, self.policy = number, int(room), resolve_policy(spec)
        built = build(self.policy, loops=LOOPS, entry_points=_compile_tier)
        if "admit" in built.form.methods or (built.compiled and "next_use" in built.mentions):
            raise InvalidInputError(f"policy {built.form.name} uses the future or admission, which tiers do not have")
        self.state = make_state(built, self.policy, chunks=max(1, trace.distinct), capacity=self.room)
        fill_state(self.state, trace, costs)
        self._arrays = self.state.s, self.state.r, self.state.t
        self._told = np.zeros(int(trace.lengths.max(initial=1)) + 1, np.int64)

    def begin(self, request: int, now: float) -> None:
        self.state.module.begin(self.state.r, now, request)

    def look(self, ids: np.ndarray, start: int, stop: int, places: np.ndarray) -> None:
        self.state.module.look(self.state.s, ids, start, stop, places, self.number)

    def give(self, ids: np.ndarray, start: int, stop: int, places: np.ndarray) -> None:
        self.state.module.give(*self._arrays, ids, start, stop, places, self.number)

    def serve(self, ids: np.ndarray, start: int, stop: int, places: np.ndarray, tail_first: bool) -> np.ndarray:
        """Victims that made room for the request's chunks."""
        victims = np.empty(stop - start, np.int64)
        arguments = ids, start, stop, places, self.number, tail_first, self._told, victims
        return victims[: self._kept(self.state.module.serve(*self._arrays, *arguments))]

    def receive(self, demoted: np.ndarray) -> np.ndarray:
        """Victims that made room for what fell from the tier above."""
        victims = np.empty(len(demoted), np.int64)
        count = self.state.module.receive(*self._arrays, demoted, len(demoted), self._told, victims)
        return victims[: self._kept(count)]

    def mark_held(self, chunks: np.ndarray, marks: np.ndarray) -> None:
        """marks[i] = 1 for each chunk that is here."""
        self.state.module.mark_held(self.state.s, chunks, len(chunks), marks)

    def _kept(self, count: int) -> int:
        if count < 0:
            broken = self.state.get_scalar("_broken")
            raise PolicyError(
                f"evict() of {self.policy!r} in tier {self.number} returned {broken}, which it does not hold"
            )
        return count


class _Run:
    """One replay: what each tier counted."""

    def __init__(self, trace: Trace, tiers: list[_Tier], tail_first: bool):
        self.trace, self.tiers, self.tail_first = trace, tiers, tail_first
        self.ids, self.offsets = trace.ids, trace.offsets.tolist()
        self.hits = np.zeros((len(tiers), trace.requests), np.int64)
        self.demoted, self.promoted, self.dropped = [0] * len(tiers), [0] * len(tiers), 0

    def exclusive(self, q: int) -> None:
        """What lower tiers have of the request moves to the first; what that evicts falls from tier to tier."""
        start, stop, places = self.found(q)
        first, *lower = self.tiers
        for tier in lower:
            tier.give(self.ids, start, stop, places)
            self.promoted[tier.number] += int(np.count_nonzero(places[: stop - start] == tier.number))
        falling = first.serve(self.ids, start, stop, places, self.tail_first)
        for tier in lower:
            before, falling = falling, tier.receive(falling)
            self.demoted[tier.number - 1] += len(before) - int(np.isin(falling, before).sum())
        self.dropped += len(falling)

    def inclusive(self, q: int) -> None:
        """Each tier keeps its own copy: what the first tier lacks is written to all."""
        start, stop, places = self.found(q)
        for k in range(1, len(self.tiers)):
            self.promoted[k] += int(np.count_nonzero(places[: stop - start] == k))
        for tier in self.tiers:
            end = min(stop, start + tier.room)
            victims = tier.serve(self.ids, start, end, places, self.tail_first)
            elsewhere = np.zeros(len(victims), np.int64)
            for other in self.tiers:
                other.mark_held(victims, elsewhere)
            self.dropped += len(victims) - int(elsewhere.sum())

    def found(self, q: int) -> tuple[int, int, np.ndarray]:
        """(first chunk, end of what fits the first tier, tier of each chunk or -1 if none has it); counts the hits."""
        start, stop = self.offsets[q], self.offsets[q + 1]
        places = np.full(stop - start, -1, np.int64)
        for tier in self.tiers:
            tier.begin(q, float(self.trace.timestamps[q]))
            tier.look(self.ids, start, stop, places)
        missing = np.flatnonzero(places < 0)
        hits = places[: missing[0]] if len(missing) else places
        self.hits[:, q] = np.bincount(hits, minlength=len(self.tiers))
        return start, min(stop, start + self.tiers[0].room), places


def _compile_tier(state: State) -> None:
    from numba import typeof, types

    arrays = [typeof(part) for part in (state.s, state.r, state.t)]
    ids, ints, number = types.int32[::1], types.int64[::1], types.int64
    where = (ids, number, number, ints, number)
    state.module.begin.compile((arrays[1], types.float64, number))
    state.module.look.compile((arrays[0], *where))
    state.module.give.compile((*arrays, *where))
    state.module.serve.compile((*arrays, *where, types.boolean, ints, ints))
    state.module.receive.compile((*arrays, ints, number, ints, ints))
    state.module.mark_held.compile((arrays[0], ints, number, ints))
