"""to_symbols, from_symbols and channel_moments: the reference's bytes (sums: to rounding) in every layout."""

import numpy as np
import pytest
from paged_caches import LAYOUTS, Cache

from kernels.entropy import choose_tables, count_symbols, normalize, table_costs
from kernels.floats import decode16
from kernels.symbols import channel_moments, from_symbols, to_symbols

BLOCKS = np.array([3, 0, 2])


def parameters(tiles, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((tiles.num_layers, tiles.num_heads, tiles.head_size)).astype(np.float32)
    steps = (rng.random((tiles.num_layers, len(BLOCKS) * tiles.block_size)) * 0.1 + 0.02).astype(np.float32)
    return {"means": means, "steps": steps}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, size, dtype", [(16, 40, "bfloat16"), (6, 20, "float16")])
def test_every_layout(layout, tokens, size, dtype):
    cache = Cache(layout, tokens, size, dtype).fill()
    tiles, numbers, found = cache.tiles(), parameters(cache.tiles()), {}
    for impl in to_symbols.impls:
        symbols = np.zeros((2, tiles.num_heads * size, len(BLOCKS) * tokens), np.uint8)
        to_symbols(tiles, BLOCKS, symbols=symbols, dtype=dtype, impl=impl, **numbers)
        target = cache.empty()
        from_symbols(target.tiles(), BLOCKS, symbols=symbols, dtype=dtype, impl=impl, **numbers)
        target.assert_guards()
        found[impl] = symbols, target.buffer
    for got, want in zip(found["numba"], found["reference"], strict=True):
        np.testing.assert_array_equal(got, want)
    assert found["numba"][0].min() == 1 and found["numba"][0].max() == 255, "no value was beyond the symbols"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments(layout):
    cache = Cache(layout, 16, 40).fill()
    tiles = cache.tiles()
    values = decode16(np.stack(tiles.pages)[:, BLOCKS], "bfloat16").astype(np.float64)
    for impl in channel_moments.impls:
        sums, squares = (np.zeros((2, tiles.num_heads, 40), np.float32) for _ in range(2))
        channel_moments(tiles, BLOCKS, sums=sums, squares=squares, impl=impl)
        np.testing.assert_allclose(sums, values.sum((1, 3)), rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(squares, np.square(values).sum((1, 3)), rtol=1e-5)


def test_tables_are_counted_and_chosen_alike():
    rng = np.random.default_rng(0)
    symbols = np.clip(rng.standard_normal((3, 7, 50)) * rng.choice([1, 9, 40], (3, 7, 1)) + 128, 0, 255).astype(
        np.uint8
    )
    choice = rng.integers(0, 4, (3, 7)).astype(np.uint8)
    counts = {impl: np.zeros((4, 256), np.int64) for impl in count_symbols.impls}
    for impl, found in counts.items():
        count_symbols(symbols, choice, counts=found, impl=impl)
        assert found.sum() == symbols.size
    np.testing.assert_array_equal(counts["numba"], counts["reference"])
    costs = table_costs(normalize(counts["reference"] + np.ones(256)))
    chosen = {impl: choose_tables(symbols, costs, impl=impl) for impl in choose_tables.impls}
    np.testing.assert_array_equal(chosen["numba"], chosen["reference"])
    assert len(np.unique(chosen["numba"])) > 1


def test_bad_arguments_are_refused():
    cache = Cache("fused", 8, 32).fill()
    tiles, numbers = cache.tiles(), parameters(cache.tiles())
    symbols = np.zeros((2, 64, 24), np.uint8)
    with pytest.raises(ValueError, match="skipped"):
        to_symbols(tiles, np.array([0, -1, 2]), symbols=symbols, **numbers)
    with pytest.raises(ValueError, match="symbols are"):
        to_symbols(tiles, BLOCKS, symbols=symbols[:, :, :8], **numbers)
    with pytest.raises(ValueError, match="steps are"):
        to_symbols(tiles, BLOCKS, symbols=symbols, means=numbers["means"], steps=numbers["steps"][:, :4])
