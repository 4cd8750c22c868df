"""The two planes joined by a queue, as under vLLM: reports come late, out of order or never; pages change hands.

Requests are admitted by the control plane while the data plane is still several steps behind. A step's orders travel as
one list and are carried out in turn, a load that fails spoils what that step computes, and blocks are given to the next
request as soon as the control plane lets go of them.
"""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import IDENTITY, SMALL, Pages, audit, chain_of, payload

from workbench.config import CacheConfig
from workbench.engine import build_control, build_data
from workbench.files import Files
from workbench.orders import STAGING, Done, Erase, Load, Store, Write
from workbench.record import header_nbytes, parse_header

CHUNK, ON_DISK = SMALL.chunk_nbytes, 8192
PER_CHUNK = SMALL.blocks_per_chunk

SETTINGS = {
    "memory": {"memory_bytes": 4 * CHUNK},
    "through": {"memory_bytes": 3 * CHUNK, "disk_bytes": 6 * ON_DISK},
    "back": {"memory_bytes": 3 * CHUNK, "disk_bytes": 5 * ON_DISK, "write": "back"},
    "disk": {"memory_bytes": 0, "disk_bytes": 5 * ON_DISK},
    "narrow": {"memory_bytes": 2 * CHUNK, "disk_bytes": 6 * ON_DISK, "staging_bytes": 1},
}


class Flaky(Files):
    """Fails so many of the next reads or writes."""

    failing_reads = failing_writes = 0

    def preadv(self, fd, buffers, offset):
        if self.failing_reads:
            self.failing_reads -= 1
            raise OSError(errno.EIO, "I/O error")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        if self.failing_writes:
            self.failing_writes -= 1
            raise OSError(errno.EIO, "I/O error")
        return super().pwritev(fd, buffers, offset)


class Request:
    def __init__(self, name, chain, blocks, hit):
        self.name, self.chain, self.blocks, self.hit = name, chain, blocks, hit
        self.failed = False  # a load failed and the control plane knows: the whole prompt is computed anew


class Step:
    """What travels to the data plane: orders before the forward pass, what it computes, orders after it."""

    def __init__(self):
        self.loads, self.stores, self.computed = [], [], []


class Planes:
    """Both planes with the queue between them."""

    def __init__(self, name: str):
        self.folder = Path(tempfile.mkdtemp())
        config = dict(SETTINGS[name])
        if "disk_bytes" in config:
            config["disk_path"] = self.folder
        config = CacheConfig(chunk_tokens=8, **config)
        self.data = build_data(IDENTITY, config)
        self.control = build_control(IDENTITY, config, self.data.tiers)
        self.now = 0.0
        self.control._clock, self.control._looked_at = lambda: self.now, 0.0
        self.files = Flaky()
        for tier in self.data.tiers:
            tier._files, tier.faults_in_a_row = self.files, 1 << 30  # the breaker has tests of its own
        self.pages, self.rng = Pages(48), np.random.default_rng(0)
        self.data.attach(self.pages.table)
        self.free = list(range(48))
        self.requests: dict[str, Request] = {}
        self.step, self.sent = Step(), []
        self.reports: list[list[Done]] = []
        self.serial, self.lost, self.late = 0, False, False
        self.seen: set[str] = set()

    # ---- scheduler

    def admit(self, tokens) -> None:
        chain = chain_of(tokens)
        if len(chain) * PER_CHUNK > len(self.free):
            return
        blocks = [self.free.pop(0) for _ in range(len(chain) * PER_CHUNK)]
        hit = self.control.lookup(chain)
        self.serial += 1
        request = Request(f"r{self.serial}", chain, blocks, hit)
        self.requests[request.name] = request
        self.control.admit(request.name, chain, reuse_tokens=hit)
        self.step.loads += self.control.plan_loads(request.name, 0, hit, blocks)
        self._compute(request, hit // 8)

    def _compute(self, request: Request, first_chunk: int) -> None:
        self.step.computed.append((request, list(request.blocks), first_chunk))
        self.step.stores += self.control.plan_stores(request.name, request.chain.num_tokens, request.blocks)

    def send(self) -> None:
        self.sent.append(self.step)
        self.step = Step()

    def preempt(self, name: str) -> None:
        """The request loses its blocks and comes back later with others; it looks its prefix up again."""
        request = self.requests[name]
        self._close_step(name)
        self.free += request.blocks
        request.blocks = [self.free.pop(0) for _ in request.blocks]
        request.hit, request.failed = self.control.lookup(request.chain), False
        self.control.admit(name, request.chain, reuse_tokens=request.hit)
        self.step.loads += self.control.plan_loads(name, 0, request.hit, request.blocks)
        self._compute(request, request.hit // 8)

    def _close_step(self, name: str) -> None:
        """A request that is part of a step ends, or loses its blocks, after that step was sent: never within it."""
        if any(request.name == name for request, _, _ in self.step.computed):
            self.send()

    def finish(self, name: str) -> None:
        self._close_step(name)
        request = self.requests.pop(name)
        self.control.finish(name)
        self.free += request.blocks  # the next request may have them at once

    def recompute(self) -> None:
        for request in self.requests.values():
            if request.failed:
                request.failed = False
                self._compute(request, 0)

    # ---- worker

    def carry_out(self) -> None:
        step = self.sent.pop(0)
        self.data.begin_step()
        self.data.run(step.loads)
        bad = self.data.take_bad_blocks()
        for order in step.loads:
            self.seen.add(type(order).__name__)
            if isinstance(order, Load) and not bad & set(order.blocks):
                self._compare(order)
        for request, blocks, first in step.computed:
            mine = set(blocks[: first * PER_CHUNK])
            if mine & bad:  # attention read blocks without KV: everything computed behind them is wrong
                for array in self.pages.arrays:
                    array[blocks[first * PER_CHUNK :]] = self.rng.integers(
                        0, 256, array[blocks[first * PER_CHUNK :]].shape
                    )
            else:
                self.pages.compute(request.chain, blocks, first)
        self.data.run(step.stores)
        self.reports.append(self.data.take_report())

    def _compare(self, order: Load) -> None:
        expected = payload(order.chunk.key)
        for layer in range(SMALL.num_layers):
            got = self.pages.arrays[layer][list(order.blocks)]
            assert np.array_equal(got, expected[layer]), "wrong KV was given out"

    # ---- reports

    def deliver(self, position: int = 0) -> None:
        """Reports come in any order: each chunk's own are in one report, or of the writing thread."""
        report = self.reports.pop(position % len(self.reports)) + self.data.take_report()
        self.control.apply(report)
        for done in report:
            self.seen.add(f"{done.kind} {done.reason}".strip())
            if done.kind == "load" and done.reason and done.request in self.requests:
                self.requests[done.request].failed = True

    def settle(self) -> None:
        """Everything that is under way arrives."""
        for _ in range(3):
            self.recompute()
            self.send()
            while self.sent:
                self.carry_out()
            assert self.data.flush(10)
            self.reports.append([])
            while self.reports:
                self.deliver()
        self.seen |= {event.kind for event in self.control.record.events}

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        before = len(self.control._awaited)
        self.control.expire()
        self.late |= len(self.control._awaited) < before

    def check_disk(self) -> None:
        """Whatever lies on disk under a name with a right header is right."""
        for path in self.folder.rglob("*.kv"):
            data = path.read_bytes()
            header = parse_header(data[: header_nbytes(8)])
            if header is not None and path not in self.spoiled:
                assert data[header.header_nbytes :] == payload(header.key).tobytes(), "wrong KV was stored"

    spoiled: frozenset = frozenset()

    def close(self) -> None:
        self.data.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def rest(planes: Planes) -> None:
    for name in list(planes.requests):
        planes.finish(name)
    planes.settle()
    if planes.lost:  # what nobody will answer any more is taken back at its deadline
        planes.pass_time(61)
    audit(planes.control)
    if not planes.lost and not planes.late:
        on_disk = sum(p.stat().st_blocks * 512 for p in planes.folder.rglob("*.kv"))
        assert on_disk == sum(t.used_bytes for t in planes.control.tiers if t.name == "disk")
    planes.check_disk()


SEEN: set[str] = set()
TREE = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def tokens_of(path) -> list[int]:
    return [token + 10 * depth for depth, token in enumerate(path) for _ in range(8)]


class PlanesMachine(RuleBasedStateMachine):
    planes = None

    @initialize(name=st.sampled_from(sorted(SETTINGS)))
    def begin(self, name):
        self.planes = Planes(name)

    @rule(path=TREE)
    def admit(self, path):
        self.planes.admit(tokens_of(path))

    @rule()
    def send(self):
        self.planes.recompute()
        self.planes.send()

    @precondition(lambda self: self.planes and self.planes.sent)
    @rule()
    def carry_out(self):
        self.planes.carry_out()

    @precondition(lambda self: self.planes and self.planes.reports)
    @rule(position=st.integers(0, 3))
    def deliver(self, position):
        self.planes.deliver(position)

    @precondition(lambda self: self.planes and self.planes.requests)
    @rule(pick=st.integers(0, 9))
    def finish(self, pick):
        names = sorted(self.planes.requests)
        self.planes.finish(names[pick % len(names)])

    @precondition(lambda self: self.planes and self.planes.requests and not self.planes.sent)
    @rule(pick=st.integers(0, 9))
    def preempt(self, pick):
        names = sorted(self.planes.requests)
        self.planes.preempt(names[pick % len(names)])

    @rule(reads=st.integers(0, 2), writes=st.integers(0, 2))
    def fail_next(self, reads, writes):
        self.planes.files.failing_reads, self.planes.files.failing_writes = reads, writes

    @rule(pick=st.integers(0, 99))
    def damage(self, pick):
        files = sorted(self.planes.folder.rglob("*.kv"))
        if files:
            path = files[pick % len(files)]
            data = bytearray(path.read_bytes())
            data[5000 % len(data)] ^= 0xFF
            path.write_bytes(data)
            self.planes.spoiled |= {path}

    @rule()
    def clear(self):
        self.planes.step.stores += self.planes.control.clear()

    @rule()
    def settle(self):
        self.planes.settle()

    @precondition(lambda self: self.planes and self.planes.sent)
    @rule()
    def lose_step(self):
        """The step never reaches the worker: its requests end, and whatever was ordered stays unconfirmed."""
        step = self.planes.sent.pop()
        self.planes.lost = True
        for request, _, _ in step.computed:
            if request.name in self.planes.requests:
                self.planes.finish(request.name)

    @rule(seconds=st.sampled_from([1, 30, 61]))
    def pass_time(self, seconds):
        self.planes.pass_time(seconds)

    @precondition(lambda self: self.planes and self.planes.reports)
    @rule()
    def lose_report(self):
        self.planes.reports.pop()
        self.planes.lost = True

    @invariant()
    def counts(self):
        if self.planes is not None:
            audit(self.planes.control, at_rest=False)

    def teardown(self):
        if self.planes is not None:
            try:
                rest(self.planes)
            finally:
                SEEN.update(self.planes.seen)
                self.planes.close()


TestPlanes = PlanesMachine.TestCase
TestPlanes.settings = settings(
    max_examples=int(os.environ.get("KVWORKBENCH_EXAMPLES", "60")), stateful_step_count=50, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_random_schedules(name, seed):
    """The same without losses, until all that should be met was met: the writing thread's turns are not the seed's."""
    rng, planes = np.random.default_rng(seed), Planes(name)
    expected = {"Load", "store", "load", "hit", "evict", "drop", "dedup"}
    expected |= {"write"} if name != "memory" else set()
    expected |= {"Write", "demote", "promote"} if name == "back" else set()
    try:
        for number in range(6000):
            if number >= 600 and expected <= planes.seen:
                break
            what = rng.integers(0, 15)
            if number % 20 == 0:
                planes.data.flush(10)  # on a busy machine the writing thread might never get its turn in between
            names = sorted(planes.requests)
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
            if len(planes.sent) > 3:
                planes.carry_out()
            if len(planes.reports) > 3:
                planes.deliver(int(rng.integers(0, 4)))
            audit(planes.control, at_rest=False)
        rest(planes)
        if name != "memory":
            assert planes.seen & {"load EIO", "write EIO"}, "no fault was met"
        assert expected <= planes.seen, expected - planes.seen
    finally:
        planes.close()


# ---------------------------------------------------------------- single cases


@pytest.fixture
def planes(request):
    made = Planes(getattr(request, "param", "through"))
    yield made
    made.close()


def run_step(planes):
    planes.send()
    planes.carry_out()
    planes.deliver()


@pytest.mark.parametrize("planes", ["through", "disk", "back"], indirect=True)
def test_what_a_step_with_a_failed_load_computed_is_never_stored(planes):
    planes.admit(range(16))
    planes.finish("r1")
    planes.settle()
    for slot in range(len(planes.data.arena.contents)):
        planes.data.arena.contents[slot] = None  # memory lost its bytes
    planes.files.failing_reads = 9
    planes.admit([*range(16), *range(100, 116)])
    planes.admit(range(200, 208))  # another request of the same step
    run_step(planes)
    planes.data.flush()
    planes.control.apply(planes.data.take_report())
    planes.files.failing_reads = 0
    assert planes.requests["r2"].failed
    assert planes.control.lookup(chain_of(range(200, 208))) == 0
    assert planes.control.lookup(planes.requests["r2"].chain) <= 16
    assert planes.control.record.totals.failures("store")["tainted"] >= 3
    planes.settle()  # computed anew, without the failed load
    assert planes.control.lookup(planes.requests["r2"].chain) >= 24
    rest(planes)


def test_a_tainted_request_of_a_disk_only_engine_is_stored_after_all():
    planes = Planes("disk")
    planes.admit(range(8))
    planes.finish("r1")
    planes.settle()
    planes.files.failing_reads = 1
    planes.admit(range(24))
    run_step(planes)
    planes.files.failing_reads = 0
    planes.settle()
    assert planes.control.lookup(chain_of(range(24))) == 24
    rest(planes)
    planes.close()


def test_an_abort_between_order_and_report_leaves_nothing_held(planes):
    planes.admit(range(16))
    planes.finish("r1")
    run_step(planes)
    planes.admit(range(16))
    planes.finish("r2")
    run_step(planes)
    rest(planes)
    assert planes.control.lookup(chain_of(range(16))) == 16
    planes.control.finish("r2")  # twice is fine
    planes.control.finish("never seen")


def test_a_chunk_that_left_between_lookup_and_plan_is_a_failed_load(planes):
    chain = chain_of(range(8))
    planes.admit(range(8))
    planes.finish("r1")
    planes.settle()
    assert planes.control.lookup(chain) == 8
    for order in planes.control.clear():
        planes.data.run([order])
    planes.control.admit("late", chain, reuse_tokens=8)
    planes.data.run(planes.control.plan_loads("late", 0, 8, [0, 1]))
    assert planes.data.flush() and planes.data.take_bad_blocks() == {0, 1}
    report = planes.data.take_report()
    assert [(done.kind, done.reason) for done in report] == [("load", "absent")]
    planes.control.apply(report)
    planes.control.finish("late")
    audit(planes.control)


def test_a_partial_chunk_is_loaded_without_touching_live_blocks(planes):
    """Blocks before the first token and behind the last belong to somebody else."""
    planes.admit(range(24))
    planes.finish("r1")
    planes.settle()
    chain = chain_of(range(24))
    planes.control.admit("r", chain, local_tokens=4, reuse_tokens=16)
    for array in planes.pages.arrays:
        array[:] = 7
    orders = planes.control.plan_loads("r", 4, 20, [40, 41, 42, 43, 44, 45])
    assert [order.blocks for order in orders if isinstance(order, Load)] == [(-1, 41), (42, 43), (44, -1)]
    planes.data.run(orders)
    for layer, array in enumerate(planes.pages.arrays):
        assert (array[[40, 45]] == 7).all()
        whole = np.concatenate([payload(chain[n].key)[layer] for n in range(3)])
        assert np.array_equal(array[[41, 42, 43, 44]], whole[1:5])
    planes.control.apply(planes.data.take_report())
    planes.control.finish("r")
    rest(planes)


def test_a_preempted_request_counts_once(planes):
    planes.admit(range(16))
    run_step(planes)
    planes.preempt("r1")
    run_step(planes)
    assert planes.control.record.totals.count("lookup") == 1
    rest(planes)


def test_a_load_that_failed_for_one_request_does_not_take_back_what_another_stored(planes):
    """Two loads of one damaged chunk: between their reports the chunk is stored anew."""
    chain = chain_of(range(8))
    planes.admit(range(8))
    planes.finish("r1")
    planes.settle()
    bad = Done("load", "x", 0, chain[0].key, 1, 0, 0.0, "corrupt")
    planes.control.apply([bad, bad])
    planes.control.apply([bad._replace(level=0, reason="mismatch")])
    shutil.rmtree(planes.folder)
    planes.admit(range(8))
    planes.control.apply([bad])  # late; the chunk is on its way again
    run_step(planes)
    rest(planes)
    assert planes.control.lookup(chain) == 8


def test_a_second_load_through_staging_does_not_confirm_the_firsts_promotion():
    planes = Planes("through")
    chain = chain_of(range(8))
    planes.admit(range(8))
    planes.finish("r1")
    planes.settle()
    entry = planes.control.index.find(chain[0].key)
    planes.control._leave(entry, 0, "test")
    planes.control.begin("a", chain), planes.control.begin("b", chain)
    (first,) = planes.control.plan_loads("a", 0, 8, [0, 1])
    (second,) = planes.control.plan_loads("b", 0, 8, [2, 3])
    assert first.slot != STAGING and second.slot == STAGING
    done = Done("load", "b", 0, chain[0].key, 1, CHUNK, 0.0, "")
    planes.control.apply([done])
    assert not planes.control.index.resident[entry] & 1, "the arena slot is not filled yet"
    planes.control.apply([done._replace(request="a", reason="EIO")])
    planes.control.finish("a"), planes.control.finish("b")
    audit(planes.control)
    planes.close()


# ---------------------------------------------------------------- deadlines


def deadlines_met(planes) -> dict[str, int]:
    return {kind: planes.control.record.totals.failures(kind).get("deadline", 0) for kind in ("store", "load", "drop")}


@pytest.mark.parametrize("planes", ["memory", "through", "back", "disk"], indirect=True)
def test_stores_whose_orders_are_lost_are_taken_back(planes):
    planes.admit(range(16))
    planes.send()
    planes.sent.clear()  # the step never reaches the worker
    planes.finish("r1")
    tier = planes.control.tiers[0]
    assert planes.control.lookup(chain_of(range(16))) == 0 and len(tier) == 2
    planes.pass_time(59)
    assert len(tier) == 2, "not yet"
    planes.pass_time(2)
    assert len(tier) == 0 and deadlines_met(planes)["store"] == (4 if planes.control.tiers[1:] and
                                                                 planes.control.write == "through" else 2)  # fmt: skip
    audit(planes.control)
    planes.admit(range(16))  # and it can be stored again
    planes.finish("r2")
    planes.settle()
    assert planes.control.lookup(chain_of(range(16))) == 16
    audit(planes.control)


def test_reports_that_are_lost_hold_no_room_for_ever(planes):
    planes.admit(range(16))
    planes.send()
    planes.carry_out()
    assert planes.data.flush(10) and planes.data.take_report() is not None
    planes.reports.clear()
    planes.finish("r1")
    assert planes.control.memory.holds == 2, "the arena's copies wait to be written down"
    planes.pass_time(61)
    assert planes.control.memory.holds == 0
    audit(planes.control)


def test_a_load_that_rises_for_ever_is_taken_back(planes):
    chain = chain_of(range(8))
    planes.admit(range(8))
    planes.finish("r1")
    planes.settle()
    planes.control._leave(planes.control.index.find(chain[0].key), 0, "test")
    planes.control.admit("late", chain, reuse_tokens=8)
    (load,) = planes.control.plan_loads("late", 0, 8, [0, 1])
    assert load.slot != STAGING
    planes.control.finish("late")
    planes.pass_time(61)
    assert deadlines_met(planes)["load"] == 1 and planes.control.lookup(chain) == 8, "it still lies on disk"
    planes.data.run([load])  # it was slow, not lost
    planes.control.apply(planes.data.take_report())
    assert len(planes.control.memory) == 0, "a slot that was given up is not taken for filled"
    audit(planes.control)


def test_a_late_answer_counts_what_is_there_after_all(planes):
    planes.admit(range(16))
    planes.send()
    planes.carry_out()
    planes.pass_time(61)
    planes.data.flush(10)
    planes.deliver()
    planes.finish("r1")
    disk = planes.control.tiers[1]
    assert disk.used_bytes == sum(p.stat().st_blocks * 512 for p in planes.folder.rglob("*.kv")) > 0
    audit(planes.control)


@pytest.mark.parametrize("planes", ["memory", "through", "back", "disk"], indirect=True)
def test_an_answer_that_lay_unread_past_the_deadline_counts(planes):
    """Nobody comes for the answers while nothing is asked, or while a step takes minutes: they are no worse for it."""
    planes.admit(range(16))
    planes.send()
    planes.carry_out()
    assert planes.data.flush(10)
    planes.now += 300
    planes.deliver()
    planes.finish("r1")
    assert planes.control.lookup(chain_of(range(16))) == 16
    assert set(deadlines_met(planes).values()) == {0}
    rest(planes)


def test_a_request_that_never_finishes_lets_go(planes):
    planes.admit(range(16))
    planes.finish("r1")
    planes.settle()
    planes.admit(range(16))
    assert sum(tier.holds for tier in planes.control.tiers) == 2
    for _ in range(20):  # signs of life keep it
        planes.pass_time(300)
        planes.control.plan_stores("r2", 16, planes.requests["r2"].blocks)
    assert sum(tier.holds for tier in planes.control.tiers) == 2
    planes.pass_time(601)
    assert sum(tier.holds for tier in planes.control.tiers) == 0 and deadlines_met(planes)["drop"] == 1
    assert planes.control.plan_stores("r2", 16, planes.requests["r2"].blocks) == []
    planes.finish("r2")
    rest(planes)


# ---------------------------------------------------------------- the data plane alone


def store_order(chain, number, slot, blocks, write_to=(), request="r"):
    return Store(request, 0, chain[number], tuple(blocks), slot, write_to)


def test_a_slot_that_a_queued_write_has_still_to_read_is_not_filled_anew():
    """The fence of the arena: without it, the second chunk's bytes would be stored under the first one's key."""
    planes, gate = Planes("through"), []

    class Gated(Files):
        def open(self, path, flags, mode=0o600):
            while not gate:
                pass
            return super().open(path, flags, mode)

    planes.data.tiers[0]._files = Gated()
    a, b = chain_of(range(8)), chain_of(range(50, 58))
    planes.pages.compute(a, [0, 1]), planes.pages.compute(b, [2, 3])
    planes.data.run([store_order(a, 0, 0, [0, 1], (1,)), Erase(bytes(32), 1), store_order(b, 0, 0, [2, 3], (1,))])
    planes.data.run([Load("x", 0, b[0], (4, 5), 1, 0)])
    gate.append(1)
    assert planes.data.flush(10)
    reasons = [(done.kind, done.reason) for done in planes.data.take_report()]
    assert reasons.count(("store", "slot busy")) == 1 and ("load", "slot busy") in reasons
    planes.check_disk()
    planes.close()


def test_a_demotion_waits_for_the_erasure_of_an_older_copy():
    planes = Planes("back")
    a = chain_of(range(8))
    planes.pages.compute(a, [0, 1])
    for _ in range(50):
        planes.data.run([store_order(a, 0, 0, [0, 1]), Write(a[0], 0, 1)])
        assert planes.data.flush(10) and len(list(planes.folder.rglob("*.kv"))) == 1
        planes.data.run([Erase(a[0].key, 1), Write(a[0], 0, 1)])
        assert planes.data.flush(10) and len(list(planes.folder.rglob("*.kv"))) == 1, "the new copy was erased"
        planes.data.run([Erase(a[0].key, 1)])
        planes.data.flush(10)
    planes.close()


def test_a_write_of_a_slot_that_holds_something_else_is_refused():
    planes = Planes("back")
    a, b = chain_of(range(8)), chain_of(range(50, 58))
    planes.pages.compute(a, [0, 1])
    planes.data.run([store_order(a, 0, 0, [0, 1]), Write(b[0], 0, 1), Write(b[0], 1, 1)])
    assert [done.reason for done in planes.data.take_report()] == ["", "slot lost", "slot lost"]
    assert not list(planes.folder.rglob("*.kv"))
    planes.close()


def test_one_list_may_use_a_slot_or_a_block_twice():
    """A request that is aborted and one that follows it: what comes later in the list wins, whole."""
    planes = Planes("through")
    a, b = chain_of(range(8)), chain_of(range(50, 58))
    planes.pages.compute(a, [0, 1]), planes.pages.compute(b, [2, 3])
    planes.data.run([store_order(a, 0, 0, [0, 1], (1,)), store_order(b, 0, 1, [2, 3], (1,))])
    planes.data.flush()
    for _ in range(50):
        planes.data.run([Load("x", 0, a[0], (4, 5), 0, 0), Load("y", 0, b[0], (4, 5), 1, 0)])
        assert planes.pages.holds(b, [4, 5], 0)
        planes.data.run([Load("x", 0, b[0], (6, 7), 0, 0), Load("y", 0, a[0], (8, 9), 1, 0)])
        assert planes.pages.holds(b, [6, 7], 0) and planes.pages.holds(a, [8, 9], 0)
    planes.close()


@pytest.mark.parametrize("blocks, reason", [((0, -1), "no block"), ((0, 48), "raised ValueError")])
def test_a_store_from_blocks_that_are_none_is_refused_and_answered(blocks, reason):
    planes = Planes("disk")
    chain = chain_of(range(16))
    planes.data.run([store_order(chain, 0, STAGING, blocks, (0,)), store_order(chain, 1, STAGING, (2, 3), (0,))])
    assert planes.data.flush(10)
    assert {done.reason for done in planes.data.take_report()} <= {reason, "prefix not stored"}
    assert len(planes.data.arena._staging) == (256 << 20) // CHUNK, "a staging slot is lost"
    planes.data.run([Load("x", 0, chain[0], (0, 48), 0, STAGING)])
    assert planes.data.take_report()[0].reason == "absent"
    planes.close()


def test_wrong_blocks_of_a_load_are_an_answer_not_an_exception():
    planes = Planes("memory")
    chain = chain_of(range(8))
    planes.data.run([store_order(chain, 0, 0, (0, 1)), Load("x", 0, chain[0], (2, 99), 0, 0)])
    assert [done.reason for done in planes.data.take_report()] == ["", "raised ValueError"]
    assert planes.data.take_bad_blocks() == {2, 99}
    planes.close()


def test_pages_that_cannot_be_moved_are_an_answer_not_an_exception(planes, monkeypatch):
    """A GPU without memory for chunks on their way."""

    def no_memory(*args):
        raise RuntimeError("CUDA out of memory")

    planes.admit(range(16))
    planes.finish("r1")
    planes.settle()
    monkeypatch.setattr("workbench.transfers.scatter_pages", no_memory)
    planes.admit(range(16))
    planes.send()
    planes.carry_out()
    planes.deliver()
    assert planes.control.record.totals.failures("load") == {"raised RuntimeError": 2}
    monkeypatch.setattr("workbench.transfers.gather_pages", no_memory)
    planes.admit(range(100, 108))
    planes.finish("r3")
    planes.settle()
    assert planes.control.lookup(chain_of(range(100, 108))) == 0
    monkeypatch.undo()
    rest(planes)


def test_arena_is_page_locked_once_and_kernels_compile_when_pages_are_attached(planes, monkeypatch):
    calls = []
    monkeypatch.setattr("kernels.pages_triton.pin", lambda array: not calls.append("pin"))
    monkeypatch.setattr("kernels.pages_triton.unpin", lambda array: calls.append("unpin"))
    monkeypatch.setattr("workbench.transfers.gather_pages", lambda pages, blocks, *a: calls.append(blocks.tolist()))
    monkeypatch.setattr("workbench.transfers.scatter_pages", lambda c, s, pages, blocks: calls.append(blocks.tolist()))
    for _ in range(2):
        table = Pages(4).table
        table.is_cuda = True
        planes.data.attach(table)
    planes.data.close()
    planes.data.close()
    nothing = [[-1] * PER_CHUNK]
    assert calls == ["pin", *4 * [nothing], "unpin"]


def test_close_twice_and_with_a_full_queue(planes):
    chain = chain_of(range(8))
    planes.data.run([store_order(chain, 0, 0, [0, 1], (1,))] * 3)
    planes.data.close()
    planes.data.close()
    assert not any(writer.is_alive() for writer in planes.data._writers)


def test_a_load_of_a_slot_that_holds_something_else_is_a_miss():
    planes = Planes("memory")
    a, b = chain_of(range(8)), chain_of(range(50, 58))
    planes.pages.compute(a, [0, 1])
    planes.data.run([store_order(a, 0, 0, [0, 1])])
    forged = a[0]._replace(tokens=b[0].tokens)  # a digest that collided: the key agrees, the tokens do not
    planes.data.run([Load("x", 0, chunk, (2, 3), 0, slot) for chunk, slot in ((b[0], 0), (forged, 0), (a[0], 1))])
    assert [done.reason for done in planes.data.take_report()] == ["", "mismatch", "mismatch", "absent"]
    assert planes.data.take_bad_blocks() == {2, 3} and not any(array[[2, 3]].any() for array in planes.pages.arrays)
    planes.close()
