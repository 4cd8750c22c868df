"""rANS: equal words in both implementations, exact round trips, near the entropy, and no wrong symbols unnoticed."""

import numpy as np
import pytest

from kernels.entropy import (
    SCALE,
    capacity_words,
    choose_tables,
    decode,
    encode,
    normalize,
    table_costs,
    table_totals,
)


def sample(streams: int, rows: int, columns: int, spread: float = 3.0, seed: int = 0):
    """(symbols, choice, frequencies) of rounded Gaussians with two tables."""
    rng = np.random.default_rng(seed)
    symbols = np.clip(np.rint(rng.standard_normal((streams, rows, columns)) * spread) + 128, 0, 255).astype(np.uint8)
    counts = np.bincount(symbols.reshape(-1), minlength=256)
    frequencies = normalize(np.stack([counts, counts + 1]))
    return symbols, rng.integers(0, 2, (streams, rows)).astype(np.uint8), frequencies


def encoded(symbols, choice, frequencies, impl="auto"):
    words = np.zeros((len(symbols), capacity_words(symbols[0].size)), np.uint16)
    counts = encode(symbols, choice, frequencies=frequencies, words=words, impl=impl)
    return words, counts


@pytest.mark.parametrize("shape", [(2, 3, 70), (1, 5, 32), (3, 2, 1), (2, 1, 300), (1, 1, 0), (2, 0, 8), (0, 2, 8)])
@pytest.mark.parametrize("spread", [0.2, 3.0, 60.0])
def test_words_and_symbols_are_the_references(shape, spread):
    symbols, choice, frequencies = (
        sample(*shape, spread)
        if np.prod(shape)
        else (np.zeros(shape, np.uint8), np.zeros(shape[:2], np.uint8), normalize(np.ones((1, 256))))
    )
    words = np.zeros((shape[0], capacity_words(shape[1] * shape[2])), np.uint16)
    counts = encode(symbols, choice, frequencies=frequencies, words=words, impl="numba")
    want = np.zeros_like(words)
    np.testing.assert_array_equal(
        encode(symbols, choice, frequencies=frequencies, words=want, impl="reference"), counts
    )
    for stream, count in enumerate(counts):
        np.testing.assert_array_equal(words[stream, :count], want[stream, :count])
    for impl in decode.impls:
        out = np.zeros_like(symbols)
        decode(out, choice, frequencies=frequencies, words=words, counts=counts, impl=impl)
        np.testing.assert_array_equal(out, symbols)


def test_size_is_near_the_entropy():
    symbols, choice, frequencies = sample(1, 64, 4096)
    _, counts = encoded(symbols, choice * 0, frequencies)  # table 1 spends on symbols that do not occur
    share = np.bincount(symbols.reshape(-1), minlength=256) / symbols.size
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    assert entropy <= counts[0] * 16 / symbols.size <= entropy * 1.01


@pytest.mark.parametrize("impl", decode.impls)
def test_changed_words_are_noticed(impl):
    symbols, choice, frequencies = sample(1, 4, 64)
    words, counts = encoded(symbols, choice, frequencies)
    rng = np.random.default_rng(1)
    for _ in range(100):
        bad, out = words.copy(), np.zeros_like(symbols)
        bad[0, rng.integers(counts[0])] ^= np.uint16(1 << rng.integers(16))
        with pytest.raises(ValueError, match="not what was encoded"):
            decode(out, choice, frequencies=frequencies, words=bad, counts=counts, impl=impl)
    with pytest.raises(ValueError, match="not what was encoded"):
        decode(out, choice, frequencies=frequencies, words=words, counts=counts - 1, impl=impl)


@pytest.mark.parametrize("impl", encode.impls)
def test_a_symbol_without_frequency_is_refused(impl):
    symbols = np.full((1, 2, 40), 7, np.uint8)
    frequencies = normalize(np.bincount([1, 1, 2], minlength=256)[None])
    with pytest.raises(ValueError, match="no frequency"):
        encoded(symbols, np.zeros((1, 2), np.uint8), frequencies, impl)


def test_frequencies_sum_to_the_scale():
    rng = np.random.default_rng(0)
    cases = [np.zeros(256), np.eye(256)[3] * 9, np.ones(256), rng.integers(0, 2, 256), rng.pareto(0.3, 256) * 100]
    for counts in cases:
        frequencies = normalize(counts)
        assert frequencies.sum() == SCALE and frequencies.max() < SCALE
        assert (frequencies[counts > 0] > 0).all()


def test_bad_arguments_are_refused():
    symbols, choice, frequencies = sample(1, 2, 32)
    with pytest.raises(ValueError, match="summing to"):
        encoded(symbols, choice, frequencies + 1)
    with pytest.raises(ValueError, match="names table"):
        encoded(symbols, choice + 2, frequencies)
    with pytest.raises(ValueError, match="have room"):
        encode(symbols, choice, frequencies=frequencies, words=np.zeros((1, 8), np.uint16))
    words, counts = encoded(symbols, choice, frequencies)
    with pytest.raises(ValueError, match="counts must be"):
        decode(symbols, choice, frequencies=frequencies, words=words, counts=counts + 10**6)


def test_totals_are_the_bits_and_the_choice_is_the_least():
    symbols, _, frequencies = sample(3, 5, 200, spread=2.0)
    costs = table_costs(np.concatenate([frequencies, normalize(np.ones((1, 256)))]))
    totals = {impl: table_totals(symbols, costs, impl=impl) for impl in table_totals.impls}
    for found in totals.values():
        np.testing.assert_allclose(found, totals["reference"], rtol=1e-4)
    assert totals["reference"].shape == (3, 5, 3) and totals["reference"][0, 0, 2] == 200 * 8
    for impl in choose_tables.impls:
        np.testing.assert_array_equal(choose_tables(symbols, costs, impl=impl), totals[impl].argmin(2))
    _, counts = encoded(symbols, totals["reference"][:, :, :2].argmin(2), frequencies)
    bits = totals["reference"][:, :, :2].min(2).sum()
    assert bits <= counts.sum() * 16 <= bits + 3 * 64 * 16 + 3 * 32 * 16
