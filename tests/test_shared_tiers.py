"""Engines that know nothing of each other share a tier: one stores, another finds, and what is gone is a miss."""

import pytest
from fault_servers import redis_process
from oracle import IDENTITY, Pages, audit, chain_of

from workbench import CacheEngine, ChunkScope
from workbench.tiers.base import Tier

TOKENS = list(range(100, 140))
BLOCKS = list(range(40))


@pytest.fixture(scope="module")
def redis_url():
    server = redis_process()
    yield server.url
    server.close()


@pytest.fixture(params=["redis", "object_store"])
def shared(request, tmp_path):
    """Settings of an engine with one shared tier below a small memory tier."""
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        return {"redis_url": url, "redis_timeout_seconds": 5.0}
    return {"object_store_url": f"file://{tmp_path}", "object_store_timeout_seconds": 5.0}


def engine(shared, chunks=2, **more):
    return CacheEngine(IDENTITY, memory_bytes=chunks * IDENTITY.layout.chunk_nbytes, **shared, **more)


def scope(request):
    return ChunkScope(salt=request.node.name)  # the server outlives the test


def computed(tokens, salt=ChunkScope()):
    pages = Pages(48)
    pages.compute(chain_of(tokens, scope=salt), BLOCKS)
    return pages


def test_another_engine_finds_what_one_stored(shared, request):
    salt, target = scope(request), Pages(48)
    with engine(shared) as one, engine(shared) as other:
        assert other.lookup(TOKENS, scope=salt) == 0
        assert one.store(TOKENS, computed(TOKENS, salt).table, blocks=BLOCKS, scope=salt) == len(TOKENS)
        assert one.flush()
        assert other.lookup(TOKENS, scope=salt) == len(TOKENS)
        assert other.retrieve(TOKENS, target.table, blocks=BLOCKS[::-1], scope=salt) == len(TOKENS)
        assert target.wrong_chunks(chain_of(TOKENS, scope=salt), BLOCKS[::-1], len(TOKENS)) == []
        assert other.stats()["failed_loads"] == {}
        audit(other.control)


def test_what_is_gone_there_is_a_miss_and_found_again_when_stored_anew(shared, request):
    salt = scope(request)
    pages = computed(TOKENS, salt)
    with engine(shared) as one, engine(shared) as other:
        one.store(TOKENS, pages.table, blocks=BLOCKS, scope=salt)
        one.flush()
        assert other.lookup(TOKENS, scope=salt) == len(TOKENS)
        for presence in other.control._shared.values():
            presence.seconds = 0.0  # believe nothing: ask each time
            presence._known.clear()
        remote: Tier = one.data.tiers[-1]
        for chunk in chain_of(TOKENS, scope=salt):
            remote.erase(chunk.key)
        assert other.lookup(TOKENS, scope=salt) == 0
        assert other.explain(TOKENS, scope=salt).miss_reason == "evicted elsewhere"
        assert other.store(TOKENS, pages.table, blocks=BLOCKS, scope=salt) == len(TOKENS)
        other.flush()
        one.clear()


def test_eviction_of_what_others_use_only_forgets(shared, request):
    """A small budget in one engine takes nothing away from another."""
    salt, name = scope(request), next(iter(shared)).removesuffix("_url")
    with engine(shared) as probe:
        one_chunk = probe.control.tiers[1].chunk_nbytes
    with engine(shared, **{f"{name}_bytes": 2 * one_chunk}) as small, engine(shared) as other:
        for start in (0, 1000, 2000):
            tokens = [start + t for t in TOKENS]
            small.store(tokens, computed(tokens, salt).table, blocks=BLOCKS, scope=salt)
            small.flush()
        tier = small.tiers()[1]
        assert tier.used_bytes <= tier.capacity_bytes
        assert any(e.kind == "evict" and e.tier == name for e in small.record.events)
        assert other.lookup(TOKENS, scope=salt) >= IDENTITY.layout.chunk_tokens


def test_a_dead_server_is_a_miss():
    server = redis_process()
    settings = {"redis_url": server.url, "redis_timeout_seconds": 0.25}
    pages = computed(TOKENS)
    with engine(settings, chunks=8) as one:
        one.store(TOKENS, pages.table, blocks=BLOCKS)
        one.flush()
        server.close()
        assert one.lookup(TOKENS) == len(TOKENS), "the memory tier has it still"
        assert one.lookup([7] * 40) == 0
        assert one.store([9] * 40, pages.table, blocks=BLOCKS) == 40, "stores go on in memory"
        one.flush()
        assert one.stats()["failed_stores"]
        assert one.retrieve([9] * 40, pages.table, blocks=BLOCKS) == 40
