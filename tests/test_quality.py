"""The quality study on a small random model: its zero is zero, and coarser codecs are farther from it."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from experiments import quality
from workbench.errors import CacheError


@pytest.fixture(scope="module")
def model() -> quality.StudyModel:
    return quality.StudyModel("random:tiny")


@pytest.fixture(scope="module")
def rows(model) -> dict[str, quality.CodecQuality]:
    texts = dict(list(quality.sample_texts().items())[:2])
    codecs = ["raw", "lossless", "int8", "rotated", "kivi(bits=2)", "ecsq", "ecsq(step=2.0)"]
    measured = quality.measure_quality(
        model, codecs, texts=texts, prefix_tokens=256, scored_tokens=32, greedy_tokens=4, needles=1
    )
    return {row.codec: row for row in measured}


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_lossless_changes_nothing(rows, codec):
    row = rows[codec]
    assert row.kl == row.nll_change == row.nll_interval == row.key_error == row.value_error == 0
    assert row.top1_agreement == 1 and row.greedy_tokens == 4
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
