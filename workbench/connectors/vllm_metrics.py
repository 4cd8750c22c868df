"""The cache in vLLM's own statistics: the periodic log line and the Prometheus endpoint.

worker     each transfer -> seconds, bytes, failures
scheduler  the control plane's events -> what was added since the last time: tokens looked up, hit, dropped, ...
"""

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from workbench.control import ControlPlane
from workbench.events import Totals
from workbench.metrics import by_tier, count_by
from workbench.orders import Done

__all__ = ["CacheFigures", "TransferMetrics", "TransferStats"]

_KINDS = ("load", "store", "write")
_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


# name -> (what it counts, its label), as in workbench/metrics.py
_COUNTERS = {
    "lookup_tokens": ("Prompt tokens looked up, those in vLLM's own prefix cache excluded.", ""),
    "reused_tokens": ("Prompt tokens that were to be loaded for requests.", ""),
    "hit_tokens": ("Tokens of the chunks that were found for requests, by tier.", "tier"),
    "evicted_chunks": ("Chunks that left a tier to make room.", "tier"),
    "dropped": ("Chunks not stored, or gone from every tier, by reason.", "reason"),
}
_GAUGES = {"tier_used_bytes": ("Bytes that chunks take in a tier.", "tier")}


def _empty() -> dict:
    transfers = {kind: {"seconds": [], "nbytes": 0, "failures": 0} for kind in _KINDS}
    return {**transfers, "counters": {}, "gauges": {}}


class CacheFigures:
    """What the control plane counted since the last time it was asked.

    Args:
        control: Whose events are counted.
    """

    def __init__(self, control: ControlPlane):
        self._control = control
        self._told: dict[str, dict[str, float]] = {}

    def take(self) -> "TransferStats":
        """The additions, and how full each tier is; empty if nothing was added."""
        stats, now = TransferStats(), _counted(self._control.record.totals)
        for name, values in now.items():
            told = self._told.get(name, {})
            added = {label: value - told.get(label, 0) for label, value in values.items() if value != told.get(label)}
            if added:
                stats.data["counters"][name] = added
        if stats.data["counters"]:
            stats.data["gauges"]["tier_used_bytes"] = {tier.name: tier.used_bytes for tier in self._control.tiers}
        self._told = now
        return stats


def _counted(totals: Totals) -> dict[str, dict[str, float]]:
    labelled = {
        "hit_tokens": by_tier(totals.tier_tokens, "hit"),
        "evicted_chunks": count_by(totals, "evict", "tier"),
        "dropped": count_by(totals, "drop", "reason"),
    }
    plain = {"lookup_tokens": totals.tokens["lookup"], "reused_tokens": totals.tokens["reuse"]}
    return {
        **{name: {"": value} for name, value in plain.items() if value},
        **{name: {label: value for (label,), value in values.items()} for name, values in labelled.items()},
    }


class TransferStats(KVConnectorStats):
    """Seconds of each chunk, bytes and failures by kind of transfer; `data` is what crosses process borders."""

    def __init__(self, data: dict | None = None):
        super().__init__(data=data or _empty())

    def note(self, done: Done) -> None:
        """Count one outcome."""
        row = self.data[done.kind]
        if done.reason not in ("", "dedup"):
            row["failures"] += 1
            return
        row["seconds"].append(done.seconds)
        row["nbytes"] += done.nbytes

    def reset(self) -> None:
        self.data = _empty()

    def is_empty(self) -> bool:
        moved = any(self.data[kind]["seconds"] or self.data[kind]["failures"] for kind in _KINDS)
        return not moved and not self.data["counters"]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for kind in _KINDS:
            mine, row = self.data[kind], other.data[kind]
            mine["seconds"] = mine["seconds"] + row["seconds"]
            mine["nbytes"] += row["nbytes"]
            mine["failures"] += row["failures"]
        for name, values in other.data["counters"].items():
            counter = self.data["counters"].setdefault(name, {})
            for label, value in values.items():
                counter[label] = counter.get(label, 0) + value
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        line: dict[str, int | float] = {}
        for kind in _KINDS:
            row = self.data[kind]
            line[f"{kind}s"] = len(row["seconds"])
            line[f"{kind}_ms"] = round(1e3 * sum(row["seconds"]), 2)
            line[f"{kind}_MB"] = round(row["nbytes"] / 1e6, 1)
            line[f"{kind}_failures"] = row["failures"]
        for name in ("lookup_tokens", "reused_tokens"):
            line[name] = self.data["counters"].get(name, {}).get("", 0)
        return line


class TransferMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the engine: one series a kind of transfer, and the figures of the cache.

    The names begin with "vllm:", because vLLM clears and lists only what carries its name.
    """

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = [*labelnames, "transfer"]
        seconds = self._histogram_cls(
            name="vllm:kvworkbench_transfer_seconds",
            documentation="Seconds to move a chunk: load (tier to pages), store (pages to memory), write (to a tier).",
            labelnames=labels,
            buckets=_SECONDS,
        )
        nbytes = self._counter_cls(
            name="vllm:kvworkbench_transfer_bytes", documentation="Bytes of KV moved.", labelnames=labels
        )
        failures = self._counter_cls(
            name="vllm:kvworkbench_transfer_failures",
            documentation="Chunks that could not be moved; each is a miss or a chunk not stored.",
            labelnames=labels,
        )
        self._series = {
            (engine, kind): tuple(metric.labels(*values, kind) for metric in (seconds, nbytes, failures))
            for engine, values in per_engine_labelvalues.items()
            for kind in _KINDS
        }
        self._engines = per_engine_labelvalues
        self._counters = {name: self._made(self._counter_cls, name, labelnames, *_COUNTERS[name]) for name in _COUNTERS}
        self._gauges = {name: self._made(self._gauge_cls, name, labelnames, *_GAUGES[name]) for name in _GAUGES}

    @staticmethod
    def _made(metric, name: str, labelnames: list[str], documentation: str, label: str):
        labels = [*labelnames, label] if label else list(labelnames)
        return metric(name=f"vllm:kvworkbench_{name}", documentation=documentation, labelnames=labels)

    def observe(self, transfer_stats_data: dict, engine_idx: int = 0) -> None:
        engine = self._engines[engine_idx]
        for name, values in transfer_stats_data["counters"].items():
            for label, value in values.items():
                self._counters[name].labels(*engine, *([label] if label else [])).inc(value)
        for name, values in transfer_stats_data["gauges"].items():
            for label, value in values.items():
                self._gauges[name].labels(*engine, label).set(value)
        for kind in _KINDS:
            row = transfer_stats_data[kind]
            seconds, nbytes, failures = self._series[engine_idx, kind]
            for value in row["seconds"]:
                seconds.observe(value)
            nbytes.inc(row["nbytes"])
            failures.inc(row["failures"])
