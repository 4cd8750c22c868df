"""Several engines in several processes share a directory and a Redis server: right bytes, no errors, caps kept.

Each process has a memory tier of its own and stores, retrieves, looks up, prefetches, pins and clears prompts that all
have in common. Every chunk that is given out is compared with the oracle to the byte.
"""

import multiprocessing
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fault_servers import redis_process
from oracle import IDENTITY, SMALL, Pages, audit, chain_of
from test_disk import leftovers
from test_engine import BLOCKS, CHUNK, ON_DISK, prompts

from workbench.engine import CacheEngine
from workbench.tiers.disk import DiskTier

MEMORY_CHUNKS, DISK_CHUNKS, REDIS_CHUNKS = 12, 150, 400
SURVEY_SECONDS = 0.2  # between two looks at what the others brought to the directory
REDIS_LIMIT = "6mb"  # the server itself evicts, too
WEIGHTS = {"retrieve": 40, "store": 40, "lookup": 10, "prefetch": 5, "pin": 4, "clear": 0.2}


def settings(folder: str, url: str) -> dict:
    return {
        "memory_bytes": MEMORY_CHUNKS * CHUNK,
        "disk_path": folder,
        "disk_bytes": DISK_CHUNKS * ON_DISK,
        "disk_survey_seconds": SURVEY_SECONDS,
        "redis_url": url,
        "redis_bytes": REDIS_CHUNKS * (4096 + CHUNK),
        "redis_timeout_seconds": 5.0,
    }


def one_engine(folder: str, url: str, seed: int, seconds: float, results) -> None:
    """One process: works until the time is over, then reports its counts."""
    counts: Counter = Counter()
    rng, pages = np.random.default_rng(seed), Pages(64)
    with CacheEngine(IDENTITY, **settings(folder, url)) as engine:
        work(engine, pages, rng, until=time.monotonic() + seconds, counts=counts)
        assert engine.flush()
        audit(engine.control)
        stats = engine.stats()
        counts.update({f"load {reason}": n for reason, n in stats["failed_loads"].items()})
        counts.update({f"write {reason}": n for reason, n in stats["failed_stores"].items()})
        kinds = Counter((event.kind, event.tier) for event in engine.record.events)
        counts.update({f"hits in {tier}": n for (kind, tier), n in kinds.items() if kind == "hit"})
        counts["evictions"] = engine.record.totals.count("evict")
    results.put(counts)


def work(engine: CacheEngine, pages: Pages, rng: np.random.Generator, *, until: float, counts: Counter) -> None:
    names, weights = list(WEIGHTS), np.array(list(WEIGHTS.values()))
    for tokens in prompts(rng):
        what = str(rng.choice(names, p=weights / weights.sum()))
        try:
            do(what, engine, tokens, pages, rng, counts)
        except Exception as error:  # what a caller would see
            counts[f"ERROR {type(error).__name__}: {error}"] += 1
        counts[what] += 1
        for tier in engine.tiers():
            counts["OVER CAPACITY"] += tier.high_water_bytes > tier.capacity_bytes
        if time.monotonic() > until:
            return


def do(what: str, engine: CacheEngine, tokens, pages: Pages, rng: np.random.Generator, counts: Counter) -> None:
    match what:
        case "retrieve":
            pages.spoil(rng)
            hit = engine.retrieve(tokens, pages.table, blocks=BLOCKS)
            counts["chunks compared"] += hit // SMALL.chunk_tokens
            counts["WRONG BYTES"] += len(pages.wrong_chunks(chain_of(tokens), BLOCKS, hit))
        case "store":
            pages.compute(chain_of(tokens), BLOCKS)
            engine.store(tokens, pages.table, blocks=BLOCKS)
        case "lookup":
            engine.lookup(tokens)
        case "prefetch":
            engine.prefetch(tokens)
        case "pin":
            engine.unpin(engine.pin(tokens))
        case "clear":
            engine.clear()


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512 if path.is_file() else 0
        except OSError:  # evicted while it was counted
            pass
    return total


@pytest.mark.redis
@pytest.mark.parametrize("processes, seconds", [(3, 6), pytest.param(8, 60, marks=pytest.mark.slow)])
def test_engines_share_a_directory_and_a_redis_server(processes, seconds, tmp_path, capsys):
    server = redis_process("--maxmemory", REDIS_LIMIT, "--maxmemory-policy", "allkeys-lru")
    context = multiprocessing.get_context("spawn")
    results, most = context.Queue(), 0
    arguments = [(str(tmp_path), server.url, seed, seconds, results) for seed in range(processes)]
    workers = [context.Process(target=one_engine, args=given) for given in arguments]
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers) and results.qsize() < processes:
            most = max(most, disk_bytes(tmp_path))
            time.sleep(0.05)
        counts = sum((results.get(timeout=30) for _ in workers), Counter())
        for worker in workers:
            worker.join(30)
        assert [worker.exitcode for worker in workers] == [0] * processes
    finally:
        for worker in workers:
            worker.kill()
        server.close()
    with capsys.disabled():
        print(f"\n{processes} engines, {seconds} s: {dict(sorted(counts.items()))}, disk at most {most} bytes")
    assert counts["WRONG BYTES"] == counts["OVER CAPACITY"] == 0
    assert not [name for name in counts if name.startswith("ERROR")]
    assert not {"load corrupt", "load mismatch"} & set(counts)
    assert all(counts[f"hits in {tier}"] for tier in ("memory", "disk", "redis"))
    assert counts["chunks compared"] > 100 * processes and counts["evictions"]
    assert most <= 2 * DISK_CHUNKS * ON_DISK, "the directory outgrew its cap by more than comes between two looks"
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path, disk_bytes=DISK_CHUNKS * ON_DISK) as engine:
        engine.flush()
        assert engine.tiers()[0].used_bytes == disk_bytes(tmp_path) <= DISK_CHUNKS * ON_DISK
    list(DiskTier(tmp_path).scan())
    assert not leftovers(tmp_path)
