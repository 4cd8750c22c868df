"""Breaks the engine on purpose, one line at a time, and shows that the suite notices each.

    python -m pytest -m slow tests/test_seeded_defects.py

A defect is (file, text that stands there once, what to put in its place, tests that must fail).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

DEFECTS = {
    "dtype is not in the key": (
        "workbench/layout.py",
        "for f in fields(value) for part",
        'for f in fields(value) if f.name != "dtype" for part',
        "test_identity.py",
    ),
    "salt is not in the key": (
        "workbench/chunks.py",
        "_framed([self.salt, *self.lora])",
        "_framed([*self.lora])",
        "test_identity.py",
    ),
    "the key does not cover the prefix": (
        "workbench/chunks.py",
        "hashlib.sha256(parent + own)",
        "hashlib.sha256(own)",
        "test_chunks.py",
    ),
    "token ids wrap": (
        "workbench/chunks.py",
        "if array.size and (array.min() < 0 or array.max() > _MAX_TOKEN):",
        "if False:",
        "test_chunks.py",
    ),
    "the checksum is skipped": (
        "workbench/tiers/disk.py",
        'return "" if self._read_payload(fd, out, size) == header.payload_digest else "corrupt"',
        'return "" if self._read_payload(fd, out, size) else "corrupt"',
        "test_disk.py",
    ),
    "tokens are not compared": (
        "workbench/record.py",
        "place == (chunk.key, chunk.parent, chunk.start, chunk.stop, chunk.tokens)",
        "place[:1] == (chunk.key,)",
        "test_disk.py",
    ),
    "records are written in place": (
        "workbench/tiers/disk.py",
        "temporary = self._temporary_name(chunk.key)",
        "temporary = target",
        "test_disk.py",
    ),
    "temporary files stay": (
        "workbench/tiers/disk.py",
        "if entry.name.endswith(_TEMPORARY):\n                    self._sweep(entry)\n",
        "if False:\n                    pass\n",
        "test_disk.py",
    ),
    "a transient fault takes the record away": (
        "workbench/tiers/disk.py",
        'if reason in ("corrupt", "mismatch"):',
        "if reason:",
        "test_disk.py",
    ),
    "damaged records stay": (
        "workbench/tiers/disk.py",
        'if reason in ("corrupt", "mismatch"):',
        "if False:",
        "test_disk.py",
    ),
    "links are followed": (
        "workbench/tiers/disk.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)\n        except OSError as error:\n            if",
        "os.O_RDONLY | os.O_CLOEXEC)\n        except OSError as error:\n            if",
        "test_security.py",
    ),
    "one release is forgotten": (
        "workbench/control.py",
        "for tier, entry in running.holds:",
        "for tier, entry in running.holds[1:]:",
        "test_engine.py test_control.py",
    ),
    "a written chunk stays held": (
        "workbench/control.py",
        "            self.memory.release(entry)\n",
        "            pass\n",
        "test_engine.py",
    ),
    "the arena copy is not held while it is written": (
        "workbench/control.py",
        "        self.memory.hold(entry)\n        self._writing.add((entry, level))\n",
        "        pass\n",
        "test_engine.py test_control.py",
    ),
    "capacity is not looked at": (
        "workbench/tiers/base.py",
        "return self.used_bytes + nbytes <= self.capacity_bytes",
        "return True",
        "test_engine.py",
    ),
    "a failed store keeps its room": (
        "workbench/control.py",
        '        if entry in self.tiers[level]:\n            self._leave(entry, level, "store failed")',
        "        pass",
        "test_disk.py test_control.py",
    ),
    "lookups see what is only ordered": (
        "workbench/index.py",
        "if entry < 0 or not resident[entry] & levels:",
        "if entry < 0:",
        "test_control.py",
    ),
    "what a failed load spoiled is stored": (
        "workbench/transfers.py",
        "if self._step_tainted or order.attempt <= self._tainted.get(order.request, -1):",
        "if False:",
        "test_control.py",
    ),
    "slots are not checked": (
        "workbench/transfers.py",
        'return "" if contents == order.chunk else "mismatch"',
        'return ""',
        "test_control.py",
    ),
    "a queued write does not protect its slot": (
        "workbench/transfers.py",
        "elif order.slot != STAGING and self.arena.leaving[order.slot]:",
        "elif False:",
        "test_control.py",
    ),
    "demotions overtake erasures": (
        "workbench/transfers.py",
        "            self._enqueue(order.level, leaving)\n            return\n        if slot != STAGING:",
        "            self._write(leaving), self._left(slot)\n            return\n        if slot != STAGING:",
        "test_control.py",
    ),
    "a child may outlive its parent": (
        "workbench/control.py",
        "return self.index.children[entry] > 0 and self.index.is_last_copy(entry, level)",
        "return False",
        "test_engine.py",
    ),
    "a parent's entry is given away": (
        "workbench/index.py",
        "or self._links[entry] or self._users[entry]",
        "or self._users[entry]",
        "test_index.py",
    ),
    "promotions push out what the same request loads": (
        "workbench/control.py",
        "            self._hold(running, level, entry)\n        return level",
        "            pass\n        return level",
        "test_engine.py test_control.py",
    ),
    "the use of a file is not noted": (
        "workbench/tiers/disk.py",
        "            self._touch(chunk.key)",
        "            pass",
        "test_engine.py",
    ),
    "the last page of a chunk is not moved": (
        "kernels/pages.py",
        "for i in range(width):",
        "for i in range(width - 1):",
        "test_kernel_pages.py",
    ),
    "a fast copy writes past its page": (
        "kernels/pages.py",
        "if not stream or target % 64 or nbytes % 64:",
        "if not stream or target % 64:",
        "test_kernel_pages.py",
    ),
    "the checksum of a remote record is skipped": (
        "workbench/tiers/remote.py",
        "if xxhash.xxh3_128_digest(payload.data) != header.payload_digest:",
        "if False:",
        "test_redis.py",
    ),
    "the seal is not compared": (
        "workbench/tiers/remote.py",
        'self._seal.holds(tag, head, payload) else "mac"',
        'True else "mac"',
        "test_redis.py",
    ),
    "a connection with replies under way is kept": (
        "workbench/tiers/redis.py",
        "            wire.close()\n            raise",
        "            self._idle.append(wire)\n            raise",
        "test_remote_faults.py",
    ),
    "an outage is not remembered": (
        "workbench/tiers/remote.py",
        "                self.breaker.trip(fault.reason)",
        "                pass",
        "test_remote_faults.py",
    ),
    "a remote record that is gone is still believed in": (
        "workbench/tiers/presence.py",
        "            self._known.pop(key, None)",
        "            pass",
        "test_remote_faults.py",
    ),
    "a part of a chunk reaches one token too far": (
        "workbench/control.py",
        "return _Further(chunk, chunk.start + tokens)",
        "return _Further(chunk, min(chunk.start + tokens + 1, chain.num_tokens))",
        "test_beginnings.py",
    ),
    "an image does not end a part": (
        "workbench/chunks.py",
        "stop = min([stop, *(max(start, first)",
        "stop = min([stop, *(max(stop, first)",
        "test_beginnings.py",
    ),
    "a stored image is taken for text": (
        "workbench/chunks.py",
        "return self.key == _key_of(",
        "return True or self.key == _key_of(",
        "test_beginnings.py",
    ),
    "a tail goes while it is used": (
        "workbench/control.py",
        "if self.index.in_use(entry) or self.index.pending[entry] or not self.index.resident[above] & self._own:",
        "if not self.index.resident[above] & self._own:",
        "test_beginnings.py",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    target = tmp_path_factory.mktemp("defects") / "tree"
    target.mkdir()
    for name in ("kernels", "workbench", "tests", "pyproject.toml"):
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, target / name)
    return target


def run_tests(tree: Path, tests: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(tree / "cache")}
    files = [f"tests/{name}" for name in tests.split()]
    machines = ["--deselect", "tests/test_control.py::TestPlanes", "--deselect", "tests/test_index.py::TestIndex"]
    arguments = ["-m", "not slow", "-x", "-q", "-p", "no:cacheprovider", *machines, *files]  # those shrink for minutes
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )


def test_every_defect_still_breaks_a_line():
    counts = {name: (ROOT / path).read_text().count(before) for name, (path, before, *_) in DEFECTS.items()}
    assert {name for name, count in counts.items() if count != 1} == set(), "say anew which lines these break"


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_seeded_defect_is_caught(name, copy, capsys):
    path, before, after, tests = DEFECTS[name]
    source = (copy / path).read_text()
    try:
        (copy / path).write_text(source.replace(before, after))
        result = run_tests(copy, tests)
    finally:
        (copy / path).write_text(source)
    assert result.returncode == 1, f"the suite did not notice (exit {result.returncode}): {result.stdout[-500:]}"
    caught = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    with capsys.disabled():
        print(f"\n    {name}: {caught[1] if caught else 'caught'}", end="")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_defect_the_suite_passes(copy):
    """Otherwise nothing here says anything."""
    result = run_tests(copy, " ".join(sorted({test for *_, tests in DEFECTS.values() for test in tests.split()})))
    assert result.returncode == 0, result.stdout[-2000:]
