"""KV given back to transformers is what its own forward pass computes, and greedy answers do not change."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from experiments.models import resolve_model
from workbench.chunks import ChunkScope
from workbench.connectors.transformers import TransformersConnector
from workbench.errors import InvalidInputError, LayoutError

CHUNK = 16


@pytest.fixture(scope="module")
def model():
    path = str(resolve_model("random:tiny", progress=False).path)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture
def connector(model):
    with TransformersConnector(model, chunk_tokens=CHUNK, memory_bytes="16MB") as connector:
        yield connector


def prompt(seed, length):
    return torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(seed))


def answer(model, ids, **options):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, min_new_tokens=12, **options)


def computed(model, ids):
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


def test_round_trip_is_exact(model, connector):
    ids = prompt(0, 70)
    past = computed(model, ids)
    tokens = ids[0].tolist()
    assert connector.store(tokens, past) == 70
    assert connector.store(tokens, past) == 0, "stored once"
    found = connector.retrieve([*tokens, 5])
    assert found.get_seq_length() == 70
    for mine, theirs in zip(found.layers, past.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)


def test_generate_gives_the_same_tokens(model, connector):
    shared = prompt(1, 100)
    prompts = [torch.cat([shared[:, :n], prompt(10 + n, 9)], 1) for n in (100, 64, 47, 7)]
    expected = [answer(model, ids) for ids in prompts]
    with connector.reusing():
        got = [answer(model, ids) for ids in prompts]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    stats = connector.engine.stats()
    assert stats["hit_tokens"] == 64 + 47 + 7, "each shares all that it has in common with the first"
    assert torch.equal(answer(model, prompts[0]), expected[0]), "outside the context nothing is changed"
    assert "generate" not in vars(model)


def test_a_whole_hit_leaves_one_token_to_compute(model, connector):
    ids = prompt(2, 64)
    expected = answer(model, ids)
    with connector.reusing():
        answer(model, ids)
        again = answer(model, ids)
    assert torch.equal(again, expected)
    tokens = ids[0].tolist()
    assert connector.retrieve(tokens).get_seq_length() == 63
    assert connector.retrieve(tokens, max_prefix_length=20).get_seq_length() == 20
    assert connector.retrieve(tokens, max_prefix_length=0).get_seq_length() == 0


def test_salt_separates(model, connector):
    ids = prompt(3, 40)
    tokens = ids[0].tolist()
    connector.store(tokens, computed(model, ids), scope=ChunkScope(salt="a"))
    assert connector.retrieve(tokens).get_seq_length() == 0
    assert connector.retrieve(tokens, scope=ChunkScope(salt="a")).get_seq_length() == 39


def test_batches_and_padding_run_unchanged(model, connector):
    pair = torch.cat([prompt(4, 40), prompt(5, 40)])
    padded = torch.ones_like(prompt(4, 40))
    padded[0, 0] = 0
    with connector.reusing():
        both = answer(model, pair)
        model.generate(prompt(4, 40), attention_mask=padded, max_new_tokens=2, do_sample=False)
    assert torch.equal(both, answer(model, pair))
    assert connector.engine.stats()["lookups"] == 0


def test_wrong_shapes_are_refused(model, connector):
    with pytest.raises(InvalidInputError, match="expected"):
        past = computed(model, torch.cat([prompt(6, 40)] * 2))
        connector.store(prompt(6, 40)[0].tolist(), past)


def test_sliding_windows_are_refused(model):
    config = transformers.Gemma3TextConfig(vocab_size=260, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                                           num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                                           layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    with pytest.raises(LayoutError, match="sliding_attention"):
        TransformersConnector(transformers.Gemma3ForCausalLM(config), memory_bytes="16MB")
