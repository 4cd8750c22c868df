"""Records that are large enough to be read by two threads: exact, and as careful as small ones."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from test_disk import Faulty

from workbench.files import Beside
from workbench.record import header_nbytes
from workbench.testing_tiers import sample_chunks, sample_payload
from workbench.tiers.disk import DiskTier

NBYTES = (9 << 20) + 12_345  # no multiple of anything
CHUNK = sample_chunks(1)[0]
PAYLOAD = sample_payload(CHUNK, NBYTES)
BODY = header_nbytes(CHUNK.num_tokens)


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(tmp_path / "kv", files=Faulty())
    assert tier.write(CHUNK, PAYLOAD)[0] == ""
    yield tier
    tier.close()


def read(tier) -> str:
    out = np.full(NBYTES, 0xAA, np.uint8)
    reason = tier.read(CHUNK, out)
    assert reason or np.array_equal(out, PAYLOAD), "wrong KV"
    return reason


def file_of(tier) -> str:
    return tier._file(CHUNK.key)


def test_round_trip_in_both_threads_and_after_closing(tier):
    assert [read(tier) for _ in range(5)] == [""] * 5
    calls = tier._files.calls
    assert calls.count("preadv") >= 15, "the header and two halves, each time"
    tier.close()
    assert read(tier) == ""


@pytest.mark.parametrize("at", [BODY, BODY + NBYTES // 2 - 1, BODY + NBYTES // 2, BODY + NBYTES - 1])
def test_a_flip_in_either_half_is_a_miss(tier, at):
    with open(file_of(tier), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    assert read(tier) == "corrupt" and not os.path.exists(file_of(tier)) and read(tier) == "absent"


class FailingOnce(Faulty):
    """The n-th read of all fails, and the others take their time."""

    def __init__(self, failing: int):
        super().__init__()
        self.failing, self.lock = failing, threading.Lock()

    def preadv(self, fd, buffers, offset):
        with self.lock:
            self.failing -= 1
            fails = self.failing == 0
        if fails:
            raise OSError(errno.EIO, "I/O error")
        time.sleep(0.05 if offset >= BODY else 0)
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("number", [2, 3])  # the first read is the header's
def test_a_fault_in_either_half_is_a_miss_that_deletes_nothing(tier, number):
    whole, tier._files = tier._files, FailingOnce(number)
    out = np.zeros(NBYTES, np.uint8)
    assert tier.read(CHUNK, out) == "EIO" and not tier._files.open_fds
    left = out.copy()
    time.sleep(0.1)
    assert np.array_equal(out, left), "a thread still reads into a buffer that was given back"
    tier._files = whole
    assert read(tier) == ""


class Cutting(Faulty):
    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def preadv(self, fd, buffers, offset):
        if offset >= BODY:
            os.truncate(self.path, BODY + 100)
        return super().preadv(fd, buffers, offset)


def test_a_file_that_ends_while_it_is_read_is_a_miss(tier):
    tier._files = Cutting(file_of(tier))
    assert read(tier) == "corrupt"


@pytest.mark.parametrize("number", range(1, 8))
def test_a_fault_at_each_call_of_a_write_stores_nothing_or_everything(tmp_path, number):
    files = Faulty(number, errno.EIO)
    tier = DiskTier(tmp_path / "kv", durable=True, files=files)
    reason, _ = tier.write(CHUNK, PAYLOAD)
    assert files.calls[number] in ("mkdir", "open", "allocate", "pwritev", "fsync", "stat_fd", "link", "close")
    assert reason in ("", "EIO") and not files.open_fds
    assert read(tier) == ("" if reason == "" else "absent")
    tier.close()


def test_a_thread_that_does_not_come_to_it_is_not_waited_for():
    beside, gate = Beside("test"), threading.Event()
    blocked = beside.start(gate.wait)
    start = time.monotonic()
    assert beside.start(lambda: threading.get_ident())() == threading.get_ident(), "the caller did it itself"
    assert time.monotonic() - start < 1.0
    gate.set()
    assert blocked() is True
    other = beside.start(lambda: threading.get_ident())
    time.sleep(0.2)
    assert other() != threading.get_ident()
    failing = beside.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing()
    beside.close()
    assert beside.start(lambda: 7)() == 7
