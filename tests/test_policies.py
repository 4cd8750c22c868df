"""Policies: the form, names, saving, the notebook's magic."""

import subprocess
import sys
import textwrap
import warnings

import pytest

from experiments.replay import ready, replay
from tests.test_live_policy import LIVE, random_requests
from workbench.errors import InvalidInputError, UnknownNameError
from workbench.policies import policy, policy_names, resolve_policy, save_policy
from workbench.policies.base import PolicyError
from workbench.policies.compiled import PlainPolicyWarning
from workbench.policies.live import LivePolicy
from workbench.policies.names import user_policy_folder
from workbench.testing import check_policy

KNOWN = {
    "arc", "belady", "break_even", "clock", "fifo", "filo", "gdsf", "gittins", "hyperbolic", "length_aware", "lfu",
    "lhd", "lirs", "lru", "marconi", "mru", "optimal", "pgdsf", "random", "s3fifo", "session_aware", "sglang_slru",
    "sieve", "slru", "tinylfu", "tlru", "ttl", "two_queues", "vllm", "workload_aware",
}  # fmt: skip


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


def made(**parts):
    """A policy class from its parts; whatever is not given does nothing."""
    queue = dict(on_hit=lambda self, c: None, on_insert=lambda self, c: None, evict=lambda self: 0)
    return policy(type("Made", (), parts if "score" in parts else {**queue, **parts}))


def least(self, c):
    return 0.0


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            dict(score=least, on_insert=least),
            "defines score and on_insert: in the score form the engine keeps the order",
        ),
        (dict(score=least, evict=lambda self: 0, on_return=least), "defines score and evict, on_return"),
        (dict(touch=least), "defines touch, which only the score form has"),
        (dict(on_evict=least), "defines on_evict, which only the score form has"),
        (dict(on_removed=least), "on_removed, which the engine never calls; did you mean on_remove?"),
        (dict(evict=least), r"evict\(self, c\) must take \(self\)"),
        (dict(on_hit=lambda self: None), r"on_hit\(self\) must take \(self, c\)"),
        (dict(fields={"used": "int33"}), "field 'used' of policy Made has type 'int33'; types are i1,"),
        (dict(table={"seen": float}), "field 'seen' of policy Made has type"),
        (dict(fields=["used"]), r"fields of policy Made must be a dict such as dict\(used="),
        (dict(fields={"a b": "f8"}), "may not declare 'a b'"),
        (dict(fields={"used": "f8"}, scalars={"used": 0}), "may not declare 'used'"),
    ],
)
def test_common_mistakes_are_refused_at_declaration(parts, message):
    with pytest.raises(InvalidInputError, match=message):
        made(**parts)


def endless(self):
    while True:
        pass


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (dict(evict=lambda self: None), r"evict\(\) returned None; it must return the number of a chunk"),
        (dict(score=lambda self, c: None), r"score\(\) returned None; it must return a number"),
        (dict(evict=endless), "line .*no end after 800,000 lines; is there a loop that never stops"),
    ],
)
def test_mistakes_that_show_when_it_runs_are_found_before_it_is_compiled(parts, message):
    with pytest.raises(PolicyError, match=message):
        ready(made(**parts))


@policy
class SparesLeaves:
    """Counts how often a chunk became a leaf again."""

    fields = dict(freed="i4", older="i4")
    scalars = dict(top=-1)

    def on_insert(self, c):
        self.older[c] = self.top
        self.top = c

    def on_hit(self, c):
        pass

    def on_leaf(self, c):
        self.freed[c] += 1

    def evict(self):
        c = self.top
        self.top = self.older[c]
        return c


def test_a_queue_policy_hears_of_chunks_that_become_leaves():
    live = LivePolicy(SparesLeaves, capacity_chunks=8)
    for c, parent in ((0, -1), (1, 0), (2, 1)):
        live.insert(c, parent=parent, key=c)
        live.begin(c, float(c))
    live.remove(2)
    live.pin(1)
    live.unpin(1)
    assert [int(live._state.get(live._slot[c], "freed")) for c in (0, 1)] == [0, 2]  # the child went, then the pin


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
    for name, semantics in (("sieve", "object"), ("lru", "object"), ("lru", "prefix"), ("lfu", "prefix")):
        loop = _fresh_loop(name, semantics)
        assert "getelementptr" in loop, "this must be the code of the loop"
        calls = [line for line in loop.splitlines() if "call" in line and "NRT_incref" in line]
        assert not calls, calls[:3]


def _fresh_loop(name: str, semantics: str) -> str:
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
