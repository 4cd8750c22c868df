"""Hit-rate curves: exact and in one pass for prefix LRU, on a grid of capacities for every other policy.

Prefix LRU with touch order tail first has a stack: before a request, the chunks in the order of their last use, later
chunks of a request below earlier ones. A chunk is a hit at every capacity that reaches its place in the stack, and its
ancestors lie above it, so one pass counts the hits of all capacities (Mattson et al., 1970). Places are counted with
one bit for each use, in 64-bit words under a Fenwick tree over the words. All places of a request are read before any
is moved, or a chunk would push down its own ancestors.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numba import njit

from experiments.replay import ReplayResult, Semantics, ready, replay
from experiments.replay_costs import ReuseCosts
from experiments.traces import Trace
from workbench.errors import InvalidInputError
from workbench.policies import resolve_policy
from workbench.policies.live import TouchOrder

__all__ = ["LruCurve", "chunk_size_sweep", "hit_rate_curve", "lru_curve"]


@dataclass(frozen=True, eq=False)
class LruCurve:
    """Exact hits of prefix LRU, tail first, at every capacity.

    Valid where no request is longer than the capacity: below `longest_request` chunks a replay, which cuts long
    requests short, can differ.

    Attributes:
        trace: Name of the trace.
        chunk_tokens: Tokens of a chunk.
        accesses: Chunks looked up.
        hits: int64[distinct + 1]; hits[c] chunks are found by a cache of c chunks.
        longest_request: Chunks of the longest request.
        seconds: CPU time of the pass.
    """

    trace: str
    chunk_tokens: int
    accesses: int
    hits: np.ndarray
    longest_request: int
    seconds: float

    def hit_rate(self, capacity_chunks: int | np.ndarray) -> np.ndarray:
        """Hit chunks / looked-up chunks at one or more capacities."""
        capped = np.minimum(capacity_chunks, len(self.hits) - 1)
        return self.hits[capped] / max(1, self.accesses)

    def tiers(self, first_chunks: int, second_chunks: int) -> tuple[float, float]:
        """Hit rates by chunks of two exclusive LRU tiers: of the first, and of what the second adds."""
        first = float(self.hit_rate(first_chunks))
        return first, float(self.hit_rate(first_chunks + second_chunks)) - first

    def capacity_for(self, hit_rate: float) -> int | None:
        """The fewest chunks that reach a hit rate; None if no capacity does."""
        reached = np.flatnonzero(self.hits >= hit_rate * self.accesses)
        return int(reached[0]) if len(reached) else None

    def knee(self) -> int:
        """The capacity whose point lies farthest above the line from an empty cache to the ceiling."""
        top = self.capacity_for(self.hits[-1] / max(1, self.accesses)) or 1
        line = np.arange(top + 1) * (self.hits[top] / top)
        return int(np.argmax(self.hits[: top + 1] - line))

    def frame(self, points: int = 200) -> pl.DataFrame:
        """capacity_chunks, capacity_tokens, hit_rate_by_chunks at so many capacities, evenly on a log scale."""
        most = max(1, len(self.hits) - 1)
        capacities = np.unique(np.geomspace(1, most, points).astype(np.int64))
        return pl.DataFrame(
            {
                "trace": self.trace,
                "capacity_chunks": capacities,
                "capacity_tokens": capacities * self.chunk_tokens,
                "hit_rate_by_chunks": self.hit_rate(capacities),
            }
        )


def lru_curve(trace: Trace) -> LruCurve:
    """The exact curve of prefix LRU with touch order tail first, all capacities in one pass."""
    trace = trace.as_prefixes()
    longest = int(trace.lengths.max()) if trace.requests else 0
    places = 64 * (-(-(2 * trace.distinct + longest + 64) // 64))  # room to move each chunk once before packing
    started = time.thread_time()
    at_depth = np.zeros(trace.distinct + 1, np.int64)
    _stack_depths(trace.ids, trace.offsets, trace.distinct, places, at_depth)
    hits = np.cumsum(at_depth)
    return LruCurve(trace.name, trace.block_tokens, trace.accesses, hits, longest, seconds=time.thread_time() - started)


def hit_rate_curve(
    trace: Trace,
    policies: Sequence[Any],
    *,
    capacities_chunks: Sequence[int],
    semantics: Semantics = "prefix",
    touch_order: TouchOrder = "tail_first",
    costs: ReuseCosts | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> pl.DataFrame:
    """Replay a trace at each capacity under each policy, in parallel on the cores.

    Args:
        trace: From experiments.traces.
        policies: Classes, instances or names.
        capacities_chunks: Capacities.
        semantics, touch_order, costs: As replay() takes them.
        progress: Called with (runs done, runs in all).

    Returns:
        One row for each policy and capacity, in that order; see ReplayResult.frame().
    """
    if not policies or not len(capacities_chunks):
        raise InvalidInputError("hit_rate_curve needs at least one policy and one capacity")
    chosen = [resolve_policy(spec) for spec in policies]
    if semantics == "prefix":
        trace = trace.as_prefixes()
    for one in chosen:
        ready(one, semantics=semantics)  # compiled before the threads start, which then run without the GIL
    runs = [(one, capacity) for one in chosen for capacity in capacities_chunks]
    done = 0

    def run(pair: tuple[Any, int]) -> ReplayResult:
        nonlocal done
        result = replay(
            trace, pair[0], capacity_chunks=int(pair[1]), semantics=semantics, touch_order=touch_order, costs=costs
        )
        done += 1
        if progress:
            progress(done, len(runs))
        return result

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        results = list(threads.map(run, runs))
    return pl.concat([result.frame() for result in results])


def chunk_size_sweep(
    trace: Trace, *, blocks_per_chunk: Sequence[int], capacities_tokens: Sequence[int] | None = None
) -> pl.DataFrame:
    """Prefix LRU with coarser chunks at equal capacity in tokens.

    Coarser ids come from the finer ones: a chunk is named by its last block. Only full chunks count, as stored.

    Args:
        trace: Its block is the finest chunk.
        blocks_per_chunk: Chunk sizes in blocks.
        capacities_tokens: Capacities; by default without limit.

    Returns:
        chunk_tokens, capacity_tokens (null: no limit), hit_rate (hit tokens / prompt tokens), cpu_seconds of the curve.
    """
    rows = []
    for blocks in blocks_per_chunk:
        started = time.thread_time()
        coarse = trace.coarsen(blocks)
        curve = lru_curve(coarse)
        seconds = time.thread_time() - started
        for capacity in [None] if capacities_tokens is None else [None, *capacities_tokens]:
            chunks = len(curve.hits) - 1 if capacity is None else capacity // coarse.block_tokens
            hits = curve.hits[min(chunks, len(curve.hits) - 1)]
            rate = hits * coarse.block_tokens / max(1, int(trace.input_tokens.sum()))
            rows.append((trace.name, coarse.block_tokens, capacity, rate, seconds))
    names = ["trace", "chunk_tokens", "capacity_tokens", "hit_rate", "cpu_seconds"]
    return pl.DataFrame(rows, names, orient="row", infer_schema_length=None)


@njit(cache=True, nogil=True)
def _ones(word):
    """Bits set in a 64-bit word."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(cache=True, nogil=True)
def _add(sums, word, change):
    """Fenwick tree: word number `word` has `change` more bits."""
    i = word + 1
    while i < len(sums):
        sums[i] += change
        i += i & -i


@njit(cache=True, nogil=True)
def _below(sums, bits, place):
    """Bits set at places up to and including `place`."""
    word = place >> 6
    total = 0
    i = word
    while i > 0:
        total += sums[i]
        i &= i - 1
    mask = (np.uint64(1) << np.uint64(place & 63)) - np.uint64(1)
    return total + _ones(bits[word] & mask) + 1


@njit(cache=True, nogil=True)
def _pack(bits, sums, last, owner, places):
    """Move the set bits to the first places, in order; returns the next free place."""
    count = 0
    for place in range(places):
        if (bits[place >> 6] >> np.uint64(place & 63)) & np.uint64(1):
            chunk = owner[place]
            owner[count] = chunk
            last[chunk] = count
            count += 1
    bits[:] = 0
    sums[:] = 0
    for place in range(count):
        bits[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
    for word in range(len(bits)):
        sums[word + 1] += _ones(bits[word])
        up = (word + 1) + ((word + 1) & -(word + 1))
        if up < len(sums):
            sums[up] += sums[word + 1]
    return count


@njit(cache=True, nogil=True)
def _read(ids, start, stop, last, bits, sums, known, at_depth):
    """Count the stack depth of each known chunk of a request. A child lies right below its parent, or farther."""
    above = -10
    below = 0
    for i in range(start, stop):
        place = last[ids[i]]
        if place < 0:
            break
        below = below - 1 if place == above - 1 else _below(sums, bits, place)
        above = place
        at_depth[known - below + 1] += 1


@njit(cache=True, nogil=True)
def _clear(ids, start, stop, last, bits, sums):
    """Take the request's chunks out of the stack, one tree update a word; returns how many were new."""
    word = -1
    count = 0
    new = 0
    for i in range(start, stop):
        place = last[ids[i]]
        if place < 0:
            new += 1
            continue
        if place >> 6 != word:
            if count:
                _add(sums, word, -count)
            word = place >> 6
            count = 0
        bits[word] &= ~(np.uint64(1) << np.uint64(place & 63))
        count += 1
    if count:
        _add(sums, word, -count)
    return new


@njit(cache=True, nogil=True)
def _push(ids, start, stop, last, bits, sums, owner, place):
    """Put the request's chunks on top, its last chunk lowest; returns the next free place."""
    word = -1
    count = 0
    for i in range(stop - 1, start - 1, -1):
        if place >> 6 != word:
            if count:
                _add(sums, word, count)
            word = place >> 6
            count = 0
        bits[word] |= np.uint64(1) << np.uint64(place & 63)
        count += 1
        owner[place] = ids[i]
        last[ids[i]] = place
        place += 1
    if count:
        _add(sums, word, count)
    return place


@njit(cache=True, nogil=True)
def _stack_depths(ids, offsets, distinct, places, at_depth):
    """at_depth[d] += 1 for each access that is a hit from capacity d on."""
    bits = np.zeros(places // 64, np.uint64)
    sums = np.zeros(places // 64 + 1, np.int32)
    last = np.full(distinct, -1, np.int32)
    owner = np.empty(places, np.int32)
    known = 0
    place = 0
    for q in range(len(offsets) - 1):
        start = offsets[q]
        stop = offsets[q + 1]
        if place + stop - start > places:
            place = _pack(bits, sums, last, owner, places)
        _read(ids, start, stop, last, bits, sums, known, at_depth)
        known += _clear(ids, start, stop, last, bits, sums)
        place = _push(ids, start, stop, last, bits, sums, owner, place)
