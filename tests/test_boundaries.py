"""Chunks that end where the text has a seam, and tails that fill no chunk: exact, shared, never served wrongly."""

import random

import numpy as np
import pytest
from oracle import IDENTITY, SMALL, Pages, audit, payload

from workbench.chunks import Boundaries, ChunkChain, ChunkScope
from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError
from workbench.layout import KVLayout

pytestmark = pytest.mark.usefixtures("whole_chunks")

BLOCK, FULL = 4, 16
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_size=16, block_size=BLOCK, chunk_tokens=FULL)
END = 99  # the token that ends a turn
OURS = type(IDENTITY)(layout=LAYOUT, weights="w")
CHUNK = LAYOUT.chunk_nbytes
BLOCKS = list(range(64))


def cut(tokens, least=BLOCK, pieces=1) -> list[int]:
    """Where chunks end, the prompt given in so many pieces."""
    boundaries = Boundaries([END, 77], min_tokens=least, max_tokens=FULL, block_size=BLOCK)
    chain = ChunkChain(b"r" * 32, FULL, boundaries=boundaries)
    for part in np.array_split(np.array(tokens), pieces):
        chain.extend(part)
    return [chunk.stop for chunk in chain]


def by_definition(tokens, least) -> list[int]:
    """The same from the docstring's words: at each border of a block, look."""
    ends, start = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        seam = any(tokens[p - 1] in (END, 77) for p in range(end, min(end + BLOCK, len(tokens) + 1)))
        if end - start == FULL or (seam and end - start >= least):
            ends.append(end)
            start = end
    return ends


def text(rng: random.Random, length: int, seams: float = 0.1) -> list[int]:
    return [rng.choice([END, 77]) if rng.random() < seams else rng.randrange(60) for _ in range(length)]


# ---------------------------------------------------------------- where chunks end


@pytest.mark.parametrize(
    "seams, expected",
    [
        ([], [16, 32]),
        ([7], [8, 24, 40]),  # position 7 is the 8th token: the turn ends with the block
        ([8], [8, 24, 40]),  # in the middle of the next block: its last whole block before
        ([10], [8, 24, 40]),
        ([11], [12, 28]),
        ([2], [16, 32]),  # no whole block before it
        ([15], [16, 32]),
        ([5, 9, 13, 17], [4, 8, 12, 16, 32]),
        ([31], [16, 32]),
    ],
)
def test_chunks_end_at_the_last_whole_block_of_a_turn(seams, expected):
    tokens = [END if n in seams else n for n in range(40)]
    assert cut(tokens) == expected == by_definition(tokens, BLOCK)


def test_chunks_are_cut_by_the_definition_in_any_pieces():
    rng = random.Random(0)
    for _ in range(400):
        tokens, least = text(rng, rng.randrange(120), rng.choice([0.02, 0.1, 0.5])), rng.choice([4, 8, 16])
        ends = cut(tokens, least)
        assert ends == by_definition(tokens, least) == cut(tokens, least, pieces=rng.randrange(1, 40))
        sizes = np.diff([0, *ends])
        assert all(least <= size <= FULL and size % BLOCK == 0 for size in sizes)


def test_the_same_prefix_is_cut_in_the_same_way():
    """What follows a seam changes nothing before it: a prompt and its continuations share every chunk up to there."""
    rng = random.Random(1)
    for _ in range(200):
        shared = [*text(rng, rng.randrange(10, 80)), END]
        ends = cut(shared)
        for _ in range(3):
            longer = cut([*shared, *text(rng, rng.randrange(60))])
            assert longer[: len(ends)] == ends
        assert len(shared) - (ends[-1] if ends else 0) < 2 * BLOCK or len(shared) < BLOCK + FULL


def test_full_chunks_keep_their_keys_and_short_ones_cannot_be_taken_for_them():
    tokens = [END if n == 20 else n for n in range(48)]
    fixed = list(ChunkChain(b"r" * 32, FULL).extend(tokens))
    bounded = list(ChunkChain(b"r" * 32, FULL, boundaries=Boundaries([END], min_tokens=4, max_tokens=FULL,
                                                                     block_size=BLOCK)).extend(tokens))  # fmt: skip
    assert bounded[0] == fixed[0] and bounded[1].num_tokens == 4
    assert bounded[1].key not in {chunk.key for chunk in fixed}
    # Tokens that spell an input's digest must not give the key of fewer tokens with that input.
    spelled = b"\4\0\0\0" + b"0:xx"
    whole = ChunkChain(b"r" * 32, FULL).extend([*range(4), *np.frombuffer(spelled, "<i4")])
    with_input = ChunkChain(b"r" * 32, FULL, ChunkScope(inputs=((0, 4, "xx"),))).extend(range(4))
    assert whole.part(0, 6).key != with_input.part(0, 4).key


@pytest.mark.parametrize("wrong", [{"min_tokens": 6}, {"min_tokens": 0}, {"min_tokens": 20}, {"tokens": []}])
def test_sizes_that_cannot_be_are_refused(wrong):
    with pytest.raises(InvalidInputError):
        Boundaries(**{"tokens": [END], "min_tokens": 4, "max_tokens": FULL, "block_size": BLOCK, **wrong})


# ---------------------------------------------------------------- in the engine


def chain_of(engine, tokens, scope=ChunkScope()):
    return engine._chain(tokens, scope)


def fill(engine, tokens, pages, tail=False):
    """The only right KV of a prompt's chunks, and of its tail if that is to be stored."""
    chain = chain_of(engine, tokens)
    chunks = list(chain)
    if tail and chain.end(len(chain)) < len(tokens):
        chunks.append(chain.part(len(chain), len(tokens)))
    for chunk in chunks:
        own = range(chunk.start // BLOCK, LAYOUT.blocks_of(chunk.stop))
        for layer, part in enumerate(payload(chunk.key, LAYOUT)):
            pages.arrays[layer][list(own)] = part[: len(own)]


def store(engine, tokens, **options) -> int:
    pages = Pages(64, LAYOUT)
    fill(engine, tokens, pages, tail=bool(options.get("partial")) or engine.config.stores_tails)
    return engine.store(tokens, pages.table, blocks=BLOCKS, **options)


def retrieve(engine, tokens) -> int:
    """Tokens retrieved, each chunk compared with the oracle to the byte."""
    pages = Pages(64, LAYOUT)
    pages.spoil(np.random.default_rng(0))
    before = [array.copy() for array in pages.arrays]
    chunks = engine.control.covering(chain_of(engine, tokens), 0, engine.lookup(tokens))
    hit = engine.retrieve(tokens, pages.table, blocks=BLOCKS)
    for chunk in chunks:
        if chunk.stop <= hit:
            own = list(range(chunk.start // BLOCK, LAYOUT.blocks_of(chunk.stop)))
            for layer, part in enumerate(payload(chunk.key, LAYOUT)):
                assert np.array_equal(pages.arrays[layer][own], part[: len(own)]), "wrong KV"
    beyond = LAYOUT.blocks_of(hit)
    for array, old in zip(pages.arrays, before, strict=True):
        assert np.array_equal(array[beyond:], old[beyond:]), "a block beyond the hit was written"
    return hit


@pytest.fixture(params=["memory", "disk", "both", "back"])
def settings(request, tmp_path):
    memory = {"memory": 40, "disk": 0, "both": 3, "back": 2}[request.param]
    found = {"memory_bytes": memory * CHUNK, "verify": True, "write": "back" if request.param == "back" else "through"}
    return found if request.param == "memory" else {**found, "disk_path": tmp_path / "kv"}


def test_a_prompt_that_ends_with_a_turn_is_reused_to_its_last_block(settings):
    turn = [*range(20), END, *range(5), END]  # 27 tokens: whole blocks up to 24
    with CacheEngine(OURS, boundary_tokens=(END,), min_chunk_tokens=BLOCK, **settings) as engine:
        assert store(engine, turn) == 24 and engine.flush()
        assert retrieve(engine, turn) == 24
        assert retrieve(engine, [*turn, *range(40, 80)]) == 24, "fixed chunks would have given 16"
        assert store(engine, [*turn, *range(40, 80)]) == 32 and engine.flush()
        assert retrieve(engine, [*turn, *range(40, 80)]) == 56
        assert "24 of 27 tokens hit" in str(engine.explain(turn))
        audit(engine.control)


def test_a_short_chunk_takes_its_own_room_on_disk(tmp_path):
    turn = [*range(6), END, *range(30, 40)]
    with CacheEngine(OURS, memory_bytes=0, disk_path=tmp_path, boundary_tokens=(END,),
                     min_chunk_tokens=BLOCK) as engine:  # fmt: skip
        store(engine, turn)
        engine.flush()
        sizes = sorted(path.stat().st_size - 4096 for path in tmp_path.rglob("*.kv"))
        assert sizes == [BLOCK * LAYOUT.token_nbytes]
        on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv"))
        assert engine.tiers()[0].used_bytes == on_disk


def test_random_conversations_with_seams(settings):
    """Turns that branch: every hit is a whole chunk of the asked prompt, exact to the byte."""
    rng, best = random.Random(2), 0
    with CacheEngine(OURS, boundary_tokens=(END, 77), min_chunk_tokens=BLOCK, **settings) as engine:
        turns = [[rng.randrange(60) for _ in range(rng.randrange(1, 24))] + [END] for _ in range(8)]
        for _ in range(60):
            prompt = [token for _ in range(rng.randrange(1, 5)) for token in rng.choice(turns)]
            hit = retrieve(engine, prompt)
            assert hit in (0, *(chunk.stop for chunk in chain_of(engine, prompt)))
            best = max(best, hit)
            store(engine, prompt)
        assert best > 24 and engine.flush()
        engine.tiers()
        audit(engine.control)


# ---------------------------------------------------------------- tails


def test_a_tail_is_stored_only_if_asked_and_never_served_to_a_prompt_that_differs_in_it(settings):
    prompt = list(range(100, 122))  # a chunk of 16 and a tail of 6
    with CacheEngine(OURS, **settings) as engine:
        assert store(engine, prompt) == 16 and engine.flush()
        assert engine.lookup(prompt) == 16
        assert store(engine, prompt, partial=True) == 6 and engine.flush()
        assert store(engine, prompt, partial=True) == 0, "what is there is not stored again"
        assert retrieve(engine, prompt) == 22
        assert retrieve(engine, [*prompt, 1, 2, 3]) == 22
        assert retrieve(engine, prompt[:-1]) == 16, "a shorter prompt has no such tail"
        for position in range(16, 22):
            other = [*prompt, 1, 2, 3]
            other[position] += 1000
            assert retrieve(engine, other) == 16, f"served although token {position} differs"
        assert engine.explain(prompt).hit_tokens == 22
        hit = engine.retrieve([*prompt, 7], Pages(64, LAYOUT).table, blocks=BLOCKS)
        assert hit.mask.tolist() == [True] * 22 + [False]
        audit(engine.control)


def test_the_longest_tail_that_agrees_wins_and_a_full_chunk_beats_them(settings):
    prompt = list(range(100, 140))
    with CacheEngine(OURS, store_partial=True, **settings) as engine:
        for length in (19, 22, 27):
            store(engine, prompt[:length])
        engine.flush()
        assert [retrieve(engine, prompt[:n]) for n in (18, 19, 21, 26, 27, 40)] == [16, 19, 19, 22, 27, 27]
        assert store(engine, prompt) == 24 and engine.flush()  # the second whole chunk and the tail behind it
        assert [retrieve(engine, prompt[:n]) for n in (27, 31, 32, 40)] == [27, 27, 32, 40]
        audit(engine.control)


def test_a_tail_that_leaves_between_lookup_and_load_is_a_failed_load_not_a_shorter_one():
    """Every promised block is filled or reported: a shorter tail in its place would leave some unsaid."""
    prompt = list(range(100, 130))
    with CacheEngine(OURS, memory_bytes=8 * CHUNK) as engine:
        for length in (20, 28):
            store(engine, prompt[:length], partial=True)
        chain, control = chain_of(engine, prompt), engine.control
        assert control.lookup(chain) == 28
        longest = control.index.find(control.covering(chain, 0, 28)[-1].key)
        control._leave(longest, 0, "test")
        control.admit("late", chain, reuse_tokens=28)
        orders = control.plan_loads("late", 0, 28, BLOCKS)
        assert [block for order in orders for block in order.blocks] == BLOCKS[:7]
        engine.data.attach(Pages(64, LAYOUT).table)
        engine.data.run(orders)
        assert [done.reason for done in engine.data.take_report()] == ["", "absent"]
        assert engine.data.take_bad_blocks() == {4, 5, 6}
        control.finish("late")


def test_a_whole_chunk_that_comes_between_lookup_and_load_promises_no_more(tmp_path):
    """Where a tail was found and now a whole chunk lies: blocks beyond the tail were not asked for."""
    prompt = list(range(100, 140))
    with CacheEngine(OURS, memory_bytes=0, disk_path=tmp_path) as engine:
        store(engine, prompt[:22], partial=True)
        engine.flush()
        store(engine, prompt)
        assert engine.data.flush()  # written, and the report not read yet
        engine._lookup = engine.control.lookup  # the writer was done right behind it
        pages = Pages(64, LAYOUT)
        assert engine.retrieve(prompt, pages.table, blocks=BLOCKS[:6]) == 22
        assert not any(array[6:].any() for array in pages.arrays)


def test_tails_of_one_length_leave_one_by_one():
    tails = [[*range(16), n, n, n] for n in (40, 50)]
    with CacheEngine(OURS, memory_bytes=3 * CHUNK, store_partial=True) as engine:
        for prompt in tails:
            store(engine, prompt)
        assert [retrieve(engine, prompt) for prompt in tails] == [19, 19]
        store(engine, [*range(16), 60, 60, 60, 60])  # in the place of the first
        assert [retrieve(engine, prompt) for prompt in tails] == [16, 19]
        engine.clear()
        assert not engine.control._tails


def test_a_chunk_that_stops_where_a_loaded_tail_did(tmp_path):
    """What was stored under other settings is met as a tail; the same request then stores chunks of its own cut."""
    prompt = [*range(3), END, *range(5, 12), END, *range(20, 40)]
    settings = {"disk_path": tmp_path, "boundary_tokens": (END,)}
    with CacheEngine(OURS, memory_bytes=0, min_chunk_tokens=2 * BLOCK, **settings) as engine:
        store(engine, prompt[:13])
    with CacheEngine(OURS, memory_bytes=4 * CHUNK, min_chunk_tokens=BLOCK, **settings) as engine:
        chain, control, pages = chain_of(engine, prompt), engine.control, Pages(64, LAYOUT)
        assert [chunk.stop for chunk in chain] == [4, 12, 28] and control.lookup(chain) == 12
        control.admit("r", chain, reuse_tokens=12)
        engine.data.attach(pages.table)
        engine.data.run(control.plan_loads("r", 0, 12, BLOCKS))
        fill(engine, prompt, pages)
        engine.data.run(control.plan_stores("r", 32, BLOCKS))
        assert engine.data.flush()
        control.apply(engine.data.take_report())
        control.finish("r")
        assert retrieve(engine, prompt) == 28
        audit(control)


def test_a_pinned_and_a_prefetched_tail(tmp_path):
    prompt = list(range(100, 122))
    with CacheEngine(OURS, memory_bytes=0, disk_path=tmp_path) as engine:
        store(engine, prompt, partial=True)
    with CacheEngine(OURS, memory_bytes=8 * CHUNK, disk_path=tmp_path) as engine:
        assert engine.prefetch(prompt) == 22, "a restart finds the tail"
        pin = engine.pin(prompt)
        assert pin.hit_tokens == 22
        engine.unpin(pin)
        assert retrieve(engine, [*prompt, 5]) == 22
        assert engine.stats()["failed_loads"] == {}
        audit(engine.control)


def test_evicted_tails_are_forgotten():
    with CacheEngine(OURS, memory_bytes=4 * CHUNK, store_partial=True) as engine:
        for start in range(0, 3000, 50):
            store(engine, range(start, start + 20))
            audit(engine.control)
        assert retrieve(engine, range(2950, 2970)) == 20
        assert sum(map(len, engine.control._tails.values())) <= 4
        engine.clear()
        assert not engine.control._tails


def test_a_damaged_tail_is_a_miss(tmp_path):
    prompt = list(range(100, 122))
    with CacheEngine(OURS, memory_bytes=0, disk_path=tmp_path, store_partial=True) as engine:
        store(engine, prompt)
        engine.flush()
        tail = engine.control.covering(chain_of(engine, prompt), 0, 22)[-1]
        path = tmp_path / tail.key.hex()[:2] / f"{tail.key.hex()}.kv"
        data = bytearray(path.read_bytes())
        data[4100] ^= 1
        path.write_bytes(data)
        assert retrieve(engine, prompt) == 16
        assert engine.lookup(prompt) == 16 and engine.stats()["failed_loads"] == {"corrupt": 1}


def test_tails_through_a_codec(tmp_path):
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_size=64, block_size=16, chunk_tokens=64)
    tokens, pages, loaded = np.arange(100), Pages(8, layout), Pages(8, layout)
    for array in pages.arrays:
        numbers = np.random.default_rng(0).normal(size=array.view(np.uint16).shape).astype(np.float32)
        array.view(np.uint16)[:] = numbers.view(np.uint32) >> 16  # as bfloat16
    for codec in ("lossless", "int8"):
        with CacheEngine(type(IDENTITY)(layout=layout, weights="w"), memory_bytes=0, disk_path=tmp_path / codec,
                         codec=codec, store_partial=True) as engine:  # fmt: skip
            assert engine.store(tokens, pages.table, blocks=range(8)) == 100
            assert engine.flush()
            assert engine.retrieve(tokens, loaded.table, blocks=range(8)) == 100
            if codec == "lossless":
                for a, b in zip(pages.arrays, loaded.arrays, strict=True):
                    assert np.array_equal(a[:7], b[:7])


def test_without_the_settings_nothing_changes():
    assert Boundaries.of(SMALL, ()) is None
    with CacheEngine(IDENTITY, memory_bytes="1MiB") as engine:
        assert engine._chain(range(30), ChunkScope()).end(3) == 24
