"""Codecs in the engine's path: smaller chunks in every tier, and what comes back is what the codec promises."""

from dataclasses import replace

import numpy as np
import pytest
from fault_servers import redis_process
from oracle import Pages, audit

from workbench.chunks import ChunkChain
from workbench.codecs import codec_names, resolve_codec
from workbench.config import CacheConfig
from workbench.engine import CacheEngine, encoded_identity
from workbench.errors import InvalidInputError
from workbench.layout import Identity, KVLayout
from workbench.testing_tiers import check_tier
from workbench.tiers.encoded import EncodedTier
from workbench.tiers.memory import MemoryTier

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_size=64, block_size=16, chunk_tokens=64)
IDENTITY = Identity(layout=LAYOUT, weights="w")
BLOCKS = list(range(16))
TOKENS = np.arange(256, dtype=np.int32)


def real_pages(seed: int = 0, layout: KVLayout = LAYOUT) -> Pages:
    """Pages of normal numbers, as KV is; random bits would hold NaN, which lossy codecs refuse."""
    import torch

    pages, generator = Pages(len(BLOCKS), layout), torch.Generator().manual_seed(seed)
    for array in pages.arrays:
        values = torch.randn(array.size // 2, generator=generator).to(getattr(torch, layout.dtype))
        array[:] = values.view(torch.uint8).numpy().reshape(array.shape)
    return pages


def numbers(pages: Pages) -> np.ndarray:
    import torch

    parts = [torch.from_numpy(a.reshape(-1)).view(getattr(torch, pages.layout.dtype)).float() for a in pages.arrays]
    return torch.stack(parts).numpy()


def round_trip(engine: CacheEngine) -> tuple[Pages, Pages]:
    """Pages as stored and as retrieved."""
    stored, loaded = real_pages(), Pages(len(BLOCKS), engine.identity.layout)
    assert engine.store(TOKENS, stored.table, blocks=BLOCKS) == len(TOKENS)
    assert engine.flush()
    assert engine.retrieve(TOKENS, loaded.table, blocks=BLOCKS) == len(TOKENS)
    assert engine.flush()
    audit(engine.control)
    return stored, loaded


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("codec", codec_names())
def test_every_codec_in_every_local_tier(codec, tier, tmp_path):
    settings = {"memory_codec": codec} if tier == "memory" else {"memory_bytes": 0, "disk_path": tmp_path / "kv"}
    with CacheEngine(IDENTITY, codec="raw" if tier == "memory" else codec, **settings) as engine:
        stored, loaded = round_trip(engine)
        before, after, tolerance = numbers(stored), numbers(loaded), resolve_codec(codec).tolerance
        if tolerance == 0.0:
            assert np.array_equal(before, after)
        else:
            error = np.abs(before - after).max() / np.abs(before).max()
            assert 0 < error <= (tolerance if tolerance is not None else 1.0)
            assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.8
        assert engine.tiers()[0].name == tier


@pytest.mark.parametrize("codec", ["int8", "ecsq", "lossless"])
def test_a_tier_counts_the_bytes_that_are_really_there(codec, tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path / "kv", codec=codec) as engine:
        round_trip(engine)
        files = list((tmp_path / "kv").rglob("*.kv"))
        assert engine.tiers()[0].used_bytes == sum(f.stat().st_blocks * 512 for f in files)
        assert sum(f.stat().st_size - 4096 for f in files) < len(TOKENS) * LAYOUT.token_nbytes


def test_a_budget_holds_more_chunks_when_they_are_encoded():
    budget = 3 * LAYOUT.chunk_nbytes
    with (
        CacheEngine(IDENTITY, memory_bytes=budget) as raw,
        CacheEngine(IDENTITY, memory_bytes=budget, memory_codec="int4") as small,
    ):
        for engine in (raw, small):
            engine.store(TOKENS, real_pages().table, blocks=BLOCKS)
            engine.flush()
        assert raw.lookup(TOKENS) == 3 * LAYOUT.chunk_tokens
        assert small.lookup(TOKENS) == len(TOKENS)
        assert small.tiers()[0].used_bytes < budget


def test_chunks_survive_a_restart_and_only_under_their_codec(tmp_path):
    settings = dict(memory_bytes=0, disk_path=tmp_path / "kv")
    with CacheEngine(IDENTITY, codec="int8", **settings) as engine:
        _, first = round_trip(engine)
    for other in ("raw", "fp8", "int8(sink_tokens=4)", "lossless"):
        with CacheEngine(IDENTITY, codec=other, **settings) as engine:
            assert engine.lookup(TOKENS) == 0
    with CacheEngine(IDENTITY, codec="int8", **settings) as engine:
        again = Pages(len(BLOCKS), LAYOUT)
        assert engine.retrieve(TOKENS, again.table, blocks=BLOCKS) == len(TOKENS)
        assert np.array_equal(numbers(first), numbers(again))


def test_memory_as_it_is_above_an_encoded_disk(tmp_path):
    """What was just stored is exact; what comes back from below is near, and stays in memory as it came."""
    settings = dict(memory_bytes=4 * LAYOUT.chunk_nbytes, disk_path=tmp_path / "kv", codec="int8", verify=True)
    with CacheEngine(IDENTITY, **settings) as engine:
        stored, loaded = round_trip(engine)
        assert np.array_equal(numbers(stored), numbers(loaded))
    with CacheEngine(IDENTITY, **settings) as engine:
        near, again = Pages(len(BLOCKS), LAYOUT), Pages(len(BLOCKS), LAYOUT)
        assert engine.retrieve(TOKENS, near.table, blocks=BLOCKS) == len(TOKENS)
        assert not np.array_equal(numbers(stored), numbers(near))
        assert engine.retrieve(TOKENS, again.table, blocks=BLOCKS) == len(TOKENS)
        assert np.array_equal(numbers(near), numbers(again))


def test_write_back_through_a_codec(tmp_path):
    settings = dict(memory_bytes=2 * LAYOUT.chunk_nbytes, disk_path=tmp_path / "kv", codec="lossless", write="back")
    with CacheEngine(IDENTITY, **settings) as engine:
        stored, loaded = round_trip(engine)
        assert np.array_equal(numbers(stored), numbers(loaded))


def test_what_a_codec_cannot_keep_is_a_counted_drop(tmp_path):
    pages = real_pages()
    pages.arrays[0][4, :2] = np.frombuffer(np.uint16(0x7FC0).tobytes(), np.uint8)  # NaN in the second chunk
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path / "kv", codec="int8") as engine:
        engine.store(TOKENS, pages.table, blocks=BLOCKS)
        engine.flush()
        assert engine.lookup(TOKENS) == LAYOUT.chunk_tokens
        faults = [event.reason for event in engine.record.events if event.kind == "store" and event.reason]
        assert faults == ["unrepresentable"]


def test_a_code_that_was_changed_is_a_miss(tmp_path):
    """The record's checksum finds damage; the frame finds a code that somebody else wrote under our key."""
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path / "kv", codec="int8") as engine:
        round_trip(engine)
        for file in (tmp_path / "kv").rglob("*.kv"):
            data = bytearray(file.read_bytes())
            data[5000] ^= 1
            file.write_bytes(data)
        assert engine.retrieve(TOKENS, Pages(len(BLOCKS), LAYOUT).table, blocks=BLOCKS) == 0

    inner = MemoryTier()
    ours, theirs = (EncodedTier(inner, resolve_codec(name), LAYOUT) for name in ("int8", "int8(sink_tokens=2)"))
    chunk = ChunkChain(bytes(32), LAYOUT.chunk_tokens).extend(TOKENS)[0]
    payload = np.zeros(LAYOUT.chunk_nbytes, np.uint8)
    assert theirs.write(chunk, payload)[0] == ""
    assert ours.read(chunk, payload) == "mismatch"
    assert ours.read(chunk, payload) == "absent"


def test_a_code_shorter_than_its_frame_says_is_no_other_chunks():
    """What the last read left behind in the buffer is not taken for the rest of this one."""
    inner = MemoryTier()
    tier = EncodedTier(inner, resolve_codec("int8"), LAYOUT)
    first, second = list(ChunkChain(bytes(32), LAYOUT.chunk_tokens).extend(TOKENS))[:2]
    pages, out = real_pages(), np.zeros(LAYOUT.chunk_nbytes, np.uint8)
    for number, chunk in enumerate((first, second)):
        blocks = BLOCKS[4 * number : 4 * number + 4]
        payload = np.stack([array[blocks] for array in pages.arrays]).reshape(-1)
        assert tier.write(chunk, payload)[0] == ""
    code = np.zeros(tier.nbytes_of(LAYOUT.chunk_nbytes, 64), np.uint8)
    assert inner.read(second, code, at_most=True) == ""
    inner.erase(second.key)
    assert inner.write(second, code[:64].copy())[0] == ""
    assert tier.read(first, out) == ""
    assert tier.read(second, out) == "mismatch"


@pytest.mark.parametrize("settings", [
    dict(codec="int9"), dict(codec="int4(group=)"), dict(memory_codec="int8", write="back"),
])  # fmt: skip
def test_settings_that_cannot_work(settings, tmp_path):
    with pytest.raises(InvalidInputError):
        CacheEngine(IDENTITY, disk_path=tmp_path / "kv", **settings)


def test_an_identity_that_names_a_codec_keeps_the_engines_own_apart_too():
    named = replace(IDENTITY, codec="of the model's own")
    found = [encoded_identity(who, CacheConfig(codec=codec)) for who in (IDENTITY, named) for codec in ("raw", "int8")]
    assert found[0] == IDENTITY and found[2] == named and len({who.digest for who in found}) == 4


def test_a_layout_that_a_codec_cannot_read():
    opaque = Identity(layout=replace(LAYOUT, page_format="opaque"), weights="w")
    with pytest.raises(InvalidInputError, match="opaque"):
        CacheEngine(opaque, memory_codec="int8")


def test_the_memory_tier_keeps_the_contract():
    check_tier(MemoryTier)


@pytest.mark.parametrize("shared", ["redis", "object_store"])
@pytest.mark.parametrize("codec", ["int8", "ecsq", "lossless"])
def test_a_codec_before_a_shared_tier(codec, shared, tmp_path, request):
    if shared == "redis":
        server = redis_process()
        request.addfinalizer(server.close)
        place = {"redis_url": server.url, "redis_timeout_seconds": 5.0}
    else:
        place = {"object_store_url": f"file://{tmp_path}", "object_store_timeout_seconds": 5.0}
    settings = dict(memory_bytes=0, codec=codec, **place)
    with CacheEngine(IDENTITY, **settings) as engine:
        _, first = round_trip(engine)
    with CacheEngine(IDENTITY, **settings) as engine:
        again = Pages(len(BLOCKS), LAYOUT)
        assert engine.retrieve(TOKENS, again.table, blocks=BLOCKS) == len(TOKENS)
        assert np.array_equal(numbers(first), numbers(again))
