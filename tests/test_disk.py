"""The disk tier under damage, faults, kills and company: exact bytes or a named miss, and nothing left behind."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from oracle import IDENTITY, SMALL, Pages, audit, chain_of, payload

from workbench.engine import CacheEngine
from workbench.files import Files
from workbench.record import header_nbytes, pack_header, parse_header
from workbench.tiers.disk import DiskTier

ROOT = Path(__file__).parent.parent
CHAIN = chain_of(range(64))
RECORD = header_nbytes(8) + SMALL.chunk_nbytes


def write(tier, chunk) -> str:
    return tier.write(chunk, payload(chunk.key).reshape(-1))[0]


def read(tier, chunk) -> str:
    """The reason; the bytes are compared with the oracle where there is none."""
    out = np.full(SMALL.chunk_nbytes, 0xAA, np.uint8)
    reason = tier.read(chunk, out)
    assert reason or np.array_equal(out, payload(chunk.key).reshape(-1)), "wrong KV"
    return reason


def place_of(tier, chunk) -> Path:
    return tier.path / chunk.key.hex()[:2] / f"{chunk.key.hex()}.kv"


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


# ---------------------------------------------------------------- damage


def damages(record: bytes, other: bytes, rng: random.Random, offsets: list[int]):
    """(what was done, the bytes that now lie at the name)."""
    for at in offsets:
        yield f"truncated at {at}", record[:at]
        yield f"bit flipped at {at}", record[:at] + bytes([record[at] ^ 1 << rng.randrange(8)]) + record[at + 1 :]
        yield f"zeros from {at}", record[:at] + bytes(len(record) - at)
        yield f"another record from {at}", record[:at] + other[at:]
        yield f"garbage from {at}", record[:at] + rng.randbytes(len(record) - at)
    for more in (1, 4096, 65536):
        yield f"extended by {more}", record + bytes(more)
    yield "empty", b""
    yield "of another format", record[:8] + (99).to_bytes(4, "little") + record[12:]
    yield "another key's record", other


def check_damage(tmp_path, offsets):
    tier, chunk = DiskTier(tmp_path), CHAIN[1]
    write(tier, chunk), write(tier, CHAIN[2])
    record, other = place_of(tier, chunk).read_bytes(), place_of(tier, CHAIN[2]).read_bytes()
    assert len(record) == RECORD
    tried = 0
    for name, data in damages(record, other, random.Random(0), offsets):
        if data == record:
            continue
        place_of(tier, chunk).write_bytes(data)
        reason = read(tier, chunk)
        if int(name.split()[-1] if name.split()[-1].isdigit() else 0) >= 168 and _same_meaning(data, record):
            assert reason == "", f"{name}: padding carries nothing"
        else:
            assert reason in ("corrupt", "mismatch"), f"{name}: {reason!r}"
            assert not place_of(tier, chunk).exists(), f"{name}: the record stays"
            assert read(tier, chunk) == "absent"
        tried += 1
    assert write(tier, chunk) in ("", "dedup") and read(tier, chunk) == ""
    return tried


def _same_meaning(data: bytes, record: bytes) -> bool:
    used, body = 160 + 4 * 8, header_nbytes(8)
    return len(data) == len(record) and data[:used] == record[:used] and data[body:] == record[body:]


def test_a_damaged_record_is_a_miss_at_many_offsets(tmp_path):
    edges = [
        0,
        7,
        8,
        11,
        12,
        15,
        16,
        47,
        48,
        79,
        80,
        111,
        112,
        116,
        120,
        127,
        128,
        143,
        144,
        159,
        160,
        191,
        192,
        4095,
        4096,
    ]
    spread = random.Random(1).sample(range(RECORD), 60)
    assert check_damage(tmp_path, sorted({*edges, *spread, RECORD - 1})) > 400


@pytest.mark.slow
def test_a_damaged_record_is_a_miss_at_every_offset(tmp_path):
    assert check_damage(tmp_path, list(range(RECORD))) > 20_000


def test_every_byte_of_the_header_counts():
    chunk, body = CHAIN[1], payload(CHAIN[1].key).reshape(-1)
    header = pack_header(chunk, IDENTITY.digest, body)
    parsed = parse_header(header)
    assert parsed.describes(chunk) and parsed.identity == IDENTITY.digest and parsed.payload_nbytes == body.nbytes
    assert not parsed.describes(chunk._replace(tokens=bytes(32))), "a key nominates, tokens decide"
    assert not parsed.describes(chunk._replace(parent=bytes(32)))
    for at in range(160 + 32):
        damaged = bytearray(header)
        damaged[at] ^= 0x40
        found = parse_header(bytes(damaged))
        assert found is None, f"a flip at {at} went unnoticed"
    for size in range(0, 200, 7):
        assert parse_header(header[:size]) is None


def test_random_bytes_are_no_header():
    rng = random.Random(0)
    for _ in range(2000):
        data = bytearray(rng.randbytes(rng.randrange(300)))
        data[:12] = pack_header(CHAIN[0], bytes(32), np.zeros(1, np.uint8))[:12]
        assert parse_header(bytes(data)) is None


def test_damage_is_counted_once_and_the_next_lookup_misses(tmp_path):
    pages = Pages(64)
    pages.compute(CHAIN, range(64))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        engine.store(range(64), pages.table, blocks=range(64))
        engine.flush()
        place = tmp_path / CHAIN[3].key.hex()[:2] / f"{CHAIN[3].key.hex()}.kv"
        data = bytearray(place.read_bytes())
        data[5000] ^= 1
        place.write_bytes(data)
        assert engine.lookup(range(64)) == 64
        assert engine.retrieve(range(64), pages.table, blocks=range(64)) == 24
        assert engine.lookup(range(64)) == 24
        assert engine.stats()["failed_loads"] == {"corrupt": 1}
        assert [(e.tier, e.reason) for e in engine.record.events if e.kind == "remove"] == [("disk", "corrupt")]
        audit(engine.control)
        on_disk = sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*.kv"))
        assert engine.tiers()[0].used_bytes == on_disk


def test_start_up_takes_broken_records_away_and_leaves_strangers_alone(tmp_path):
    tier = DiskTier(tmp_path)
    for number in range(6):
        write(tier, CHAIN[number])
    place_of(tier, CHAIN[0]).write_bytes(b"")
    place_of(tier, CHAIN[1]).write_bytes(place_of(tier, CHAIN[2]).read_bytes())
    with place_of(tier, CHAIN[3]).open("r+b") as file:
        file.truncate(RECORD - 1)
    good = place_of(tier, CHAIN[4])
    (tmp_path / "zz").mkdir()
    for stranger in ("readme.txt", f"{good.parent.name}/notes", f"zz/{good.name}", f"{good.parent.name}/not-hex.kv"):
        (tmp_path / stranger).write_text("not ours")
    found = {stored.key for stored in tier.scan()}
    assert found == {CHAIN[2].key, CHAIN[4].key, CHAIN[5].key}
    assert [place_of(tier, CHAIN[n]).exists() for n in range(6)] == [False, False, True, False, True, True]
    assert read(tier, CHAIN[4]) == ""
    assert (tmp_path / "readme.txt").exists() and (tmp_path / "zz" / good.name).exists()


def test_a_file_cut_short_while_it_is_read_kills_nobody(tmp_path):
    """Reads go through preadv: a short file is a miss, where a mapping would be a SIGBUS."""
    code = (
        "import sys, test_disk as t\n"
        "tier = t.DiskTier(sys.argv[1]); chunk = t.CHAIN[0]\n"
        "class Cutting(t.Files):\n"
        "    def preadv(self, fd, buffers, offset):\n"
        "        got = super().preadv(fd, [buffers[0]], offset)\n"
        "        t.os.truncate(t.place_of(tier, chunk), 4096)\n"
        "        return got\n"
        "t.write(tier, chunk)\n"
        "print(t.read(t.DiskTier(sys.argv[1], files=Cutting()), chunk))\n"
    )
    out = run_python(code, str(tmp_path))
    assert (out.returncode, out.stdout.strip()) == (0, "corrupt"), out.stderr


# ---------------------------------------------------------------- faults


class Faulty(Files):
    """Fails the n-th call of the operating system, once or from then on."""

    def __init__(self, fail_at: int = -1, error: int = errno.EIO, *, for_good: bool = False, short: bool = False):
        self.calls: list[str] = []
        self.fail_at, self.error, self.for_good, self.short = fail_at, error, for_good, short
        self.open_fds: set[int] = set()

    def _passes(self, name: str) -> bool:
        self.calls.append(name)
        number = len(self.calls) - 1
        if number == self.fail_at or (self.for_good and 0 <= self.fail_at <= number):
            if self.short and name in ("preadv", "pwritev"):
                return False
            raise OSError(self.error, os.strerror(self.error))
        return True

    def open(self, path, flags, mode=0o600):
        self._passes("open")
        fd = super().open(path, flags, mode)
        self.open_fds.add(fd)
        return fd

    def close(self, fd):
        super().close(fd)  # a close that fails has closed the file all the same
        self.open_fds.discard(fd)
        self._passes("close")

    def preadv(self, fd, buffers, offset):
        return super().preadv(fd, buffers if self._passes("preadv") else [memoryview(buffers[0])[:5]], offset)

    def pwritev(self, fd, buffers, offset):
        return super().pwritev(fd, buffers if self._passes("pwritev") else [memoryview(buffers[0])[:5]], offset)

    def allocate(self, fd, nbytes):
        self._passes("allocate")
        super().allocate(fd, nbytes)

    def fsync(self, fd):
        self._passes("fsync")
        super().fsync(fd)

    def stat_fd(self, fd):
        self._passes("stat_fd")
        return super().stat_fd(fd)

    def link(self, source, target):
        self._passes("link")
        super().link(source, target)

    def unlink(self, path):
        self._passes("unlink")
        super().unlink(path)

    def utime(self, path):
        self._passes("utime")
        super().utime(path)

    def mkdir(self, path):
        self._passes("mkdir")
        super().mkdir(path)

    def scan(self, path):
        self._passes("scan")
        yield from super().scan(path)


def exercise(tier: DiskTier) -> list[str]:
    """Every operation of a tier, hits and misses and damage; returns reasons."""
    reasons = [write(tier, chunk) for chunk in CHAIN]
    reasons += [read(tier, chunk) for chunk in CHAIN]
    reasons.append(write(tier, CHAIN[0]))
    tier.erase(CHAIN[1].key)
    reasons += [read(tier, CHAIN[1]), write(tier, CHAIN[1]), read(tier, CHAIN[1])]
    found = list(tier.scan())
    assert {stored.key for stored in found} <= {chunk.key for chunk in CHAIN}
    return reasons


def test_the_exercise_calls_every_operation(tmp_path):
    files = Faulty()
    assert set(exercise(DiskTier(tmp_path, durable=True, files=files))) == {"", "dedup", "absent"}
    own = {name for name in vars(Files) if not name.startswith("_")}
    assert set(files.calls) == own


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize(
    "error", [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EDQUOT]
)
def test_a_fault_at_every_call_is_a_named_miss_and_leaks_nothing(error, for_good, tmp_path):
    probe = Faulty()
    exercise(DiskTier(tmp_path / "probe", durable=True, files=probe))
    allowed = {"", "dedup", "absent", errno.errorcode[error]}
    if for_good and error in (errno.EIO, errno.ESTALE):
        allowed.add("breaker open")
    stride = 1 if error == errno.EIO else 7
    for fail_at in range(
        1, len(probe.calls), stride
    ):  # call 0 makes the directory; its failure is the caller's to know
        folder = tmp_path / f"{error}-{fail_at}"
        files = Faulty(fail_at, error, for_good=for_good)
        tier = DiskTier(folder, durable=True, files=files)
        reasons = set(exercise(tier))
        tier.close()
        assert reasons <= allowed, f"{probe.calls[fail_at]}: {reasons}"
        assert not files.open_fds, f"{probe.calls[fail_at]}: a file stays open"
        again = DiskTier(folder)
        found = list(again.scan())
        assert not leftovers(folder), f"{probe.calls[fail_at]}: a temporary file outlived the next start"
        for stored in found:
            chunk = next(c for c in CHAIN if c.key == stored.key)
            assert read(again, chunk) == ""
        if not for_good and probe.calls[fail_at] == "preadv":
            assert len(found) == len(CHAIN), "a passing fault takes no record away"


def test_short_reads_and_writes_are_continued(tmp_path):
    for fail_at in range(1, 400, 3):
        files = Faulty(fail_at, for_good=fail_at % 2 == 0, short=True)
        if files.for_good:
            files.error = 0
        folder = tmp_path / str(fail_at)
        files._passes = lambda name, files=files: _shorten(files, name)
        assert set(exercise(DiskTier(folder, files=files))) <= {"", "dedup", "absent"}
        assert len(list(DiskTier(folder).scan())) == len(CHAIN)
        if fail_at > len(files.calls):
            break


def _shorten(files: Faulty, name: str) -> bool:
    files.calls.append(name)
    return not (name in ("preadv", "pwritev") and len(files.calls) - 1 == files.fail_at)


def test_a_directory_that_cannot_be_made_is_the_callers_to_know(tmp_path):
    with pytest.raises(Exception, match="cannot be used: Read-only file system"):
        DiskTier(tmp_path / "kv", files=Faulty(0, errno.EROFS))


def test_a_directory_that_is_removed_comes_back(tmp_path):
    import shutil

    tier = DiskTier(tmp_path / "kv")
    write(tier, CHAIN[0])
    shutil.rmtree(tmp_path / "kv")
    assert read(tier, CHAIN[0]) == "absent"
    write(tier, CHAIN[0])
    assert write(tier, CHAIN[0]) in ("", "dedup") and read(tier, CHAIN[0]) == ""
    assert list(tier.scan())


def test_a_full_disk_under_the_engine(tmp_path):
    """Every store to disk fails: memory goes on, nothing is counted on disk, nothing hangs."""
    pages = Pages(64)
    pages.compute(CHAIN, range(64))
    with CacheEngine(IDENTITY, memory_bytes="64KiB", disk_path=tmp_path) as engine:
        engine.data.tiers[0]._files = Faulty(0, errno.ENOSPC, for_good=True)
        assert engine.store(range(64), pages.table, blocks=range(64)) == 64
        assert engine.flush(5)
        assert engine.retrieve(range(64), pages.table, blocks=range(64)) == 64
        assert engine.stats()["failed_stores"] == {"ENOSPC": 8}
        assert engine.tiers()[1].used_bytes == 0
        audit(engine.control)


def test_a_tier_that_breaks_its_promise_and_raises_is_a_miss(tmp_path):
    pages = Pages(64)
    pages.compute(CHAIN, range(64))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        tier = engine.data.tiers[0]
        engine.store(range(32), pages.table, blocks=range(64))
        engine.flush()
        tier.read = lambda chunk, out: 1 / 0
        assert engine.retrieve(range(32), pages.table, blocks=range(64)) == 0
        tier.write = tier.erase = lambda *args: 1 / 0
        engine.store(range(64), pages.table, blocks=range(64))
        engine.clear()
        assert engine.flush(5), "the writing thread died"
        stats = engine.stats()
        assert stats["failed_loads"]["raised ZeroDivisionError"] == 4
        assert stats["failed_stores"] == {"raised ZeroDivisionError": 4}
        audit(engine.control)


def test_a_slow_disk_does_not_keep_close_waiting(tmp_path):
    class Slow(Files):
        def allocate(self, fd, nbytes):
            time.sleep(1.0)

    pages = Pages(64)
    pages.compute(CHAIN, range(64))
    engine = CacheEngine(IDENTITY, memory_bytes="64KiB", disk_path=tmp_path)
    engine.data.tiers[0]._files = Slow()
    start = time.monotonic()
    engine.store(range(64), pages.table, blocks=range(64))
    assert time.monotonic() - start < 1, "a store waits for no disk"
    engine.data.close(timeout=1.5)
    assert time.monotonic() - start < 4
    engine.close()
    assert engine.stats()["failed_stores"].get("closed", 0) + len(list(tmp_path.rglob("*.kv"))) <= 8


# ---------------------------------------------------------------- kills


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


KILLED = """
import os, signal, sys, test_disk as t
from oracle import chain_of

class Killed(t.Files):
    '''Dies before or in the middle of the n-th call that changes the directory.'''
    left = 0
    def __getattribute__(self, name):
        call = object.__getattribute__(self, name)
        if name not in ('open', 'allocate', 'pwritev', 'link', 'unlink', 'close', 'utime', 'mkdir', 'fsync'):
            return call
        def counted(*args):
            Killed.left -= 1
            if Killed.left == 0:
                if name == 'pwritev':
                    call(args[0], [memoryview(args[1][0])[:1000]], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)
        return counted

for kill in map(int, sys.argv[2].split(',')):
    child = os.fork()
    if child == 0:
        files = Killed()
        tier = t.DiskTier(sys.argv[1], durable=kill % 2 == 0, files=files)
        Killed.left = kill % 60 + 1
        for prompt in range(kill, kill + 3):
            for chunk in chain_of([prompt, *range(39)]):
                t.write(tier, chunk)
                t.read(tier, chunk)
                if chunk.start == 16:
                    tier.erase(chunk.key)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-9, 7)
    tier = t.DiskTier(sys.argv[1])
    keys = {stored.key for stored in tier.scan()}
    assert not t.leftovers(tier.path), f'kill {kill} left a temporary file'
    known = 0
    for prompt in range(kill, kill + 3):
        for chunk in chain_of([prompt, *range(39)]):
            reason = t.read(tier, chunk)
            assert reason == ('' if chunk.key in keys else 'absent'), f'kill {kill}: {reason}'
            known += not reason
    print(kill, known)
"""


def check_kills(tmp_path, kills: range):
    out = run_python(KILLED, str(tmp_path), ",".join(map(str, kills)))
    assert out.returncode == 0, out.stderr[-2000:]
    lines = [line.split() for line in out.stdout.splitlines()]
    assert len(lines) == len(kills) and {int(known) for _, known in lines} > {0, 5}, "the kills came at many places"


def test_kill_9_in_the_middle_of_stores(tmp_path):
    check_kills(tmp_path, range(120))


@pytest.mark.slow
def test_kill_9_in_the_middle_of_stores_for_long(tmp_path):
    check_kills(tmp_path, range(5000))


ENDLESS = """
import sys, test_disk as t
from oracle import chain_of
tier, prompt = t.DiskTier(sys.argv[1]), 0
print('ready', flush=True)
while True:
    prompt += 1
    for chunk in chain_of([prompt, *range(39)]):
        t.write(tier, chunk)
"""


def test_kill_9_at_random_moments(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    rng, total = random.Random(0), 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path)], env=environment, stdout=subprocess.PIPE
        )
        child.stdout.readline()
        time.sleep(rng.uniform(0.05, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        tier = DiskTier(tmp_path)
        found = {stored.key for stored in tier.scan()}
        assert not leftovers(tmp_path)
        chunks = {
            chunk.key: chunk for prompt in range(1, len(found) // 5 + 3) for chunk in chain_of([prompt, *range(39)])
        }
        assert all(read(tier, chunks[key]) == "" for key in found)
        total += len(found)
    assert total > 50


# ---------------------------------------------------------------- company


def test_the_first_writer_wins(tmp_path):
    first, second = DiskTier(tmp_path), DiskTier(tmp_path)
    assert write(first, CHAIN[0]) == ""
    before = place_of(first, CHAIN[0]).stat().st_ino
    assert second.write(CHAIN[0], np.zeros(SMALL.chunk_nbytes, np.uint8)) == ("dedup", 0)
    assert place_of(first, CHAIN[0]).stat().st_ino == before
    assert read(second, CHAIN[0]) == "" and not leftovers(tmp_path)


def test_a_reader_that_has_the_file_open_is_safe_from_an_eviction(tmp_path):
    tier = DiskTier(tmp_path)
    write(tier, CHAIN[0])

    class Evicting(Files):
        def preadv(self, fd, buffers, offset):
            if offset == 0:
                tier.erase(CHAIN[0].key)
            return super().preadv(fd, buffers, offset)

    assert read(DiskTier(tmp_path, files=Evicting()), CHAIN[0]) == ""
    assert read(tier, CHAIN[0]) == "absent"


COMPANY = """
import random, sys, test_disk as t
from oracle import chain_of
tier, rng = t.DiskTier(sys.argv[1]), random.Random(int(sys.argv[2]))
chunks = [chunk for prompt in range(20) for chunk in chain_of([prompt, *range(39)])]
seen = {}
for step in range(int(sys.argv[3])):
    chunk = rng.choice(chunks)
    what = rng.choice(['write', 'read', 'scan'] if step % 50 == 0 else ['write', 'read', 'erase'])
    if what == 'erase':
        tier.erase(chunk.key)
        continue
    if what == 'scan':
        list(tier.scan())
        continue
    reason = t.write(tier, chunk) if what == 'write' else t.read(tier, chunk)
    seen[reason] = seen.get(reason, 0) + 1
    assert reason in ('', 'dedup', 'absent'), reason
assert seen.get('dedup') and seen.get('absent') and seen.get('')
"""


@pytest.mark.parametrize("processes, steps", [(3, 1500), pytest.param(8, 10_000, marks=pytest.mark.slow)])
def test_processes_share_a_directory(processes, steps, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    children = [
        subprocess.Popen([sys.executable, "-c", COMPANY, str(tmp_path), str(n), str(steps)], env=environment,
                         stderr=subprocess.PIPE, text=True)
        for n in range(processes)
    ]  # fmt: skip
    for child in children:
        _, stderr = child.communicate(timeout=240)
        assert child.returncode == 0, stderr[-2000:]
    list(DiskTier(tmp_path).scan())
    assert not leftovers(tmp_path)


def test_the_janitor_spares_those_who_live(tmp_path):
    tier = DiskTier(tmp_path)
    write(tier, CHAIN[0])
    folder = place_of(tier, CHAIN[0]).parent
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    sleeping = subprocess.Popen(["sleep", "60"])
    try:
        for owner in (dead.pid, sleeping.pid):
            (folder / f"0123456789abcdef.{owner}.1.tmp").write_text("half a record")
        old = folder / f"0123456789abcdef.{sleeping.pid}.2.tmp"
        old.write_text("of an hour ago")
        os.utime(old, (time.time() - 7200,) * 2)
        list(tier.scan())
        assert [p.name for p in leftovers(tmp_path)] == [f"0123456789abcdef.{sleeping.pid}.1.tmp"]
    finally:
        sleeping.kill()
        sleeping.wait()


def test_a_second_engine_in_this_process_takes_no_file_away_that_the_first_still_writes(tmp_path):
    class Scanning(Files):
        def link(self, source, target):
            list(DiskTier(tmp_path).scan())
            super().link(source, target)

    assert write(DiskTier(tmp_path, files=Scanning()), CHAIN[0]) == ""


# ---------------------------------------------------------------- a medium that is lost


class Lost(Files):
    """Every access fails while `gone`."""

    gone = False
    calls = 0

    def _check(self):
        self.calls += 1
        if self.gone:
            raise OSError(errno.EIO, "I/O error")

    def open(self, path, flags, mode=0o600):
        self._check()
        return super().open(path, flags, mode)


def until(condition, seconds=8.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_lost_medium_is_left_alone_and_found_again(tmp_path):
    files = Lost()
    tier = DiskTier(tmp_path, files=files)
    assert [write(tier, chunk) for chunk in CHAIN] == [""] * len(CHAIN)
    files.gone = True
    assert [read(tier, CHAIN[n]) for n in range(3)] == ["EIO"] * 3
    assert tier.breaker.state != "closed" and tier.breaker.reason == "EIO"
    assert read(tier, CHAIN[0]) == "breaker open" and write(tier, CHAIN[0]) == "breaker open"
    tier.erase(CHAIN[0].key)
    assert place_of(tier, CHAIN[0]).exists(), "nothing is asked of it"
    files.gone = False
    assert until(lambda: tier.breaker.allows)
    assert read(tier, CHAIN[0]) == "" and not leftovers(tmp_path)
    tier.close()


def test_single_faults_open_no_breaker(tmp_path):
    files = Lost()
    tier = DiskTier(tmp_path, files=files)
    write(tier, CHAIN[0])
    for _ in range(20):
        files.gone = True
        assert read(tier, CHAIN[0]) == "EIO" == read(tier, CHAIN[0])
        files.gone = False
        assert read(tier, CHAIN[0]) == ""
    assert tier.breaker.trips == 0
    tier.close()


def test_an_engine_whose_disk_is_lost_misses_and_recovers(tmp_path):
    """Lookups stop counting on what lies only there; memory goes on; nothing is forgotten."""
    pages, files = Pages(64), Lost()
    pages.compute(CHAIN, range(64))
    with CacheEngine(IDENTITY, memory_bytes=2 * SMALL.chunk_nbytes, disk_path=tmp_path) as engine:
        engine.store(range(64), pages.table, blocks=range(64))
        assert engine.flush() and engine.lookup(range(64)) == 64
        engine.data.tiers[0]._files = files
        files.gone = True
        for _ in range(4):
            engine.retrieve(range(64), pages.table, blocks=range(64))
        assert "breaker open" in engine.stats()["failed_loads"]
        assert until(lambda: engine.lookup(range(64)) <= 16)
        files.gone = False
        assert until(lambda: engine.retrieve(range(64), pages.table, blocks=range(64)) == 64)
        assert engine.data.tiers[0].breaker.allows
        assert engine.flush()
        audit(engine.control)


class Stuck(Files):
    """Reads do not return before the gate is opened."""

    def __init__(self):
        self.gate = threading.Event()

    def preadv(self, fd, buffers, offset):
        self.gate.wait(20)
        return super().preadv(fd, buffers, offset)


def test_a_read_that_never_returns_is_a_miss_and_its_slot_is_nobodys(tmp_path):
    """The late read may still write into its slot: until it ends, nothing else is put there."""
    pages, files = Pages(64), Stuck()
    pages.compute(CHAIN, range(64))
    settings = {"disk_path": tmp_path, "load_deadline_seconds": 0.2}
    with CacheEngine(IDENTITY, memory_bytes=0, **settings) as engine:
        engine.store(range(64), pages.table, blocks=range(64))
    with CacheEngine(IDENTITY, memory_bytes=2 * SMALL.chunk_nbytes, **settings) as engine:
        engine.data.tiers[0]._files = files
        start = time.monotonic()
        assert engine.retrieve(range(64), pages.table, blocks=range(64)) == 0
        assert engine.retrieve(range(64), pages.table, blocks=range(64)) == 0
        assert time.monotonic() - start < 2 and engine.data.tiers[0].breaker.reason == "timeout"
        assert engine.stats()["failed_loads"]["timeout"] == 2, "the first two; nobody waits for the rest"
        store_reasons = set()
        for number in range(3):  # the two slots of the memory tier are still being read into
            tokens = range(1000 + 100 * number, 1016 + 100 * number)
            other = Pages(64)
            other.compute(chain_of(tokens), range(64))
            engine.store(tokens, other.table, blocks=range(64))
            store_reasons |= set(engine.stats()["failed_stores"])
        assert "slot busy" in store_reasons
        files.gate.set()
        assert until(lambda: not any(engine.data.arena.leaving))
        assert until(lambda: engine.retrieve(range(64), pages.table, blocks=range(64)) == 64)
        assert not pages.wrong_chunks(CHAIN, range(64), 64)
        engine.flush()
        audit(engine.control)


# ---------------------------------------------------------------- what other processes do


def test_changes_tell_what_others_brought_and_took(tmp_path):
    ours, theirs = DiskTier(tmp_path), DiskTier(tmp_path)
    for number in range(4):
        write(ours, CHAIN[number])
    mine = [CHAIN[number].key for number in range(4)]
    assert ours.changes(mine) == ([], [])
    write(theirs, CHAIN[4])
    assert ours.changes(mine) == ([], []), "at first sight it may be our own"
    theirs.erase(CHAIN[0].key)
    arrived, gone = ours.changes(mine)
    assert [stored.key for stored in arrived] == [CHAIN[4].key] and gone == [CHAIN[0].key]
    assert arrived[0].nbytes == place_of(ours, CHAIN[4]).stat().st_blocks * 512
    (tmp_path / CHAIN[1].key.hex()[:2] / "notes.kv").write_text("not ours")
    assert ours.changes([key for key in mine if key != CHAIN[0].key] + [CHAIN[4].key]) == ([], [])


def test_a_record_that_could_not_be_erased_is_told_of(tmp_path):
    """Its folder has not changed, but what is counted there has."""
    tier = DiskTier(tmp_path)
    write(tier, CHAIN[0])
    os.utime(place_of(tier, CHAIN[0]).parent, (1e9, 1e9))
    assert [tier.changes([CHAIN[0].key]) for _ in range(2)] == [([], [])] * 2
    assert tier.changes([]) == ([], []), "evicted, but the file is still there"
    assert [stored.key for stored in tier.changes([]).arrived] == [CHAIN[0].key]


def test_a_folder_that_did_not_change_is_not_listed(tmp_path):
    class Counting(Files):
        listed = 0

        def scan(self, path):
            self.listed += 1
            return super().scan(path)

    files = Counting()
    tier = DiskTier(tmp_path, files=files)
    for chunk in CHAIN:
        write(tier, chunk)
    keys = [chunk.key for chunk in CHAIN]
    folders = len({key[:1] for key in keys})
    for folder in tmp_path.iterdir():
        os.utime(folder, (1e9, 1e9))
    assert tier.changes(keys) == ([], []) and files.listed == 1 + folders
    assert tier.changes(keys) == ([], []) and files.listed == 2 + folders


def test_two_engines_in_one_directory_keep_one_budget(tmp_path):
    """Each counts what the other brings and what it takes, and so the directory stays within the cap of both."""
    settings = {"memory_bytes": 0, "disk_path": tmp_path, "disk_bytes": 10 * 8192, "disk_survey_seconds": 0.02}

    def used() -> int:
        return sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv"))

    def keys(engine) -> set[str]:
        return {key.hex() for key in engine.control.keys_at(0)}

    with CacheEngine(IDENTITY, **settings) as one, CacheEngine(IDENTITY, **settings) as other:
        for start in range(0, 600, 100):
            for engine, base in ((one, start), (other, start + 50)):
                tokens, pages = range(base, base + 24), Pages(16)
                pages.compute(chain_of(tokens), range(16))
                engine.store(tokens, pages.table, blocks=range(16))
                assert engine.flush()
                assert until(lambda: keys(one) == keys(other) == {path.stem for path in tmp_path.rglob("*.kv")})
                assert one.tiers()[0].used_bytes == other.tiers()[0].used_bytes == used()
                assert used() <= 10 * 8192
                fresh = Pages(16)
                reader = other if engine is one else one
                assert reader.retrieve(tokens, fresh.table, blocks=range(16)) == 24, "one finds what the other stored"
                assert not fresh.wrong_chunks(chain_of(tokens), range(16), 24)
        for engine in (one, other):
            engine.flush()
            audit(engine.control)


def test_records_that_somebody_removes_are_no_longer_counted(tmp_path):
    pages = Pages(64)
    pages.compute(CHAIN, range(64))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path, disk_survey_seconds=0.02) as engine:
        engine.store(range(64), pages.table, blocks=range(64))
        engine.flush()
        place_of(DiskTier(tmp_path), CHAIN[2]).unlink()
        assert until(lambda: engine.tiers()[0].chunks == 7)
        assert engine.lookup(range(64)) == 16
        assert engine.explain(range(64)).miss_reason == "removed elsewhere"
        engine.clear()
        audit(engine.control)


# ---------------------------------------------------------------- a slow start


class SlowScan(Files):
    """Listing a folder takes long."""

    def scan(self, path):
        time.sleep(0.1)
        return super().scan(path)


def test_nobody_waits_for_a_directory_that_takes_long_to_look_through(tmp_path, monkeypatch):
    pages = Pages(64)
    pages.compute(CHAIN, range(64))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path) as engine:
        engine.store(range(64), pages.table, blocks=range(64))
        for start in range(1000, 1800, 20):
            engine.store(range(start, start + 8), pages.table, blocks=range(64))
        engine.flush()
        before = engine.tiers()[0]
    monkeypatch.setattr("workbench.tiers.disk.Files", SlowScan)
    start = time.monotonic()
    with CacheEngine(IDENTITY, memory_bytes=4 * SMALL.chunk_nbytes, disk_path=tmp_path) as engine:
        assert time.monotonic() - start < 2
        start = time.monotonic()
        assert engine.lookup(range(64)) == 0 and time.monotonic() - start < 0.1
        fresh = range(500, 508)
        assert engine.store(fresh, pages.table, blocks=range(64)) == 8, "memory takes it"
        assert engine.tiers()[1].chunks == 0, "nothing is written before it is known how full the disk is"
        assert until(lambda: engine.lookup(range(64)) == 64)
        after = engine.tiers()[1]
        assert (after.chunks, after.used_bytes) == (before.chunks, before.used_bytes)
        assert engine.store(fresh, pages.table, blocks=range(64)) == 0 and engine.flush()
        assert engine.tiers()[1].chunks == before.chunks + 1, "what only memory had is written down now"
        audit(engine.control)


def test_a_fault_while_changes_are_noted_ends_no_survey(tmp_path):
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path, disk_survey_seconds=0.02) as engine:
        faults, real = [], engine.control.note_changes

        def note_changes(level, changes):
            if not faults:
                faults.append(level)
                raise KeyError("a fault")
            return real(level, changes)

        engine.control.note_changes = note_changes
        write(DiskTier(tmp_path), CHAIN[0])
        assert until(lambda: engine.tiers()[0].chunks == 1) and faults


def test_closing_during_the_first_look(tmp_path, monkeypatch):
    for chunk in CHAIN:
        write(DiskTier(tmp_path), chunk)
    monkeypatch.setattr("workbench.tiers.disk.Files", SlowScan)
    monkeypatch.setattr("workbench.engine._START_SECONDS", 0.0)
    start = time.monotonic()
    engine = CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path)
    engine.close()
    assert time.monotonic() - start < 4 and engine.lookup(range(64)) == 0
