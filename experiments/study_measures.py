"""What a cell of real vLLM gave: its requests and its engine's events, as rows and as figures."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.intervals import percentile
from experiments.workloads import Request, Workload
from workbench.events import Event, Totals

__all__ = ["EventSums", "cell_figures", "contamination", "request_row"]


def request_row(arm: Arm, request: Request, bound: int, answer: dict[str, Any], sums: "EventSums") -> dict[str, Any]:
    loaded = sums.load_seconds[answer["engine_request"]]
    return {
        "arm": arm.name, "arm_label": arm.label, "request_id": request.request_id,
        "group": request.group, "document": str(request.document), "expected": request.kind,
        "phase": "again" if request.kind == "warm" else "first",
        "kind": "reused" if answer["cached_tokens"] else "cold", "prompt_tokens": len(request.token_ids),
        "output_tokens": len(answer["token_ids"]), "cached_tokens": answer["cached_tokens"],
        "expected_hit_tokens": bound, "ttft_s": answer["ttft_s"], "queue_s": answer["queue_s"],
        "lookup_s": sums.lookup_seconds[answer["engine_request"]], "load_s": loaded,
        "prefill_s": answer["load_and_prefill_s"] - loaded,
        "itl_s": answer["itl_s"], "e2e_s": answer["e2e_s"], "token_ids": answer["token_ids"],
        "error": "" if answer["finish_reason"] != "error" else "finish_reason error",
    }  # fmt: skip


def cell_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a cell over its requests; cold and warm as the workload expects them, whatever was found."""
    good = [row for row in rows if not row["error"]]
    cold, warm = ([row["ttft_s"] for row in good if row["expected"] == kind] for kind in ("cold", "warm"))
    ttft = [row["ttft_s"] for row in good]
    prompt, hit = (sum(row[name] for row in good) for name in ("prompt_tokens", "cached_tokens"))
    seconds = sum(row["e2e_s"] for row in good)
    return {
        "n": len(good), "failed_requests": len(rows) - len(good),
        "ttft_s": percentile(ttft, 50), "ttft_p90_s": percentile(ttft, 90), "ttft_p99_s": percentile(ttft, 99),
        "ttft_mean_s": sum(ttft) / len(ttft) if ttft else None,
        "ttft_cold_s": percentile(cold, 50), "ttft_warm_s": percentile(warm, 50), "n_warm": len(warm),
        "ttft_warm_mean_s": sum(warm) / len(warm) if warm else None,
        **{name: percentile([row[name] for row in good], 50)
           for name in ("queue_s", "load_s", "prefill_s", "itl_s", "e2e_s")},
        "hit_rate": hit / prompt if prompt else None,
        "hit_rate_by_requests": sum(row["cached_tokens"] > 0 for row in good) / len(good) if good else None,
        "hit_rate_bound": sum(row["expected_hit_tokens"] for row in good) / prompt if prompt else None,
        "hit_tokens": hit, "prompt_tokens": prompt,
        "prompt_tokens_per_s": prompt / seconds if seconds else None,
    }  # fmt: skip


class EventSums:
    """What the engine's events of one cell add up to."""

    def __init__(self, events: Sequence[Event]):
        self._totals, self.load_seconds, self.lookup_seconds = Totals(), Counter[str](), Counter[str]()
        for event in events:
            self._totals.add(event)
            if event.kind == "load":
                self.load_seconds[event.request] += event.seconds
            elif event.kind == "lookup":
                self.lookup_seconds[event.request] += event.seconds
        self._known = bool(events)

    def figures(self) -> dict[str, Any]:
        """Evictions, bytes and tokens moved, the hit rate by chunks; None for an engine without events."""
        if not self._known:
            names = ("hit_rate_by_chunks", "evictions", "bytes_stored", "bytes_loaded", "bytes_per_token")
            return dict.fromkeys(names)
        totals = self._totals
        nbytes, tokens = Counter[str](), totals.tokens["store"]
        for (kind, _), moved in totals.nbytes.items():
            nbytes[kind] += moved
        return {
            "hit_rate_by_chunks": totals.hit_rates()["hit_rate_by_chunks"], "evictions": totals.count("evict"),
            "bytes_stored": nbytes["store"], "bytes_loaded": nbytes["load"],
            "bytes_per_token": nbytes["store"] / tokens if tokens else None,
        }  # fmt: skip


def contamination(rows: Sequence[dict[str, Any]], workload: Workload) -> str:
    """Why the cell was not cold: the server found more than had been sent before in this cell."""
    for row, most in zip(rows, workload.upper_bound_hit_tokens(1).tolist(), strict=True):
        most = 0 if row["arm"] == "none" else most
        if row["cached_tokens"] > most:
            return f"{row['request_id']} found {row['cached_tokens']} tokens where {most} were sent before"
    return ""
