"""Hits that end within a stored chunk: exact to the token, never beyond where the prompts part, whatever the tier."""

import hashlib
import random
import threading
import time

import numpy as np
import pytest
from oracle import Pages, audit

from workbench.beginnings import Beginnings
from workbench.chunks import Chunk, ChunkScope, common_tokens
from workbench.engine import CacheEngine
from workbench.layout import Identity, KVLayout
from workbench.tiers.base import Tier

BLOCK, FULL, LEAST = 8, 64, 16
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_size=16, block_size=BLOCK, chunk_tokens=FULL)
IDENTITY = Identity(layout=LAYOUT, weights="w")
CHUNK = LAYOUT.chunk_nbytes
BLOCKS = list(range(64))


def kv(tokens, salt="") -> np.ndarray:
    """uint8 [layer, block, token, byte]: each token's KV is a function of all tokens up to it; behind the last one
    lies what happened to lie there."""
    rows, state = LAYOUT.blocks_of(len(tokens)) * BLOCK, hashlib.sha256(salt.encode())
    out = np.random.default_rng(len(tokens)).integers(0, 256, (2, rows, LAYOUT.page_nbytes // BLOCK), np.uint8)
    for place, token in enumerate(tokens):
        state.update(int(token).to_bytes(4, "little"))
        own = hashlib.shake_256(state.digest()).digest(2 * out.shape[2])
        out[:, place] = np.frombuffer(own, np.uint8).reshape(2, -1)
    return out.reshape(2, -1, BLOCK, out.shape[2])


def store(engine, tokens, **options) -> int:
    pages = Pages(64, LAYOUT)
    for layer, blocks in enumerate(kv(tokens, getattr(options.get("scope"), "salt", ""))):
        pages.arrays[layer][: len(blocks)] = blocks.reshape(len(blocks), -1)
    return engine.store(tokens, pages.table, blocks=BLOCKS, **options)


def retrieve(engine, tokens, **options) -> int:
    """Tokens retrieved, each one's KV compared with the oracle to the byte."""
    pages = Pages(64, LAYOUT)
    pages.spoil(np.random.default_rng(0))
    expected = engine.lookup(tokens, **options)
    before = [array.copy() for array in pages.arrays]
    hit = int(engine.retrieve(tokens, pages.table, blocks=BLOCKS, **options))
    assert hit == expected
    found = kv(tokens, getattr(options.get("scope"), "salt", "")).reshape(2, -1, LAYOUT.page_nbytes // BLOCK)
    for layer, array in enumerate(pages.arrays):
        assert np.array_equal(array.reshape(-1, found.shape[2])[:hit], found[layer, :hit]), "wrong KV"
        assert np.array_equal(array[LAYOUT.blocks_of(hit) :], before[layer][LAYOUT.blocks_of(hit) :])
    return hit


@pytest.fixture(params=["memory", "disk", "both", "back", "encoded"])
def settings(request, tmp_path):
    memory = {"memory": 60, "disk": 0, "both": 60, "back": 60, "encoded": 60}[request.param]
    found = {"memory_bytes": memory * CHUNK, "verify": True, "write": "back" if request.param == "back" else "through"}
    if request.param == "encoded":
        found["memory_codec"] = "lossless"
    return found if request.param in ("memory", "encoded") else {**found, "disk_path": tmp_path / "kv"}


# ---------------------------------------------------------------- the structure


def test_beginnings_find_what_comparing_with_every_chunk_finds():
    rng, known, table = random.Random(0), {}, Beginnings()
    for number in range(600):
        tokens = np.array([rng.randrange(3) for _ in range(rng.randrange(1, 9))], "<i4").tobytes()
        parent = rng.choice([b"a", b"b"])
        key = number.to_bytes(32, "little")
        if not any(tokens == t and parent == p for p, t in known.values()):
            known[key] = parent, tokens
            table.add(Chunk(key, parent, 64, 64 + len(tokens) // 4, tokens))
        if known and rng.random() < 0.3:
            gone = rng.choice(list(known))
            table.discard(gone)
            del known[gone]
        asked = np.array([rng.randrange(3) for _ in range(6)], "<i4").tobytes()
        found = list(table.along(parent, asked))
        everything = {k: common_tokens(t, asked) for k, (p, t) in known.items() if p == parent}
        assert sorted((c.key, n) for c, n in found) == sorted((k, n) for k, n in everything.items() if n)
        assert [n for _, n in found] == sorted((n for _, n in found), reverse=True)
        assert all((c.parent, c.start, c.tokens) == (known[c.key][0], 64, known[c.key][1]) for c, _ in found)
    assert len(table) == len(known)


def test_the_oldest_make_room():
    table, tokens = Beginnings(most_tokens=20), np.arange(8, dtype="<i4").tobytes()
    for name in "abc":
        table.add(Chunk(name.encode(), b"root", 0, 8, tokens))
        assert table.touch(b"a")
    assert len(table) == 2 and not table.touch(b"b") and table.touch(b"c")
    table.discard(b"b")
    assert {chunk.key for chunk, _ in table.along(b"root", tokens)} == {b"a", b"c"}


# ---------------------------------------------------------------- in the engine


def test_a_hit_ends_where_the_prompts_part(settings):
    prompt = list(range(1000, 1200))  # three chunks and a tail of 8
    with CacheEngine(IDENTITY, **settings) as engine:
        assert store(engine, prompt) == 200 and engine.flush()
        assert retrieve(engine, prompt) == 200
        for parts_at in (1, 15, 16, 17, 63, 64, 65, 79, 80, 100, 127, 128, 150, 192, 193, 199):
            other = [*prompt[:parts_at], 5, *prompt[parts_at + 1 :]]
            within = parts_at % FULL
            assert retrieve(engine, other) == parts_at - (within if within < LEAST else 0)
        assert retrieve(engine, prompt[:100]) == 100, "a shorter prompt is a beginning"
        assert retrieve(engine, [*prompt, 1, 2, 3]) == 200
        assert retrieve(engine, prompt, scope=ChunkScope(salt="other")) == 0
        engine.tiers()
        audit(engine.control)


def test_whole_chunks_alone_if_so_set():
    prompt = list(range(1000, 1100))
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK, partial_hits=False) as engine:
        assert store(engine, prompt) == 64
        assert retrieve(engine, prompt) == 64 and retrieve(engine, prompt[:60]) == 0


def test_nothing_is_taken_from_behind_the_start_of_an_image():
    prompt = list(range(1000, 1064))
    image, other = (ChunkScope(inputs=((40, 50, digest),)) for digest in ("cat", "dog"))
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK) as engine:
        store(engine, prompt, scope=image)
        assert engine.lookup(prompt, scope=image) == 64
        assert engine.lookup(prompt, scope=other) == engine.lookup(prompt) == 0, "a chunk with an image serves it alone"
        assert store(engine, prompt) == 64
        assert engine.lookup(prompt, scope=other) == 40, "the text before the image is the same"
        late = ChunkScope(inputs=((64, 70, "cat"),))
        assert engine.lookup([*prompt, 1, 2], scope=late) == 64


def test_random_conversations_hit_all_that_was_ever_seen(settings):
    """With room for everything: the longest beginning of any earlier prompt, but for what is not worth moving."""
    rng, seen = random.Random(1), []
    with CacheEngine(IDENTITY, **settings) as engine:
        turns = [[rng.randrange(50) for _ in range(rng.randrange(1, 40))] for _ in range(7)]
        for _ in range(40):
            prompt = [token for _ in range(rng.randrange(1, 7)) for token in rng.choice(turns)]
            asked = np.array(prompt, "<i4")
            longest = max((common_tokens(p, asked) for p in seen), default=0)
            hit = retrieve(engine, prompt)
            assert longest - LEAST < hit <= longest
            store(engine, prompt)
            engine.flush()
            seen.append(asked)
        engine.tiers()
        audit(engine.control)


def test_with_little_room_nothing_is_wrong_and_nothing_is_lost(tmp_path):
    rng = random.Random(2)
    with CacheEngine(IDENTITY, memory_bytes=4 * CHUNK, disk_path=tmp_path, disk_bytes=12 * (CHUNK + 4096),
                     verify=True) as engine:  # fmt: skip
        turns = [[rng.randrange(50) for _ in range(rng.randrange(1, 60))] for _ in range(9)]
        best = 0
        for _ in range(120):
            prompt = [token for _ in range(rng.randrange(1, 7)) for token in rng.choice(turns)]
            engine.flush()  # a write that ends between the lookup and the load would make a larger hit
            hit = retrieve(engine, prompt)
            best = max(best, hit % FULL)
            store(engine, prompt)
        assert best > 30 and engine.flush()
        engine.tiers()
        audit(engine.control)


def test_what_lies_on_disk_is_read_for_a_large_part_only_and_stays_there(tmp_path):
    prompt = list(range(1000, 1064))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        store(engine, prompt)
        engine.flush()
        assert retrieve(engine, [*prompt[:15], 1, 2]) == 0 and retrieve(engine, [*prompt[:16], 1, 2]) == 16


def test_after_a_restart_and_from_another_process(tmp_path):
    prompt, image = list(range(1000, 1064)), list(range(2000, 2064))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path, disk_survey_seconds=0.05) as first:
        store(first, prompt)
        store(first, image, scope=ChunkScope(inputs=((40, 50, "cat"),)))
        first.flush()
        with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as second:
            assert retrieve(second, [*prompt[:40], 7]) == 40
            assert retrieve(second, image) == 0, "what holds an image is not text alone"
            store(second, list(range(3000, 3064)))
            second.flush()
        deadline = time.monotonic() + 10
        while first.lookup(list(range(3000, 3040))) != 40 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert retrieve(first, list(range(3000, 3040))) == 40


def test_a_borrowed_chunk_keeps_its_place_in_the_order():
    first, second = list(range(64)), list(range(100, 164))
    with CacheEngine(IDENTITY, memory_bytes=2 * CHUNK, store_partial=False) as engine:
        store(engine, first)
        store(engine, second)
        assert retrieve(engine, first[:40]) == 40
        store(engine, list(range(200, 264)))
        assert engine.lookup(first) == 0 and engine.lookup(second) == 64, "the least recently used one left"


def test_a_borrowed_chunk_cannot_leave_while_it_is_read():
    first = list(range(64))
    with CacheEngine(IDENTITY, memory_bytes=1 * CHUNK) as engine:
        store(engine, first)
        chain, control = engine._chain([*first[:40], 7], ChunkScope()), engine.control
        control.admit("reader", chain, reuse_tokens=40)
        orders = control.plan_loads("reader", 0, 40, BLOCKS)
        assert [order.blocks for order in orders] == [(*BLOCKS[:5], -1, -1, -1)]
        assert store(engine, list(range(100, 164))) == 0, "no room while the only slot is held"
        control.finish("reader")
        assert store(engine, list(range(100, 164))) == 64
        audit(control)


def test_a_borrowed_chunk_that_left_is_a_failed_load(settings):
    prompt = list(range(1000, 1064))
    with CacheEngine(IDENTITY, **settings) as engine:
        store(engine, prompt)
        engine.flush()
        asked = [*prompt[:40], 1, 2, 3]
        chain, control = engine._chain(asked, ChunkScope()), engine.control
        assert engine.lookup(asked) == 40
        entry = control.index.find(control.covering(chain, 0, 40)[0].key)
        for level in range(len(control.tiers)):
            control._leave(entry, level, "test")
        control.admit("late", chain, reuse_tokens=40)
        engine.data.attach(Pages(64, LAYOUT).table)
        engine.data.run(control.plan_loads("late", 0, 40, BLOCKS))
        assert engine.data.take_bad_blocks() == {0, 1, 2, 3, 4}
        control.apply(engine.data.take_report())
        control.finish("late")


def test_damage_behind_the_part_that_is_wanted_is_damage(tmp_path):
    prompt = list(range(1000, 1064))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        store(engine, prompt)
        engine.flush()
        (file,) = tmp_path.rglob("*.kv")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        pages = Pages(64, LAYOUT)
        assert engine.retrieve([*prompt[:40], 1], pages.table, blocks=BLOCKS) == 0
        assert engine.lookup([*prompt[:40], 1]) == 0, "what is damaged is no longer there"


# ---------------------------------------------------------------- tails that a longer chunk contains


def test_a_tail_goes_when_a_longer_chunk_contains_it(settings):
    prompt = list(range(1000, 1200))
    with CacheEngine(IDENTITY, **settings) as engine:
        for stop in (30, 50, 100, 140):
            assert retrieve(engine, prompt[:stop]) == {30: 0, 50: 30, 100: 50, 140: 100}[stop]
            store(engine, prompt[:stop])
            engine.flush()
        store(engine, [1, 2, 3])
        engine.flush()
        spans = {(engine.control.index.starts[e], engine.control.index.stops[e])
                 for e in engine.control.index._entries.values()}  # fmt: skip
        assert spans == {(0, 64), (64, 128), (128, 140), (0, 3)}
        assert retrieve(engine, prompt) == 140 and retrieve(engine, prompt[:50]) == 50
        engine.tiers()
        audit(engine.control)


def test_a_tail_in_use_or_pinned_goes_later():
    prompt = list(range(1000, 1064))
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK) as engine:
        store(engine, prompt[:30])
        pin = engine.pin(prompt[:30])
        store(engine, prompt)
        store(engine, [1, 2, 3])
        assert engine.tiers()[0].chunks == 3
        engine.unpin(pin)
        store(engine, [4, 5, 6])
        assert engine.tiers()[0].chunks == 3, "the tail of 30 left, that of three came"
        audit(engine.control)


def test_lookups_of_other_threads_while_chunks_come_and_go():
    rng, stop, faults = random.Random(3), threading.Event(), []
    with CacheEngine(IDENTITY, memory_bytes=6 * CHUNK) as engine:
        prompts = [[n % 3, *range(60), n] for n in range(40)]

        def look():
            while not stop.is_set():
                try:
                    for prompt in prompts:
                        engine.lookup(prompt)
                except Exception as error:
                    faults.append(error)
                    return

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(150):
            store(engine, rng.choice(prompts))
        stop.set()
        for thread in threads:
            thread.join()
    assert not faults


def test_explain_counts_what_hits_within_a_chunk():
    prompt = list(range(1000, 1100))
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK) as engine:
        store(engine, prompt)
        found = engine.explain([*prompt[:90], 5, 6])
        assert (found.hit_tokens, found.shared_tokens, found.lost_to_chunk_size) == (90, 90, 0)
        assert "90 of 92 tokens hit" in str(found)
        lost = engine.explain([*prompt[:70], *range(60)])
        assert (lost.hit_tokens, lost.lost_to_chunk_size) == (64, 6)


# ---------------------------------------------------------------- what is kept, and where


def test_a_borrowed_chunk_that_is_confirmed_meanwhile_can_still_leave(tmp_path):
    """Its write to the disk is reported while a request borrows it, and no other request is left to settle it."""
    first = list(range(64))
    with CacheEngine(IDENTITY, memory_bytes=4 * CHUNK, disk_path=tmp_path) as engine:
        control, data = engine.control, engine.data
        chain = engine._chain(first, ChunkScope())
        pages = Pages(64, LAYOUT)
        data.attach(pages.table)
        control.begin("writer", chain)
        data.run(control.plan_stores("writer", 64, BLOCKS))
        assert data.flush()
        report = data.take_report()
        control.apply([done for done in report if done.kind == "store"])
        control.finish("writer")
        control.admit("reader", engine._chain([*first[:40], 7], ChunkScope()), reuse_tokens=40)
        control.plan_loads("reader", 0, 40, BLOCKS)
        control.apply([done for done in report if done.kind == "write"])
        control.finish("reader")
        audit(control)


def test_a_hit_within_a_chunk_that_reaches_beyond_the_prompts_own():
    """With boundaries the prompt's own chunk may end before the stored one does; vLLM may have all of it itself."""
    first = list(range(1000, 1050))
    second = [*first, 1, 2, 9, *range(20)]
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK, boundary_tokens=(9,), min_chunk_tokens=BLOCK) as engine:
        store(engine, first)
        chain, control = engine._chain(second, ChunkScope()), engine.control
        assert chain.end(1) == 48 and retrieve(engine, second) == 50
        control.admit("half", chain, local_tokens=48, reuse_tokens=2)
        engine.data.attach(Pages(64, LAYOUT).table)
        engine.data.run(control.plan_loads("half", 48, 50, BLOCKS))
        assert not engine.data.take_bad_blocks()
        control.apply(engine.data.take_report())
        control.finish("half")
        audit(control)


class _Others(Tier):
    """A tier that others use, too, in a dictionary."""

    name, shared = "redis", True

    def __init__(self):
        self.held, self.erased = {}, []

    def read(self, chunk, out, *, at_most=False):
        if chunk.key not in self.held:
            return "absent"
        out[:] = self.held[chunk.key]
        return ""

    def write(self, chunk, payload):
        self.held[chunk.key] = payload.copy()
        return "", payload.nbytes

    def erase(self, key):
        self.erased.append(key)
        self.held.pop(key, None)

    def contains(self, keys):
        return [key in self.held for key in keys]


@pytest.fixture
def others(monkeypatch):
    tier = _Others()
    monkeypatch.setattr("workbench.engine._media", lambda identity, config: [tier])
    return tier


@pytest.mark.parametrize("write", ["through", "back"])
def test_tails_stay_out_of_what_others_use(others, write):
    with CacheEngine(IDENTITY, memory_bytes=2 * CHUNK, redis_url="redis://unused", write=write) as engine:
        for start in range(0, 6000, 1000):
            store(engine, list(range(start, start + 30)))
            store(engine, list(range(start + 500, start + 500 + FULL)))
        assert engine.flush()
        engine.tiers()
        sizes = {len(payload) for payload in others.held.values()}
        assert sizes == {CHUNK}, "whole chunks alone"
        audit(engine.control)


def test_what_lies_in_a_longer_chunk_is_forgotten_where_others_may_need_it(others):
    """A chunk that ends at a boundary, nothing known behind it, and another prompt's chunk that contains it."""
    turn = list(range(1000, 1048))
    options = {"boundary_tokens": (9,), "min_chunk_tokens": BLOCK, "redis_url": "redis://unused"}
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK, store_partial=False, **options) as engine:
        store(engine, [*turn, 9])
        assert engine.flush() and len(others.held) == 1
        store(engine, [*turn, *range(20, 36)])
        store(engine, list(range(2000, 2200)))
        assert engine.flush() and not others.erased and len(others.held) == 5
        engine.tiers()
        audit(engine.control)


def test_tails_of_running_requests_are_looked_at_a_few_at_a_time():
    with CacheEngine(IDENTITY, memory_bytes=60 * CHUNK) as engine:
        pins = []
        for start in range(0, 20_000, 1000):
            store(engine, list(range(start, start + 30)))
            pins.append(engine.pin(list(range(start, start + 30))))
            store(engine, list(range(start, start + FULL)))
        waiting = engine.control._outgrown
        assert len(waiting) == 20
        looked_at = []
        engine.control.index.find = lambda key, find=engine.control.index.find: looked_at.append(key) or find(key)
        engine.control._remove_outgrown([])
        del engine.control.index.find
        assert len(looked_at) <= 2 * 8 and len(waiting) == 20
        for pin in pins:
            engine.unpin(pin)
        for start in range(30_000, 40_000, 1000):
            store(engine, list(range(start, start + FULL)))
        assert not waiting and engine.tiers()[0].chunks == 20 + 10
        audit(engine.control)
