"""What happened, in order. Every statistic, metric and plot is computed from these events and from nothing else."""

import os
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import polars

__all__ = ["EVENT_KINDS", "SECONDS_BUCKETS", "Event", "Recorder", "Totals", "events_frame"]

EVENT_KINDS = {
    "lookup": "a request was admitted; tokens = prompt tokens that were looked up, those of the serving engine's own "
    "prefix cache excluded",
    "reuse": "the same request; tokens = what will be loaded for it",
    "hit": "a chunk was found for a request; tier says where",
    "miss": "a chunk was not found for a request; reason says why",
    "load": "a chunk's bytes reached the serving engine's pages, or failed to (reason)",
    "store": "a chunk's bytes reached a tier, or failed to (reason)",
    "dedup": "a chunk was to be stored that is already there: nothing was copied",
    "promote": "a chunk was copied up to a faster tier on a hit",
    "demote": "a chunk was written one tier down because it was evicted above",
    "evict": "a chunk left a tier to make room",
    "drop": "a chunk was not stored or left the engine altogether (reason)",
    "remove": "a chunk was taken out because somebody asked, or because its bytes were wrong (reason)",
}


class Event(NamedTuple):
    """One thing that happened to one chunk or one request."""

    time: float  # seconds, wall clock, for display; order is the order of the list
    kind: str  # a key of EVENT_KINDS
    tier: str
    request: str
    key: str  # hex digest of the chunk, "" for a request
    start: int  # first token of the chunk
    tokens: int
    nbytes: int
    seconds: float
    reason: str  # "" where nothing went wrong


# Upper ends, in seconds, of the classes in which loads and stores are counted; the last class has none.
SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass
class Totals:
    """Running sums over events; `add` is the only writer."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (kind, tier, reason) -> events
    tokens: Counter[str] = field(default_factory=Counter)  # kind -> tokens
    tier_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, tier) -> tokens
    nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, tier) -> bytes
    seconds: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, tier) -> seconds
    buckets: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # (kind, tier, bucket) -> loads or stores
    requests_with_hit: int = 0

    def add(self, event: Event) -> None:
        self.counts[event.kind, event.tier, event.reason] += 1
        if event.reason and event.kind in ("load", "store"):
            return
        self.tokens[event.kind] += event.tokens
        self.tier_tokens[event.kind, event.tier] += event.tokens
        if event.kind in ("load", "store"):
            self.buckets[event.kind, event.tier, bisect_left(SECONDS_BUCKETS, event.seconds)] += 1
        self.nbytes[event.kind, event.tier] += event.nbytes
        self.seconds[event.kind, event.tier] += event.seconds
        self.requests_with_hit += event.kind == "reuse" and event.tokens > 0

    def count(self, kind: str) -> int:
        return sum(n for (k, _, _), n in self.counts.items() if k == kind)

    def failures(self, kind: str) -> dict[str, int]:
        """Events of a kind that carry a reason, by reason."""
        found: Counter[str] = Counter()
        for (k, _, reason), n in self.counts.items():
            if k == kind and reason:
                found[reason] += n
        return dict(found)

    def hit_rates(self) -> dict[str, float | None]:
        """The three hit rates, each None without a sample.

        by tokens = loaded tokens / looked-up tokens; by chunks = hit chunks / looked-up full chunks;
        by requests = requests with any loaded token / requests.
        """
        chunks = self.count("hit") + self.count("miss")
        return {
            "hit_rate": _share(self.tokens["reuse"], self.tokens["lookup"]),
            "hit_rate_by_chunks": _share(self.count("hit"), chunks),
            "hit_rate_by_requests": _share(self.requests_with_hit, self.count("lookup")),
        }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class Recorder:
    """Takes events, keeps the last ones and the totals of all, and passes each on.

    Args:
        keep: How many events stay in memory; totals cover all.
        sink: Called with every event, for example to write it to a file.
    """

    def __init__(self, keep: int = 200_000, sink: Callable[[Event], None] | None = None):
        self.events: deque[Event] = deque(maxlen=keep)
        self.totals = Totals()
        self.sink = sink

    def __call__(self, kind: str, *, tier: str = "", request: str = "", chunk=None, tokens: int | None = None,
                 nbytes: int = 0, seconds: float = 0.0, reason: str = "") -> None:  # fmt: skip
        """Record one event now. `chunk` supplies key, start and, if not given, tokens."""
        key, start = (chunk.key.hex(), chunk.start) if chunk is not None else ("", 0)
        if tokens is None:
            tokens = chunk.num_tokens if chunk is not None else 0
        event = Event(time.time(), kind, tier, request, key, start, tokens, nbytes, seconds, reason)
        self.events.append(event)
        self.totals.add(event)
        if self.sink is not None:
            self.sink(event)

    def frame(self) -> "polars.DataFrame":
        """The kept events as a polars frame, one column a field."""
        return events_frame(self.events)

    def to_parquet(self, path: str | Path) -> None:
        """Write the kept events to a Parquet file, whole or not at all."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            self.frame().write_parquet(temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def events_frame(events: Iterable[Event]) -> "polars.DataFrame":
    """Events as a polars frame with a fixed schema, empty or not."""
    import polars

    types = {str: polars.String, int: polars.Int64, float: polars.Float64}
    schema = {name: types[kind] for name, kind in Event.__annotations__.items()}
    return polars.DataFrame(list(events), schema=schema, orient="row")
