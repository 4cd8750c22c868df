"""The engine as one object: what is retrieved is what was stored, or it is not retrieved."""

import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from oracle import IDENTITY, SMALL, Pages, audit, chain_of, orphans

from workbench.chunks import ChunkScope
from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError, LayoutError
from workbench.layout import Identity, KVLayout
from workbench.tiers.disk import DiskTier

pytestmark = pytest.mark.usefixtures("whole_chunks")

CHUNK = SMALL.chunk_nbytes
ON_DISK = 4096 + 4096  # a header page and a payload of less than a page
BLOCKS = list(range(64))


def store(engine, tokens, pages=None, blocks=BLOCKS, scope=None) -> int:
    scope = scope or ChunkScope()
    pages = pages or Pages(64, engine.identity.layout)
    pages.compute(chain_of(tokens, engine.identity, scope), blocks)
    return engine.store(tokens, pages.table, blocks=blocks, scope=scope)


def retrieve(engine, tokens, blocks=BLOCKS, scope=None) -> int:
    """Tokens retrieved, compared with the oracle to the byte."""
    scope = scope or ChunkScope()
    pages = Pages(64, engine.identity.layout)
    pages.spoil(np.random.default_rng(0))
    hit = engine.retrieve(tokens, pages.table, blocks=blocks, scope=scope)
    assert not pages.wrong_chunks(chain_of(tokens, engine.identity, scope), blocks, hit)
    return hit


def rest(engine) -> None:
    """Everything that is under way arrives; then all bookkeeping must be right."""
    assert engine.flush()
    audit(engine.control)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    "layout",
    [
        SMALL,
        KVLayout(num_layers=1, num_kv_heads=1, head_size=4, block_size=1, chunk_tokens=1, dtype="fp8_e4m3"),
        KVLayout(num_layers=3, num_kv_heads=2, head_size=5, block_size=2, chunk_tokens=6, dtype="float16"),
        KVLayout(num_layers=2, num_kv_heads=3, head_size=8, block_size=16, chunk_tokens=16, dtype="float32"),
        KVLayout(num_layers=4, num_kv_heads=2, head_size=64, block_size=16, chunk_tokens=256),
    ],
    ids=lambda layout: f"{layout.num_layers}x{layout.chunk_tokens}x{layout.page_nbytes}",
)
@pytest.mark.parametrize("tiers", ["memory", "disk", "both", "back"])
def test_round_trip(layout, tiers, tmp_path):
    identity, rng = Identity(layout=layout, weights="w"), np.random.default_rng(0)
    settings = {
        "memory_bytes": 40 * layout.chunk_nbytes if tiers != "disk" else 0,
        "write": "back" if tiers == "back" else "through",
        "disk_path": tmp_path if tiers != "memory" else None,
        "verify": True,
        "staging_bytes": 8 * layout.chunk_nbytes,
    }
    with CacheEngine(identity, **settings) as engine:
        for count in (0, 1, layout.chunk_tokens - 1, layout.chunk_tokens, 3 * layout.chunk_tokens + 1):
            tokens = rng.integers(0, 2**31, count)
            blocks = rng.permutation(64)
            full = count // layout.chunk_tokens * layout.chunk_tokens
            assert retrieve(engine, tokens) == 0
            assert store(engine, tokens, blocks=blocks) == full
            engine.flush()
            assert engine.lookup(tokens) == retrieve(engine, tokens, blocks=rng.permutation(64)) == full
            assert store(engine, tokens) == 0, "what is there is not stored again"
        rest(engine)


def test_boundaries_at_the_end_of_a_prompt_and_while_decoding():
    layout = replace(SMALL, block_size=16, chunk_tokens=16)
    identity = Identity(layout=layout, weights="w")
    for n in (15, 16, 17, 31, 32, 33, 48):
        with CacheEngine(identity, memory_bytes="4MiB") as engine:
            seen = 0
            for length in (n, n + 1, n + 15, n + 16, n + 17):
                seen += store(engine, range(length))
                assert seen == length // 16 * 16 == engine.lookup(range(length))
            assert len(engine.control.memory) == (n + 17) // 16
            assert engine.lookup(range(n)) == 16 * (n // 16)


def test_a_hole_ends_the_hit(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        store(engine, range(24))
        rest(engine)
        DiskTier(tmp_path).erase(chain_of(range(24))[1].key)
        assert engine.lookup(range(24)) == 24
        assert retrieve(engine, range(24)) == 8
        assert engine.lookup(range(24)) == 8 and engine.stats()["failed_loads"] == {"absent": 1}
        assert "absent" in str(engine.explain(range(24)))
        assert store(engine, range(24)) == 8
        engine.flush()
        assert retrieve(engine, range(24)) == 24
        rest(engine)


# ---------------------------------------------------------------- the random walk

WALKS = {
    "memory": {"memory_bytes": 6 * CHUNK},
    "through": {"memory_bytes": 3 * CHUNK, "disk_bytes": 9 * ON_DISK},
    "back": {"memory_bytes": 3 * CHUNK, "disk_bytes": 6 * ON_DISK, "write": "back"},
    "back, wide": {"memory_bytes": 8 * CHUNK, "disk_bytes": 3 * ON_DISK, "write": "back"},
    "disk": {"memory_bytes": 0, "disk_bytes": 5 * ON_DISK},
    "one each": {"memory_bytes": CHUNK, "disk_bytes": ON_DISK},
    "one each, back": {"memory_bytes": CHUNK, "disk_bytes": ON_DISK, "write": "back"},
    "narrow": {"memory_bytes": 3 * CHUNK, "disk_bytes": 9 * ON_DISK, "staging_bytes": 1},
    "other policies": {"memory_bytes": 4 * CHUNK, "disk_bytes": 7 * ON_DISK, "policy": "fifo", "disk_policy": "lru"},
}
REACHED = {  # kinds of events that a walk must have seen, or it proves little
    "memory": {"evict", "drop"},
    "through": {"evict", "drop", "promote", "dedup"},
    "disk": {"evict", "drop", "dedup"},
    "back": {"evict", "drop", "demote", "promote"},
    "back, wide": {"evict", "demote", "promote"},
    "one each": {"evict", "drop"},
    "one each, back": {"evict", "drop", "demote"},
    "narrow": {"evict", "promote"},
    "other policies": {"evict", "drop", "promote"},
}


def prompts(rng: np.random.Generator):
    """Prompts that share prefixes often: each is a walk down a small tree."""
    while True:
        tokens = np.repeat(rng.integers(0, 3, size=6) + 10 * np.arange(6), 8)
        yield tokens[: rng.integers(1, 49)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WALKS)
def test_random_walk(name, seed, tmp_path):
    rng, settings = np.random.default_rng(seed), dict(WALKS[name])
    if "disk_bytes" in settings:
        settings["disk_path"] = tmp_path
    with CacheEngine(IDENTITY, verify=True, **settings) as engine:
        for step, tokens in enumerate(prompts(rng)):
            blocks = rng.permutation(64)
            retrieve(engine, tokens, blocks=blocks)
            store(engine, tokens, blocks=blocks)
            audit(engine.control, at_rest=False)
            if step % 10 == 0:
                rest(engine)
                assert not orphans(engine.control), "a child outlived its parent"
            if step == 150:
                break
        rest(engine)
        hit_tiers = {e.tier for e in engine.record.events if e.kind == "hit"}
        assert (
            hit_tiers == {t.name for t in engine.tiers()} or name == "one each"
        )  # there the disk holds what memory does
        assert REACHED[name] <= {e.kind for e in engine.record.events}
        assert not engine.stats()["failed_loads"]
        assert set(engine.stats()["failed_stores"]) <= {"queue full", "prefix not stored"}
        assert engine.data.verified_loads > 0
        on_disk = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.kv"))
        assert on_disk == sum(t.used_bytes for t in engine.tiers() if t.name == "disk") <= settings.get("disk_bytes", 0)
        engine.clear()
        rest(engine)
        assert all(t.chunks == t.used_bytes == 0 for t in engine.tiers())
        assert not list(tmp_path.rglob("*.kv")) and len(engine.control.index) == 0


def test_a_demoted_chunk_comes_back_whole(tmp_path):
    """What goes down carries its tokens and its parent, also the very first chunk of a prompt."""
    settings = {"memory_bytes": 2 * CHUNK, "disk_path": tmp_path, "write": "back"}
    with CacheEngine(IDENTITY, **settings) as engine:
        for start in range(0, 320, 40):
            store(engine, range(start, start + 16))
        rest(engine)
        assert engine.record.totals.count("demote") == 14
        assert all(retrieve(engine, range(start, start + 16)) == 16 for start in range(0, 320, 40))
        assert not engine.stats()["failed_loads"] and not engine.stats()["failed_stores"]


def test_write_back_touches_the_disk_only_on_eviction(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=4 * CHUNK, disk_path=tmp_path, write="back") as engine:
        store(engine, range(32))
        rest(engine)
        assert not list(tmp_path.rglob("*.kv"))
        store(engine, range(100, 108))
        rest(engine)
        assert len(list(tmp_path.rglob("*.kv"))) == 1
        assert retrieve(engine, range(32)) == 32


def test_write_through_is_on_disk_after_flush(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=4 * CHUNK, disk_path=tmp_path) as engine:
        store(engine, range(32))
        assert engine.flush()
        assert len(list(tmp_path.rglob("*.kv"))) == 4


def test_chunks_that_a_load_needs_do_not_make_room_for_its_promotions(tmp_path):
    """Prefix on disk, tail in memory alone: promoting the prefix must not push the tail out before it is loaded."""
    with CacheEngine(IDENTITY, memory_bytes=4 * CHUNK, disk_path=tmp_path, write="back") as engine:
        store(engine, range(32))
        store(engine, range(100, 116))  # two of the four go down, deepest first
        rest(engine)
        for _ in range(3):
            assert retrieve(engine, range(32)) == 32
            engine.flush()  # what made room has to arrive below before it is found again
            assert retrieve(engine, range(100, 116)) == 16
            engine.flush()
        assert not engine.stats()["failed_loads"]
        rest(engine)


# ---------------------------------------------------------------- larger than the cache


@pytest.mark.parametrize("chunks", [1, 2, 9, 10, 11])
@pytest.mark.parametrize("tiers", ["memory", "disk", "both", "back"])
def test_a_request_larger_than_the_cache_keeps_its_longest_prefix(tiers, chunks, tmp_path):
    settings = {"memory_bytes": chunks * CHUNK if tiers in ("memory", "both") else 0}
    if tiers in ("disk", "both"):
        settings |= {"disk_path": tmp_path, "disk_bytes": chunks * ON_DISK}
    if tiers == "back":
        settings = {"memory_bytes": CHUNK, "disk_path": tmp_path, "disk_bytes": chunks * ON_DISK, "write": "back"}
    start = time.monotonic()
    with CacheEngine(IDENTITY, **settings) as engine:
        for _ in range(3):
            store(engine, range(80))
            engine.flush()
            kept = engine.lookup(range(80))
            assert kept >= 8 * min(chunks, 10)
            assert retrieve(engine, range(80)) == kept
            rest(engine)
        store(engine, range(200, 280))
        rest(engine)
        assert retrieve(engine, range(200, 280)) >= 8 * min(chunks, 10), "the next request gets its room, too"
    assert time.monotonic() - start < 2


def test_one_byte_short_is_one_chunk_less(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=3 * CHUNK - 1) as engine:
        store(engine, range(80))
        assert retrieve(engine, range(80)) == 16
        assert engine.stats()["dropped"] == {"no room": 1, "prefix not stored": 7}
        assert "no room" in str(engine.explain(range(80)))


# ---------------------------------------------------------------- explain


def test_explain_says_what_was_shared_and_what_was_lost():
    layout = replace(SMALL, block_size=16, chunk_tokens=16)
    engine = CacheEngine(Identity(layout=layout, weights="w"), memory_bytes="1MiB")
    a = list(range(100))
    assert store(engine, a) == 96
    b = [*range(40), *range(900, 960)]
    c = [*range(15), *range(900, 960)]
    d = [5000, *range(1, 100)]
    assert [engine.lookup(p) for p in (a, b, c, d)] == [96, 32, 0, 0]
    assert str(engine.explain(b)) == "32 of 100 tokens hit; shared 40 tokens, 8 lost to chunk size"
    assert str(engine.explain(c)) == "0 of 75 tokens hit; shared 15 tokens < chunk 16"
    assert "diverges at token 0" in str(engine.explain(d))
    assert str(engine.explain(a)) == "96 of 100 tokens hit; the last 4 tokens do not fill a chunk"
    assert str(engine.explain(a[:96])) == "96 of 96 tokens hit"
    assert "shorter than a chunk" in str(engine.explain(a[:10]))
    assert "diverges at token 0" in str(engine.explain(a, scope=ChunkScope(salt="other"))), (
        "nothing told of other salts"
    )
    assert engine.explain(b).hit_tiers == ("memory", "memory") and engine.explain([]).hit_tokens == 0
    engine.close()


def test_explain_names_eviction():
    with CacheEngine(IDENTITY, memory_bytes=CHUNK) as engine:
        store(engine, range(8))
        store(engine, range(50, 58))
        assert "evicted" in str(engine.explain(range(8)))


# ---------------------------------------------------------------- restart


def test_restart_finds_everything_and_counts_the_same(tmp_path):
    settings = {"memory_bytes": 0, "disk_path": tmp_path}
    with CacheEngine(IDENTITY, **settings) as engine:
        for start in range(0, 1000, 40):
            store(engine, range(start, start + 32))
        engine.flush()
        before = engine.tiers()
        assert before[0].chunks == 100
    for _ in range(2):
        with CacheEngine(IDENTITY, **settings) as engine:
            after = engine.tiers()
            assert (after[0].chunks, after[0].used_bytes) == (100, before[0].used_bytes)
            assert all(retrieve(engine, range(start, start + 32)) == 32 for start in range(0, 1000, 40))
            rest(engine)


def test_the_order_of_use_survives_a_restart(tmp_path):
    """Same victims with and without a restart in between, hits counted as uses."""
    left = []
    for restart in (False, True):
        settings = {"memory_bytes": 0, "disk_path": tmp_path / str(restart), "disk_bytes": 12 * ON_DISK}
        engine = CacheEngine(IDENTITY, **settings)
        for start in (0, 100, 200, 300):
            store(engine, range(start, start + 24))
            engine.flush()
            time.sleep(0.02)  # file times have the grain of the kernel's clock tick
        assert retrieve(engine, range(24)) == 24
        time.sleep(0.02)
        if restart:
            engine.close()
            engine = CacheEngine(IDENTITY, **settings)
        for start in (400, 500):
            store(engine, range(start, start + 16))
            engine.flush()
        left.append([engine.lookup(range(start, start + 24)) for start in (0, 100, 200, 300)])
        rest(engine)
        assert not orphans(engine.control)
        engine.close()
    assert left[0] == left[1] == [24, 0, 16, 24]


def test_restart_with_less_room_keeps_what_was_used_last_and_whole_prefixes(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        for start in (0, 100, 200):
            store(engine, range(start, start + 40))
            engine.flush()
            time.sleep(0.02)
        assert retrieve(engine, range(8)) == 8  # the head of the oldest prompt
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path, disk_bytes=8 * ON_DISK) as engine:
        rest(engine)
        assert [engine.lookup(range(start, start + 40)) for start in (0, 100, 200)] == [8, 16, 40]
        assert not orphans(engine.control)
        assert len(list(tmp_path.rglob("*.kv"))) == 8
        assert retrieve(engine, range(200, 240)) == 40


def test_records_of_another_model_in_the_folder_count_and_can_be_evicted(tmp_path):
    other = Identity(layout=replace(SMALL, chunk_tokens=32, num_layers=8), weights="other")
    with CacheEngine(other, memory_bytes=0, disk_path=tmp_path) as engine:
        store(engine, range(64))
    used = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.kv"))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path, disk_bytes=used + ON_DISK) as engine:
        assert engine.tiers()[0].used_bytes == used and engine.lookup(range(64)) == 0
        for start in range(0, 400, 16):
            store(engine, range(start, start + 16))
            rest(engine)
            assert sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.kv")) <= used + ON_DISK
        assert engine.lookup(range(384, 400)) == 16
    with CacheEngine(other, memory_bytes=0, disk_path=tmp_path) as engine:
        assert retrieve(engine, range(64)) == 0


@pytest.mark.slow
def test_taking_over_100_000_files_takes_seconds(tmp_path):
    from workbench.record import header_nbytes, pack_header

    chain, count = chain_of(range(80)), 0
    body = np.zeros(SMALL.chunk_shape, np.uint8)
    for prompt in range(10_000):
        chain = chain_of([prompt, *range(79)])
        for chunk in chain:
            folder = tmp_path / chunk.key.hex()[:2]
            folder.mkdir(exist_ok=True)
            (folder / f"{chunk.key.hex()}.kv").write_bytes(pack_header(chunk, IDENTITY.digest, body) + body.tobytes())
            count += 1
    assert count == 100_000 and header_nbytes(8) == 4096
    start, busy = time.monotonic(), time.process_time()
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        assert time.monotonic() - start < 2, "the start waits a second at most"
        waits = []
        while engine.lookup([7, *range(79)]) < 80 or engine._surveys[0].wait(0) is False:
            asked = time.monotonic()
            engine.lookup([7, *range(79)])
            waits.append(time.monotonic() - asked)
            time.sleep(0.01)
        busy = time.process_time() - busy
        assert busy < 10, "seconds of one core: on a busy machine the clock says more"
        print(f"100,000 files in {time.monotonic() - start:.1f} s, {busy:.1f} s of a core; lookups meanwhile: median "
              f"{sorted(waits)[len(waits) // 2] * 1e3:.2f} ms, longest {max(waits) * 1e3:.1f} ms")  # fmt: skip
        assert len(waits) > 20 and sorted(waits)[len(waits) // 2] < 0.02, "no lookup waits for it"
        assert engine.tiers()[0].chunks == 100_000


# ---------------------------------------------------------------- callers


@pytest.mark.parametrize(
    "blocks, error",
    [
        ([0, 1, 2], "3 blocks for 4"),
        ([0, 1, 2, 64], "64"),
        ([0, 1, 2, -1], "-1"),
        ([0, 1, 1, 2], "twice"),
    ],
)
def test_a_wrong_block_table_changes_nothing(blocks, error):
    with CacheEngine(IDENTITY, memory_bytes="1MiB") as engine:
        with pytest.raises(InvalidInputError, match=error):
            engine.store(range(16), Pages(64).table, blocks=blocks)
        audit(engine.control)
        assert engine.lookup(range(16)) == 0
        store(engine, range(16))
        with pytest.raises(InvalidInputError, match=error):
            engine.retrieve(range(16), Pages(64).table, blocks=blocks)
        rest(engine)
        assert retrieve(engine, range(16)) == 16


def test_pages_of_another_shape_are_refused():
    with CacheEngine(IDENTITY, memory_bytes="1MiB") as engine:
        for layout in (replace(SMALL, num_layers=3), replace(SMALL, head_size=8)):
            with pytest.raises(LayoutError, match="built for 2 layers"):
                engine.store(range(16), Pages(64, layout).table, blocks=BLOCKS)
        audit(engine.control)


@pytest.mark.parametrize("bad", [[-1], [2**31], [True], [3.0], None])
def test_bad_token_ids(bad):
    with CacheEngine(IDENTITY, memory_bytes="1MiB") as engine:
        for call in (engine.lookup, engine.explain):
            with pytest.raises(InvalidInputError):
                call(bad)
        for call in (engine.store, engine.retrieve):
            with pytest.raises(InvalidInputError):
                call(bad, Pages(4).table, blocks=[0, 1])
        assert engine.lookup([]) == 0
        audit(engine.control)


def test_scopes_do_not_meet():
    with CacheEngine(IDENTITY, memory_bytes="1MiB") as engine:
        scope = ChunkScope(salt="x", lora=("A", "1"))
        assert store(engine, range(64), scope=scope) == 64
        for other in (
            ChunkScope("x", ("B", "1")),
            ChunkScope("y", ("A", "1")),
            ChunkScope("x"),
            ChunkScope("x", ("A", "2")),
        ):
            assert retrieve(engine, range(64), scope=other) == 0
        assert retrieve(engine, range(64), scope=scope) == 64


def test_verify_notices_a_flipped_byte_in_memory():
    """The detector itself: a byte changed behind the engine's back is found, and the chunk is gone afterwards."""
    with CacheEngine(IDENTITY, memory_bytes="1MiB", verify=True) as engine:
        store(engine, range(24))
        slot = engine.control.index.slots[engine.control.index.find(chain_of(range(24))[1].key)]
        engine.data.arena.chunks[slot, 1, 0, 7] ^= 1
        assert retrieve(engine, range(24)) == 8
        assert engine.stats()["failed_loads"] == {"corrupt": 1}
        assert engine.lookup(range(24)) == 8
        rest(engine)


def test_many_threads_take_turns(tmp_path):
    settings = {"memory_bytes": 6 * CHUNK, "disk_path": tmp_path, "disk_bytes": 20 * ON_DISK}
    faults = []
    with CacheEngine(IDENTITY, **settings) as engine:

        def work(seed):
            try:
                rng = np.random.default_rng(seed)
                for step, tokens in enumerate(prompts(rng)):
                    retrieve(engine, tokens)
                    store(engine, tokens)
                    if step == 20:
                        return engine.clear() if seed == 0 else None
            except Exception as error:
                faults.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not faults and not any(thread.is_alive() for thread in threads)
        rest(engine)


def test_lookups_wait_for_no_turn_and_see_no_half_made_state():
    """They read what the engine's thread is changing; at worst one nominates what the load will not confirm."""
    faults, looked, done = [], [], threading.Event()
    with CacheEngine(IDENTITY, memory_bytes=6 * CHUNK, store_partial=True) as engine:

        def look(seed):
            try:
                for tokens in prompts(np.random.default_rng(seed)):
                    hit = engine.lookup(tokens)
                    assert 0 <= hit <= len(tokens)
                    looked.append(hit)
                    if done.is_set():
                        return
            except Exception as error:
                faults.append(error)

        threads = [threading.Thread(target=look, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        pages = Pages(64)
        for step, tokens in enumerate(prompts(np.random.default_rng(9))):
            engine.store(tokens, pages.table, blocks=BLOCKS)
            if step % 20 == 0:
                engine.clear()
            if step == 200:
                break
        done.set()
        for thread in threads:
            thread.join(20)
        assert not faults and len(looked) > 200 and max(looked) > 0
        blocked, gate = threading.Event(), threading.Event()
        busy = threading.Thread(target=engine._turns.run, args=(lambda: blocked.set() or gate.wait(20),))
        busy.start()
        assert blocked.wait(5), "somebody's turn takes long"
        start = time.monotonic()
        engine.lookup(range(48))
        assert time.monotonic() - start < 1 and not gate.is_set()
        gate.set()
        busy.join(20)
        rest(engine)


def test_interrupts_leave_no_count_half_changed(tmp_path):
    pages, interrupts = Pages(64), 0
    with CacheEngine(IDENTITY, memory_bytes=6 * CHUNK, disk_path=tmp_path, disk_bytes=20 * ON_DISK) as engine:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        rng = np.random.default_rng(0)
        try:
            for step, tokens in enumerate(prompts(rng)):
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, 2e-3)))
                    engine.retrieve(tokens, pages.table, blocks=BLOCKS)
                    engine.store(tokens, pages.table, blocks=BLOCKS)
                    engine.stats()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupts += 1
                if step == 300:
                    break
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        rest(engine)
        assert interrupts > 30


# ---------------------------------------------------------------- the end


def test_a_closed_engine_finds_nothing(tmp_path):
    engine = CacheEngine(IDENTITY, memory_bytes="1MiB", disk_path=tmp_path)
    store(engine, range(16))
    engine.close()
    engine.close()
    assert engine.lookup(range(16)) == 0 and store(engine, range(16)) == 0
    assert engine.retrieve(range(16), Pages(64).table, blocks=BLOCKS) == 0
    assert engine.flush() and engine.stats()["tiers"]["disk"]["chunks"] == 2
    assert len(list(tmp_path.rglob("*.kv"))) == 2, "closing finishes what was queued"


def test_open_and_close_leave_no_threads_and_no_files_open(tmp_path):
    def counts():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with CacheEngine(IDENTITY, memory_bytes="1MiB", disk_path=tmp_path) as engine:
        store(engine, range(64))
    time.sleep(0.1)
    before = counts()
    for _ in range(30):
        with CacheEngine(IDENTITY, memory_bytes="1MiB", disk_path=tmp_path) as engine:
            retrieve(engine, range(64))
    deadline = time.monotonic() + 2
    while counts() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert counts() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork_the_child_misses_and_the_parent_goes_on(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes="1MiB", disk_path=tmp_path) as engine:
        store(engine, range(16))
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                hits = engine.lookup(range(16)) + engine.store(range(16), Pages(64).table, blocks=BLOCKS)
                engine.stats(), engine.flush(), engine.close()
                os._exit(0 if hits == 0 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert retrieve(engine, range(16)) == 16
        rest(engine)


def test_prefetch_brings_a_prefix_up(tmp_path):
    tokens, pages = list(range(40)), Pages(48)
    pages.compute(chain_of(tokens), range(10))
    settings = {"disk_path": tmp_path, "disk_bytes": "1MB"}
    with CacheEngine(IDENTITY, memory_bytes=0, **settings) as engine:
        engine.store(tokens, pages.table, blocks=range(10))
        assert engine.prefetch(tokens) == 0, "there is no memory tier to bring it to"
    with CacheEngine(IDENTITY, memory_bytes=3 * CHUNK, **settings) as engine:
        assert engine.prefetch(list(range(500, 540))) == 0
        assert engine.prefetch(tokens) == 24
        assert engine.record.totals.count("lookup") == 0
        fresh = Pages(48)
        hit = engine.retrieve([*tokens, 7], fresh.table, blocks=range(20, 30))
        assert hit == 40 and fresh.wrong_chunks(chain_of(tokens), range(20, 30), hit) == []
        assert hit.mask.tolist() == [True] * 40 + [False]
        assert [e.tier for e in engine.record.events if e.kind == "hit"][:3] == ["memory"] * 3
        rest(engine)


def test_what_is_written_while_it_is_pinned_can_leave_afterwards(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK, disk_path=tmp_path) as engine:
        tier, gate = engine.data.tiers[0], threading.Event()
        real = tier.write
        tier.write = lambda *order: (gate.wait(5), real(*order))[1]
        store(engine, range(16))
        pin = engine.pin(range(16))
        gate.set()
        assert engine.flush()
        engine.unpin(pin)
        rest(engine)


def test_a_pinned_prefix_stays():
    pages = Pages(48)
    with CacheEngine(IDENTITY, memory_bytes=3 * CHUNK) as engine:
        kept = list(range(16))
        engine.store(kept, pages.table, blocks=range(4))
        pin = engine.pin([*kept, 1, 2])
        assert pin.hit_tokens == 16
        for start in (100, 200, 300):
            engine.store(list(range(start, start + 16)), pages.table, blocks=range(4))
        assert engine.lookup(kept) == 16
        engine.unpin(pin)
        with pytest.raises(InvalidInputError, match="already"):
            engine.unpin(pin)
        for start in (400, 500):
            engine.store(list(range(start, start + 24)), pages.table, blocks=range(6))
        assert engine.lookup(kept) == 0
        assert engine.pin([9] * 16).hit_tokens == 0
        rest(engine)
