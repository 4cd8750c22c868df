"""The engine's figures for Prometheus, computed from its events when somebody asks.

from prometheus_client import REGISTRY, start_http_server
REGISTRY.register(engine.metrics())
start_http_server(9108, addr="127.0.0.1")
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from workbench.events import SECONDS_BUCKETS, Totals
from workbench.tiers.base import TierUse

__all__ = ["EngineMetrics", "Snapshot", "TierState", "by_tier", "count_by"]

_CORRUPT = ("corrupt", "mismatch", "mac")  # bytes that are not what was stored


@dataclass(frozen=True)
class TierState(TierUse):
    """One tier at one moment."""

    queued: int  # writes and erasures that wait for the tier
    breaker_open: bool | None = None  # None for a tier without a breaker
    breaker_trips: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What the metrics are computed from: all at one moment, and not changed any more."""

    totals: Totals
    tiers: Sequence[TierState]


class EngineMetrics(Collector):
    """A collector for a registry of `prometheus_client`; `str()` gives the text that a server would.

    Args:
        take: Gives the figures of this moment.
    """

    def __init__(self, take: Callable[[], Snapshot]):
        self._take = take

    def __str__(self) -> str:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()

    def describe(self) -> list[Metric]:
        """Nothing in advance: registering asks no engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._take()
        yield from _lookups(snapshot.totals)
        yield from _transfers(snapshot.totals)
        yield from _losses(snapshot.totals)
        yield from _tiers(snapshot.tiers)


def _lookups(totals: Totals) -> Iterator[Metric]:
    yield _counter("requests", "Requests that were admitted.", {(): totals.count("lookup")})
    yield _counter("requests_with_hit", "Requests that loaded any token.", {(): totals.requests_with_hit})
    yield _counter(
        "lookup_tokens",
        "Prompt tokens looked up, those in the serving engine's own prefix cache excluded.",
        {(): totals.tokens["lookup"]},
    )
    yield _counter("reused_tokens", "Prompt tokens that were to be loaded for requests.", {(): totals.tokens["reuse"]})
    yield _counter(
        "hit_tokens",
        "Tokens of the chunks that were found for requests, by tier.",
        by_tier(totals.tier_tokens, "hit"),
        ["tier"],
    )
    yield _counter("hit_chunks", "Chunks found for requests, by tier.", count_by(totals, "hit", "tier"), ["tier"])
    yield _counter("miss_chunks", "Chunks not found, by reason.", count_by(totals, "miss", "reason"), ["reason"])
    rates = GaugeMetricFamily(
        "kvworkbench_hit_ratio",
        "Hit rate since the start: reused over looked-up tokens, hit over looked-up chunks, requests with a hit over "
        "requests. Absent without a sample.",
        labels=["by"],
    )
    names = {"hit_rate": "tokens", "hit_rate_by_chunks": "chunks", "hit_rate_by_requests": "requests"}
    for name, rate in totals.hit_rates().items():
        if rate is not None:
            rates.add_metric([names[name]], rate)
    yield rates


def _transfers(totals: Totals) -> Iterator[Metric]:
    for kind, done, what in (("store", "stored", "into the tier"), ("load", "loaded", "from the tier to pages")):
        yield _counter(
            f"{done}_bytes", f"Bytes of KV that reached their place: {what}.", by_tier(totals.nbytes, kind), ["tier"]
        )
        yield _counter(
            f"{kind}_failures", f"Chunks that could not be {done}, by tier and reason.",
            count_by(totals, kind, "tier", "reason", failed=True), ["tier", "reason"],
        )  # fmt: skip
        seconds = HistogramMetricFamily(
            f"kvworkbench_{kind}_seconds", f"Seconds to move a chunk: {what}.", labels=["tier"]
        )
        for tier in sorted({t for k, t, _ in totals.buckets if k == kind}):
            seconds.add_metric([tier], _cumulated(totals, kind, tier), totals.seconds[kind, tier])
        yield seconds
    for kind, name, what in (
        ("promote", "promoted", "Chunks copied up to a faster tier on a hit."),
        ("demote", "demoted", "Chunks written one tier down because they were evicted above."),
        ("dedup", "deduplicated", "Chunks that were to be stored and were there already."),
    ):
        yield _counter(f"{name}_chunks", what, {(): totals.count(kind)})


def _losses(totals: Totals) -> Iterator[Metric]:
    yield _counter(
        "evicted_chunks", "Chunks that left a tier to make room.", count_by(totals, "evict", "tier"), ["tier"]
    )
    yield _counter(
        "dropped",
        "Chunks not stored, or gone from every tier, by reason.",
        count_by(totals, "drop", "reason"),
        ["reason"],
    )
    corrupt = {
        (tier, reason): number
        for (kind, tier, reason), number in totals.counts.items()
        if kind == "load" and reason in _CORRUPT
    }
    yield _counter("corrupt", "Chunks whose bytes were not what was stored.", corrupt, ["tier", "reason"])
    late = sum(number for (_, _, reason), number in totals.counts.items() if reason == "deadline")
    yield _counter("deadlines_exceeded", "Orders and requests that were given up for want of an answer.", {(): late})


def _tiers(tiers: Sequence[TierState]) -> Iterator[Metric]:
    for field, name, what in (
        ("used_bytes", "tier_used_bytes", "Bytes that chunks take in a tier."),
        ("capacity_bytes", "tier_capacity_bytes", "The most that chunks may take in a tier."),
        ("high_water_bytes", "tier_high_water_bytes", "The most that chunks have taken in a tier so far."),
        ("chunks", "tier_chunks", "Chunks in a tier."),
        ("holds", "tier_holds", "Holds that keep chunks from eviction; 0 at rest."),
        ("queued", "tier_queued", "Writes and erasures that wait for a tier."),
    ):
        gauge = GaugeMetricFamily(f"kvworkbench_{name}", what, labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.name], getattr(tier, field))
        yield gauge
    guarded = [tier for tier in tiers if tier.breaker_open is not None]
    breakers = GaugeMetricFamily(
        "kvworkbench_breaker_open", "1 while a tier that failed is left alone.", labels=["tier"]
    )
    for tier in guarded:
        breakers.add_metric([tier.name], int(bool(tier.breaker_open)))
    yield breakers
    yield _counter("breaker_trips", "Times that a breaker opened.", {(t.name,): t.breaker_trips for t in guarded},
                   ["tier"])  # fmt: skip


def _counter(name: str, what: str, values: Mapping[tuple[str, ...], float], labels: Sequence[str] = ()) -> Metric:
    family = CounterMetricFamily(f"kvworkbench_{name}", what, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(list(key), value)
    return family


def by_tier(sums: Mapping[tuple[str, str], float], kind: str) -> dict[tuple[str, ...], float]:
    """What one of the sums of `Totals` says of a kind of event, tier by tier."""
    return {(tier,): value for (k, tier), value in sums.items() if k == kind and tier}


def count_by(totals: Totals, kind: str, *labels: str, failed: bool = False) -> dict[tuple[str, ...], float]:
    """Events of a kind by tier, by reason or by both; only those with a reason, if they are to have failed."""
    found: dict[tuple[str, ...], float] = {}
    for (k, tier, reason), number in totals.counts.items():
        if k == kind and (reason or not failed):
            parts = {"tier": tier, "reason": reason}
            key = tuple(parts[label] for label in labels)
            found[key] = found.get(key, 0) + number
    return found


def _cumulated(totals: Totals, kind: str, tier: str) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: how many took at most so long."""
    buckets, below = [], 0
    for number, bound in enumerate([*map(str, SECONDS_BUCKETS), "+Inf"]):
        below += totals.buckets[kind, tier, number]
        buckets.append((bound, below))
    return buckets
