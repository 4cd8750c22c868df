"""Clearing one tenant's chunks: all of them, in every tier, also after a restart, and nobody else's."""

import pytest
from fault_servers import redis_process
from oracle import IDENTITY, Pages, audit, chain_of

from workbench.chunks import ChunkScope
from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("whole_chunks")

CHUNK = IDENTITY.layout.chunk_nbytes
BLOCKS = list(range(48))
PROMPTS = [list(range(start, start + 30)) for start in (0, 100, 1000)]
ALICE, BOB = ChunkScope(salt="alice"), ChunkScope(salt="bob")


@pytest.fixture(scope="module")
def redis_url():
    server = redis_process()
    yield server.url
    server.close()


@pytest.fixture(params=["memory", "disk", "through", "back", "encoded", "redis", "object_store"])
def settings(request, tmp_path):
    kind = request.param
    disk = {"disk_path": tmp_path / "kv"}
    if kind == "redis":
        return {"memory_bytes": 0, "redis_url": request.getfixturevalue("redis_url"), "redis_timeout_seconds": 5.0}
    return {
        "memory": {"memory_bytes": "1MiB"},
        "disk": {"memory_bytes": 0, **disk},
        "through": {"memory_bytes": 3 * CHUNK, **disk},
        "back": {"memory_bytes": 3 * CHUNK, "write": "back", **disk},
        "encoded": {"memory_bytes": "1MiB", "memory_codec": "lossless"},
        "object_store": {"memory_bytes": 0, "object_store_url": f"file://{tmp_path}/objects",
                         "object_store_timeout_seconds": 5.0},
    }[kind]  # fmt: skip


def fill(engine, *scopes):
    for scope in scopes:
        for tokens in PROMPTS:
            pages = Pages(48)
            pages.compute(chain_of(tokens, scope=scope), BLOCKS)
            engine.store(tokens, pages.table, blocks=BLOCKS, scope=scope)
        assert engine.flush()


def hits(engine, scope) -> list[int]:
    return [engine.lookup(tokens, scope=scope) for tokens in PROMPTS]


def exact(engine, scope) -> bool:
    """Every prompt comes back whole and right."""
    for tokens in PROMPTS:
        pages = Pages(48)
        if engine.retrieve(tokens, pages.table, blocks=BLOCKS, scope=scope) != 24:
            return False
        assert not pages.wrong_chunks(chain_of(tokens, scope=scope), BLOCKS, 24)
        engine.flush()
    return True


def test_only_the_named_tenant_is_cleared(settings):
    with CacheEngine(IDENTITY, **settings) as engine:
        fill(engine, ALICE, BOB, ChunkScope())
        assert hits(engine, ALICE) == [24] * 3
        engine.clear("alice")
        assert hits(engine, ALICE) == [0] * 3
        assert exact(engine, BOB) and exact(engine, ChunkScope())
        assert engine.explain(PROMPTS[0], scope=ALICE).shared_tokens == 0, "nothing of the prompts is remembered"
        fill(engine, ALICE)
        assert exact(engine, ALICE), "a cleared tenant stores anew"
        engine.clear("")
        assert hits(engine, ChunkScope()) == [0] * 3 and exact(engine, BOB)
        engine.clear("nobody")
        assert exact(engine, BOB)
        engine.clear()
        assert hits(engine, BOB) == hits(engine, ALICE) == [0] * 3
        engine.flush()
        audit(engine.control)
        assert sum(tier.chunks for tier in engine.tiers()) == 0


def test_adapters_of_a_tenant(settings):
    with_adapter, others = ChunkScope("alice", ("A", "1")), ChunkScope("bob", ("A", "1"))
    with CacheEngine(IDENTITY, **settings) as engine:
        fill(engine, ALICE, with_adapter, others)
        engine.clear(with_adapter)
        assert hits(engine, with_adapter) == [0] * 3 and hits(engine, ALICE) == [24] * 3
        fill(engine, with_adapter)
        engine.clear("alice")
        assert hits(engine, with_adapter) == hits(engine, ALICE) == [0] * 3 and exact(engine, others)
        engine.clear()


def test_after_a_restart(tmp_path):
    settings = {"memory_bytes": 4 * CHUNK, "disk_path": tmp_path}
    with CacheEngine(IDENTITY, **settings) as engine:
        fill(engine, ALICE, BOB)
    with CacheEngine(IDENTITY, **settings) as engine:
        engine.clear("alice")
    assert len(list(tmp_path.rglob("*.kv"))) == 9
    with CacheEngine(IDENTITY, **settings) as engine:
        assert hits(engine, ALICE) == [0] * 3 and exact(engine, BOB)
        audit(engine.control)


def test_a_namespace_that_is_none():
    with CacheEngine(IDENTITY, memory_bytes="1MiB") as engine, pytest.raises(InvalidInputError, match="salt"):
        engine.clear(5)


def test_what_is_pinned_stays():
    with CacheEngine(IDENTITY, memory_bytes="1MiB") as engine:
        fill(engine, ALICE)
        pin = engine.pin(PROMPTS[0], scope=ALICE)
        engine.clear("alice")
        assert hits(engine, ALICE) == [24, 0, 0]
        engine.unpin(pin)
        engine.clear("alice")
        assert hits(engine, ALICE) == [0, 0, 0]
        audit(engine.control)
