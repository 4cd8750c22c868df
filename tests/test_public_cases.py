"""What other caches got wrong in public, each with the right outcome here.

The first list is behaviours of a widely used peer (LMCache 0.5.6, each reproduced on it), the second the numbered cases
of public reports. Each stands in the table with the test that holds it; those without a file name are in this module.

    seen elsewhere                                         held by
    1  a file cut in half is a hit with stale bytes        test_half_a_file_is_a_miss_without_stale_bytes
    2  a flipped bit on disk is a hit                      test_disk: test_damage_is_counted_once_...
    3  the only file of a prompt deleted: KeyError         test_the_only_file_of_a_prompt_is_deleted
    4  one of four deleted: lookups go on promising all    test_engine: test_a_hole_ends_the_hit
    5  a failed write leaks room, pins and half files      test_a_failed_write_...; test_a_chunk_that_only_memory_...
    6  an empty tier refuses stores after some clears      test_a_cleared_tier_takes_as_much_as_a_new_one
    7  clear leaves disk and Redis as they were            test_clear_reaches_every_tier
    8  orphans after a restart, the cap exceeded           test_engine: test_restart_...
    9  the prefix is evicted before its suffix             test_the_suffix_goes_before_its_prefix
    10 two model names share a file                        test_identity, test_security: test_no_name_of_a_model_...
    11 storing what is stored copies it again              test_storing_again_moves_no_byte
    12 a load without staging room keeps a lock for good   test_loads_go_on_without_a_free_slot
    13 close never returns                                 test_close_returns
    14 lookups lose their answer                           test_no_lookup_is_left_without_an_answer
    15 "stored", but nothing is; starved below a watermark test_what_store_says_is_stored_is_stored
    16 each call waits 5 s for a stopped Redis             test_redis: test_stopped_server
    17 Redis dead at the start                             test_a_server_that_comes_up_later_is_used
    18 a batch is lost after Redis came back               test_redis: test_killed_and_restarted_server
    19 other keys in another process                       test_chunks: test_golden_keys_under_any_hash_seed

    case                                                   held by
    1  KV dtype                                            test_identity: test_dtype_there_and_back_again
    2  LoRA, salt, prompt embeddings                       test_engine: test_scopes_do_not_meet; test_an_adapter_...,
                                                           test_prompt_embeddings_are_not_cached
    3  names of models                                     test_security, test_identity;
                                                           test_two_directories_of_one_name_are_two_models
    4  zero hits across processes                          test_chunks: test_golden_keys_...
    5  whole prompt hits                                   test_vllm_connector: test_prompts_at_every_boundary
    6  partial last chunk                                  test_only_blocks_between_local_and_usable_are_loaded
    7  boundary at the prompt's end                        test_engine: test_boundaries_at_the_end_of_a_prompt_...
    8  hit rate lower than expected                        test_engine: test_explain_says_what_was_shared_...
    9  a block freed while it is copied                    test_control: test_random_schedules, TestPlanes
    10 pins that never come off                            test_no_pin_is_left; test_vllm_connector: test_abort_...
    11 a cache smaller than one request                    test_engine: test_a_request_larger_than_the_cache_...
    12 values too large, keys gone, connections dropped    test_a_key_that_goes_between_lookup_and_load; test_redis
    13 inputs                                              test_engine: test_bad_token_ids; test_kernel_pages
    14 TTFT measured wrongly                               test_client: test_ttft_is_the_first_chunk_...
    15 sweeps killed and resumed                           test_study: test_killed_at_random_cells_and_resumed_...
    16 restart                                             test_engine: test_restart_finds_everything_...; test_disk
    17 shared memory                                       test_killed_engines_leave_no_shared_memory; test_config
"""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import redis
from fault_servers import free_port, redis_process, wait_until
from oracle import IDENTITY, audit, chain_of, orphans
from test_control import Planes, run_step
from test_control import rest as planes_rest
from test_disk import leftovers
from test_engine import CHUNK, ON_DISK, rest, retrieve, store

from workbench.chunks import ChunkScope
from workbench.control import ControlPlane
from workbench.engine import CacheEngine
from workbench.fingerprint import fingerprint_files
from workbench.layout import Identity, KVLayout
from workbench.orders import Done, Load, Store
from workbench.testing_tiers import sample_chunks
from workbench.tiers.base import TierIndex
from workbench.tiers.redis import RedisTier

ROOT = Path(__file__).parent.parent
PROMPT = range(32)  # four chunks


def test_every_test_of_the_table_is_there():
    texts = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    defined = set(re.findall(r"^(?:def )?(test_\w+|Test\w+)\b(?:\(| = )", texts, re.MULTILINE))
    files = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    for name, more in re.findall(r"\b((?:test_|Test)\w+)(\.\.\.)?", __doc__):
        assert name in files or name in defined or (more and any(other.startswith(name) for other in defined)), name


def place(folder: Path, tokens, number: int) -> Path:
    """File of one chunk."""
    name = chain_of(tokens)[number].key.hex()
    return folder / name[:2] / f"{name}.kv"


@pytest.fixture(scope="module")
def server():
    server = redis_process()
    yield server
    server.close()


# ---------------------------------------------------------------- the peer's behaviours


def test_half_a_file_is_a_miss_without_stale_bytes(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        store(engine, PROMPT)
        engine.flush()
        os.truncate(place(tmp_path, PROMPT, 1), 4096 + CHUNK // 2)
        engine.data.arena.chunks[:] = 7  # whatever lay in the staging memory must not come out as KV
        assert retrieve(engine, PROMPT) == 8
        assert engine.lookup(PROMPT) == 8 and engine.stats()["failed_loads"] == {"corrupt": 1}
        rest(engine)


def test_the_only_file_of_a_prompt_is_deleted(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        store(engine, range(8))
        engine.flush()
        place(tmp_path, range(8), 0).unlink()
        assert engine.lookup(range(8)) == 8, "nobody told the index"
        assert retrieve(engine, range(8)) == 0
        assert engine.lookup(range(8)) == 0 and engine.stats()["failed_loads"] == {"absent": 1}
        rest(engine)


def test_a_failed_write_leaks_nothing_and_is_made_good(tmp_path):
    """The system itself refuses to write more than half a record, then no longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + CHUNK // 2, hard))
        try:
            store(engine, PROMPT)
            assert engine.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert engine.stats()["failed_stores"] == {"EFBIG": 4}
        assert engine.lookup(PROMPT) == engine.tiers()[0].used_bytes == 0
        assert not leftovers(tmp_path) and not list(tmp_path.rglob("*.kv"))
        rest(engine)
        assert store(engine, PROMPT) == 32 and engine.flush()
        assert retrieve(engine, PROMPT) == 32
        rest(engine)


def test_a_chunk_that_only_memory_has_is_written_down_when_it_is_stored_again(tmp_path):
    """The disk was full for a while: what was stored meanwhile reaches it with the next store of the same prompt."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK, disk_path=tmp_path) as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + CHUNK // 2, hard))
        try:
            assert store(engine, PROMPT) == 32 and engine.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert retrieve(engine, PROMPT) == 32 and not list(tmp_path.rglob("*.kv"))
        store(engine, PROMPT)
        rest(engine)
        assert len(list(tmp_path.rglob("*.kv"))) == 4
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK, disk_path=tmp_path) as engine:
        assert retrieve(engine, PROMPT) == 32


def test_a_cleared_tier_takes_as_much_as_a_new_one(tmp_path):
    settings = {"memory_bytes": 4 * CHUNK, "disk_path": tmp_path, "disk_bytes": 6 * ON_DISK}
    with CacheEngine(IDENTITY, **settings) as engine:
        for start in range(0, 500, 50):
            tokens = range(start, start + 32)
            store(engine, tokens)
            assert engine.flush() and retrieve(engine, tokens) == 32
            assert len(list(tmp_path.rglob("*.kv"))) == 4
            engine.clear()
            rest(engine)
            assert [(tier.chunks, tier.used_bytes) for tier in engine.tiers()] == [(0, 0), (0, 0)]
            assert engine.lookup(tokens) == 0 and not list(tmp_path.rglob("*.kv"))


@pytest.mark.redis
def test_clear_reaches_every_tier(server, tmp_path):
    settings = {"memory_bytes": 8 * CHUNK, "disk_path": tmp_path, "redis_url": server.url, "redis_timeout_seconds": 5.0}
    scope = ChunkScope(salt="clear")
    with CacheEngine(IDENTITY, **settings) as engine:
        store(engine, PROMPT, scope=scope)
        engine.flush()
        engine.clear()
        engine.flush()
        assert engine.lookup(PROMPT, scope=scope) == 0
    with CacheEngine(IDENTITY, **settings) as another:
        assert another.lookup(PROMPT, scope=scope) == 0, "a slower tier kept what was cleared"


def test_the_suffix_goes_before_its_prefix():
    """Room for 10 chunks: 8 of one prompt, then 4 of another. What is left of the first is its beginning."""
    with CacheEngine(IDENTITY, memory_bytes=10 * CHUNK) as engine:
        first, second = range(64), range(500, 532)
        store(engine, first)
        store(engine, second)
        assert retrieve(engine, first) == 48 and retrieve(engine, second) == 32
        assert not orphans(engine.control) and len(engine.control.memory) == 10
        rest(engine)


def test_storing_again_moves_no_byte(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=8 * CHUNK, disk_path=tmp_path) as engine:

        def moved() -> int:
            engine.flush()
            return sum(event.nbytes for event in engine.record.events if event.kind == "store")

        store(engine, PROMPT)
        before, times = moved(), [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.kv"))]
        for _ in range(3):
            assert store(engine, PROMPT) == 0
        assert moved() == before > 0
        assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.kv"))] == times
        assert engine.record.totals.count("dedup") == 12


def test_loads_go_on_without_a_free_slot(tmp_path):
    """Everything in memory is pinned and nothing may be staged: what lies on disk is loaded all the same."""
    settings = {"memory_bytes": 4 * CHUNK, "disk_path": tmp_path, "staging_bytes": 1}
    with CacheEngine(IDENTITY, **settings) as engine:
        wide, pinned = range(100, 180), range(32)
        for tokens in (wide, pinned):
            for length in range(8, len(tokens) + 8, 8):
                store(engine, tokens[:length])
                engine.flush()
        pin = engine.pin(pinned)
        assert pin.hit_tokens == 32
        on_disk = engine.lookup(wide)
        for _ in range(3):
            assert retrieve(engine, wide) == on_disk == engine.lookup(wide) > 4 * 8
        engine.unpin(pin)
        assert not engine.stats()["failed_loads"]
        rest(engine)


@pytest.mark.redis
@pytest.mark.parametrize("state", ["well", "stopped", "dead"])
def test_close_returns(state):
    """With writes in the queue and whatever Redis does, within 5 s; a second time at once."""
    server = redis_process()
    engine = CacheEngine(IDENTITY, memory_bytes="1MiB", redis_url=server.url)
    try:
        if state == "stopped":
            os.kill(server.process.pid, signal.SIGSTOP)
        elif state == "dead":
            server.kill()
        for start in range(0, 4000, 100):
            store(engine, range(start, start + 64))
        start = time.monotonic()
        engine.close()
        engine.close()
        assert time.monotonic() - start < 5.0
        assert engine.lookup(PROMPT) == 0
    finally:
        if state == "stopped":
            os.kill(server.process.pid, signal.SIGCONT)
        server.close()


@pytest.mark.redis
def test_no_lookup_is_left_without_an_answer(server):
    """640 questions of 8 threads at a time, every one answered, and rightly."""
    tier, wrong = RedisTier(server.url, timeout_seconds=10.0), []
    chunks = sample_chunks(40, salt=77)
    for chunk in chunks[::2]:
        assert tier.write(chunk, np.ones(100, np.uint8))[0] == ""

    def ask() -> None:
        for _ in range(80):
            found = tier.contains([chunk.key for chunk in chunks])
            if found != [True, False] * 20:
                wrong.append(found)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads) and not wrong
    tier.close()


def test_what_store_says_is_stored_is_stored():
    """Requests of 8 chunks into room for 25, over and over: the fourth does not fit beside the others and evicts."""
    with CacheEngine(IDENTITY, memory_bytes=25 * CHUNK) as engine:
        for start in range(0, 2000, 100):
            tokens = range(start, start + 64)
            assert store(engine, tokens) == engine.lookup(tokens) == 64
        assert len(engine.control.memory) == 25, "no room is left unused below a watermark"
        rest(engine)


@pytest.mark.redis
def test_a_server_that_comes_up_later_is_used():
    port = free_port()
    settings = {"redis_url": f"redis://127.0.0.1:{port}/0", "redis_timeout_seconds": 5.0}
    start = time.monotonic()
    with CacheEngine(IDENTITY, memory_bytes="1MiB", **settings) as engine:
        assert store(engine, PROMPT) == 32 and retrieve(engine, PROMPT) == 32
        assert engine.lookup(range(900, 932)) == 0
        assert time.monotonic() - start < 2.0, "a server that is not there costs no waiting"
        server = redis_process(port=port)
        try:
            prompts = (range(first, first + 32) for first in range(1000, 9000, 50))
            with CacheEngine(IDENTITY, memory_bytes="1MiB", **settings) as other:

                def lands() -> bool:
                    tokens = next(prompts)
                    store(engine, tokens)
                    engine.flush()
                    return other.lookup(tokens) == 32

                wait_until(lands, 5.0)
        finally:
            server.close()


# ---------------------------------------------------------------- the numbered cases


def test_an_adapter_of_the_same_name_with_other_weights_is_another(tmp_path):
    identity = pytest.importorskip("workbench.connectors.vllm_identity")
    request = SimpleNamespace(cache_salt=None, mm_features=None,
                              lora_request=SimpleNamespace(lora_name="A", lora_path=str(tmp_path)))  # fmt: skip
    scopes = []
    for weights in (b"first", b"second"):
        (tmp_path / "adapter.safetensors").write_bytes(weights)
        scopes.append(identity.scope_of(request))
    request.lora_request = None
    scopes.append(identity.scope_of(request))
    request.cache_salt = "x"
    scopes.append(identity.scope_of(request))
    assert len({scope.root(IDENTITY) for scope in scopes}) == 4


def test_prompt_embeddings_are_not_cached():
    """Their token ids say nothing: no key could tell two of them apart."""
    identity = pytest.importorskip("workbench.connectors.vllm_identity")
    request = SimpleNamespace(cache_salt=None, mm_features=None, lora_request=None, prompt_embeds=np.zeros((4, 8)))
    assert identity.scope_of(request) is None
    request.prompt_embeds = None
    assert identity.scope_of(request) is not None


def test_two_directories_of_one_name_are_two_models(tmp_path):
    digests = set()
    for parent, weights in (("a", b"1" * 100), ("b", b"2" * 100)):
        folder = tmp_path / parent / "model"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(weights)
        digests.add(fingerprint_files([folder / "model.safetensors"]))
    assert len(digests) == 2


LONG = KVLayout(num_layers=1, num_kv_heads=1, head_size=1, block_size=16, chunk_tokens=256)


def test_only_blocks_between_local_and_usable_are_loaded():
    """A prompt of 14,820 tokens in chunks of 256; the serving engine's own cache holds some of its blocks."""
    control = ControlPlane(LONG, [TierIndex("memory", 0, 64 * LONG.chunk_nbytes, chunk_nbytes=LONG.chunk_nbytes)],
                           arena=True)  # fmt: skip
    tokens, blocks = np.arange(14_820), range(5_000, 5_927)
    chain = chain_of(tokens, Identity(layout=LONG, weights="w"))
    control.begin("first", chain)
    orders = control.plan_stores("first", 14_820, blocks)
    assert [type(order) for order in orders] == [Store] * 57
    control.apply(Done("store", "first", 0, order.chunk.key, 0, 1, 0.0, "") for order in orders)
    control.finish("first")
    usable = control.lookup(chain)
    assert usable == 57 * 256 == 14_592, "the tail of 228 tokens fills no chunk and is not served"
    other_tail = np.concatenate([tokens[:14_592], np.arange(90_000, 90_228)])
    assert control.lookup(chain_of(other_tail, Identity(layout=LONG, weights="w"))) == 14_592
    for local in (0, 16, 256, 14_336 + 16, 14_576, 14_592):
        name = f"local {local}"
        control.admit(name, chain, local_tokens=local, reuse_tokens=usable - local)
        loads = control.plan_loads(name, local, usable, blocks)
        assert all(isinstance(order, Load) for order in loads)
        touched = [block for order in loads for block in order.blocks if block >= 0]
        assert touched == list(blocks[local // 16 : usable // 16]), "a live block would be overwritten"
        control.finish(name)
    assert max(0, min(usable, len(tokens) - 1) - 14_816) == 0, "what the engine has itself is not asked for again"


@pytest.mark.parametrize("ending", ["served elsewhere", "load fails at chunk 4", "only decode steps", "aborted early"])
def test_no_pin_is_left(ending):
    planes, tokens = Planes("through"), [*range(48)]
    try:
        planes.admit(tokens)
        run_step(planes)
        planes.finish("r1")
        planes.settle()
        chain, blocks = chain_of(tokens), list(range(12))
        hit = planes.control.lookup(chain)
        assert hit == 48
        if ending == "served elsewhere":
            planes.control.admit("x", chain, local_tokens=48, reuse_tokens=0)
        else:
            planes.control.admit("x", chain, reuse_tokens=hit)
        if ending == "load fails at chunk 4":
            place(planes.folder, tokens, 3).write_bytes(b"")
        if ending in ("load fails at chunk 4", "aborted early"):
            planes.data.run(planes.control.plan_loads("x", 0, hit, blocks))
        if ending == "load fails at chunk 4":
            assert planes.data.bad_blocks == {6, 7}
            planes.control.apply(planes.data.take_report())
        if ending == "only decode steps":
            for length in range(48, 56):
                assert planes.control.plan_stores("x", length, blocks) == []
        planes.control.finish("x")
        planes.control.apply(planes.data.take_report())
        planes.data.take_bad_blocks()
        assert sum(tier.holds for tier in planes.control.tiers) == 0
        planes_rest(planes)
    finally:
        planes.close()


@pytest.mark.redis
def test_a_key_that_goes_between_lookup_and_load(server):
    scope = ChunkScope(salt="gone")
    settings = {"memory_bytes": 0, "redis_url": server.url, "redis_timeout_seconds": 5.0}
    with CacheEngine(IDENTITY, **settings) as engine:
        store(engine, PROMPT, scope=scope)
        engine.flush()
        assert engine.lookup(PROMPT, scope=scope) == 32
        with redis.Redis(port=server.port) as client:
            client.delete(f"kvworkbench:{chain_of(PROMPT, scope=scope)[1].key.hex()}")
        assert retrieve(engine, PROMPT, scope=scope) == 8
        assert engine.stats()["failed_loads"] == {"absent": 1}
        assert engine.lookup(PROMPT, scope=scope) == 8
        audit(engine.control)


KILLED = """
import os, signal
from oracle import IDENTITY
from workbench.engine import CacheEngine
from workbench.tiers.base import TierIndex
TierIndex("memory", 0, 4096, chunk_nbytes=1024)  # loads what every child needs, once
for _ in range(20):
    child = os.fork()
    if child == 0:
        engine = CacheEngine(IDENTITY, memory_bytes="64MiB")
        engine.data.arena.chunks[:] = 1  # every page of it is there
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
"""


def test_killed_engines_leave_no_shared_memory():
    """20 engines of 64 MiB, killed: the memory tier is a private mapping, which goes with its process."""
    shared = Path("/dev/shm")
    before = set(os.listdir(shared)) if shared.is_dir() else set()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    after = set(os.listdir(shared)) if shared.is_dir() else set()
    assert not {name for name in after - before if "kv" in name}
