"""Speed of the engine's own path: lookup, store and retrieve in memory, and the index at size.

    python -m experiments.benchmarks.engine [--repeats 7] [--short]

The shape is 32 layers x 8 KV heads x 128 in 16 bit (128 KiB a token), chunks of 256 tokens (32 MiB). Every copy stands
beside a plain copy of the same bytes between two warm buffers, in turns, with one thread. LMCache 0.5.6 takes its turn
in each round, where KVWORKBENCH_LMCACHE_PYTHON names an interpreter that has it (`_lmcache_peer.py` says how to make
one); without it the peer's column is empty.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.benchmarks import row
from experiments.benchmarks._peer import Peer, lmcache_peer
from experiments.environment import describe_environment
from kernels.pages import PageTable
from workbench.chunks import Chunk, ChunkChain
from workbench.control import ControlPlane
from workbench.engine import CacheEngine
from workbench.layout import Identity, KVLayout
from workbench.tiers.base import TierIndex

__all__ = ["main", "run"]

LAYERS, HEADS, HEAD_SIZE, CHUNK_TOKENS = 32, 8, 128, 256
LOOKUP_TOKENS = 10_240


def run(short: bool = False, repeats: int = 7) -> dict[str, Any]:
    """Measure everything; the short form moves 4 chunks instead of 16 and indexes 100,000 instead of a million."""
    chunks = 4 if short else 16
    with lmcache_peer() as peer:
        results = {
            "lookup": measure_lookup(repeats * 20, peer),
            "paged": measure_moves(chunks, repeats, block_size=16, peer=peer),
            "dense": measure_moves(chunks, repeats, block_size=CHUNK_TOKENS, peer=peer),
        }
    results["index"] = measure_index(100_000 if short else 1_000_000)
    return {"name": "engine", "environment": describe_environment(), "repeats": repeats, "results": results,
            "rows": _rows(results)}  # fmt: skip


def measure_lookup(repeats: int, peer: Peer | None = None) -> dict[str, Any]:
    """Seconds to look up 40 resident chunks, and a prompt that misses at once; medians. The peer's come right after."""
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
            "peer": peer and peer.ask("lookup", tokens=LOOKUP_TOKENS, repeats=repeats),
        }


def measure_moves(chunks: int, repeats: int, *, block_size: int, peer: Peer | None = None) -> dict[str, Any]:
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
    if peer:
        peer.open("dense" if block_size == CHUNK_TOKENS else "paged", chunks)
        peer.round()  # its first one makes buffers
    with CacheEngine(Identity(layout=layout, weights="bench"), memory_bytes=2 * nbytes) as engine:
        engine.store(prompts[0], pages, blocks=blocks)  # fills one half; from now on each store evicts
        engine.store(prompts[1], pages, blocks=blocks)
        for prompt in prompts[2:]:
            times["copy"].append(_seconds(lambda: np.copyto(target, source)))
            times["store"].append(_seconds(lambda p=prompt: engine.store(p, pages, blocks=blocks)))
            times["again"].append(_seconds(lambda p=prompt: engine.store(p, pages, blocks=blocks)))
            times["retrieve"].append(_seconds(lambda p=prompt: engine.retrieve(p, pages, blocks=blocks)))
            if peer:
                peer.round()
    found = {f"{name}_s": statistics.median(values) for name, values in times.items()}
    for name in ("store", "retrieve"):
        pairs = zip(times["copy"], times[name], strict=True)
        found[f"{name}_over_copy"] = statistics.median(copy / move for copy, move in pairs)
    return {**found, "nbytes": nbytes, "block_size": block_size, "peer": peer and peer.close()}


def measure_index(chunks: int) -> dict[str, float]:
    """Resident bytes of a chunk in the index, and seconds to look up prompts of 40 chunks at this size and at 10,000.

    The prompts looked up are the first 50 in the index; what comes after are chunks that nobody asks for.
    """
    import psutil

    layout = KVLayout(num_layers=1, num_kv_heads=1, head_size=1, block_size=16, chunk_tokens=CHUNK_TOKENS)
    tier = TierIndex("memory", 0, chunks * layout.chunk_nbytes, chunk_nbytes=layout.chunk_nbytes)
    control, rng = ControlPlane(layout, [tier], arena=True), np.random.default_rng(2)
    prompts = rng.integers(0, 50_000, (50, LOOKUP_TOKENS)).astype(np.int32)
    process, few = psutil.Process(), 0.0
    before, index = process.memory_info().rss, control.index
    wanted = (chunk for prompt in prompts for chunk in _chain(prompt))
    for number in range(chunks):
        if number % 40 == 0:
            parent = b"root"
        start = number % 40 * CHUNK_TOKENS
        chunk = next(wanted, None) or Chunk(rng.bytes(32), parent, start, start + CHUNK_TOKENS, b"")
        index.set_resident(index.add_chunk(chunk), 0)
        parent = chunk.key
        if number == 9_999:
            few = _lookup_seconds(control, prompts)
    grown = process.memory_info().rss - before
    return {
        "chunks": chunks,
        "nbytes_per_chunk": grown / chunks,
        "lookup_s": _lookup_seconds(control, prompts),
        "lookup_at_10000_s": few,
    }


def _chain(prompt: np.ndarray) -> ChunkChain:
    return ChunkChain(bytes(32), CHUNK_TOKENS).extend(prompt)


def _lookup_seconds(control: ControlPlane, prompts: np.ndarray, rounds: int = 11) -> float:
    """Median seconds of a lookup, keys and all; each prompt was last looked up 49 prompts ago."""

    def lookup(prompt: np.ndarray) -> None:
        assert control.lookup(_chain(prompt)) == len(prompt)

    return statistics.median(_seconds(lambda p=prompt: lookup(p)) for _ in range(rounds) for prompt in prompts)


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    lookup, index = results["lookup"], results["index"]
    theirs = lookup["peer"] or {}
    bound = theirs.get("list_hit_s", 156e-6)  # LMCache's 3.9 us a chunk on an idle machine of this kind
    rows = [
        row("lookup of 40 chunks, all hits, integer array", ours=_us(lookup["array_hit_s"]),
            peer=_us(theirs.get("array_hit_s")), ratio=lookup["array_hit_s"] / 100e-6, goal="<= 1 (100 us)",
            met=lookup["array_hit_s"] <= 100e-6),
        row("lookup of 40 chunks, all hits, list", ours=_us(lookup["list_hit_s"]), peer=_us(theirs.get("list_hit_s")),
            ratio=lookup["list_hit_s"] / bound, goal="<= 1 (the peer)", met=lookup["list_hit_s"] <= bound),
        row("lookup of 40 chunks, none there, list", ours=_us(lookup["list_miss_s"]),
            peer=_us(theirs.get("list_miss_s"))),
    ]  # fmt: skip
    for kind, least in (("dense", 0.97), ("paged", 0.8)):
        found = results[kind]
        for name in ("store", "retrieve"):
            ratio = found[f"{name}_over_copy"]
            rows.append(row(f"memory tier, {kind} source, {name}", ours=_speed(found, name),
                            peer=_peer_speed(found, name), limit=_speed(found, "copy"), ratio=ratio,
                            goal=f">= {least}", met=ratio >= least))  # fmt: skip
    again = results["paged"]["again_s"] / results["paged"]["store_s"]
    theirs = results["paged"]["peer"]
    rows.append(row("storing what is stored, over storing", ours=f"{results['paged']['again_s'] * 1e3:.2f} ms",
                    peer=f"{theirs['again_s'] * 1e3:.1f} ms" if theirs else None,
                    ratio=again, goal="no copy: <= 0.1", met=again <= 0.1))  # fmt: skip
    rows.append(row(f"index of {index['chunks']:,} chunks", ours=f"{index['nbytes_per_chunk']:.0f} bytes a chunk",
                    ratio=index["nbytes_per_chunk"] / 300, goal="<= 300 bytes",
                    met=index["nbytes_per_chunk"] <= 300))  # fmt: skip
    slower = index["lookup_s"] / index["lookup_at_10000_s"]
    rows.append(row("lookup of 40 chunks at that size, over 10,000 chunks", ours=_us(index["lookup_s"]), ratio=slower,
                    goal="<= 2", met=slower <= 2))  # fmt: skip
    return rows


def _us(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e6:.0f} us"


def _peer_speed(found: dict[str, Any], name: str) -> str | None:
    """The peer's bytes per second and how they compare with the copy that it makes itself in the same round."""
    theirs = found["peer"]
    if not theirs:
        return None
    return f"{found['nbytes'] / theirs[f'{name}_s'] / 1e9:.1f} GB/s, {theirs[f'{name}_over_copy']:.2f} of a copy"


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
