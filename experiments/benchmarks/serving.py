"""What having the cache costs where it cannot help: traffic that never repeats, and short prompts.

    python -m experiments.benchmarks.serving [--model NAME] [--short]

Two single-process engines with the same fixed threads, with and without the connector, answer the same prompts in
alternating order. Throughput is prompts and answers of all requests over the seconds in which the engine worked on
them. The ratio that counts is paired: per request, then the median; beside it stands the ratio of the sums.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from experiments.arms import arm_by_name, ready
from experiments.benchmarks import row
from experiments.environment import describe_environment
from experiments.models import resolve_model
from experiments.serving import EngineProcess
from experiments.workloads import Request, make_workload

__all__ = ["main", "measure", "run"]

ARMS = ("none", "memory", "disk")  # the last writes every chunk to files, too
MOST_OVERHEAD, MOST_SHORT = 1.03, 1.03
SHORT_PROMPT_TOKENS = 200
_WARM_UP_REQUESTS = 3
_FIRST_WORDS = 64  # tokens that prompts of any kind may begin with alike


def measure(model: str, threads: int, *, requests: int = 24, text_tokens: int = 1024) -> dict[str, Any]:
    """Seconds of every request by arm, of one-off prompts and of short ones; see `_ratios`."""
    from transformers import AutoTokenizer

    source = resolve_model(model)
    tokenizer = AutoTokenizer.from_pretrained(str(source.path))
    one_off = make_workload("one_off", tokenizer, requests=requests + _WARM_UP_REQUESTS, text_tokens=text_tokens,
                            max_tokens=8).requests  # fmt: skip
    rng = np.random.default_rng(0)
    short = [
        Request(f"s{i}", rng.integers(10, 250, SHORT_PROMPT_TOKENS), group=i, document=0, question=0, kind="cold",
                max_tokens=1)
        for i in range(2 * requests + _WARM_UP_REQUESTS)
    ]  # fmt: skip
    longest = max(len(request.token_ids) + request.max_tokens for request in one_off)
    options = {"max_model_len": -(-longest // 128) * 128 + 128,
               "kv_cache_memory_bytes": 8 * longest * (source.bytes_per_token or 1 << 16)}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kvworkbench-bench-") as name, ExitStack() as stack:
        folder, engines = Path(name), {}
        for arm in (stack.enter_context(ready(arm_by_name(arm), folder)) for arm in ARMS):
            engines[arm.name] = stack.enter_context(
                EngineProcess(str(source.path), threads=threads, vllm=options, log=folder / f"{arm.name}.log",
                              **arm.engine_options(folder))
            )  # fmt: skip
        found = {"one_off": _alternating(engines, one_off, "e2e_s"), "short": _alternating(engines, short, "ttft_s")}
    return {"model": source.name, "threads": threads, "requests": requests, "text_tokens": text_tokens,
            "tokens": sum(len(r.token_ids) + r.max_tokens for r in one_off[_WARM_UP_REQUESTS:]),
            "seconds": found}  # fmt: skip


def _alternating(engines: dict[str, EngineProcess], requests: Sequence[Request], figure: str) -> dict[str, list[float]]:
    """Seconds of each request by arm; the first requests load code paths and are left out."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn, request in enumerate(requests):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            answer = engines[name].generate(request.token_ids, max_tokens=request.max_tokens, ignore_eos=True)
            assert answer["cached_tokens"] < _FIRST_WORDS, f"{request.request_id} shares a prefix with an earlier one"
            if turn >= _WARM_UP_REQUESTS:
                seconds[name].append(answer[figure])
    return seconds


def _ratios(seconds: dict[str, list[float]], arm: str) -> dict[str, float]:
    """An arm's seconds over those without the connector: median of pairs, and of the sums."""
    pairs = [ours / plain for ours, plain in zip(seconds[arm], seconds["none"], strict=True)]
    return {"paired": statistics.median(pairs), "sums": sum(seconds[arm]) / sum(seconds["none"])}


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The benchmark's table."""
    rows, one_off, short = [], result["seconds"]["one_off"], result["seconds"]["short"]
    for arm in ARMS[1:]:
        ratio = _ratios(one_off, arm)
        rates = {name: result["tokens"] / sum(one_off[name]) for name in (arm, "none")}
        rows.append(row(f"one-off traffic, {result['model']}, {arm}: seconds over no connector",
                        ours=f"{rates[arm]:.0f} tokens/s", limit=f"{rates['none']:.0f} tokens/s", ratio=ratio["paired"],
                        goal=f"<= {MOST_OVERHEAD}", met=ratio["paired"] <= MOST_OVERHEAD))  # fmt: skip
        ratio = _ratios(short, arm)
        medians = {name: statistics.median(short[name]) * 1e3 for name in (arm, "none")}
        rows.append(row(f"TTFT of {SHORT_PROMPT_TOKENS} tokens, {result['model']}, {arm}: over no connector",
                        ours=f"{medians[arm]:.1f} ms", limit=f"{medians['none']:.1f} ms", ratio=ratio["paired"],
                        goal=f"<= {MOST_SHORT}", met=ratio["paired"] <= MOST_SHORT))  # fmt: skip
    return rows


def run(short: bool = False) -> dict[str, Any]:
    """The short form takes about a minute."""
    result = measure("random:llama-8layer", 1, requests=12 if short else 40)
    return {"name": "serving", "environment": describe_environment(), "results": [result], "rows": rows_of(result)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:llama-8layer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    result = measure(options.model, options.threads, requests=12 if options.short else options.requests)
    print(json.dumps({"environment": describe_environment(), "results": [result], "rows": rows_of(result)}, indent=1))


if __name__ == "__main__":
    main()
