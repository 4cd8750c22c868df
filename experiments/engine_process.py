"""One vLLM engine in a process of its own, spoken to in lines of JSON. Started by `experiments.serving`.

    parent -> {"op": "generate", "id": ..., "token_ids": [...], "max_tokens": ...}
    child  -> {"ttft_s": ..., "queue_s": ..., "token_ids": [...], "counters": {...}}
    parent -> {"op": "reset"}
    child  -> {"reset": true}

The engine runs in single-process mode: no idle core spins, nothing but the request runs while it is measured, and the
scheduler's and the worker's half of the connector share the process without sharing memory.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

__all__ = ["ENVIRONMENT", "UNTRACKED", "engine_environment", "main"]

UNTRACKED = {"VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}  # nothing calls home

# Fixed for every engine alike. vLLM's automatic binding takes another core away when a connector is configured, so
# that engines with and without one would compute with different numbers of threads.
ENVIRONMENT = {
    **UNTRACKED,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
}

# Inherited, these would overrule what the engine is told.
_OVERRULING = {"kv_cache_memory_bytes": "VLLM_CPU_KVCACHE_SPACE"}


def engine_environment(threads: int, options: Mapping[str, Any]) -> dict[str, str]:
    """Environment of an engine's process: this one's, with what must be the same for every engine.

    Args:
        threads: Compute threads; 0 for all cores.
        options: Arguments of `vllm.LLM`.
    """
    count = str(threads or os.cpu_count() or 1)
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    overruling = {variable for option, variable in _OVERRULING.items() if option in options}
    inherited = {name: value for name, value in os.environ.items() if name not in overruling}
    return {**inherited, **ENVIRONMENT, "OMP_NUM_THREADS": count, "NUMBA_NUM_THREADS": count,
            "NUMBA_THREADING_LAYER": "omp", "PYTHONPATH": path}  # fmt: skip


_COUNTERS = ("vllm:prefix_cache_hits", "vllm:external_prefix_cache_hits", "vllm:prefix_cache_queries",
             "vllm:external_prefix_cache_queries", "vllm:prompt_tokens")  # fmt: skip


def main() -> None:
    """Serve one engine over the two file descriptors named on the command line."""
    requests, answers = os.fdopen(int(sys.argv[1]), "r"), os.fdopen(int(sys.argv[2]), "w")
    try:
        engine = _Engine(json.loads(requests.readline()))
        _answer(answers, {"settings": engine.settings()})
        for line in requests:
            message = json.loads(line)
            if message["op"] == "close":
                break
            _answer(answers, engine.reset() if message["op"] == "reset" else engine.generate(message))
        engine.close()
        _answer(answers, {"closed": True})
    except Exception as error:
        traceback.print_exc()
        _answer(answers, {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})


def _answer(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


class _Engine:
    """A vLLM engine and what is read from it after each request."""

    def __init__(self, spec: dict[str, Any]):
        if spec["append_path"]:
            sys.path.append(spec["append_path"])
        options = dict(spec["arguments"])
        if "kv_transfer_config" in options:
            import workbench.connectors.vllm  # noqa: F401  lets vLLM start although another connector loads numba

        from vllm import LLM
        from vllm.config import KVTransferConfig

        if "kv_transfer_config" in options:
            options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
        self.llm = LLM(disable_log_stats=False, **options)

    def settings(self) -> dict[str, Any]:
        """What the engine says that it runs with, not what it was asked for."""
        import torch

        config = self.llm.llm_engine.vllm_config
        connector = config.kv_transfer_config.kv_connector if config.kv_transfer_config else None
        return {
            "model": config.model_config.model,
            "dtype": str(config.model_config.dtype),
            "max_model_len": config.model_config.max_model_len,
            "block_size": config.cache_config.block_size,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "num_blocks": config.cache_config.num_gpu_blocks,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "enforce_eager": config.model_config.enforce_eager,
            "kv_connector": connector,
            "threads": torch.get_num_threads(),
            "thread_binding": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
            "device": config.device_config.device_type,
            **_cache_settings(self.llm),
        }

    def generate(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer one prompt, alone in the engine."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=message["max_tokens"],
                                ignore_eos=message.get("ignore_eos", False),
                                logprobs=message.get("logprobs"))  # fmt: skip
        prompt: dict[str, Any] = {"prompt_token_ids": message["token_ids"]}
        if message.get("cache_salt"):
            prompt["cache_salt"] = message["cache_salt"]
        before, start = self._counters(), time.perf_counter()
        output = self.llm.generate([prompt], params, use_tqdm=False)[0]
        client_s, after = time.perf_counter() - start, self._counters()
        answer, timing = output.outputs[0], output.metrics
        generated = len(answer.token_ids)
        decode_s = timing.last_token_ts - timing.first_token_ts
        return {
            "engine_request": output.request_id,
            "ttft_s": timing.first_token_latency,
            "queue_s": timing.scheduled_ts - timing.queued_ts,
            "load_and_prefill_s": timing.first_token_ts - timing.scheduled_ts,
            "itl_s": decode_s / (generated - 1) if generated > 1 else None,
            "e2e_s": client_s,
            "cached_tokens": output.num_cached_tokens or 0,
            "token_ids": list(answer.token_ids),
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "logprobs": _chosen_logprobs(answer),
            "counters": {name: after[name] - before[name] for name in after},
        }

    def reset(self) -> dict[str, bool]:
        """Forget what vLLM's prefix cache and the connector hold."""
        has_connector = self.llm.llm_engine.vllm_config.kv_transfer_config is not None
        return {"reset": bool(self.llm.reset_prefix_cache(reset_connector=has_connector))}

    def _counters(self) -> dict[str, float]:
        found: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        for metric in self.llm.get_metrics():
            if metric.name in found:
                found[metric.name] += metric.value
        return found

    def close(self) -> None:
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()  # finishes queued writes
        self.llm.llm_engine.engine_core.shutdown()


def _cache_settings(llm: Any) -> dict[str, Any]:
    """Chunk size and tiers that this project's connector runs with; nothing for another connector."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    half = getattr(connector, "half", None)
    if half is None:
        return {}
    codecs = {tier.name: repr(tier.codec) for tier in half.tiers if hasattr(tier, "codec")}
    return {
        "chunk_tokens": half.identity.layout.chunk_tokens,
        "tiers": {
            tier.name: {"capacity_bytes": tier.capacity_bytes, "policy": repr(tier.order.policy),
                        "codec": codecs.get(tier.name, "raw")}
            for tier in half.control.tiers
        },
    }  # fmt: skip


def _chosen_logprobs(answer: Any) -> list[float] | None:
    if answer.logprobs is None:
        return None
    return [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]


if __name__ == "__main__":
    main()
