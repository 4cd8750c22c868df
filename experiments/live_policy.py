"""A policy in the live engine under real vLLM, beside its replay: the same prompts, the same room.

file.py:Class -> study of real vLLM: the policy and a rival, memory for a part of the chunks -> measured
              -> the same prompts as a trace through the replay                              -> simulated

study = live_study("mine.py:Mine")
study.start()                       # a process of its own; Study.open(study.folder) finds it again
beside_replay(study)                # a frame, as far as there are results
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from experiments.models import resolve_model
from experiments.replay import replay
from experiments.runs import RUNS_FOLDER
from experiments.study import Study
from experiments.traces import Trace
from experiments.workloads import Workload, make_workload
from workbench.chunks import ChunkChain

__all__ = ["beside_replay", "live_study", "workload_trace"]

_CHUNK_TOKENS = 128
# Passages that come back, the popular ones sooner, some behind others than before: what is kept matters.
_WORKLOAD = {
    "workload": "rag", "workload.requests": 40, "workload.passages": 10, "workload.passages_per_request": 2,
    "workload.passage_tokens": 256, "workload.permuted_share": 0.3, "workload.max_tokens": 1,
}  # fmt: skip
# A replay knows whole chunks of the prompts alone.
_NOT_IN_A_REPLAY = ("cache.store_decoded", "cache.partial_hits")
_SCHEMA = {"policy": pl.String, "how": pl.String, "hit_rate": pl.Float64, "hit_tokens": pl.Int64,
           "prompt_tokens": pl.Int64, "evictions": pl.Int64, "ttft_warm_mean_s": pl.Float64}  # fmt: skip


def live_study(policy: str, *, rival: str = "lru", model: str = "random:llama-8layer", capacity_chunks: int = 24,
               runs: Path = RUNS_FOLDER) -> Study:  # fmt: skip
    """A study of two cells on real vLLM: retrieval prompts with the policy in the memory tier, and with a rival.

    Args:
        policy: A name, "file.py:Class" or "module:Class", as the engine's process takes it.
        rival: Another one.
        model: What `resolve_model` takes; hits do not depend on it.
        capacity_chunks: Chunks of 128 tokens that the memory tier holds.
        runs: Folder of the run store.
    """
    nbytes = capacity_chunks * _CHUNK_TOKENS * (resolve_model(model, progress=False).bytes_per_token or 1 << 16)
    fixed = {"model": model, "arm": "cache", "tier": "memory", "chunk_tokens": _CHUNK_TOKENS, "memory_bytes": nbytes,
             **dict.fromkeys(_NOT_IN_A_REPLAY, False), **_WORKLOAD}  # fmt: skip
    return Study("policy-live", kind="serving", space={"policy": [policy, rival]}, fixed=fixed, runs=runs)


def beside_replay(study: Study) -> pl.DataFrame:
    """policy, how ("measured" or "simulated"), hit_rate, hit_tokens, prompt_tokens, evictions, ttft_warm_mean_s.

    Two rows for each policy whose cell is finished and good.
    """
    from transformers import AutoTokenizer

    rows: list[tuple[Any, ...]] = []
    for row in (row for row in study.rows() if not row["error"]):
        settings, found = row["settings"], row["results"]
        source = resolve_model(settings["model"], progress=False)
        options = {name.removeprefix("workload."): value for name, value in settings.items() if "workload." in name}
        workload = make_workload(settings["workload"], AutoTokenizer.from_pretrained(str(source.path)),
                                 seed=row["seed"], **options)  # fmt: skip
        trace = workload_trace(workload, settings["chunk_tokens"])
        capacity = settings["memory_bytes"] // (settings["chunk_tokens"] * (source.bytes_per_token or 1 << 16))
        again = replay(trace, settings["policy"], capacity_chunks=capacity)
        name = settings["policy"].rpartition(":")[2]
        rows.append((name, "measured", found["hit_rate"], found["hit_tokens"], found["prompt_tokens"],
                     found["evictions"], found["ttft_warm_mean_s"]))  # fmt: skip
        rows.append((name, "simulated", again.hit_rate, int(again.hit_tokens.sum()), int(trace.input_tokens.sum()),
                     again.evictions, None))  # fmt: skip
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def workload_trace(workload: Workload, chunk_tokens: int) -> Trace:
    """The whole chunks of each prompt of a workload as a trace whose ids name prefixes."""
    numbers: dict[bytes, int] = {}
    chains = [ChunkChain(bytes(32), chunk_tokens).extend(request.token_ids) for request in workload.requests]
    blocks = [[numbers.setdefault(chunk.key, len(numbers)) for chunk in chain] for chain in chains]
    lengths = np.array([len(request.token_ids) for request in workload.requests], np.int64)
    return Trace(
        name=workload.name,
        ids=np.array(list(itertools.chain(*blocks)), np.int32),
        offsets=np.concatenate([[0], np.cumsum([len(chain) for chain in blocks])]).astype(np.int64),
        block_tokens=chunk_tokens,
        timestamps=np.array([r.arrival_s or float(n) for n, r in enumerate(workload.requests)]),
        input_tokens=lengths,
        output_tokens=np.array([request.max_tokens for request in workload.requests], np.int64),
        tenants=np.zeros(len(blocks), np.int32),
    )
