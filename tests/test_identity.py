"""Whatever changes KV changes the key: one field different, 0 hits; the same values, a full hit."""

from dataclasses import fields, replace

import numpy as np
import pytest
from oracle import Pages, chain_of

from workbench.chunks import ChunkScope
from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError
from workbench.layout import FORMAT_VERSION, Identity, KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_size=8, block_size=4, chunk_tokens=8)
IDENTITY = Identity(
    layout=LAYOUT,
    weights="sha256:1",
    architecture="LlamaForCausalLM",
    model_dtype="bfloat16",
    rope="theta=10000",
    attention="full",
    isa="avx512",
    extra=("seed=0",),
)
SCOPE = ChunkScope(salt="x", lora=("A", "content 1"), inputs=((2, 6, "picture"),))
TOKENS = list(range(64))

# Every field, with values that differ from the ones above. A field that is not listed here fails the suite.
OTHER_LAYOUTS = {
    "num_layers": [3],
    "num_kv_heads": [1],
    "head_size": [16],
    "block_size": [8, 2],
    "chunk_tokens": [16, 4],
    "dtype": ["float16", "float32", "fp8_e4m3", "fp8_e5m2"],
    "page_format": ["opaque", "vllm-cpu-vec"],
}
OTHER_IDENTITIES = {
    "layout": [replace(LAYOUT, num_layers=4)],
    "weights": ["sha256:2", "", "../evil", "org/model", "org/model-SEP-name", "ä", "a\u0308", "x" * 300],
    "architecture": ["QwenForCausalLM"],
    "model_dtype": ["float16"],
    "kv_scales": ["k=1"],
    "rope": ["theta=500000"],
    "attention": ["sliding 4096"],
    "tensor_parallel": [(1, 2), (0, 2)],
    "pipeline_parallel": [(1, 2), (0, 2)],
    "isa": ["amx", ""],
    "codec": ["int8"],
    "extra": [("seed=1",), (), ("seed=0", "more"), ("seed=", "0")],
}
OTHER_SCOPES = {
    "salt": ["y", ""],
    "lora": [("B", "content 1"), ("A", "content 2"), (), ("A",)],
    "inputs": [(), ((2, 6, "other"),), ((1, 6, "picture"),), ((2, 6, "picture"), (3, 5, "sound"))],
}


@pytest.mark.parametrize(
    "kind, listed",
    [
        (KVLayout, OTHER_LAYOUTS),
        (Identity, OTHER_IDENTITIES),
        (ChunkScope, OTHER_SCOPES),
    ],
)
def test_every_field_is_classified(kind, listed):
    assert {f.name for f in fields(kind)} == set(listed), "say here which values of a new field must not share KV"


def neighbours():
    for name, values in OTHER_LAYOUTS.items():
        for value in values:
            yield f"layout.{name}={value}", replace(IDENTITY, layout=replace(LAYOUT, **{name: value})), SCOPE
    for name, values in OTHER_IDENTITIES.items():
        for value in values:
            yield f"{name}={value!r}"[:60], replace(IDENTITY, **{name: value}), SCOPE
    for name, values in OTHER_SCOPES.items():
        for value in values:
            yield f"scope.{name}={value!r}", IDENTITY, replace(SCOPE, **{name: value})


NEIGHBOURS = list(neighbours())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A disk tier that holds TOKENS under every neighbour, but not under IDENTITY and SCOPE."""
    folder = tmp_path_factory.mktemp("shared")
    for _, identity, scope in NEIGHBOURS:
        store(folder, identity, scope)
    return folder


def store(folder, identity: Identity, scope: ChunkScope) -> None:
    pages = Pages(64, identity.layout)
    blocks = list(range(64 // identity.layout.block_size))
    pages.compute(chain_of(TOKENS, identity, scope), blocks)
    with CacheEngine(identity, memory_bytes=0, disk_path=folder, partial_hits=False) as engine:
        assert engine.lookup(TOKENS, scope=scope) == 0, "a neighbour's KV was taken for this one's"
        assert engine.store(TOKENS, pages.table, blocks=blocks, scope=scope) == 64
        engine.flush()
        assert engine.lookup(TOKENS, scope=scope) == 64, "the same values must hit, or nothing is cached at all"


def test_one_field_different_is_a_miss_and_equal_fields_are_a_hit(folder):
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=folder, partial_hits=False) as engine:
        assert engine.lookup(TOKENS, scope=SCOPE) == 0
        assert engine.lookup(TOKENS) == 0
    for name, identity, scope in NEIGHBOURS:
        with CacheEngine(identity, memory_bytes=0, disk_path=folder, partial_hits=False) as engine:
            pages, blocks = Pages(64, identity.layout), list(range(64 // identity.layout.block_size))
            assert engine.retrieve(TOKENS, pages.table, blocks=blocks, scope=scope) == 64, name
            assert not pages.wrong_chunks(chain_of(TOKENS, identity, scope), blocks, 64), name


def test_all_roots_differ():
    roots = [scope.root(identity) for _, identity, scope in NEIGHBOURS if scope.inputs == SCOPE.inputs]
    roots.append(SCOPE.root(IDENTITY))
    assert len(set(roots)) == len(roots)


def test_dtype_there_and_back_again(tmp_path):
    """Equal sizes, other meaning: fp8_e4m3 and fp8_e5m2 of one model never meet."""
    kinds = {
        name: replace(IDENTITY, layout=replace(LAYOUT, dtype=name)) for name in ("bfloat16", "fp8_e4m3", "fp8_e5m2")
    }
    store(tmp_path, kinds["bfloat16"], SCOPE)
    for name, hits in (("fp8_e4m3", 0), ("fp8_e5m2", 0), ("bfloat16", 64)):
        with CacheEngine(kinds[name], memory_bytes=0, disk_path=tmp_path) as engine:
            assert engine.lookup(TOKENS, scope=SCOPE) == hits
    store(tmp_path, kinds["fp8_e4m3"], SCOPE)
    with CacheEngine(kinds["fp8_e5m2"], memory_bytes=0, disk_path=tmp_path) as engine:
        assert engine.lookup(TOKENS, scope=SCOPE) == 0


def test_equal_values_of_other_types_are_the_same_identity():
    other = replace(IDENTITY, tensor_parallel=[np.int64(0), 1], layout=replace(LAYOUT, num_layers=np.int64(2)))
    assert other.digest == IDENTITY.digest


@pytest.mark.parametrize("field, value", [("weights", None), ("extra", (1.5,)), ("rope", {"theta": 1})])
def test_what_has_no_one_form_is_refused(field, value):
    with pytest.raises(InvalidInputError, match=field):
        _ = replace(IDENTITY, **{field: value}).digest


def test_the_format_version_is_part_of_the_identity(monkeypatch):
    before = IDENTITY.digest
    monkeypatch.setattr("workbench.layout.FORMAT_VERSION", FORMAT_VERSION + 1)
    assert IDENTITY.digest != before


def test_fields_cannot_run_into_each_other():
    values = [("ab", ""), ("a", "b"), ("", "ab")]
    assert len({replace(IDENTITY, weights=w, architecture=a).digest for w, a in values}) == 3
    assert replace(IDENTITY, extra=("1",)).digest != replace(IDENTITY, extra=(1,)).digest


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_layers": 0},
        {"num_kv_heads": -1},
        {"head_size": 2.0},
        {"block_size": True},
        {"chunk_tokens": 12, "block_size": 8},
        {"chunk_tokens": 4, "block_size": 8},
        {"dtype": "int8"},
        {"page_format": "tokens"},
        {"num_layers": "2"},
    ],
)
def test_layouts_that_cannot_be(wrong):
    with pytest.raises(InvalidInputError):
        replace(LAYOUT, **wrong)


def test_a_wrong_chunk_size_names_the_nearest_right_ones():
    with pytest.raises(InvalidInputError, match="16 and 32"):
        replace(LAYOUT, block_size=16, chunk_tokens=20)


@pytest.mark.parametrize("page_format", ["token-major", "vllm-cpu-vec"])
def test_keys_and_values_are_views_of_every_element(page_format):
    layout = replace(LAYOUT, page_format=page_format)
    chunk = np.arange(layout.chunk_nbytes // 2, dtype=np.uint16).view(np.uint8).reshape(layout.chunk_shape)
    keys, values = layout.keys_and_values(chunk)
    assert keys.shape == values.shape == (2, 2, 2, 4, 8)  # layer, block, head, token, element
    assert np.shares_memory(keys, chunk) and np.shares_memory(values, chunk)
    assert set(keys.flat) | set(values.flat) == set(range(layout.chunk_nbytes // 2))
    head = 2 * 8 * 4  # elements of one head in one page
    base = head  # layer 0, block 0, head 1
    if page_format == "token-major":
        assert keys[0, 0, 1, 3, 5] == base + 3 * 16 + 5 and values[0, 0, 1, 3, 5] == base + 3 * 16 + 8 + 5
    else:
        assert keys[0, 0, 1, 3, 5] == base + 5 * 4 + 3 and values[0, 0, 1, 3, 5] == base + 32 + 3 * 8 + 5


def test_opaque_pages_have_no_tokens():
    layout = replace(LAYOUT, page_format="opaque")
    with pytest.raises(InvalidInputError, match="opaque"):
        layout.keys_and_values(np.zeros(layout.chunk_shape, np.uint8))
