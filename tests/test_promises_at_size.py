"""Promises that only size or time can prove: a small form in each run, the full one behind `-m slow`; counts printed.

KVWORKBENCH_SHARE=0.1 runs the full ones at a tenth of their size.
"""

import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from fault_servers import wait_until
from oracle import IDENTITY, Pages, audit, chain_of, payload
from test_control import SETTINGS, Planes, tokens_of
from test_control import rest as planes_rest
from test_disk import Faulty, leftovers, read, run_python, write
from test_engine import BLOCKS, CHUNK, ON_DISK, prompts, rest, retrieve, store
from test_live_policy import LIVE
from test_object_store import PATIENT
from test_object_store import path as object_path

from workbench import chunks as chunks_module
from workbench.engine import CacheEngine
from workbench.layout import Identity, KVLayout
from workbench.record import header_nbytes
from workbench.testing_tiers import sample_chunks, sample_payload
from workbench.tiers.disk import DiskTier
from workbench.tiers.object_store import ObjectStoreTier

SHARE = float(os.environ.get("KVWORKBENCH_SHARE", "1"))


def full(count: float, *, unit: str = "", timeout: int = 1800):
    """The full size of a promise, as a slow case of its test."""
    count = max(1, round(count * SHARE)) if not unit else count * SHARE
    return pytest.param(count, marks=[pytest.mark.slow, pytest.mark.timeout(timeout)], id=f"full-{count:g}{unit}")


@pytest.fixture
def say(capsys):
    """Print past pytest's capture."""

    def print_now(text: object) -> None:
        with capsys.disabled():
            print(f"\n    {text}", end="")

    return print_now


# ---------------------------------------------------------------- kills and power loss

KILLED_ANYWHERE = """
import itertools, os, random, signal, sys, time, test_disk as t
from oracle import chain_of
folder, kills = sys.argv[1], int(sys.argv[2])
rng, known = random.Random(0), 0
for kill in range(kills):
    child = os.fork()
    if child == 0:
        tier = t.DiskTier(folder, durable=kill % 3 == 0)
        for prompt in itertools.count(1000 * kill):
            for chunk in chain_of([prompt, *range(39)]):
                t.write(tier, chunk)
                t.read(tier, chunk)
    time.sleep(rng.uniform(0.0, 0.02))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    tier = t.DiskTier(folder)
    left = {stored.key for stored in tier.scan()}
    assert not t.leftovers(tier.path), f'kill {kill} left a temporary file'
    known += len(left)
    for prompt in range(1000 * kill, 1000 * kill + 1000):
        for chunk in chain_of([prompt, *range(39)]):
            reason = t.read(tier, chunk)  # compares every byte
            assert reason == ('' if chunk.key in left else 'absent'), f'kill {kill}: {reason}'
            left.discard(chunk.key)
            tier.erase(chunk.key)
        if not left:
            break
    assert not left, 'a record of nobody'
print(known)
"""


@pytest.mark.parametrize("kills", [80, full(5000)])
def test_kill_9_at_random_moments(kills, tmp_path, say):
    exact = 0
    for batch in range(-(-kills // 250)):
        out = run_python(KILLED_ANYWHERE, str(tmp_path / str(batch)), str(min(250, kills - 250 * batch)))
        assert out.returncode == 0, out.stderr[-2000:]
        exact += int(out.stdout)
    say(f"{kills} kills: {exact} chunks found, all exact; 0 wrong, 0 temporary files left")
    assert exact > kills


def _zero_tail(file: Path, other: bytes, rng: random.Random) -> None:
    data, at = file.read_bytes(), rng.randrange(0, file.stat().st_size)
    file.write_bytes(data[:at] + bytes(len(data) - at))


def _missing(file: Path, other: bytes, rng: random.Random) -> None:
    file.unlink()


def _other_bytes(file: Path, other: bytes, rng: random.Random) -> None:
    file.write_bytes(other)


def _half_renamed(file: Path, other: bytes, rng: random.Random) -> None:
    """The name came to the disk and its bytes did not: old ones stand there, of any length."""
    file.write_bytes(other[: rng.randrange(len(other))] + rng.randbytes(rng.randrange(4096)))


POWER_LOSSES = {"zero tail": _zero_tail, "file missing": _missing, "old name with new bytes": _other_bytes,
                "new name with old bytes": _half_renamed}  # fmt: skip


@pytest.mark.parametrize("seeds", [10, full(200)])
@pytest.mark.parametrize("shape", POWER_LOSSES)
def test_power_loss(shape, seeds, tmp_path, say):
    """What was not synced is gone in some way or other: after the start each chunk is exact or a miss."""
    found: Counter = Counter()
    for seed in range(seeds):
        rng, folder = random.Random(seed), tmp_path / str(seed)
        tokens, tier = [seed, *range(63)], DiskTier(folder)
        chain = chain_of(tokens)
        for chunk in chain:
            write(tier, chunk)
        hurt = sorted(rng.sample(range(len(chain)), rng.randint(1, 3)))
        files = {n: folder / chain[n].key.hex()[:2] / f"{chain[n].key.hex()}.kv" for n in range(len(chain))}
        records = [files[number].read_bytes() for number in range(len(chain))]
        for number in hurt:
            POWER_LOSSES[shape](files[number], records[number - 1], rng)
        with CacheEngine(IDENTITY, memory_bytes=0, disk_path=folder) as engine:
            hit = retrieve(engine, tokens)  # compares every byte
            assert hit >= 8 * hurt[0], "what stands before the loss is whole"
            rest(engine)
        found["exact"] += hit // 8
        found["missed"] += len(chain) - hit // 8
        shutil.rmtree(folder)
    say(f"power loss, {shape}: {seeds} times, {dict(found)} chunks, 0 wrong")
    assert found["missed"] >= seeds // 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["flip", "truncate", "zeros"])
def test_damage_at_every_offset_of_an_object(how, tmp_path, say):
    """A record of 64 KiB in an object store, damaged at each of its bytes."""
    tier = ObjectStoreTier(f"file://{tmp_path}/store", timeout_seconds=PATIENT)
    chunk = sample_chunks(1)[0]
    good = sample_payload(chunk, 61_440)
    assert tier.write(chunk, good)[0] == ""
    file = tmp_path / "store" / object_path(chunk)
    record, out, seen = file.read_bytes(), np.zeros(good.nbytes, np.uint8), Counter()
    border = header_nbytes(chunk.num_tokens)
    for at in range(0, len(record), max(1, round(1 / SHARE))):
        flipped = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
        bad = {"flip": flipped, "truncate": record[:at], "zeros": record[:at] + bytes(len(record) - at)}[how]
        file.write_bytes(bad)
        reason = tier.read(chunk, out)
        seen[reason] += 1
        if reason == "":
            assert np.array_equal(out, good) and (bad == record or 160 + len(chunk.tokens) <= at < border)
        else:
            assert reason == "corrupt" and not file.exists(), (reason, at)
    say(f"{how}: {dict(seen)} of {len(record)} offsets, 0 wrong")
    tier.close()


# ---------------------------------------------------------------- identity and fences


class _Short:
    """SHA-256 of which only the first 8 bits are left."""

    def __init__(self, data: bytes):
        self._digest = hashlib.sha256(data).digest()

    def digest(self) -> bytes:
        return self._digest[:1] * 32


def _true_pages(tokens: np.ndarray) -> Pages:
    """KV that is a function of all tokens up to a chunk's end, not of its key, which says little here."""
    pages = Pages(16)
    for number in range(len(tokens) // 8):
        right = payload(hashlib.sha256(tokens[: 8 * number + 8].tobytes()).digest())
        for layer, part in enumerate(right):
            pages.arrays[layer][[2 * number, 2 * number + 1]] = part
    return pages


@pytest.mark.parametrize("chunks", [2_000, full(100_000)])
def test_colliding_digests_are_misses(chunks, tmp_path, monkeypatch, say):
    monkeypatch.setattr(chunks_module, "hashlib", SimpleNamespace(sha256=_Short))
    rng, found = np.random.default_rng(0), Counter()
    with CacheEngine(IDENTITY, memory_bytes=20 * CHUNK, disk_path=tmp_path, disk_bytes=100 * ON_DISK) as engine:
        while found["chunks"] < chunks:
            tokens = rng.integers(0, 40, 8 * int(rng.integers(1, 4))).astype(np.int32)
            if rng.random() < 0.5:
                tokens[:] = tokens[::8].repeat(8)  # shares first chunks with others
            truth, target = _true_pages(tokens), Pages(16)
            hit = engine.retrieve(tokens, target.table, blocks=range(16))
            for layer, array in enumerate(target.arrays):
                assert np.array_equal(array[: hit // 4], truth.arrays[layer][: hit // 4]), "a collision gave wrong KV"
            engine.store(tokens, truth.table, blocks=range(16))
            found["chunks"] += len(tokens) // 8
            found["exact"] += hit // 8
        found.update(engine.stats()["failed_loads"])
        assert engine.flush()
    say(f"keys of 8 bits: {dict(found)}, 0 wrong")
    assert found["mismatch"] > chunks // 50 and found["exact"] > 0


@pytest.mark.parametrize("schedules", [full(200, timeout=3600)])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_thousand_schedules(name, schedules, say):
    """Preempted, finished and handed-on blocks while loads and stores are queued; every loaded byte is compared."""
    seen: Counter = Counter()
    for seed in range(schedules):
        rng, planes = np.random.default_rng(1000 + seed), Planes(name)
        try:
            for _ in range(120):
                _one_move(planes, rng)
                audit(planes.control, at_rest=False)
            planes_rest(planes)
            seen.update(planes.seen)
        finally:
            planes.close()
    say(f"{name}: {schedules} schedules of 120 moves, 0 wrong; seen in so many: {dict(seen)}")
    assert {"Load", "store", "load"} <= set(seen)


def _one_move(planes: Planes, rng: np.random.Generator) -> None:
    what, names = int(rng.integers(0, 15)), sorted(planes.requests)
    if what < 3 and len(names) < 3:
        planes.admit(tokens_of(rng.integers(0, 2, rng.integers(1, 6))))
    elif what < 5:
        planes.recompute(), planes.send()
    elif what < 8 and planes.sent:
        planes.carry_out()
    elif 8 <= what < 11 and planes.reports:
        planes.deliver(int(rng.integers(0, 3)))
    elif 11 <= what < 13 and names:
        planes.finish(names[rng.integers(len(names))])
    elif what == 13 and names and not planes.sent:
        planes.preempt(names[rng.integers(len(names))])
    elif what == 14:
        planes.files.failing_reads, planes.files.failing_writes = rng.integers(0, 5, 2)


# ---------------------------------------------------------------- budgets and leaks

WIDE = KVLayout(num_layers=4, num_kv_heads=2, head_size=64, block_size=16, chunk_tokens=64)  # 128 KiB a chunk
WIDE_BLOCKS = list(range(16))


def _wide_load(engine: CacheEngine, until: float, seed: int, faults: list) -> None:
    rng, pages = np.random.default_rng(seed), Pages(16, WIDE)
    try:
        while time.monotonic() < until:
            tokens = np.repeat(rng.integers(0, 9, 4), 64)
            engine.retrieve(tokens, pages.table, blocks=WIDE_BLOCKS)
            engine.store(tokens, pages.table, blocks=WIDE_BLOCKS)
    except Exception as error:
        faults.append(error)


@pytest.mark.parametrize("seconds", [2.0, full(600, unit="s", timeout=3600)])
def test_memory_stays_within_its_budget(seconds, tmp_path, say):
    _check_budget("lru", seconds, tmp_path, say)


@pytest.mark.parametrize("seconds", [full(30, unit="s")])
@pytest.mark.parametrize("policy", LIVE)
def test_memory_stays_within_its_budget_under_every_policy(policy, seconds, tmp_path, say):
    _check_budget(policy, seconds, tmp_path, say)


def _check_budget(policy: str, seconds: float, tmp_path: Path, say) -> None:
    """8 threads; resident memory within the budget, what is declared for staging, and 64 MiB."""
    budget, staging, faults = 32 << 20, 8 << 20, []
    settings = {"memory_bytes": budget, "disk_path": tmp_path, "disk_bytes": 48 << 20, "staging_bytes": staging}
    with CacheEngine(Identity(layout=WIDE, weights="w"), policy=policy, **settings) as engine:
        _wide_load(engine, time.monotonic() + 0.3, 99, faults)  # what is compiled and made once is there
        process, most = psutil.Process(), 0
        before = process.memory_info().rss - sum(tier.used_bytes for tier in engine.tiers() if tier.name == "memory")
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=_wide_load, args=(engine, until, n, faults)) for n in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, process.memory_info().rss - before)
            time.sleep(0.02)
        assert not faults and engine.flush()
        uses = engine.tiers()
        on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv"))
        say(f"{policy}, {seconds:g} s: {most >> 20} MiB more resident, budget {budget >> 20} + {staging >> 20}; "
            f"{engine.record.totals.count('evict')} evictions")  # fmt: skip
        assert all(tier.high_water_bytes <= tier.capacity_bytes for tier in uses)
        assert on_disk == next(tier.used_bytes for tier in uses if tier.name == "disk")
        assert most <= budget + staging + (64 << 20)
        assert engine.record.totals.count("evict") > 0 or seconds < 2.0
        audit(engine.control)


@pytest.mark.parametrize("steps", [600, full(100_000, timeout=3600)])
def test_the_disk_cap_does_not_drift(steps, tmp_path, say):
    """Overwrites, deletions from outside, failed writes and damage: what is counted is what `st_blocks` says."""
    rng, done, source = np.random.default_rng(0), Counter(), prompts(np.random.default_rng(1))
    settings = {
        "memory_bytes": 4 * CHUNK,
        "disk_path": tmp_path,
        "disk_bytes": 60 * ON_DISK,
        "disk_survey_seconds": 0.1,
    }

    def on_disk() -> int:
        return sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())

    with CacheEngine(IDENTITY, **settings) as engine:
        files = Faulty()
        engine.data.tiers[0]._files = files
        for step in range(steps):
            what = str(rng.choice(["store", "retrieve", "delete", "damage", "fail"], p=[0.5, 0.4, 0.05, 0.03, 0.02]))
            present = sorted(tmp_path.rglob("*.kv")) if what in ("delete", "damage") else []
            if what == "store":
                store(engine, next(source))
            elif what == "retrieve":
                retrieve(engine, next(source))
            elif what == "fail":
                files.fail_at = len(files.calls) + int(rng.integers(0, 20))
            elif present:
                file = present[rng.integers(len(present))]
                if what == "delete":
                    file.unlink(missing_ok=True)
                elif data := bytearray(_contents(file)):
                    data[-1] ^= 1
                    file.write_bytes(data)
            done[what] += 1
            if step % 1000 == 999:
                files.calls.clear()
                files.fail_at = -1
        files.fail_at = -1
        assert engine.flush()
        wait_until(lambda: engine.flush() and engine.tiers()[1].used_bytes == on_disk(), 10.0)
        assert on_disk() <= settings["disk_bytes"] and engine.tiers()[1].high_water_bytes <= settings["disk_bytes"]
        rest(engine)
        counted = engine.tiers()[1].used_bytes
    with CacheEngine(IDENTITY, **settings) as engine:
        assert engine.tiers()[1].used_bytes == on_disk() == counted
    say(f"{steps} operations {dict(done)}: drift 0 bytes of {counted}, also after a restart")


def _contents(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:  # evicted meanwhile
        return b""


def _held() -> Counter:
    """What the system keeps for this process."""
    sockets = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in os.listdir("/proc/self/fd")
                  if os.path.islink(f"/proc/self/fd/{fd}"))  # fmt: skip
    return Counter(files=len(os.listdir("/proc/self/fd")), threads=threading.active_count(), sockets=sockets,
                   shared_memory=len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0)  # fmt: skip


@pytest.mark.parametrize("rounds", [300, full(10_000)])
def test_nothing_leaks(rounds, tmp_path, say):
    settings = {"memory_bytes": 4 * CHUNK, "disk_path": tmp_path, "disk_bytes": 9 * ON_DISK}
    source = prompts(np.random.default_rng(0))
    with CacheEngine(IDENTITY, **settings) as engine:
        for _ in range(50):
            store(engine, next(source)), retrieve(engine, next(source))
        engine.flush()
        before = _held()
        for _ in range(rounds):
            store(engine, next(source)), retrieve(engine, next(source))
        engine.flush()
        after = _held()
        assert after["threads"] <= before["threads"] + 2, "readers start when they are first needed, and no others"
        assert {**after, "threads": 0} == {**before, "threads": 0}
        assert engine.record.totals.count("evict") > rounds // 2
        rest(engine)
    wait_until(lambda: _held()["threads"] < before["threads"], 5.0)
    closed = _held()
    opens = max(5, rounds // 100)
    for _ in range(opens):
        with CacheEngine(IDENTITY, **settings) as engine:
            store(engine, next(source))
    wait_until(lambda: _held() <= closed, 5.0)  # threads that end may take a moment, then and now
    say(f"{rounds} rounds of put, get and evict, {opens} times opened and closed: {dict(closed)} before and after")


# ---------------------------------------------------------------- many at once


class History:
    """What every call of every thread began, ended and gave, and whether that can be right.

    Calls take effect one after the other, each at some moment between its begin and its end. So a hit must come from a
    store that no clearing followed, and, where nothing is ever evicted, after a store a retrieve finds everything.
    """

    def __init__(self):
        self.stores: dict[int, list] = {}
        self.retrieves: dict[int, list] = {}
        self.clears: list = []

    def violations(self, *, evicting: bool, full: int) -> list[str]:
        found = []
        clears = np.array(sorted(self.clears), float).reshape(-1, 2)
        for prompt, retrieves in self.retrieves.items():
            stores = np.array(sorted(self.stores.get(prompt, [])), float).reshape(-1, 2)
            for begin, end, hit in retrieves:
                over = clears[clears[:, 1] < begin, 0]  # clearings that were over before it began
                since = over.max() if over.size else -np.inf
                if hit and not ((stores[:, 0] < end) & (stores[:, 1] >= since)).any():
                    found.append(f"prompt {prompt}: {hit} tokens that nobody had stored")
                done = stores[stores[:, 1] < begin, 0]
                if evicting or not done.size or hit == full:
                    continue
                if not ((clears[:, 1] > done.max()) & (clears[:, 0] < end)).any():
                    found.append(f"prompt {prompt}: {hit} of {full} tokens that were stored")
        return found


@pytest.mark.parametrize("seconds", [2.0, full(60, unit="s")])
@pytest.mark.parametrize("evicting", [False, True], ids=["roomy", "evicting"])
def test_many_threads_and_a_history_that_can_be(seconds, evicting, say):
    """48 threads for a moment, 2,000 for a minute."""
    threads = 48 if seconds == 2.0 else 2000
    number, history, faults = 20, History(), []
    tokens = [[prompt, *range(1, 24)] for prompt in range(number)]
    chains = [chain_of(prompt) for prompt in tokens]
    blocks = list(range(6))
    lock, go = threading.Lock(), threading.Event()

    def work(seed: int) -> None:
        rng, pages = random.Random(seed), Pages(6)
        go.wait()
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                prompt, draw = rng.randrange(number), rng.random()
                if draw < 0.45:
                    pages.compute(chains[prompt], blocks)
                begin = time.monotonic()
                if draw < 0.45:
                    engine.store(tokens[prompt], pages.table, blocks=blocks)
                elif draw < 0.99:
                    hit = int(engine.retrieve(tokens[prompt], pages.table, blocks=blocks))
                else:
                    engine.clear()
                end = time.monotonic()
                if 0.45 <= draw < 0.99:
                    assert not pages.wrong_chunks(chains[prompt], blocks, hit), "wrong KV"
                with lock:
                    if draw < 0.45:
                        history.stores.setdefault(prompt, []).append((begin, end))
                    elif draw < 0.99:
                        history.retrieves.setdefault(prompt, []).append((begin, end, hit))
                    else:
                        history.clears.append((begin, end))
        except Exception as error:
            faults.append(error)

    with CacheEngine(IDENTITY, memory_bytes=(17 if evicting else 3 * number) * CHUNK) as engine:
        size = threading.stack_size(256 << 10)
        try:
            workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(threads)]
            for worker in workers:
                worker.start()
        finally:
            threading.stack_size(size)
        go.set()
        deadline = time.monotonic() + seconds + 60
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        assert not any(worker.is_alive() for worker in workers), "a call hangs"
        assert not faults, faults[:3]
        rest(engine)
    calls = Counter(stores=sum(map(len, history.stores.values())), clears=len(history.clears),
                    retrieves=sum(map(len, history.retrieves.values())))  # fmt: skip
    hits = sum(hit > 0 for found in history.retrieves.values() for *_, hit in found)
    say(f"{threads} threads, {seconds:g} s: {dict(calls)}, {hits} of them hits, 0 violations")
    assert not (found := history.violations(evicting=evicting, full=24)), found[:3]
    assert hits and calls["clears"]


def test_the_history_checker_notices():
    history = History()
    history.stores[0] = [(1.0, 2.0), (5.0, 6.0)]
    history.clears = [(3.0, 4.0)]
    history.retrieves[0] = [(1.5, 2.5, 24), (2.1, 2.2, 24), (3.5, 5.5, 24), (7.0, 8.0, 24), (4.5, 5.5, 0)]
    assert history.violations(evicting=False, full=24) == []
    history.retrieves[0] = [(0.1, 0.2, 24), (4.1, 4.2, 24)]
    assert len(history.violations(evicting=True, full=24)) == 2
    history.retrieves[0] = [(7.0, 8.0, 16), (2.1, 2.2, 0)]
    assert len(history.violations(evicting=False, full=24)) == 2 and not history.violations(evicting=True, full=24)


def _evict_and_store(folder: str, stop) -> None:
    tier, chain = DiskTier(folder), chain_of(range(64))
    while not stop.is_set():
        for chunk in chain:
            tier.erase(chunk.key)
            write(tier, chunk)


@pytest.mark.parametrize("races", [3_000, full(100_000)])
def test_one_process_evicts_what_another_reads(races, tmp_path, say):
    context = multiprocessing.get_context("spawn")
    stop, tier, found = context.Event(), DiskTier(tmp_path), Counter()
    chain = chain_of(range(64))
    evictor = context.Process(target=_evict_and_store, args=(str(tmp_path), stop))
    evictor.start()
    try:
        wait_until(lambda: list(tmp_path.rglob("*.kv")), 60.0)
        for number in range(races):
            found[read(tier, chain[number % 8]) or "exact"] += 1  # compares every byte
    finally:
        stop.set()
        evictor.join(30)
    say(f"{races} reads while another process evicts: {dict(found)}, 0 wrong, 0 signals")
    assert evictor.exitcode == 0 and set(found) == {"exact", "absent"}
    list(tier.scan())
    assert not leftovers(tmp_path)


# ---------------------------------------------------------------- interrupts and clocks


@pytest.mark.parametrize("wanted", [full(2000)])
def test_two_thousand_interrupts(wanted, tmp_path, say):
    interrupts, pages = 0, Pages(64)
    rng = np.random.default_rng(0)
    with CacheEngine(IDENTITY, memory_bytes=6 * CHUNK, disk_path=tmp_path, disk_bytes=20 * ON_DISK) as engine:
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for tokens in prompts(rng):
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, 2e-3)))
                    engine.retrieve(tokens, pages.table, blocks=BLOCKS)
                    engine.store(tokens, pages.table, blocks=BLOCKS)
                    engine.stats()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupts += 1
                if interrupts == wanted:
                    break
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        rest(engine)  # no pin, no reservation and no slot is left over
        on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv"))
        assert engine.tiers()[1].used_bytes == on_disk
    say(f"{interrupts} interrupts: 0 pins left, drift 0 bytes of {on_disk}")


def test_a_jump_of_the_clock_changes_no_victim(monkeypatch, tmp_path):
    """A day forward, a day back, at any moment: the same chunks are evicted in the same order."""
    victims, real, jumps = [], time.time, np.random.default_rng(1)
    for jumping in (False, True):
        rng = np.random.default_rng(0)
        if jumping:
            monkeypatch.setattr(time, "time", lambda: real() + 86_400 * int(jumps.integers(-1, 2)))
        settings = {"memory_bytes": 4 * CHUNK, "disk_path": tmp_path / str(jumping), "disk_bytes": 9 * ON_DISK}
        with CacheEngine(IDENTITY, **settings) as engine:
            for _, tokens in zip(range(120), prompts(rng), strict=False):
                retrieve(engine, tokens)
                store(engine, tokens)
                engine.flush()
            victims.append([(e.tier, e.key) for e in engine.record.events if e.kind == "evict"])
    assert victims[0] == victims[1] and len(victims[0]) > 50
