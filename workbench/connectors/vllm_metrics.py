"""Transfers in vLLM's own statistics: the periodic log line and the Prometheus endpoint."""

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from workbench.orders import Done

__all__ = ["TransferMetrics", "TransferStats"]

_KINDS = ("load", "store", "write")
_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


def _empty() -> dict:
    return {kind: {"seconds": [], "nbytes": 0, "failures": 0} for kind in _KINDS}


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
        return not any(row["seconds"] or row["failures"] for row in self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for kind, row in other.data.items():
            mine = self.data[kind]
            mine["seconds"] = mine["seconds"] + row["seconds"]
            mine["nbytes"] += row["nbytes"]
            mine["failures"] += row["failures"]
        return self

    def reduce(self) -> dict[str, int | float]:
        line: dict[str, int | float] = {}
        for kind, row in self.data.items():
            line[f"{kind}s"] = len(row["seconds"])
            line[f"{kind}_ms"] = round(1e3 * sum(row["seconds"]), 2)
            line[f"{kind}_MB"] = round(row["nbytes"] / 1e6, 1)
            line[f"{kind}_failures"] = row["failures"]
        return line


class TransferMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the engine, one series a kind of transfer.

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

    def observe(self, transfer_stats_data: dict, engine_idx: int = 0) -> None:
        for kind, row in transfer_stats_data.items():
            seconds, nbytes, failures = self._series[engine_idx, kind]
            for value in row["seconds"]:
                seconds.observe(value)
            nbytes.inc(row["nbytes"])
            failures.inc(row["failures"])
