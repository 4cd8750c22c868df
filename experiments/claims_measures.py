"""The measures of claims that need no serving: a real engine, a real Redis, real KV through codecs, traces by replay.

Each is a function from a `Bench` to figures, as in claims_runs.py; its docstring says what it runs, and what is
simulated says so.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

from experiments.claims_runs import Bench, Figures

__all__ = ["codec_quality", "coding_agents", "lookups", "overflowing_loop", "published_table", "redis_append_only"]

# ---------------------------------------------------------------- a real engine, a real Redis


def lookups(bench: Bench) -> Figures:
    """`lookup` of a prompt of 40 chunks that memory holds, and the same question to a Redis server."""
    from experiments.benchmarks.tiers import measure_lookup, redis_server
    from kernels.pages import PageTable
    from workbench import CacheEngine, Identity, KVLayout

    layout = KVLayout(num_layers=2, num_kv_heads=1, head_size=64, block_size=16, chunk_tokens=256)
    arrays = [np.zeros((41 * 16, layout.page_nbytes), np.uint8) for _ in range(layout.num_layers)]
    tokens = np.arange(40 * 256 + 1)
    with CacheEngine(Identity(layout=layout, weights="claims"), memory_bytes=64 * layout.chunk_nbytes) as engine:
        engine.store(tokens, PageTable(arrays), blocks=range(40 * 16 + 1))
        seconds = [_timed(lambda: engine.lookup(tokens)) for _ in range(bench.pick(200, 2000))]
        assert engine.lookup(tokens) >= 40 * 256
    with redis_server() as port:
        redis = measure_lookup(bench.pick(3, 20), port=port)
    return {"memory_ms": 1e3 * statistics.median(seconds), "redis_ms": redis["tier_microseconds"] / 1e3,
            "redis_one_by_one_ms": redis["one_by_one_microseconds"] / 1e3}  # fmt: skip


def redis_append_only(bench: Bench) -> Figures:
    """The Redis tier's writes to a server that appends each to a file, and to one that does not, in turns."""
    import redis

    from experiments.benchmarks.tiers import redis_server
    from workbench.chunks import ChunkChain
    from workbench.tiers.redis import RedisTier

    chunks = list(ChunkChain(bytes(32), 256).extend(np.arange(8 * 256)))
    payload = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
    seconds: dict[str, list[float]] = {"no": [], "yes": []}
    with redis_server() as first, redis_server() as second:
        servers = {"no": first, "yes": second}
        redis.Redis(port=second).config_set("appendonly", "yes")
        tiers = {name: RedisTier(f"redis://127.0.0.1:{port}") for name, port in servers.items()}
        for _ in range(bench.pick(10, 40)):
            for name, tier in tiers.items():
                seconds[name].append(_timed(lambda tier=tier: [tier.write(chunk, payload) for chunk in chunks]))
                redis.Redis(port=servers[name]).flushall()
        for tier in tiers.values():
            tier.close()
    pairs = zip(seconds["yes"][1:], seconds["no"][1:], strict=True)
    return {"speedup_without": statistics.median(slow / fast for slow, fast in pairs) - 1}


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---------------------------------------------------------------- simulated: traces and tables


def published_table(name: str) -> Callable[[Bench], Figures]:
    """A measure that recomputes a published table: the share of its values that agree in every printed digit."""

    def measure(bench: Bench) -> Figures:
        from experiments.tables import reproduce

        found = reproduce(name)
        exact = (found["agreeing_digits"] >= found["digits"]).mean()
        return {"share_exact": float(exact), "largest_gap": float(found["gap"].abs().max()), "values": found.height}

    measure.__name__ = f"table_{name}"
    measure.__doc__ = f"The table {name} recomputed by replay (simulated)."
    return measure


def overflowing_loop(bench: Bench) -> Figures:
    """A loop over 5 % more prompts than the tier holds, twice, by replay (simulated): second pass under LRU and MRU."""
    from experiments.replay import replay
    from experiments.traces import trace_from_frame

    prompts, blocks = 40, 31
    ids = [[prompt * blocks + block for block in range(blocks)] for _ in range(2) for prompt in range(prompts)]
    frame = pl.DataFrame({"block_ids": ids, "input_tokens": [blocks * 256] * len(ids)})
    trace = trace_from_frame(frame, name="loop", block_tokens=256)
    capacity = int(prompts * blocks / 1.05)
    rates = {name: replay(trace, name, capacity_chunks=capacity).second_half() for name in ("lru", "mru")}
    return {"lru_second_pass": rates["lru"], "mru_second_pass": rates["mru"]}


def coding_agents(bench: Bench) -> Figures:
    """Real coding-agent sessions by replay (simulated): the share of prompt tokens that an unlimited cache finds."""
    from experiments.curves import lru_curve
    from experiments.traces import load_trace

    trace = load_trace("weka_claude_code")
    curve = lru_curve(trace)
    return {"hit_rate_unlimited": float(curve.hits[-1] / curve.accesses)}


def codec_quality(bench: Bench) -> Figures:
    """The KV of SmolLM2's prompts through codecs: how many times smaller than 8-bit or 16-bit KV, and at which KL."""
    from experiments.quality import StudyModel, measure_quality, sample_texts

    texts = dict(list(sample_texts().items())[: bench.pick(2, 5)])
    tokens = {"prefix_tokens": bench.pick(512, 1024), "scored_tokens": 128}
    codecs = {"cachegen": "cachegen", "kivi_2": "kivi(bits=2)", "lossless": "lossless", "int8": "int8",
              "by_channel_4": "kivi(bits=4)", "by_token_4": "int4(group=32)", "fp8": "fp8"}  # fmt: skip
    found = measure_quality(StudyModel("smollm2"), list(codecs.values()), texts=texts, **tokens)
    by_name = dict(zip(codecs, found, strict=True))
    return {
        "cachegen_times_smaller_than_8_bit": 0.5 / by_name["cachegen"].size_fraction,
        "cachegen_kl": by_name["cachegen"].kl,
        "lossless_saving": 1 - by_name["lossless"].size_fraction,
        "fp8_kept_fraction": by_name["fp8"].size_fraction,
        "kivi_2_perplexity_change": float(np.exp(by_name["kivi_2"].nll_change)) - 1,
        "key_error_by_channel_over_by_token": by_name["by_channel_4"].key_error / by_name["by_token_4"].key_error,
    }
