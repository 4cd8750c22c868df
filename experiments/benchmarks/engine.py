"""Speed of the engine's own path: lookup, store and retrieve in memory, and the index at size.

    python -m experiments.benchmarks.engine [--repeats 7] [--short]

The shape is 32 layers x 8 KV heads x 128 in 16 bit (128 KiB a token), chunks of 256 tokens (32 MiB). Every copy stands
beside a plain copy of the same bytes between two warm buffers, in turns, with one thread. The peer is LMCache 0.5.6 in
an environment of its own, where KVWORKBENCH_LMCACHE_PYTHON names its interpreter and KVWORKBENCH_LMCACHE_BENCH the
script that drives it; without them the peer's column is empty.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.benchmarks import row
from experiments.environment import describe_environment
from kernels.pages import PageTable
from workbench.chunks import Chunk
from workbench.engine import CacheEngine
from workbench.index import ChunkIndex
from workbench.layout import Identity, KVLayout

__all__ = ["main", "run"]

LAYERS, HEADS, HEAD_SIZE, CHUNK_TOKENS = 32, 8, 128, 256
LOOKUP_TOKENS = 10_240


def run(short: bool = False, repeats: int = 7) -> dict[str, Any]:
    """Measure everything; the short form moves 4 chunks instead of 16 and indexes 100,000 instead of a million."""
    chunks = 4 if short else 16
    results = {
        "lookup": measure_lookup(repeats * 20),
        "paged": measure_moves(chunks, repeats, block_size=16),
        "dense": measure_moves(chunks, repeats, block_size=CHUNK_TOKENS),
        "index": measure_index(100_000 if short else 1_000_000),
        "peer": measure_peer(),
    }
    return {"name": "engine", "environment": describe_environment(), "repeats": repeats, "results": results,
            "rows": _rows(results)}  # fmt: skip


def measure_lookup(repeats: int) -> dict[str, float]:
    """Seconds to look up 40 resident chunks, and a prompt that misses at once; medians."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_size=16, block_size=16, chunk_tokens=CHUNK_TOKENS)
    tokens = np.random.default_rng(0).integers(0, 50_000, LOOKUP_TOKENS).astype(np.int32)
    other = tokens.copy()
    other[0] += 1
    with CacheEngine(Identity(layout=layout, weights="bench"), memory_bytes="64MiB") as engine:
        pages = PageTable([np.zeros((LOOKUP_TOKENS // 16, layout.page_nbytes), np.uint8)])
        assert engine.store(tokens, pages, blocks=range(LOOKUP_TOKENS // 16)) == LOOKUP_TOKENS
        as_list, other_list = tokens.tolist(), other.tolist()
        return {
            "array_hit_s": _median(lambda: engine.lookup(tokens), repeats),
            "list_hit_s": _median(lambda: engine.lookup(as_list), repeats),
            "array_miss_s": _median(lambda: engine.lookup(other), repeats),
            "list_miss_s": _median(lambda: engine.lookup(other_list), repeats),
        }


def measure_moves(chunks: int, repeats: int, block_size: int) -> dict[str, float]:
    """Store, retrieve and store again against a plain copy: one thread, medians of seconds for the same bytes."""
    import numba

    layout = KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_size=HEAD_SIZE, block_size=block_size,
                      chunk_tokens=CHUNK_TOKENS)  # fmt: skip
    blocks_needed = chunks * layout.blocks_per_chunk
    rng = np.random.default_rng(1)
    pages = PageTable([rng.integers(0, 256, (blocks_needed + 8, layout.page_nbytes), np.uint8) for _ in range(LAYERS)])
    blocks = (
        rng.permutation(blocks_needed + 8)[:blocks_needed].tolist()
        if block_size < CHUNK_TOKENS
        else list(range(chunks))
    )
    prompts = [rng.integers(0, 50_000, chunks * CHUNK_TOKENS) for _ in range(repeats + 2)]
    nbytes = chunks * layout.chunk_nbytes
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times: dict[str, list[float]] = {"copy": [], "store": [], "again": [], "retrieve": []}
    numba.set_num_threads(1)
    with CacheEngine(Identity(layout=layout, weights="bench"), memory_bytes=2 * nbytes) as engine:
        engine.store(prompts[0], pages, blocks=blocks)  # fills one half; from now on each store evicts
        engine.store(prompts[1], pages, blocks=blocks)
        for prompt in prompts[2:]:
            times["copy"].append(_seconds(lambda: np.copyto(target, source)))
            times["store"].append(_seconds(lambda p=prompt: engine.store(p, pages, blocks=blocks)))
            times["again"].append(_seconds(lambda p=prompt: engine.store(p, pages, blocks=blocks)))
            times["retrieve"].append(_seconds(lambda p=prompt: engine.retrieve(p, pages, blocks=blocks)))
    found = {f"{name}_s": statistics.median(values) for name, values in times.items()}
    for name in ("store", "retrieve"):
        pairs = zip(times["copy"], times[name], strict=True)
        found[f"{name}_over_copy"] = statistics.median(copy / move for copy, move in pairs)
    return {**found, "nbytes": nbytes, "block_size": block_size}


def measure_index(chunks: int) -> dict[str, float]:
    """Resident bytes of a chunk in the index, and seconds of a lookup at this size and at 10,000."""
    import psutil

    process, keys = psutil.Process(), np.random.default_rng(2)
    before, index = process.memory_info().rss, ChunkIndex()
    few = 0.0
    parent = b"root"
    for number in range(chunks):
        key = keys.bytes(32)
        entry = index.add_chunk(Chunk(key, parent, number % 40 * CHUNK_TOKENS, (number % 40 + 1) * CHUNK_TOKENS, b""))
        index.set_resident(entry, 0)
        parent = key if number % 40 < 39 else b"root"
        if number == 9_999:
            few = _find_seconds(index)
    grown = process.memory_info().rss - before
    return {
        "chunks": chunks,
        "nbytes_per_chunk": grown / chunks,
        "find_s": _find_seconds(index),
        "find_at_10000_s": few,
    }


def _find_seconds(index: ChunkIndex, lookups: int = 20_000) -> float:
    rng = np.random.default_rng(3)
    wanted = [index.keys[i] for i in rng.integers(0, len(index), lookups)]
    return _seconds(lambda: [index.find(key) for key in wanted]) / lookups


def measure_peer() -> dict[str, Any] | None:
    """LMCache's figures for the same shape in this run, or None."""
    python, script = (os.environ.get(f"KVWORKBENCH_LMCACHE_{name}") for name in ("PYTHON", "BENCH"))
    if not python or not script:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [python, script, "--parts", "hash,memory,paged,lookup", "--workdir", folder]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=900, check=False)
    return json.loads(done.stdout[done.stdout.index("{") :]) if done.returncode == 0 else {"error": done.stderr[-500:]}


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    lookup, index = results["lookup"], results["index"]
    rows = [
        row("lookup of 40 chunks, all hits, integer array", ours=f"{lookup['array_hit_s'] * 1e6:.0f} us",
            ratio=lookup["array_hit_s"] * 1e6 / 100, goal="<= 1 (100 us)", met=lookup["array_hit_s"] <= 100e-6),
        row("lookup of 40 chunks, all hits, list", ours=f"{lookup['list_hit_s'] * 1e6:.0f} us", goal="<= 156 us",
            ratio=lookup["list_hit_s"] * 1e6 / 156, met=lookup["list_hit_s"] <= 156e-6),
    ]  # fmt: skip
    for kind, least in (("dense", 0.97), ("paged", 0.8)):
        found = results[kind]
        for name in ("store", "retrieve"):
            ratio = found[f"{name}_over_copy"]
            rows.append(row(f"memory tier, {kind} source, {name}", ours=_speed(found, name),
                            limit=_speed(found, "copy"),
                            ratio=ratio, goal=f">= {least}", met=ratio >= least))  # fmt: skip
    again = results["paged"]["again_s"] / results["paged"]["store_s"]
    rows.append(row("storing what is stored, over storing", ours=f"{results['paged']['again_s'] * 1e3:.2f} ms",
                    ratio=again, goal="no copy: <= 0.1", met=again <= 0.1))  # fmt: skip
    rows.append(row(f"index of {index['chunks']:,} chunks", ours=f"{index['nbytes_per_chunk']:.0f} bytes a chunk",
                    ratio=index["nbytes_per_chunk"] / 300, goal="<= 300 bytes",
                    met=index["nbytes_per_chunk"] <= 300))  # fmt: skip
    slower = index["find_s"] / index["find_at_10000_s"]
    rows.append(row("find at that size over find at 10,000", ours=f"{index['find_s'] * 1e9:.0f} ns", ratio=slower,
                    goal="<= 2", met=slower <= 2))  # fmt: skip
    return rows


def _speed(found: dict[str, float], name: str) -> str:
    return f"{found['nbytes'] / found[f'{name}_s'] / 1e9:.1f} GB/s"


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(call: Callable[[], Any], repeats: int) -> float:
    return statistics.median(_seconds(call) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    print(json.dumps(run(options.short, options.repeats), indent=1))


if __name__ == "__main__":
    main()
