"""Policies: the form, the rules of each against a model written apart from it, names, saving, the notebook's magic."""

import random
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict, deque

import numpy as np
import pytest

from experiments.replay import ready, replay
from experiments.traces import Trace
from tests.test_live_policy import LIVE, random_requests
from workbench.errors import InvalidInputError, UnknownNameError
from workbench.policies import policy, policy_names, resolve_policy, save_policy
from workbench.policies.base import PolicyError
from workbench.policies.compiled import PlainPolicyWarning
from workbench.policies.names import user_policy_folder
from workbench.testing import check_policy

KNOWN = {
    "arc", "belady", "break_even", "clock", "fifo", "filo", "gdsf", "hyperbolic", "length_aware", "lfu", "lhd", "lirs",
    "lru", "marconi", "mru", "optimal", "pgdsf", "random", "s3fifo", "session_aware", "sglang_slru", "sieve", "slru",
    "tinylfu", "tlru", "ttl", "turns", "two_queues", "vllm", "workload_aware",
}  # fmt: skip


def objects(ids: list[int]) -> Trace:
    """Plain accesses as one request."""
    return Trace(
        name="objects",
        ids=np.array(ids, np.int32),
        offsets=np.array([0, len(ids)]),
        block_tokens=1,
        timestamps=np.zeros(1),
        input_tokens=np.array([len(ids)]),
        output_tokens=np.zeros(1, np.int64),
        tenants=np.zeros(1, np.int32),
    )


def random_objects(seed: int, length: int = 150) -> list[int]:
    """Skewed accesses with a drift, so that both recency and frequency matter."""
    rng = random.Random(seed)
    return [int(rng.paretovariate(0.7)) % 30 + (i // 60) * 3 for i in range(length)]


# Models: each returns the objects it evicts, in order. Written from the papers' rules on Python's own containers.


def model_lru(ids, capacity):
    order, gone = OrderedDict(), []
    for b in ids:
        if b in order:
            order.move_to_end(b)
            continue
        if len(order) == capacity:
            gone.append(order.popitem(last=False)[0])
        order[b] = None
    return gone


def model_fifo(ids, capacity, last=False, touch=False):
    order, gone = OrderedDict(), []
    for b in ids:
        if b in order:
            if touch:
                order.move_to_end(b)
            continue
        if len(order) == capacity:
            gone.append(order.popitem(last=last)[0])
        order[b] = None
    return gone


def model_score(score):
    """Evict the least (score, time of last use); score(uses, floor) is taken at each use."""

    def model(ids, capacity):
        held, gone, floor = {}, [], 0.0
        for now, b in enumerate(ids):
            if b in held:
                uses = held[b][2] + 1
            else:
                uses = 1
                if len(held) == capacity:
                    victim = min(held, key=lambda x: held[x][:2])
                    floor = held[victim][0]
                    del held[victim]
                    gone.append(victim)
            held[b] = (score(uses, floor), now, uses)
        return gone

    return model


def model_clock(ids, capacity):
    queue, marked, gone = deque(), {}, []
    for b in ids:
        if b in marked:
            marked[b] = True
            continue
        if len(queue) == capacity:
            while marked[queue[0]]:
                marked[queue[0]] = False
                queue.rotate(-1)
            gone.append(queue.popleft())
            del marked[gone[-1]]
        queue.append(b)
        marked[b] = False
    return gone


def model_sieve(ids, capacity):
    queue, marked, gone, hand = [], {}, [], None  # oldest first
    for b in ids:
        if b in marked:
            marked[b] = True
            continue
        if len(queue) == capacity:
            i = queue.index(hand) if hand is not None else 0
            while marked[queue[i]]:
                marked[queue[i]] = False
                i = (i + 1) % len(queue)
            hand = queue[i + 1] if i + 1 < len(queue) else None
            gone.append(queue.pop(i))
            del marked[gone[-1]]
        queue.append(b)
        marked[b] = False
    return gone


def model_s3fifo(ids, capacity):
    small_room, ghost_room = int(capacity * 0.1), int(capacity * 0.9)
    small, main, ghost, count, gone = deque(), deque(), OrderedDict(), {}, []

    def evict_main():
        while True:
            b = main.popleft()
            if count[b] == 0:
                return b
            count[b] -= 1
            main.append(b)

    def evict():
        while True:
            if len(main) > capacity - small_room or not small:
                return evict_main()
            while small:
                b = small.popleft()
                if count[b] < 2:
                    ghost[b] = None
                    if len(ghost) > ghost_room:
                        ghost.popitem(last=False)
                    return b
                count[b] = 0
                main.append(b)

    for b in ids:
        if b in count:
            count[b] = min(3, count[b] + 1)
            continue
        returns = ghost.pop(b, 0) is None
        if len(small) + len(main) == capacity:
            gone.append(evict())
            del count[gone[-1]]
        early = not gone and len(small) >= small_room
        (main if returns or early else small).append(b)
        count[b] = 0
    return gone


def model_arc(ids, capacity):
    t1, t2, b1, b2 = OrderedDict(), OrderedDict(), OrderedDict(), OrderedDict()
    p, gone = 0.0, []

    def replace(in_b2):
        if t1 and (len(t1) > p or (in_b2 and len(t1) == p)):
            x = t1.popitem(last=False)[0]
            b1[x] = None
        else:
            x = t2.popitem(last=False)[0]
            b2[x] = None
        gone.append(x)

    for x in ids:
        if x in t1 or x in t2:
            t1.pop(x, 0)
            t2.pop(x, 0)
            t2[x] = None
        elif x in b1:
            p = min(capacity, p + max(len(b2) / len(b1), 1))
            replace(False)
            del b1[x]
            t2[x] = None
        elif x in b2:
            p = max(0, p - max(len(b1) / len(b2), 1))
            replace(True)
            del b2[x]
            t2[x] = None
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.popitem(last=False)
                    replace(False)
                else:
                    gone.append(t1.popitem(last=False)[0])
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.popitem(last=False)
                if len(t1) + len(t2) == capacity:
                    replace(False)
            t1[x] = None
    return gone


def model_two_queues(ids, capacity):
    recent, often, ghost, gone = OrderedDict(), OrderedDict(), OrderedDict(), []
    for b in ids:
        if b in often:
            often.move_to_end(b)
            continue
        if b in recent:
            continue
        returns = ghost.pop(b, 0) is None
        if len(recent) + len(often) == capacity:
            if len(recent) > int(capacity * 0.25) or not often:
                gone.append(recent.popitem(last=False)[0])
                ghost[gone[-1]] = None
                if len(ghost) > int(capacity * 0.5):
                    ghost.popitem(last=False)
            else:
                gone.append(often.popitem(last=False)[0])
        (often if returns else recent)[b] = None
    return gone


def model_belady(ids, capacity):
    held, gone = set(), []
    for i, b in enumerate(ids):
        if b in held:
            continue
        if len(held) == capacity:
            later = ids[i + 1 :]
            distance = {x: later.index(x) if x in later else len(ids) for x in held}
            gone.append(("any of", {x for x in held if distance[x] == max(distance.values())}))
            held.discard(_pick(gone[-1][1]))
        held.add(b)
    return gone


def _pick(candidates):
    return min(candidates)


MODELS = {
    "lru": model_lru,
    "vllm": model_lru,
    "fifo": model_fifo,
    "mru": lambda ids, capacity: model_fifo(ids, capacity, last=True, touch=True),
    "filo": lambda ids, capacity: model_fifo(ids, capacity, last=True),
    "lfu": model_score(lambda uses, floor: uses),
    "gdsf": model_score(lambda uses, floor: floor + uses),
    "sglang_slru": model_score(lambda uses, floor: uses >= 2),
    "clock": model_clock,
    "sieve": model_sieve,
    "s3fifo": model_s3fifo,
    "arc": model_arc,
    "two_queues": model_two_queues,
}


def differences(name: str, seeds: range) -> int:
    """Runs whose victims are not the model's."""
    wrong = evictions = 0
    for seed in seeds:
        ids = random_objects(seed)
        dense = {b: i for i, b in enumerate(dict.fromkeys(ids))}
        ids = [dense[b] for b in ids]
        for capacity in (3, 10, 17):
            ours = replay(objects(ids), name, capacity_chunks=capacity, semantics="object", record_victims=True)
            expected = MODELS[name](ids, capacity)
            evictions += len(expected)
            wrong += ours.victims.tolist() != expected
    assert evictions > 40 * len(seeds)
    return wrong


@pytest.mark.parametrize("name", MODELS)
def test_victims_are_those_of_a_model_written_apart(name):
    assert differences(name, range(40)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_victims_are_those_of_a_model_on_1000_traces(name):
    assert differences(name, range(1000)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_belady_misses_least(seed):
    ids = random_objects(seed)
    dense = {b: i for i, b in enumerate(dict.fromkeys(ids))}
    ids = [dense[b] for b in ids]
    best = replay(objects(ids), "belady", capacity_chunks=8, semantics="object")
    assert best.evictions == len(model_belady(ids, 8)), "equally late candidates may differ, counts may not"
    for name in ("lru", "s3fifo", "arc", "lfu"):
        assert best.hit_chunks[0] >= replay(objects(ids), name, capacity_chunks=8, semantics="object").hit_chunks[0]


# Prefix semantics: a model with sets, which looks at every chunk for each eviction.


def model_prefix(trace: Trace, capacity: int, key, *, tail_first: bool = True) -> list[int]:
    """Evict the unpinned leaf with the least key(record); records are told of at the end of a request."""
    held, gone, order = {}, [], 0
    children = dict.fromkeys(range(trace.distinct), 0)
    for q in range(trace.requests):
        chain = trace.ids[trace.offsets[q] : trace.offsets[q + 1]].tolist()[:capacity]
        for b in chain:
            if b in held:
                continue
            if len(held) == capacity:
                leaves = [x for x in held if children[x] == 0 and x not in chain]
                victim = min(leaves, key=lambda x: key(held[x]))
                gone.append(victim)
                del held[victim]
                if trace.parent[victim] >= 0:
                    children[trace.parent[victim]] -= 1
            held[b] = {"uses": 0, "depth": int(trace.depth[b]), "born": 0}
            if trace.parent[b] >= 0:
                children[trace.parent[b]] += 1
        for b in reversed(chain) if tail_first else chain:
            order += 1
            record = held[b]
            record["uses"] += 1
            record["request"], record["order"] = q, order
            record["born"] = record["born"] or order
    return gone


PREFIX_KEYS = {
    "lru": lambda x: x["order"],
    "fifo": lambda x: x["born"],
    "lfu": lambda x: (x["uses"], x["request"]),
    "sglang_slru": lambda x: (x["uses"] >= 2, x["request"]),
}


def prefix_differences(name: str, seeds: range) -> int:
    wrong = 0
    for seed in seeds:
        trace = random_requests(seed)
        for capacity in (8, 20):
            expected = model_prefix(trace, capacity, PREFIX_KEYS[name])
            ours = replay(trace, name, capacity_chunks=capacity, record_victims=True).victims.tolist()
            assert len(expected) > 10
            wrong += ours != expected
    return wrong


@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_prefix_victims_are_those_of_a_model(name):
    assert prefix_differences(name, range(25)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_prefix_victims_are_those_of_a_model_on_1000_traces(name):
    assert prefix_differences(name, range(1000)) == 0


@pytest.mark.parametrize("name", LIVE)
def test_every_policy_keeps_the_contract(name):
    check_policy(name, steps=120)


def test_the_contract_catches_what_it_should():
    with pytest.raises(PolicyError, match="not a chunk in its order"):
        check_policy(EvictsTwice)
    with pytest.raises(AssertionError, match="other victims compiled"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_policy(DependsOnHowItRuns)


@policy
class EvictsTwice:
    """Forgets to take the victim out of its order."""

    scalars = dict(last=-1)

    def on_hit(self, c):
        pass

    def on_insert(self, c):
        self.last = c

    def evict(self):
        return self.last


@policy
class DependsOnHowItRuns:
    """A per-chunk byte that wraps compiled and does not as plain Python."""

    fields = dict(turns="u1", used="f8")

    def touch(self, c):
        self.turns[c] = self.turns[c] + 100
        self.used[c] = self.request

    def score(self, c):
        return self.turns[c] * 1000.0 + self.used[c]


# The form.


def test_every_name_resolves_and_no_file_is_missing():
    shipped = set(policy_names())
    assert shipped >= KNOWN
    for name in KNOWN:
        made = resolve_policy(name)
        assert resolve_policy(made) is made and type(resolve_policy(type(made))) is type(made)


def test_a_wrong_name_lists_the_right_ones():
    with pytest.raises(UnknownNameError, match=r"no policy 'lur' \(did you mean 'lru'\?\); there are .*s3fifo"):
        resolve_policy("lur")
    with pytest.raises(InvalidInputError, match="not a policy"):
        resolve_policy(dict)
    with pytest.raises(InvalidInputError, match="No module named"):
        resolve_policy("no_such_module:Thing")


def test_settings_are_keywords_and_show():
    cls = type(resolve_policy("s3fifo"))
    assert repr(cls(small_share=0.2)) == "S3Fifo(small_share=0.2)"
    with pytest.raises(InvalidInputError, match="no setting 'smal_share'; it has small_share"):
        cls(smal_share=0.2)
    with pytest.raises(InvalidInputError, match="must be of type int"):
        cls(full=0.5)


def test_a_bad_form_is_refused_when_it_is_written():
    with pytest.raises(InvalidInputError, match="lacks on_insert, evict"):
        policy(type("Half", (), {"on_hit": lambda self, c: None}))
    with pytest.raises(InvalidInputError, match="may not declare 'depth'"):
        policy(type("Clash", (), {"fields": {"depth": "i4"}, "score": lambda self, c: 0.0}))
    with pytest.raises(InvalidInputError, match="must be an int or a float"):
        policy(type("Text", (), {"scalars": {"name": "x"}, "score": lambda self, c: 0.0}))


def test_a_setting_changes_the_replay():
    trace = random_requests(1, requests=400)
    cls = type(resolve_policy("s3fifo"))
    few = replay(trace, cls(small_share=0.1), capacity_chunks=30)
    many = replay(trace, cls(small_share=0.9), capacity_chunks=30)
    assert few.hit_chunks.sum() != many.hit_chunks.sum()


LIMIT = 3


def helper(x):
    return x * 2 + LIMIT


@policy
class UsesGlobals:
    """A module constant, a function of the module, a class constant, an own method."""

    STEP = 5
    fields = dict(value="f8")

    def touch(self, c):
        self.value[c] = helper(self.request) + self.STEP + self.twice(LIMIT)

    def twice(self, x):
        return 2 * x

    def score(self, c):
        return self.value[c]


def test_constants_functions_and_methods_compile():
    assert ready(UsesGlobals).compiled
    trace = random_requests(2)
    ours = replay(trace, UsesGlobals, capacity_chunks=15, record_victims=True)
    assert (
        ours.compiled
        and ours.victims.tolist() == replay(trace, "lru", capacity_chunks=15, record_victims=True).victims.tolist()
    )


@policy
class Undeclared:
    """Writes to an attribute that it did not declare."""

    def on_hit(self, c):
        self.count = 1

    def on_insert(self, c):
        pass

    def evict(self):
        return 0


@policy
class Mistyped:
    """numba cannot type a variable that is a number or a text."""

    fields = dict(value="f8")

    def touch(self, c):
        label = "one" if self.hits[c] > 3 else 1.0
        self.value[c] = len(str(label))

    def score(self, c):
        return self.value[c]


def test_what_cannot_be_compiled_names_the_line_and_why():
    with pytest.warns(PlainPolicyWarning, match=r"line \d+: `self.count = 1`: self.count is not declared"):
        assert not ready(Undeclared).compiled
    with pytest.warns(PlainPolicyWarning, match=r"line \d+: `label = .*`: numba: "):
        assert not ready(Mistyped).compiled


@policy
class ReadsBeforeTheFirst:
    """Follows a link of -1, which compiled would read foreign memory."""

    fields = dict(older="i4")
    scalars = dict(newest=-1)

    def on_hit(self, c):
        pass

    def on_insert(self, c):
        self.older[self.newest] = c
        self.newest = c

    def evict(self):
        return self.newest


def test_a_mistake_is_found_on_made_up_requests_before_anything_is_compiled():
    message = r"ReadsBeforeTheFirst: line \d+: `self.older\[self.newest\] = c`: IndexError: self.older\[-1\]"
    with pytest.raises(PolicyError, match=message):
        ready(ReadsBeforeTheFirst)


@policy
class EvictsNothing:
    """Returns -1 though it holds chunks."""

    def on_hit(self, c):
        pass

    def on_insert(self, c):
        pass

    def evict(self):
        return -1


def test_a_broken_policy_is_named_with_capacity_and_victim():
    with pytest.raises(PolicyError, match=r"EvictsNothing\(\) returned -1 at capacity 9"):
        replay(random_requests(0), EvictsNothing, capacity_chunks=9)
    with pytest.raises(PolicyError, match=r"at capacity 9"):
        replay(random_requests(0), EvictsNothing, capacity_chunks=9, semantics="object")


def test_no_reference_counts_are_left_in_the_compiled_loop():
    trace = random_requests(0)
    for name, semantics in (("sieve", "object"), ("lru", "object"), ("lru", "prefix"), ("lfu", "prefix")):
        loop = _fresh_loop(name, semantics, trace)
        assert "getelementptr" in loop, "this must be the code of the loop"
        calls = [line for line in loop.splitlines() if "call" in line and "NRT_incref" in line]
        assert not calls, calls[:3]


def _fresh_loop(name: str, semantics: str, trace: Trace) -> str:
    """LLVM of a replay loop, compiled without the disk cache, from which numba cannot show code."""
    script = f"""
        import os, tempfile
        os.environ["KVWORKBENCH_CACHE"] = tempfile.mkdtemp()
        from experiments.replay import ready
        from workbench.policies.generating import import_generated
        module = import_generated(ready({name!r}, semantics={semantics!r}).loops_path)
        print(*module.replay_{"objects" if semantics == "object" else "prefixes"}.inspect_llvm().values())
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout


def test_importing_policies_does_not_import_numba():
    script = "import sys, workbench.policies.live, workbench.testing; print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"


# Saving.

MINE = '''
from workbench.policies import policy

@policy
class Mine:
    """Evicts what was inserted last."""
    fields = dict(born="f8")
    def touch(self, c):
        if self.hits[c] == 0:
            self.born[c] = self.request
    def score(self, c):
        return -self.born[c]
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVWORKBENCH_POLICIES", str(tmp_path / "mine"))
    return tmp_path


def test_a_saved_policy_has_a_name_in_every_process(folder):
    path = save_policy("mine", MINE)
    assert "mine" in policy_names() and path.parent == user_policy_folder()
    trace = random_requests(4)
    here = replay(trace, "mine", capacity_chunks=12).hit_chunks.sum()
    assert here == replay(trace, f"{path}:Mine", capacity_chunks=12).hit_chunks.sum()
    script = """
        from experiments.replay import replay
        from tests.test_live_policy import random_requests
        print(replay(random_requests(4), "mine", capacity_chunks=12).hit_chunks.sum())
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(out.stdout) == here


def test_saving_again_replaces(folder):
    save_policy("mine", MINE)
    first = resolve_policy("mine")
    save_policy("mine", MINE.replace("-self.born[c]", "self.born[c]"))
    assert type(resolve_policy("mine")) is not type(first)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [("lru", MINE, "may not be called"), ("a b", MINE, "may not be called"), ("none", "x = 1", "defines 0")],
)
def test_what_may_not_be_saved(folder, name, source, message):
    with pytest.raises(InvalidInputError, match=message):
        save_policy(name, source)
    assert not list(user_policy_folder().glob("*.py"))


def test_the_cell_magic_saves_and_defines(folder):
    pytest.importorskip("IPython")
    script = f"""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "workbench.policies.notebook")
        shell.run_cell_magic("policy", "magic", {MINE.split("@policy")[1]!r})
        print(repr(shell.user_ns["Mine"]()))
        shell.run_cell({MINE.replace("Mine", "FromCell")!r}, store_history=True)
        from experiments.replay import ready
        print(ready(shell.user_ns["FromCell"]).compiled)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert out.stdout.splitlines()[-2:] == ["Mine()", "True"], out.stdout + out.stderr
    assert "magic" in policy_names()
