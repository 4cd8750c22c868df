"""rotate and unrotate: equal bytes in every implementation, and H really is its own inverse."""

import numpy as np
import pytest
from interpreted import DEVICE, torch
from paged_caches import LAYOUTS, Cache, block_ids

from kernels.floats import decode16
from kernels.rotate import random_signs, rotate, unrotate


def run(impl: str, cache: Cache, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rotated tiles, buffer of an empty cache that they were rotated back into)."""
    tiles, blocks, target = cache.tiles(), block_ids(), cache.empty()
    shape = (len(blocks), tiles.num_layers, blocks.shape[1], tiles.num_heads, tiles.rows, tiles.columns)
    turned = np.zeros(shape, np.uint16)
    options = {"signs": signs, "dtype": cache.dtype, "impl": impl}
    if impl != "triton":
        rotate(tiles, blocks, turned=turned, **options)
        unrotate(target.tiles(), blocks, turned=turned, **options)
        return turned, target.buffer
    tensor = torch.from_numpy(turned.view(np.int16)).to(DEVICE)
    rotate(cache.on_device(DEVICE)[0], blocks, turned=tensor, **options)
    tiles, fetch = target.on_device(DEVICE)
    unrotate(tiles, blocks, turned=tensor, **options)
    fetch()
    return tensor.cpu().numpy().view(np.uint16), target.buffer


@pytest.mark.parametrize("impl", [name for name in rotate.impls if name != "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "tokens, size, turn, dtype", [(8, 64, 64, "bfloat16"), (8, 64, 32, "float16"), (6, 96, 32, "bfloat16")]
)
def test_every_layout(layout, impl, tokens, size, turn, dtype):
    cache, signs = Cache(layout, tokens, size, dtype).fill(), random_signs(turn)
    want, got = run("reference", cache, signs), run(impl, cache, signs)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("size", [32, 64, 128])
def test_is_the_hadamard_matrix(size):
    cache, signs = Cache("fused", 8, size).fill(), random_signs(size)
    matrix = np.array([[1]])
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    turned, back = run("numba", cache, signs)
    values = decode16(np.stack(cache.tiles().pages)[:, block_ids()[1]], "bfloat16").astype(np.float64)
    want = (values * signs) @ (matrix / np.sqrt(size))
    np.testing.assert_allclose(decode16(turned[1], "bfloat16"), want, rtol=2.0**-8, atol=2.0**-8)
    target = cache.empty()
    target.buffer[:] = back
    returned = decode16(np.stack(target.tiles().pages)[:, block_ids()[1]], "bfloat16")
    np.testing.assert_allclose(returned, values, rtol=0.02, atol=0.1)


def test_an_outlier_is_spread():
    cache = Cache("fused", 8, 64).empty()
    for page in cache.tiles().pages:
        page[..., 3] = 0x4280  # 64.0
    turned, _ = run("reference", cache, random_signs(64))
    np.testing.assert_array_equal(np.abs(decode16(turned[1], "bfloat16")), 8.0)


@pytest.mark.parametrize("size", [16, 48, 128])
def test_sizes_that_do_not_fit_are_refused(size):
    with pytest.raises(ValueError, match="power of two"):
        run("numba", Cache("fused", 8, 64).fill(), np.ones(size, np.float32))


def test_signs_are_fixed():
    """They are part of the stored format: other signs would decode to noise."""
    assert random_signs(16).tolist() == [-1, 1, 1, -1, 1, 1, 1, 1, -1, -1, 1, 1, -1, -1, 1, -1]
    assert (random_signs(64) != random_signs(64, seed=1)).any()
    assert set(random_signs(256).tolist()) == {1.0, -1.0}
