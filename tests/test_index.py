"""The index against the plainest model: dictionaries and sets of keys."""

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from oracle import chain_of

from workbench.index import ChunkIndex

LEVELS = 3


def test_an_entry_is_recycled_when_nothing_refers_to_it():
    index, chain = ChunkIndex(), chain_of(range(24))
    entries = [index.add_chunk(chunk) for chunk in chain]
    for entry in entries:
        index.use(entry)
    index.set_resident(entries[2], 0)
    for entry in entries:
        index.unuse(entry)
    assert len(index) == 3, "a resident chunk keeps the entries above it"
    index.clear(entries[2], 0)
    assert len(index) == 0
    assert {index.add_chunk(chunk) for chunk in chain} == set(entries), "entries are used again"


def test_a_parent_that_comes_late_is_linked():
    index, chain = ChunkIndex(), chain_of(range(16))
    child = index.add_chunk(chain[1])
    index.set_resident(child, 0)
    assert index.parents[child] == -1
    parent = index.add_chunk(chain[0])
    assert index.add_chunk(chain[1]) == child
    assert (index.parents[child], index.depths[child], index.children[parent]) == (parent, 1, 1)


def test_a_used_child_keeps_its_parent_from_being_given_to_another_chunk():
    """Else the child would count as a child of a stranger once it is stored again."""
    index, chain, other = ChunkIndex(), chain_of(range(16)), chain_of(range(50, 58))
    parent, child = (index.add_chunk(chunk) for chunk in chain)
    index.use(child)
    index.set_resident(parent, 0)
    index.set_resident(child, 0)
    index.clear(child, 0)  # damaged
    index.clear(parent, 0)
    stranger = index.add_chunk(other[0])
    assert stranger != parent
    index.set_pending(child, 0)
    assert index.children[stranger] == 0 and index.children[parent] == 1


def test_levels_and_bits():
    index, chain = ChunkIndex(), chain_of(range(8))
    entry = index.add_chunk(chain[0])
    assert index.level(entry) == -1 and not index.anywhere(entry)
    index.set_pending(entry, 1)
    assert index.level(entry) == -1 and index.anywhere(entry) and index.is_last_copy(entry, 1)
    index.set_resident(entry, 1)
    index.set_resident(entry, 0)
    assert index.level(entry) == 0 and not index.is_last_copy(entry, 1)
    index.clear(entry, 0)
    assert index.level(entry) == 1


def test_letting_go_twice_is_noticed():
    index, chain = ChunkIndex(), chain_of(range(8))
    entry = index.add_chunk(chain[0])
    index.set_resident(entry, 0)
    with pytest.raises(AssertionError):
        index.unuse(entry)


NAMES = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 1)]  # a small tree of prompts


def key_of(name) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


class IndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = ChunkIndex()
        self.places: dict[tuple, set[tuple[str, int]]] = {}
        self.users: dict[tuple, int] = {}

    def entry(self, name) -> int:
        return self.index.add(key_of(name), key_of(name[:-1]) if name else b"root", 8 * len(name), 8 * len(name) + 8)

    @rule(name=st.sampled_from(NAMES), level=st.integers(0, LEVELS - 1), resident=st.booleans())
    def arrive(self, name, level, resident):
        places = self.places.setdefault(name, set())
        places -= {("pending", level), ("resident", level)} if resident else set()
        if resident:
            self.index.set_resident(self.entry(name), level)
        elif ("resident", level) in places:
            return
        else:
            self.index.set_pending(self.entry(name), level)
        places.add(("resident" if resident else "pending", level))

    @rule(name=st.sampled_from(NAMES), level=st.integers(0, LEVELS - 1))
    def leave(self, name, level):
        if (entry := self.index.find(key_of(name))) >= 0:
            self.index.clear(entry, level)
            self.places.setdefault(name, set()).difference_update({("pending", level), ("resident", level)})

    @rule(name=st.sampled_from(NAMES))
    def use(self, name):
        self.index.use(self.entry(name))
        self.users[name] = self.users.get(name, 0) + 1

    @rule(name=st.sampled_from(NAMES))
    def unuse(self, name):
        if self.users.get(name):
            self.index.unuse(self.index.find(key_of(name)))
            self.users[name] -= 1

    @invariant()
    def agrees(self):
        index = self.index
        for name in NAMES:
            entry, places = index.find(key_of(name)), self.places.get(name, set())
            if places or self.users.get(name):
                assert entry >= 0
            if entry < 0:
                continue
            assert {("resident", n) for n in range(LEVELS) if index.resident[entry] >> n & 1} | {
                ("pending", n) for n in range(LEVELS) if index.pending[entry] >> n & 1
            } == places
            assert index.in_use(entry) == bool(self.users.get(name))
            parent = index.parents[entry]
            assert parent < 0 or index.keys[parent] == key_of(name[:-1]), (
                "the parent's entry was given to another chunk"
            )
            own = [other for other in NAMES if other and other[:-1] == name and self.places.get(other)]
            linked = [o for o in own if index.parents[index.find(key_of(o))] == entry]
            assert index.children[entry] == len(linked)
        assert len(index) + len(index._free) == len(index.keys)

    def teardown(self):
        for name, places in self.places.items():
            for _, level in list(places):
                self.index.clear(self.index.find(key_of(name)), level)
        for name, count in self.users.items():
            for _ in range(count):
                self.index.unuse(self.index.find(key_of(name)))
        assert all(not index_users for index_users in self.index._users)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
