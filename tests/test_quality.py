"""The quality study on a small random model: its zero is zero, and coarser codecs are farther from it."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from experiments import quality
from experiments.recall import RecallTask, Tasks, recall_tasks
from workbench.errors import CacheError


@pytest.fixture(scope="module")
def model() -> quality.StudyModel:
    return quality.StudyModel("random:tiny")


def said_by(model, kind: str) -> RecallTask:
    """Three questions, of which a random model answers two: those whose answers are what it says."""
    tokens = model.tokenizer(quality.sample_texts()["typing.py"])["input_ids"][:256]
    questions = []
    for text in ("one is", "the second of them is"):
        question = model.tokenizer(text)["input_ids"]
        whole = quality.Prefix([*tokens, *question], *kv_of(model, [*tokens, *question[:-1]]))
        questions.append((question, model.greedy(whole, whole.keys, whole.values, 3)))
    question, answer = questions[0]
    return RecallTask(kind, tokens, [*questions, (question, [answer[0], answer[1], (answer[2] + 1) % 256])])


def kv_of(model, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    prefix = model.prefix(tokens, len(tokens))
    return prefix.keys, prefix.values


@pytest.fixture(scope="module")
def rows(model) -> dict[str, quality.CodecQuality]:
    texts = dict(list(quality.sample_texts().items())[:2])
    codecs = ["raw", "lossless", "int8", "rotated", "kivi(bits=2)", "ecsq", "ecsq(step=2.0)"]
    tasks = Tasks(greedy_tokens=4, recall=(said_by(model, "needle"), said_by(model, "key_value")))
    measured = quality.measure_quality(model, codecs, texts=texts, prefix_tokens=256, scored_tokens=32, tasks=tasks)
    return {row.codec: row for row in measured}


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_lossless_changes_nothing(rows, codec):
    row = rows[codec]
    assert row.kl == row.nll_change == row.nll_interval == row.key_error == row.value_error == 0
    assert row.top1_agreement == 1 and row.greedy_tokens == 4
    assert (row.needles, row.key_values) == (2, 2) and row.needle_recall == row.key_value_recall == 1
    assert rows["raw"].size_fraction == 1 and rows["raw"].bits_per_value == 16
    assert rows["lossless"].size_fraction < 0.8


def test_fewer_bits_are_farther_away(rows):
    order = ["int8", "rotated", "kivi(bits=2)"]
    assert rows["int8"].key_error < 0.01
    for name in ("bits_per_value", "key_error", "value_error", "kl"):
        figures = [getattr(rows[codec], name) for codec in order]
        assert figures == sorted(figures, reverse=name == "bits_per_value"), name
    assert rows["ecsq"].kl < rows["ecsq(step=2.0)"].kl
    assert rows["ecsq"].bits_per_value > rows["ecsq(step=2.0)"].bits_per_value


def test_figures_are_of_what_they_say(rows):
    row = rows["rotated"]
    assert row.source_nbytes == 2 * 256 * 2 * 2 * 2 * 32 * 2  # texts, tokens, K and V, layers, heads, size, bytes
    assert len(row.kl_by_position) == 4 and np.mean(row.kl_by_position) == pytest.approx(row.kl, rel=0.05)
    assert len(row.key_error_by_layer) == 2
    assert min(row.key_error_by_layer) <= row.key_error <= max(row.key_error_by_layer)
    assert row.encode_seconds > 0 and row.decode_seconds > 0


def test_what_is_left_of_a_prefix_may_be_short(model):
    """The first half of the KV, then the rest of the text: as the model itself, were its attention cut off there."""

    class LastHalf:
        def send(self, prefix):
            half = prefix.num_tokens // 2
            left = prefix.keys[:, :, half:], prefix.values[:, :, half:]
            return quality.Passage(*left, 2 * (left[0].size + left[1].size), None, None)

        def __repr__(self):
            return "last_half"

    texts = {"typing.py": quality.sample_texts()["typing.py"]}
    row, raw = quality.measure_quality(model, [LastHalf(), "raw"], texts=texts, prefix_tokens=256, scored_tokens=16)
    assert (row.codec, row.size_fraction, raw.kl) == ("last_half", 0.5, 0)
    assert row.key_error is None and row.encode_seconds is None and row.key_error_by_layer == []
    assert row.kl > 0
    tokens = model.tokenizer(texts["typing.py"])["input_ids"][:260]
    prefix = model.prefix(tokens, 256)
    got = model.continuation(prefix, prefix.keys[:, :, 128:], prefix.values[:, :, 128:])
    far = np.abs(got - masked_continuation(model, tokens, 256, 0)).mean()
    assert np.abs(got - masked_continuation(model, tokens, 256, 128)).mean() < 0.01 < far / 10  # KV is bfloat16


def masked_continuation(model, tokens: list[int], prefix_tokens: int, hidden: int) -> np.ndarray:
    """The same in one pass without a cache: rows after the prefix do not see the first `hidden` tokens."""
    import torch

    count = len(tokens) - 1
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    seen[prefix_tokens:, :hidden] = False
    with torch.no_grad():
        logits = model.model(torch.tensor([tokens[:-1]]), attention_mask=seen[None, None], use_cache=False).logits[0]
    return torch.log_softmax(logits[prefix_tokens:], -1).numpy()


def test_recall_tasks_hold_what_they_ask_for(model):
    texts = list(quality.sample_texts().values())[:3]
    tasks = recall_tasks(model.tokenizer, texts, tokens=1024)
    assert [task.kind for task in tasks] == ["needle"] * 3 + ["key_value"] * 2
    for task in tasks:
        assert len(task.tokens) == 1024 and len(task.questions) >= 4
        text = model.tokenizer.decode(task.tokens)
        for question, answer in task.questions:
            assert text.count(model.tokenizer.decode([*question, *answer]).lstrip("\n")) == 1
    assert len({str(task.tokens) for task in tasks}) == len(tasks)
    assert recall_tasks(model.tokenizer, texts, tokens=1024) == tasks


def test_spread_finds_an_outlier(model):
    tokens = model.tokenizer("".join(quality.sample_texts().values()))["input_ids"][:64]
    prefix = model.prefix(tokens, 64)
    before = quality.spread(prefix)
    prefix.keys[:, :, :, 3] += 50
    after = quality.spread(prefix)
    assert after["key_loudest_channel"] > 10 * before["key_loudest_channel"]
    assert after["key_energy_in_means"] > 0.9 and after["value_energy_in_means"] == before["value_energy_in_means"]


def test_the_interval_is_that_of_the_mean(rows):
    assert rows["raw"].kl_interval == 0
    for row in rows.values():
        assert sum(row.kl_by_text.values()) / len(row.kl_by_text) == pytest.approx(row.kl)
    rng = np.random.default_rng(0)
    means = [quality._interval(rng.standard_normal((4, 256)) + 1) for _ in range(20)]
    assert np.mean(means) == pytest.approx(1.96 / 32, rel=0.15)


@pytest.mark.slow
def test_the_published_figures_on_a_real_model():
    try:
        real = quality.StudyModel("smollm2")
    except CacheError as error:
        pytest.skip(f"SmolLM2 is not here: {error}")
    measured = quality.measure_quality(real, ["int8", "kivi", "rotated", "ecsq", "echo"])
    limits = {"int8": (5e-5, 1.9), "kivi": (7e-3, 3.2), "rotated": (7e-3, 3.5), "ecsq": (6e-3, 4.6),
              "echo": (6e-3, 5.5)}  # fmt: skip
    for row in measured:
        kl, times = limits[row.codec]
        assert row.kl <= kl, row
        assert 1 / row.size_fraction >= times * 0.999, row
