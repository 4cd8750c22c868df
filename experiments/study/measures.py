"""What a cell of real vLLM gave: its requests and its engine's events, as rows and as figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.arms import Arm
from experiments.client import load_summary
from experiments.intervals import percentile
from experiments.workloads import Request, Workload
from workbench.events import Event, Totals

__all__ = ["EventSums", "cell_figures", "contamination", "load_figures", "loaded_answer", "request_row"]

# What a request under load has beside the others: when it was due, and how much later the client sent it.
_OF_LOAD = ("scheduled_s", "sent_late_s")


def loaded_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `send_requests` in the form of an engine's answer: TTFT as the client saw it, from when it was due;
    queue and prefill as the server tells them, None where it does not."""
    return {
        "engine_request": f"0:{row['sent_as']}", "ttft_s": row["ttft_s"], "queue_s": row["server_queue_s"],
        "load_and_prefill_s": row["server_ttft_s"], "itl_s": row["itl_s"], "e2e_s": row["e2e_s"],
        "cached_tokens": row["cached_tokens"] or 0, "token_ids": row["token_ids"],
        "finish_reason": row["finish_reason"], "error": row["error"],
        "scheduled_s": row["scheduled_s"], "sent_late_s": row["queue_s"],
    }  # fmt: skip


def request_row(arm: Arm, request: Request, bound: int, answer: dict[str, Any], sums: "EventSums") -> dict[str, Any]:
    loaded, both = sums.load_seconds[answer["engine_request"]], answer["load_and_prefill_s"]
    failed = "finish_reason error" if answer["finish_reason"] == "error" else ""
    return {
        "arm": arm.name, "arm_label": arm.label, "request_id": request.request_id,
        "group": request.group, "document": str(request.document), "expected": request.kind,
        "phase": "again" if request.kind == "warm" else "first",
        "kind": "reused" if answer["cached_tokens"] else "cold", "prompt_tokens": len(request.token_ids),
        "output_tokens": len(answer["token_ids"]), "cached_tokens": answer["cached_tokens"],
        "expected_hit_tokens": bound, "ttft_s": answer["ttft_s"], "queue_s": answer["queue_s"],
        "lookup_s": sums.lookup_seconds[answer["engine_request"]], "load_s": loaded,
        "prefill_s": None if both is None else both - loaded,
        "itl_s": answer["itl_s"], "e2e_s": answer["e2e_s"], "token_ids": answer["token_ids"],
        "error": answer.get("error") or failed, **{name: answer[name] for name in _OF_LOAD if name in answer},
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
        "ttft_s": percentile(ttft, 50), **{f"ttft_p{percent}_s": percentile(ttft, percent) for percent in (90, 95, 99)},
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


def load_figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a cell under load, beside those of every cell: throughput from the first request due to the last
    answer, and how late the client sent, which is part of TTFT and shows whether the client kept up."""
    summary = load_summary([{**row, "queue_s": row["sent_late_s"]} for row in rows])
    rates = {name: summary[name] for name in ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s")}
    late = [row["sent_late_s"] for row in rows]
    return {**{name: None if rate == "no data" else rate for name, rate in rates.items()},
            "queue_p90_s": percentile([row["queue_s"] for row in rows if not row["error"]], 90),
            "sent_late_most_s": max(late, default=None)}  # fmt: skip


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
