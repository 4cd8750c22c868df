"""The runs behind the claims: each a function from a `Bench` to figures, on real vLLM.

    Bench(model, size, runs) -> compare(workload, arms) -> {"ttft_reduction": 0.94, ...}

A function's docstring says what it runs; several claims may read figures of one run. "quick" takes below two minutes on
two cores, "full" below ten.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from experiments.arms import ArmUnavailableError, arm_by_name
from experiments.demo import compare
from experiments.models import ModelSource, resolve_model
from experiments.runs import Run
from experiments.serving import Arm, EngineProcess, Progress
from experiments.workloads import Request, Workload, make_workload
from workbench.errors import InvalidInputError

__all__ = [
    "Bench",
    "Figures",
    "chat_rounds",
    "fp8_pages",
    "lmcache_documents",
    "long_documents",
    "one_off_traffic",
    "overflowing_device",
    "prompt_lengths",
    "same_prefix",
]

Figures = dict[str, float]
_QUESTION_TOKENS = 16


@dataclass
class Bench:
    """Where and how large claims are measured.

    Args:
        spec: The model, as `resolve_model` takes it.
        size: "quick" or "full".
        threads: Compute threads of each engine; all cores by default.
        runs: Folder of the run store; every run of real vLLM is kept there.
        watch: Called with `Progress`.
    """

    spec: str = "smollm2"
    size: str = "quick"
    threads: int = 0
    runs: Path = Path("runs")
    watch: Callable[[Progress], None] = lambda _: None
    made: list[str] = field(default_factory=list)  # names of the runs made so far

    def __post_init__(self):
        if self.size not in ("quick", "full"):
            raise InvalidInputError(f"size is {self.size!r}; quick or full")

    @cached_property
    def model(self) -> ModelSource:
        return resolve_model(self.spec)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.model.path))

    def pick(self, quick: int, full: int) -> int:
        return quick if self.size == "quick" else full

    def compare(self, name: str, workload: Workload, arms: list[str | Arm]) -> Run:
        """One interleaved run of real vLLM, kept in the store."""
        run = compare(self.model, workload, arms=arms, runs=self.runs, threads=self.threads, watch=self.watch,
                      name=f"claim-{name}")  # fmt: skip
        self.made.append(run.run_id)
        return run


# ---------------------------------------------------------------- real vLLM


def long_documents(bench: Bench) -> Figures:
    """Documents, each asked about several times: TTFT, end-to-end time and hit rate of the repeated questions."""
    requests = bench.compare("long-documents", _documents(bench), ["none", "memory"]).requests
    return _document_figures(requests, "memory")


def lmcache_documents(bench: Bench) -> Figures:
    """The same documents through LMCache itself: its server, its connector in vLLM, its own environment."""
    lmcache = arm_by_name("lmcache")
    if lmcache.missing:
        raise ArmUnavailableError(lmcache.missing)
    requests = bench.compare("lmcache-documents", _documents(bench), ["none", lmcache]).requests
    return _document_figures(requests, "lmcache")


def _documents(bench: Bench) -> Workload:
    return make_workload("long_document", bench.tokenizer, groups=bench.pick(3, 5), documents_per_group=1,
                         document_tokens=bench.pick(2000, 6000), questions=3, max_tokens=16)  # fmt: skip


def _document_figures(requests: pl.DataFrame, arm: str) -> Figures:
    again = requests.filter(pl.col("phase") == "again")
    return {
        **_reductions(again, arm),
        "ttft_times": _ratio(again, "ttft_s", "none", arm),
        "duration_reduction": 1 - 1 / _ratio(requests, "e2e_s", "none", arm),
        "hit_rate": _hit_rate(again, arm),
        "prompt_tokens": float(again["prompt_tokens"].median()),
    }


def chat_rounds(bench: Bench) -> Figures:
    """One conversation of ten rounds, whole chunks of 128 and of 256 tokens: hit rate, TTFT, and requests a second."""
    workload = make_workload("chat", bench.tokenizer, users=bench.pick(1, 3), rounds=10, max_tokens=8,
                             question_tokens=bench.pick(64, 128), answer_tokens=bench.pick(192, 384))  # fmt: skip
    # As in the caches that the claims are about, a hit ends with a chunk.
    whole = {"memory_bytes": "1GiB", "partial_hits": False}
    chunked = (Arm(f"chunk_{n}", f"whole chunks of {n}", cache={**whole, "chunk_tokens": n}) for n in (128, 256))
    arms: list[str | Arm] = ["none", *chunked]
    requests = bench.compare("chat-rounds", workload, arms).requests
    fine, coarse = (_hit_rate(requests, f"chunk_{tokens}") for tokens in (128, 256))
    return {
        **_reductions(requests, "chunk_128"),
        "throughput_times": _ratio(requests, "e2e_s", "none", "chunk_128"),
        "hit_rate": fine,
        "hit_rate_coarse": coarse,
        "hit_points_lost": 100 * (fine - coarse),
        "throughput_change_coarse": _ratio(requests, "e2e_s", "chunk_128", "chunk_256") - 1,
        "prompt_tokens": float(requests["prompt_tokens"].max()),
    }


def same_prefix(bench: Bench) -> Figures:
    """A batch of questions behind one long prefix, the first one cold: requests a second."""
    workload = make_workload("shared_prefix", bench.tokenizer, prefixes=1, prefix_tokens=bench.pick(2048, 4096),
                             questions=bench.pick(10, 24), max_tokens=8)  # fmt: skip
    requests = bench.compare("same-prefix", workload, ["none", "memory"]).requests
    return {"throughput_times": _ratio(requests, "e2e_s", "none", "memory"), "hit_rate": _hit_rate(requests, "memory")}


def one_off_traffic(bench: Bench) -> Figures:
    """Prompts that never repeat: what having the cache costs."""
    workload = make_workload("one_off", bench.tokenizer, requests=bench.pick(10, 24), text_tokens=800, max_tokens=4)
    requests = bench.compare("one-off", workload, ["none", "memory"]).requests
    by_request = requests.pivot("arm", index="request_id", values="e2e_s")
    ratios = by_request["memory"] / by_request["none"]
    return {"throughput_change": 1 / float(ratios.median()) - 1, "hit_rate": _hit_rate(requests, "memory")}


def prompt_lengths(bench: Bench) -> Figures:
    """The same prefix of 128 to 2,048 tokens asked again: from which length on is the first token sooner?

    The cost model is fitted to half of the cells of this run and judged by the others.
    """
    lengths = [128, 256, 512, 1024, 2048] + ([4096] if bench.size == "full" else [])
    workload = _prefixes(bench.tokenizer, lengths, repeats=bench.pick(5, 9))
    run = bench.compare("prompt-lengths", workload, ["none", "prefix_cache", "memory"])
    again = run.requests.filter(pl.col("phase") == "again")
    longest, shortest = (again.filter(pl.col("document") == str(n)) for n in (lengths[-1], lengths[0]))
    return {
        **{f"{arm}_break_even_tokens": _first_gain(again, arm) for arm in ("prefix_cache", "memory")},
        "ttft_times_longest": _median_ratio(longest, "ttft_s", "none", "memory"),
        "over_prefix_cache": _median_ratio(longest, "ttft_s", "memory", "prefix_cache"),
        "short_overhead": _median_ratio(shortest, "ttft_s", "memory", "none") - 1,
        **_calibration_errors(run, bench),
    }


def overflowing_device(bench: Bench) -> Figures:
    """Conversations in turn, more of them than vLLM's own cache holds: with and without a memory tier below it."""
    workload = make_workload("chat", bench.tokenizer, users=4, rounds=bench.pick(5, 10), max_tokens=4,
                             question_tokens=64, answer_tokens=bench.pick(192, 384))  # fmt: skip
    longest = -(-max(len(request.token_ids) + 128 for request in workload.requests) // 128) * 128
    room = {
        "max_model_len": longest,
        "kv_cache_memory_bytes": (longest + 256) * (bench.model.bytes_per_token or 1 << 16),
    }
    arms: list[str | Arm] = [
        Arm("device", "vLLM's prefix cache, short of room", prefix_caching=True, vllm=room),
        Arm("tier", "the same over a memory tier", prefix_caching=True, vllm=room, cache={"memory_bytes": "1GiB"}),
    ]
    requests = bench.compare("overflowing-device", workload, arms).requests
    return {
        "ttft_times": _ratio(requests, "ttft_s", "device", "tier"),
        "device_hit_rate": _hit_rate(requests, "device"),
        "tier_hit_rate": _hit_rate(requests, "tier"),
    }


def fp8_pages(bench: Bench) -> Figures:
    """vLLM itself with a bf16 and with an fp8 KV cache in the same bytes: how many more blocks it has."""
    blocks = {}
    for dtype in ("auto", "fp8"):
        options = {"max_model_len": 2048, "kv_cache_memory_bytes": 128 << 20, "kv_cache_dtype": dtype}
        with EngineProcess(str(bench.model.path), threads=bench.threads, vllm=options) as engine:
            blocks[dtype] = int(engine.settings["num_blocks"])
            engine.generate(np.arange(1, 200), max_tokens=2)
    return {"kept_fraction": blocks["auto"] / blocks["fp8"]}


def _prefixes(tokenizer: Any, lengths: list[int], repeats: int) -> Workload:
    """Prefixes of exact lengths, each once cold and then `repeats` times with another question of 16 tokens."""
    text = make_workload("one_off", tokenizer, requests=len(lengths), text_tokens=max(lengths) + 512).requests
    rng = np.random.default_rng(0)
    known = np.unique(text[0].token_ids)
    requests = []
    for question in range(1 + repeats):
        for group, (length, source) in enumerate(zip(lengths, text, strict=True)):
            # From the end: the first tokens of the prompts are the chat template's and would be shared.
            prefix = source.token_ids[-length - 64 : -64]
            ids = np.concatenate([prefix, rng.choice(known, _QUESTION_TOKENS)])
            requests.append(Request(f"n{length}-q{question}", ids, group, length, question,
                                    "warm" if question else "cold", max_tokens=4))  # fmt: skip
    return Workload("prompt_lengths", tuple(requests), 0, f"prefixes of {lengths} tokens, {repeats} times again")


def _first_gain(again: pl.DataFrame, arm: str) -> float:
    """The shortest prefix from which on every length has a lower median TTFT than without reuse; inf if none."""
    medians = again.group_by("document", "arm").agg(pl.col("ttft_s").median())
    table = medians.pivot("arm", index="document", values="ttft_s").with_columns(pl.col("document").cast(pl.Int64))
    first = np.inf
    for row in table.sort("document", descending=True).iter_rows(named=True):
        if row[arm] >= row["none"]:
            break
        first = float(row["document"])
    return first


def _calibration_errors(run: Run, bench: Bench) -> Figures:
    from experiments.cost_calibration import calibrate

    found = calibrate(run, model=str(bench.model.path))
    within = (found.held_out["error"].abs() <= 0.2).mean()
    return {"model_median_error": found.median_error, "model_largest_error": found.largest_error,
            "model_share_within_20_percent": float(within)}  # fmt: skip


def _reductions(requests: pl.DataFrame, arm: str = "memory") -> Figures:
    """Shares by which TTFT and end-to-end time fall, of means over the same requests."""
    return {f"{name}_reduction": 1 - 1 / _ratio(requests, f"{name}_s", "none", arm) for name in ("ttft", "e2e")}


def _ratio(requests: pl.DataFrame, measure: str, numerator: str, denominator: str) -> float:
    """Sum of one arm over the sum of another, over the requests that both answered."""
    table = requests.pivot("arm", index=["request_id", "repeat"], values=measure).drop_nulls([numerator, denominator])
    if table.is_empty():
        raise InvalidInputError(f"no request was answered by both {numerator} and {denominator}")
    return float(table[numerator].sum()) / float(table[denominator].sum())


def _median_ratio(requests: pl.DataFrame, measure: str, numerator: str, denominator: str) -> float:
    """Median of one arm over the median of another: what single requests disturbed by a neighbour do not move."""
    medians = dict(requests.group_by("arm").agg(pl.col(measure).median()).iter_rows())
    return medians[numerator] / medians[denominator]


def _hit_rate(requests: pl.DataFrame, arm: str) -> float:
    """Hit tokens / prompt tokens, by the server's own counters."""
    mine = requests.filter(pl.col("arm") == arm)
    return int(mine["cached_tokens"].sum()) / int(mine["prompt_tokens"].sum())
