import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from workbench.chunks import ChunkChain, ChunkScope, token_array
from workbench.errors import CacheError, InvalidInputError
from workbench.layout import Identity, KVLayout

ROOT = Path(__file__).parent.parent
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_size=8, block_size=4, chunk_tokens=8)
IDENTITY = Identity(layout=LAYOUT, weights="golden", rope="θ=10000", tensor_parallel=(1, 2), extra=("a", "b"))
TOKENS = [0, 1, 2**31 - 1, *range(100, 129)]

# Keys of TOKENS under IDENTITY, by scope. Whoever changes how keys are made must raise FORMAT_VERSION and these.
GOLDEN = {
    "plain": (ChunkScope(), "540ff41a0687e84309be92a9a8b35505293d79c4618aa060a9d333ac48c0f645"),
    "salt": (ChunkScope(salt="tenant-ä"), "fba0b98ea8c86abcbd5e8850731b33c5f53f31706b4f13944b8e142d07cedcc2"),
    "lora": (ChunkScope(lora=("name", "content")), "d3472a963ec47a03082ea31e0da1e668f0e6a78d882f948d6f0fb3a680c6c9d7"),
    "image": (ChunkScope(inputs=((5, 9, "cat"),)), "58b6a0ad6d8771740dbaf704be81db0b8edf7d8a47c0057e541ca79d740c7eb2"),
}


def last_key(tokens, scope: ChunkScope) -> str:
    chain = ChunkChain(scope.root(IDENTITY), 8, scope).extend(tokens)
    return chain[len(chain) - 1].key.hex()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_keys(name):
    scope, expected = GOLDEN[name]
    assert last_key(TOKENS, scope) == expected


@pytest.mark.parametrize("seed", ["0", "1", "4294967295", "random"])
def test_golden_keys_under_any_hash_seed(seed):
    code = "import test_chunks as t; print(*(t.last_key(t.TOKENS, s) for s, _ in t.GOLDEN.values()))"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == [expected for _, expected in GOLDEN.values()]


def test_keys_do_not_depend_on_how_tokens_are_passed():
    torch = pytest.importorskip("torch")
    expected = last_key(TOKENS, ChunkScope())
    forms = [
        tuple(TOKENS),
        np.array(TOKENS, np.int32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, ">i8"),
        np.array(TOKENS, np.uint32),
        [np.int64(t) for t in TOKENS],
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
        np.repeat(TOKENS, 2)[::2],
    ]
    assert {last_key(form, ChunkScope()) for form in forms} == {expected}


def test_a_chain_extended_in_pieces_is_the_same_chain():
    rng = random.Random(0)
    tokens = [rng.randrange(2**31) for _ in range(100)]
    whole = ChunkChain(b"r" * 32, 8).extend(tokens)
    pieces = ChunkChain(b"r" * 32, 8)
    left = list(tokens)
    while left:
        size = rng.randrange(1, 12)
        pieces.extend(left[:size])
        del left[:size]
        if len(pieces):
            pieces[len(pieces) - 1]  # hash in between
    assert list(whole) == list(pieces)
    assert len(whole) == 12 and whole.num_tokens == 100
    np.testing.assert_array_equal(whole.tokens(), tokens)


def test_chunks_are_chained_by_their_definition():
    chain = ChunkChain(b"r" * 32, 8).extend(range(16))
    first = hashlib.sha256(b"r" * 32 + np.arange(8, dtype="<i4").tobytes()).digest()
    assert (chain[0].key, chain[0].parent, chain[1].parent) == (first, b"r" * 32, first)
    assert (chain[1].start, chain[1].stop, chain[1].num_tokens) == (8, 16, 8)
    assert chain[1].tokens == np.arange(8, 16, dtype="<i4").tobytes()


def test_a_change_at_any_token_changes_this_key_and_all_behind_it():
    base = list(ChunkChain(b"r" * 32, 8).extend(range(32)))
    for position in range(32):
        tokens = list(range(32))
        tokens[position] += 1000
        other = list(ChunkChain(b"r" * 32, 8).extend(tokens))
        assert [a.key == b.key for a, b in zip(base, other, strict=True)] == [n < position // 8 for n in range(4)]


def test_hashing_is_lazy(monkeypatch):
    calls = []
    real = hashlib.sha256
    monkeypatch.setattr("workbench.chunks.hashlib.sha256", lambda data: calls.append(1) or real(data))
    chain = ChunkChain(b"r" * 32, 8).extend(range(800))
    assert len(chain) == 100 and not calls
    chain[3]
    chain[2]
    assert len(calls) == 4


@pytest.mark.parametrize("count, chunks", [(0, 0), (7, 0), (8, 1), (15, 1), (16, 2)])
def test_only_full_chunks(count, chunks):
    chain = ChunkChain(b"r" * 32, 8).extend(range(count))
    assert len(chain) == len(list(chain)) == chunks
    with pytest.raises(IndexError):
        chain[chunks]


@pytest.mark.parametrize(
    "inputs, changed",
    [
        (((0, 3, "x"),), [0]),
        (((7, 8, "x"),), [0]),
        (((8, 9, "x"),), [1]),
        (((5, 20, "x"),), [0, 1, 2]),
        (((32, 40, "x"),), []),
    ],
)
def test_inputs_count_in_each_chunk_that_they_touch(inputs, changed):
    plain = list(ChunkChain(b"r" * 32, 8).extend([0] * 32))
    seen = list(ChunkChain(b"r" * 32, 8, ChunkScope(inputs=inputs)).extend([0] * 32))
    first = min(changed, default=4)
    assert [a.key != b.key for a, b in zip(plain, seen, strict=True)] == [n >= first for n in range(4)]
    scope = ChunkScope(inputs=inputs)
    assert [n for n in range(4) if scope.inputs_within(8 * n, 8 * n + 8)] == changed


def test_scope_fields_cannot_run_into_each_other():
    scopes = [
        ChunkScope(),
        ChunkScope(salt="ab"),
        ChunkScope(salt="a", lora=("b",)),
        ChunkScope(lora=("ab",)),
        ChunkScope(lora=("a", "b")),
        ChunkScope(lora=("b", "a")),
        ChunkScope(salt="a", lora=("", "b")),
        ChunkScope(salt="a\u0308"),
        ChunkScope(salt="ä"),
    ]
    assert len({scope.root(IDENTITY) for scope in scopes}) == len(scopes)


def test_a_salt_with_half_a_surrogate_pair_is_a_salt():
    assert ChunkScope(salt="\ud800").root(IDENTITY) != ChunkScope(salt="?").root(IDENTITY)


@pytest.mark.parametrize(
    "bad",
    [
        [-1],
        [2**31],
        [2**32 + 5],
        [2**64],
        [-(2**70)],
        [True],
        [1, False],
        [3.0],
        [None],
        ["1"],
        [[1, 2]],
        [1, [2]],
        None,
        5,
        "abc",
        b"abc",
        {1: 2},
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array([2**32 + 5]),
        np.array([2**63 + 5], np.uint64),
        np.array([1, None]),
        [np.bool_(True)],
        [np.float32(1)],
        np.array([-1], np.int8),
    ],
    ids=repr,
)
def test_bad_token_ids_are_refused_before_hashing(bad):
    with pytest.raises(InvalidInputError) as caught:
        token_array(bad)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, CacheError)
    chain = ChunkChain(b"r" * 32, 8).extend([1, 2, 3])
    with pytest.raises(InvalidInputError):
        chain.extend(bad)
    assert chain.num_tokens == 3


def test_tensors_that_numpy_cannot_take_are_refused():
    torch = pytest.importorskip("torch")
    for bad in (
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(4),
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(4, dtype=torch.int64, device="meta"),
    ):
        with pytest.raises(InvalidInputError):
            token_array(bad)


def test_no_tokens_are_no_chunks():
    for empty in ([], (), np.array([]), np.array([], np.int64)):
        assert len(ChunkChain(b"r" * 32, 8).extend(empty)) == 0
        assert token_array(empty).dtype == np.dtype("<i4")
