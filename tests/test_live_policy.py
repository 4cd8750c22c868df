"""The live engine's order of chunks: the same victims as replay, pins, removal, indices that rest."""

import random
import warnings

import numpy as np
import pytest

from experiments.replay import replay
from experiments.traces import Trace
from workbench.errors import InvalidInputError
from workbench.policies import policy, policy_names, resolve_policy
from workbench.policies.base import PolicyError
from workbench.policies.compiled import PlainPolicyWarning
from workbench.policies.live import LivePolicy

REPLAY_ONLY = {"belady", "optimal"}
LIVE = [name for name in policy_names() if name not in REPLAY_ONLY]


def random_requests(seed: int, *, requests: int = 120, branch: int = 3, depth: int = 6) -> Trace:
    """Prompts as random walks down a tree that is wide enough to need eviction."""
    rng = random.Random(seed)
    known: dict[tuple[int, ...], int] = {}
    ids: list[int] = []
    offsets, tenants = [0], []
    for _ in range(requests):
        path = tuple(min(rng.randrange(branch), rng.randrange(branch)) for _ in range(rng.randint(1, depth)))
        ids += [known.setdefault(path[: i + 1], len(known)) for i in range(len(path))]
        offsets.append(len(ids))
        tenants.append(path[0])
    lengths = np.diff(offsets)
    return Trace(
        name=f"walks-{seed}",
        ids=np.array(ids, np.int32),
        offsets=np.array(offsets, np.int64),
        block_tokens=16,
        timestamps=np.cumsum(np.array([rng.expovariate(1.0) for _ in range(requests)])),
        input_tokens=lengths * 16,
        output_tokens=np.zeros(requests, np.int64),
        tenants=np.array(tenants, np.int32),
    )


def serve(live: LivePolicy, trace: Trace, capacity: int) -> list[int]:
    """Drive LivePolicy as an engine does, with indices handed out and recycled; returns victims as trace ids."""
    index: dict[int, int] = {}  # trace id -> index
    free, victims = list(range(3 * capacity)), []
    owner = np.zeros(trace.distinct, int)
    owner[trace.ids[::-1]] = np.repeat(trace.tenants, trace.lengths)[::-1]
    sizes = trace.chunk_tokens()
    costs = _costs(trace)
    for q in range(trace.requests):
        live.begin(q, float(trace.timestamps[q]))
        chain = trace.ids[trace.offsets[q] : trace.offsets[q + 1]].tolist()[:capacity]
        for b in chain:
            if b not in index:
                break
            live.hit(index[b])
            live.pin(index[b])
        pinned = [b for b in chain if b in index]
        for b in chain[len(pinned) :]:
            if len(index) == capacity:
                c = live.victim(incoming=b)
                assert c >= 0
                gone = next(x for x, i in index.items() if i == c)
                victims.append(gone)
                del index[gone]
                free.append(c)
            index[b] = free.pop(random.Random(b).randrange(len(free)))
            parent = int(trace.parent[b])
            live.insert(
                index[b],
                parent=index[parent] if parent >= 0 else -1,
                key=b,
                depth=int(trace.depth[b]),
                tokens=int(sizes[b]),
                tenant=int(owner[b]),
                **{name: values[b] for name, values in costs.items()},
            )
            live.pin(index[b])
            pinned.append(b)
        for b in pinned:
            live.unpin(index[b])
    assert live.pins_total == 0
    assert len(live) == len(index) and all(c in live for c in index.values())
    return victims


def _costs(trace: Trace) -> dict[str, np.ndarray]:
    from experiments.replay_costs import ReuseCosts

    costs, tokens = ReuseCosts(), trace.chunk_tokens().astype(np.int64)
    before = trace.depth.astype(np.int64) * trace.block_tokens
    return dict(
        nbytes=costs.nbytes(tokens),
        recompute_seconds=costs.recompute_seconds(before, before + tokens),
        load_seconds=costs.load_seconds(tokens),
    )


@pytest.mark.parametrize("name", LIVE)
def test_live_and_replay_name_the_same_victims(name):
    total = 0
    for seed in range(6):
        trace = random_requests(seed)
        for capacity in (7, 25):
            order = "tail_first" if seed % 3 else "head_first"
            expected = replay(trace, name, capacity_chunks=capacity, touch_order=order, record_victims=True)
            live = LivePolicy(name, capacity_chunks=capacity, touch_order=order)
            assert serve(live, trace, capacity) == expected.victims.tolist()
            total += expected.evictions
    assert total > 500, "the walks must really evict"


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
def test_live_and_replay_name_the_same_victims_long(name):
    for seed in range(40):
        trace = random_requests(seed, requests=800, branch=4, depth=9)
        for capacity in (9, 40, 150):
            expected = replay(trace, name, capacity_chunks=capacity, record_victims=True)
            assert serve(LivePolicy(name, capacity_chunks=capacity), trace, capacity) == expected.victims.tolist()


def filled(name: str = "lru", count: int = 4) -> LivePolicy:
    """Chunks 0 to count - 1 without parents, each from a request of its own."""
    live = LivePolicy(name, capacity_chunks=8)
    for c in range(count):
        live.begin(c, float(c))
        live.insert(c, key=c)
    live.begin(count, float(count))
    return live


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LIVE)
def test_tiers_of_a_few_chunks(name, capacity):
    """Whose parts round down to no chunk at all, and which hold more than they reckon with: chunks may be small."""
    rng, held, live = random.Random(capacity), set(), LivePolicy(name, capacity_chunks=capacity)
    for step in range(1000):
        live.begin(step, float(step))
        c = rng.randrange(4 * capacity)
        if c in held:
            live.hit(c)
            continue
        if len(held) == 2 * capacity:
            pinned = rng.sample(sorted(held), rng.randrange(capacity))
            for other in pinned:
                live.pin(other)
            gone = live.victim()
            assert gone in held.difference(pinned)
            held.remove(gone)
            for other in pinned:
                live.unpin(other)
        live.insert(c, key=c)
        held.add(c)
    live.begin(1000, 1000.0)
    assert {live.victim() for _ in range(len(held))} == held and live.victim() == -1


@pytest.mark.parametrize("name", LIVE)
def test_every_chunk_but_the_pinned_goes(name):
    live = filled(name)
    live.pin(2)
    live.pin(2)
    assert sorted(live.victim() for _ in range(3)) == [0, 1, 3]
    assert live.victim() == -1
    live.unpin(2)
    assert live.victim() == -1, "one pin is left"
    live.unpin(2)
    assert live.victim() == 2
    assert live.victim() == -1 and len(live) == 0


@pytest.mark.parametrize("name", LIVE)
def test_a_parent_stays_while_it_has_children(name):
    live = LivePolicy(name, capacity_chunks=4)
    live.begin(0, 0.0)
    live.insert(0, key=0)
    live.insert(1, parent=0, key=1)
    live.insert(2, parent=1, key=2)
    assert live.children(0) == 1 and live.children(2) == 0
    assert [live.victim() for _ in range(4)] == [2, 1, 0, -1]


@pytest.mark.parametrize("name", LIVE)
def test_kept_chunks_are_spared_for_one_call_only(name):
    live = filled(name)
    first = live.victim(keep=lambda c: c in (0, 3))
    assert first in (1, 2)
    assert live.victim(keep=lambda c: True) == -1
    assert sorted(live.victim() for _ in range(3)) == sorted({0, 1, 2, 3} - {first})


@pytest.mark.parametrize("name", LIVE)
def test_removed_chunks_are_gone_and_their_index_is_free_at_once(name):
    live = filled(name)
    live.remove(1)
    assert 1 not in live and len(live) == 3
    live.insert(1, key="again")
    live.begin(9, 9.0)
    assert sorted(live.victim() for _ in range(4)) == [0, 1, 2, 3]
    assert live.victim() == -1


def test_a_removed_parent_does_not_confuse_its_children():
    live = LivePolicy("lru", capacity_chunks=8)
    live.begin(0, 0.0)
    live.insert(0)
    live.insert(1, parent=0)
    live.remove(0)
    live.insert(0, key="other")
    live.begin(1, 1.0)
    assert live.children(0) == 0
    assert sorted([live.victim(), live.victim()]) == [0, 1]


def test_an_index_removed_while_pinned_rests_until_its_last_unpin():
    live = filled()
    live.pin(1)
    live.remove(1)
    assert 1 not in live and live.pins(1) == 1
    with pytest.raises(AssertionError):
        live.insert(1)
    live.unpin(1)
    live.insert(1)
    assert 1 in live and live.pins_total == 0


def test_unpinning_an_unpinned_chunk_is_an_error():
    live = filled()
    with pytest.raises(AssertionError, match="not pinned"):
        live.unpin(0)


@policy
class NoRemove:
    """A queue policy without on_remove: its removed chunks are skipped when evict() names them."""

    fields = dict(newer="i4")
    scalars = dict(oldest=-1, newest=-1)

    def on_hit(self, c):
        pass

    def on_insert(self, c):
        self.newer[c] = -1
        if self.newest >= 0:
            self.newer[self.newest] = c
        else:
            self.oldest = c
        self.newest = c

    def evict(self):
        c = self.oldest
        self.oldest = self.newer[c]
        if self.oldest < 0:
            self.newest = -1
        return c


def test_without_on_remove_a_removed_chunk_is_skipped():
    live = filled(NoRemove)
    live.remove(0)
    live.remove(2)
    live.insert(0)
    live.begin(9, 9.0)
    assert [live.victim() for _ in range(4)] == [1, 3, 0, -1]


def test_slots_do_not_leak():
    for name in ("lru", "arc", "s3fifo", "lirs", NoRemove):
        live = LivePolicy(name, capacity_chunks=50)
        rng = random.Random(1)
        for i in range(6000):
            live.begin(i, float(i))
            c = i % 200
            if c in live:
                live.remove(c)
            live.insert(c, key=rng.randrange(400) + 1000 * i)
            if len(live) > 50:
                assert live.victim() >= 0
        assert len(live._state.s) <= 2048, f"{name}: {len(live._state.s)} records for 50 chunks"


@policy
class Liar:
    """Names a chunk that it does not hold."""

    def on_hit(self, c):
        pass

    def on_insert(self, c):
        pass

    def evict(self):
        return 77


def test_a_policy_that_names_a_foreign_chunk_is_named():
    live = filled(Liar)
    with pytest.raises(PolicyError, match=r"Liar\(\) returned 77"):
        live.victim()


def test_what_needs_the_future_is_refused():
    with pytest.raises(InvalidInputError, match="future"):
        LivePolicy("belady", capacity_chunks=4)
    with pytest.raises(InvalidInputError, match="touch_order"):
        LivePolicy("lru", capacity_chunks=4, touch_order="backwards")
    with pytest.raises(InvalidInputError, match="capacity_chunks"):
        LivePolicy("lru", capacity_chunks=0)


@policy
class DictLru:
    """Cannot be compiled: its order is a dict."""

    def __init__(self):
        self.order = {}

    def on_hit(self, c):
        del self.order[c]
        self.order[c] = None

    def on_insert(self, c):
        self.order[c] = None

    def evict(self):
        c = next(iter(self.order))
        del self.order[c]
        return c

    def on_return(self, c):
        self.order = {c: None, **self.order}


def test_a_plain_python_policy_runs_live_and_in_replay_with_a_warning():
    trace = random_requests(3)
    with pytest.warns(PlainPolicyWarning, match=r"line \d+: `del self.order\[c\]`: self.order is no field"):
        plain = replay(trace, DictLru(), capacity_chunks=20, record_victims=True)
    assert not plain.compiled
    compiled = replay(trace, "lru", capacity_chunks=20, record_victims=True)
    assert plain.victims.tolist() == compiled.victims.tolist() and plain.evictions > 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlainPolicyWarning)
        live = LivePolicy(DictLru, capacity_chunks=20)
    assert serve(live, trace, 20) == compiled.victims.tolist()


def test_settings_reach_the_live_order():
    assert repr(resolve_policy("lru")) == "Lru()"
    live = LivePolicy(resolve_policy("s3fifo").__class__(small_share=0.5), capacity_chunks=10)
    assert "small_share=0.5" in repr(live)
