"""Our arm against the others on every workload: warm TTFT and hit tokens, in one interleaved run a workload.

    python -m experiments.benchmarks.workloads [NAME ...] [--model NAME] [--short]

Every arm answers every request once, in rotating order. Warm are the requests that have more than a tenth of their
tokens in common with an earlier one. The limit is vLLM's prefix cache, which loads nothing; the peers are the other
connectors, LMCache among them where KVWORKBENCH_LMCACHE_PYTHON names an environment that has it.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import polars as pl

from experiments.arms import arm_by_name
from experiments.benchmarks import row
from experiments.demo import compare
from experiments.environment import describe_environment
from experiments.models import resolve_model
from experiments.summary import NO_REUSE, PREFIX_CACHE
from experiments.workloads import make_workload

__all__ = ["main", "measure", "run"]

OURS = "memory"
PEERS = ("offloading_cpu", "offloading_file", "example", "lmcache")
_CHAT = {"users": 2, "question_tokens": 256, "answer_tokens": 64, "max_tokens": 4}
WORKLOADS: dict[str, dict[str, Any]] = {
    "chat": {"rounds": 5, **_CHAT},
    "rag": {"requests": 10, "passages": 6, "passages_per_request": 3, "passage_tokens": 400, "max_tokens": 4},
    "agent": {"sessions": 2, "steps": 5, "result_tokens": 300, "max_tokens": 4},
    "shared_prefix": {"prefixes": 2, "prefix_tokens": 1500, "questions": 5, "max_tokens": 4},
    "long_document": {"groups": 2, "documents_per_group": 1, "document_tokens": 1500, "max_tokens": 4},
    "mixed": {"requests": 12, "settings": {"chat": {"rounds": 3, **_CHAT},
                                           "one_off": {"text_tokens": 512, "max_tokens": 4}}},
}  # fmt: skip
_SHORT = ("shared_prefix",)
_WARM_SHARE = 0.1
_UNFOUND = 256  # tokens of a request that a cache may leave out of the bound: one chunk


def measure(name: str, model: str = "random:llama-8layer", *, threads: int = 1) -> dict[str, Any]:
    """Figures of every arm on one workload."""
    from transformers import AutoTokenizer

    source = resolve_model(model)
    workload = make_workload(name, AutoTokenizer.from_pretrained(str(source.path)), **WORKLOADS[name])
    peers = [peer for peer in PEERS if not arm_by_name(peer).missing]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvworkbench-bench-") as folder:
        arms = [NO_REUSE, PREFIX_CACHE, OURS, *peers]
        run = compare(source, workload, arms=arms, runs=Path(folder), threads=threads, name=name)
        requests = run.requests.filter(pl.col("error") == "")
        failed = run.requests.height - requests.height
    bounds = workload.upper_bound_hit_tokens(1).tolist()
    most = {request.request_id: bound for request, bound in zip(workload.requests, bounds, strict=True)}
    requests = requests.with_columns(bound=pl.col("request_id").replace_strict(most, return_dtype=pl.Int64))
    figures = requests.group_by("arm", maintain_order=True).agg(
        requests=pl.len(),
        hit_tokens=pl.col("cached_tokens").sum(),
        bound_tokens=pl.col("bound").sum(),
        prompt_tokens=pl.col("prompt_tokens").sum(),
        most_unfound=(pl.col("bound") - pl.col("cached_tokens")).max(),
        warm=(pl.col("bound") > _WARM_SHARE * pl.col("prompt_tokens")).sum(),
        warm_s=pl.col("ttft_s").filter(pl.col("bound") > _WARM_SHARE * pl.col("prompt_tokens")).median(),
    )
    return {"workload": name, "description": workload.description, "model": source.name, "threads": threads,
            "seconds": time.perf_counter() - began, "failed": failed,
            "arms": {line.pop("arm"): line for line in figures.to_dicts()}}  # fmt: skip


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The benchmark's table."""
    arms, what = result["arms"], f"{result['workload']}, {result['model']}"
    ours, limit = arms[OURS], arms[PREFIX_CACHE]
    found = {peer: arms[peer]["warm_s"] for peer in PEERS if peer in arms}
    best = min(found, key=found.__getitem__) if found else None
    beside = None if best is None else f"{found[best] * 1e3:.1f} ms ({best})"
    ratio = ours["warm_s"] / limit["warm_s"]
    rows = [row(f"warm TTFT on {what}, n = {ours['warm']}: over vLLM's prefix cache",
                ours=f"{ours['warm_s'] * 1e3:.1f} ms", peer=beside, limit=f"{limit['warm_s'] * 1e3:.1f} ms",
                ratio=ratio, goal="<= 1.05", met=ratio <= 1.05)]  # fmt: skip
    if best is not None:
        ratio = ours["warm_s"] / found[best]
        rows.append(row(f"warm TTFT on {what}: over the best other connector", ours=f"{ours['warm_s'] * 1e3:.1f} ms",
                        peer=beside, ratio=ratio, goal="< 1", met=ratio < 1))  # fmt: skip
    rows.append(row(f"hit tokens on {what}: most tokens short of the bound in a request",
                    ours=f"{ours['hit_tokens']:,}", limit=f"{ours['bound_tokens']:,}", ratio=ours["most_unfound"],
                    goal=f"< {_UNFOUND}", met=ours["most_unfound"] < _UNFOUND))  # fmt: skip
    return rows


def run(short: bool = False) -> dict[str, Any]:
    """The short form takes one workload."""
    results = [measure(name) for name in (_SHORT if short else WORKLOADS)]
    return {"name": "workloads", "environment": describe_environment(), "results": results,
            "rows": [line for result in results for line in rows_of(result)]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of workloads; all without")
    parser.add_argument("--model", default="random:llama-8layer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    names = options.names or (_SHORT if options.short else list(WORKLOADS))
    results = [measure(name, options.model, threads=options.threads) for name in names]
    print(json.dumps({"environment": describe_environment(), "results": results,
                      "rows": [line for result in results for line in rows_of(result)]}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
