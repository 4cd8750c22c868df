"""A trace through a policy at compiled speed.

    trace -> (static prefix tree) -> policy module + replay_loops.py -> hits for each request -> ReplayResult

Two semantics, always named. "prefix": the hit of a request is the contiguous prefix of resident chunks, its own chunks
are never evicted for it, only leaves are evicted, and the policy hears of the request's chunks in touch order when it
ends; this is what the live engine does. "object": each block access on its own, as in cache simulators for the web;
for a cache without prefix protection this is touch order head first. Touch order moves LRU by points only there: where
only leaves are evicted, LRU hardly sees it, while policies with several queues do.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from experiments.replay_costs import ReuseCosts
from experiments.traces import Trace, tree
from workbench.errors import InvalidInputError
from workbench.policies import resolve_policy
from workbench.policies.base import PolicyError
from workbench.policies.compiled import Built, State, build, make_state
from workbench.policies.live import TouchOrder

__all__ = ["ReplayResult", "Semantics", "fill_state", "ready", "replay"]

LOOPS = Path(__file__).with_name("replay_loops.py")
Semantics = Literal["prefix", "object"]


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What one replay counted.

    Attributes:
        trace: Trace that was replayed; under prefix semantics its ids name prefixes.
        policy: The policy with its settings.
        semantics, touch_order: How the trace was run; touch order says nothing under object semantics.
        capacity_chunks: Chunks the cache held.
        hit_chunks: int64[requests], chunks found for each request.
        leading_chunks: int64[requests], chunks found before the first that was missing: what a prefix cache can use.
            Under prefix semantics the same as hit_chunks.
        evictions: Chunks evicted.
        victims: int32[evictions], which, in order; empty unless asked for.
        seconds: CPU time of the loop.
        compiled: False if the policy ran as plain Python.
        costs: Cost model of the seconds saved, None if none was given.
    """

    trace: Trace
    policy: Any
    semantics: Semantics
    touch_order: TouchOrder
    capacity_chunks: int
    hit_chunks: np.ndarray
    leading_chunks: np.ndarray
    evictions: int
    victims: np.ndarray
    seconds: float
    compiled: bool
    costs: ReuseCosts | None = None

    @property
    def hit_tokens(self) -> np.ndarray:
        """int64[requests], prompt tokens of the leading chunks that were found."""
        return self.trace.hit_tokens(self.leading_chunks)

    @property
    def hit_rate(self) -> float:
        """Hit tokens / looked-up tokens."""
        return _share(self.hit_tokens.sum(), self.trace.input_tokens.sum())

    @property
    def hit_rate_by_chunks(self) -> float:
        """Hit chunks / looked-up chunks."""
        return _share(self.hit_chunks.sum(), self.trace.accesses)

    @property
    def hit_rate_by_requests(self) -> float:
        """Requests with at least one hit chunk / requests."""
        return _share(np.count_nonzero(self.hit_chunks), self.trace.requests)

    @property
    def seconds_saved(self) -> float | None:
        """Prefill seconds that the hits save, less the seconds to load them; None without a cost model."""
        return None if self.costs is None else float(self.costs.seconds_saved(self.hit_tokens).sum())

    def second_half(self) -> float:
        """Hit rate by tokens over the second half of the requests, when the cache is warm."""
        half = self.trace.requests // 2
        return _share(self.hit_tokens[half:].sum(), self.trace.input_tokens[half:].sum())

    def frame(self) -> pl.DataFrame:
        """One row: what was run, the three hit rates, evictions, CPU seconds."""
        return pl.DataFrame(
            {
                "trace": [self.trace.name],
                "policy": [repr(self.policy)],
                "semantics": [self.semantics],
                "touch_order": [self.touch_order if self.semantics == "prefix" else None],
                "chunk_tokens": [self.trace.block_tokens],
                "capacity_chunks": [self.capacity_chunks],
                "hit_rate": [self.hit_rate],
                "hit_rate_by_chunks": [self.hit_rate_by_chunks],
                "hit_rate_by_requests": [self.hit_rate_by_requests],
                "evictions": [self.evictions],
                "seconds_saved": [self.seconds_saved],
                "cpu_seconds": [self.seconds],
                "compiled": [self.compiled],
                "notes": ["; ".join(self.trace.notes)],
            }
        )


@dataclass(frozen=True)
class Counts:
    """What a loop fills; see replay_loops.py."""

    hits: np.ndarray
    leading: np.ndarray
    victims: np.ndarray

    @classmethod
    def empty(cls, trace: Trace, record_victims: bool) -> "Counts":
        """Zeros for every request; room for one victim an access, if they are recorded."""
        rows = trace.requests
        return cls(
            np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(trace.accesses * record_victims, np.int32)
        )


def replay(
    trace: Trace,
    policy: Any,
    *,
    capacity_chunks: int,
    semantics: Semantics = "prefix",
    touch_order: TouchOrder = "tail_first",
    costs: ReuseCosts | None = None,
    record_victims: bool = False,
) -> ReplayResult:
    """Replay a trace through a policy.

    Args:
        trace: From experiments.traces. Under prefix semantics its ids are made to name prefixes if they do not.
        policy: A policy class, instance or name; see workbench.policies.resolve_policy.
        capacity_chunks: Chunks the cache holds.
        semantics: "prefix" or "object".
        touch_order: In which order the policy hears of a request's chunks: "tail_first" (vLLM) or "head_first".
        costs: Fills nbytes, recompute_seconds and load_seconds for policies that weigh them, and seconds_saved.
        record_victims: Keep which chunks were evicted, in order.

    Raises:
        InvalidInputError: A setting is out of range or not one of those allowed.
        PolicyError: The policy broke its contract.
    """
    _check(capacity_chunks, semantics, touch_order)
    policy = resolve_policy(policy)
    trace = trace.as_prefixes() if semantics == "prefix" else trace
    built = ready(policy, semantics=semantics)
    state = make_state(built, policy, chunks=max(1, trace.distinct), capacity=capacity_chunks)
    fill_state(state, trace, costs)
    counts = Counts.empty(trace, record_victims)
    started = time.thread_time()
    outcome = _run(state, trace, semantics == "object", touch_order == "tail_first", counts)
    seconds = time.thread_time() - started
    if outcome < 0:
        raise PolicyError(_broken(state, policy, outcome, capacity_chunks))
    leading = counts.hits if semantics == "prefix" else counts.leading
    found = (counts.hits, leading, int(outcome), counts.victims[:outcome])
    return ReplayResult(
        trace, policy, semantics, touch_order, capacity_chunks, *found, seconds, compiled=built.compiled, costs=costs
    )


def ready(policy: Any, *, semantics: Semantics = "prefix") -> Built:
    """Compile a policy for replay now, or take it from the disk cache, so that the first replay is not slowed."""
    objects = semantics == "object"
    return build(
        resolve_policy(policy),
        object_semantics=objects,
        loops=LOOPS,
        entry_points=_compile_objects if objects else _compile_prefixes,
    )


def _check(capacity_chunks: int, semantics: str, touch_order: str) -> None:
    if not isinstance(capacity_chunks, int | np.integer) or capacity_chunks < 1:
        raise InvalidInputError(f"capacity_chunks must be an integer of at least 1, got {capacity_chunks!r}")
    if semantics not in ("prefix", "object"):
        raise InvalidInputError(f"semantics must be 'prefix' or 'object', got {semantics!r}")
    if touch_order not in ("tail_first", "head_first"):
        raise InvalidInputError(f"touch_order must be 'tail_first' or 'head_first', got {touch_order!r}")


def fill_state(state: State, trace: Trace, costs: ReuseCosts | None) -> None:
    """What is known of a chunk before it is stored, for the fields that the policy mentions."""
    wanted = state.built.chunk_type.names or ()
    if "parent" in wanted:
        state.set_column("parent", trace.parent)
    if "depth" in wanted:
        state.set_column("depth", trace.depth)
    if "key" in wanted:
        state.set_column("key", np.arange(trace.distinct))
    if "tokens" in wanted:
        state.set_column("tokens", trace.chunk_tokens())
    if "tenant" in wanted:
        owner = np.zeros(trace.distinct, np.int32)
        owner[trace.ids[::-1]] = np.repeat(trace.tenants, trace.lengths)[::-1]  # the first request to use it owns it
        state.set_column("tenant", owner)
    if {"nbytes", "recompute_seconds", "load_seconds"} & set(wanted):
        costs = costs or ReuseCosts()
        tokens = trace.chunk_tokens().astype(np.int64)
        before = tree.tokens_before(trace.parent, trace.depth, tokens)
        state.set_column("nbytes", costs.nbytes(tokens))
        state.set_column("recompute_seconds", costs.recompute_seconds(before, before + tokens))
        state.set_column("load_seconds", costs.load_seconds(tokens))


def _run(state: State, trace: Trace, objects: bool, tail_first: bool, counts: Counts) -> int:
    ids, offsets, times = trace.ids, trace.offsets, trace.timestamps
    future = np.empty(0)
    if "next_use" in (state.built.chunk_type.names or ()):
        future = tree.next_access(ids, trace.distinct) if objects else trace.next_use
    if not state.built.compiled:  # plain Python is faster, and wraps nothing, on its own integers
        ids, offsets, times, future = (array.tolist() for array in (ids, offsets, times, future))
    arrays = state.s, state.r, state.t
    if objects:
        resident = np.zeros(max(1, trace.distinct), np.uint8)
        results = counts.hits, counts.leading, counts.victims
        return state.module.replay_objects(*arrays, resident, ids, offsets, times, future, *results)
    return state.module.replay_prefixes(*arrays, ids, offsets, times, future, tail_first, counts.hits, counts.victims)


def _broken(state: State, policy: Any, outcome: int, capacity: int) -> str:
    named = state.get_scalar("_broken") if outcome == -2 else -1
    return (
        f"evict() of {policy!r} returned {named} at capacity {capacity}; "
        "it must return a chunk that was inserted and has not left since"
    )


def _compile_objects(state: State) -> None:
    from numba import typeof, types

    arrays = [typeof(part) for part in (state.s, state.r, state.t)]
    ids, ints, floats = types.int32[::1], types.int64[::1], types.float64[::1]
    state.module.replay_objects.compile((*arrays, types.uint8[::1], ids, ints, floats, floats, ints, ints, ids))


def _compile_prefixes(state: State) -> None:
    from numba import typeof, types

    arrays = [typeof(part) for part in (state.s, state.r, state.t)]
    ids, ints, floats = types.int32[::1], types.int64[::1], types.float64[::1]
    state.module.replay_prefixes.compile((*arrays, ids, ints, floats, floats, types.boolean, ints, ids))


def _share(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0
