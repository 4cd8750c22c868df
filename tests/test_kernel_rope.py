"""unrope and rope: equal bytes in both implementations, each other's inverse, and the model's own rotation."""

import numpy as np
import pytest
from paged_caches import LAYOUTS, Cache

from kernels.floats import decode16
from kernels.rope import angles_of, rope, unrope


def run(impl: str, cache: Cache, angles: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, Cache]:
    tiles, target = cache.tiles(), cache.empty()
    plain = np.zeros((tiles.num_layers, len(blocks), tiles.num_heads, tiles.rows, tiles.columns), np.uint16)
    unrope(tiles, blocks, angles=angles, plain=plain, dtype=cache.dtype, impl=impl)
    rope(target.tiles(), blocks, angles=angles, plain=plain, dtype=cache.dtype, impl=impl)
    return plain, target


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, size, dtype", [(16, 64, "bfloat16"), (6, 20, "float16")])
def test_every_layout(layout, tokens, size, dtype):
    cache, blocks = Cache(layout, tokens, size, dtype).fill(), np.array([3, 0, 4])
    angles = angles_of(3 * tokens, size, 10000.0)
    (want, want_cache), (got, got_cache) = (run(impl, cache, angles, blocks) for impl in ("reference", "numba"))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_cache.buffer, want_cache.buffer)
    got_cache.assert_guards()
    back, was = (decode16(np.stack(c.tiles().pages)[:, blocks], dtype) for c in (got_cache, cache))
    np.testing.assert_allclose(back, was, atol=0.1)


def test_is_the_rotation_of_llama():
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cache, blocks = Cache("fused", 16, 64).fill(), np.array([1, 2])
    angles = angles_of(32, 64, 10000.0)
    _, target = run("numba", cache, angles, blocks)
    plain, _ = run("numba", cache, angles, blocks)
    values = torch.from_numpy(decode16(plain, "bfloat16")).transpose(1, 2).reshape(2, 2, 32, 64)
    both = torch.from_numpy(np.concatenate([angles, angles], axis=1))[None]
    want, _ = llama.apply_rotary_pos_emb(values, values, both.cos(), both.sin())
    got = np.stack(target.tiles().pages)[:, blocks].transpose(0, 2, 1, 3, 4).reshape(2, 2, 32, 64)
    np.testing.assert_allclose(decode16(np.ascontiguousarray(got), "bfloat16"), want.numpy(), rtol=2.0**-7, atol=1e-2)


def test_bad_arguments_are_refused():
    cache = Cache("fused", 8, 32).fill()
    with pytest.raises(ValueError, match="do not fit"):
        run("numba", cache, angles_of(8, 32, 1e4), np.array([0, 1]))
    with pytest.raises(ValueError, match="skipped"):
        run("numba", cache, angles_of(16, 32, 1e4), np.array([0, -1]))
