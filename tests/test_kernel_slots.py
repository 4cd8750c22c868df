"""gather_slots and scatter_slots: every implementation moves the reference's bytes, and nothing else."""

import numpy as np
import pytest
from interpreted import DEVICE, torch
from paged_caches import BLOCKS, HEADS, LAYERS, LAYOUTS, Cache

from kernels.slots import gather_slots, scatter_slots


def run(impl: str, cache: Cache, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(gathered array, buffer of an empty cache that it was scattered into)."""
    tiles, target = cache.tiles(), cache.empty()
    plain = np.full((LAYERS, len(slots), tiles.num_heads, tiles.head_size), 0x1234, np.uint16)
    if impl != "triton":
        gather_slots(tiles, slots, plain=plain, impl=impl)
        scatter_slots(target.tiles(), slots, plain=plain, impl=impl)
        return plain, target.buffer
    tensor = torch.from_numpy(plain.view(np.int16)).to(DEVICE)
    gather_slots(cache.on_device(DEVICE)[0], slots, plain=tensor, impl=impl)
    tiles, fetch = target.on_device(DEVICE)
    scatter_slots(tiles, slots, plain=tensor, impl=impl)
    fetch()
    return tensor.cpu().numpy().view(np.uint16), target.buffer


@pytest.mark.parametrize("impl", [name for name in gather_slots.impls if name != "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, size", [(8, 32), (6, 20)])
def test_every_layout(layout, impl, tokens, size):
    cache = Cache(layout, tokens, size).fill()
    slots = np.random.default_rng(1).permutation(BLOCKS * tokens)[:17].astype(np.int64)
    slots[[0, 5]] = -1
    want = run("reference", cache, slots)
    got = run(impl, cache, slots)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    assert (want[0][:, [0, 5]] == 0x1234).all()


@pytest.mark.parametrize("impl", gather_slots.impls)
@pytest.mark.parametrize("slots", [np.zeros(0, np.int64), np.full(3, -1)], ids=["empty", "all skipped"])
def test_nothing_to_do(impl, slots):
    cache = Cache("fused", 8, 32).fill()
    plain, buffer = run(impl, cache, slots)
    assert (plain == 0x1234).all()
    np.testing.assert_array_equal(buffer, cache.empty().buffer)


def test_a_token_is_where_its_slot_says():
    cache = Cache("cpu vec", 8, 32).fill()
    plain, _ = run("reference", cache, np.array([13]))
    np.testing.assert_array_equal(plain[1, 0], np.stack(cache.tiles().pages)[1, 1, :, 5])
    assert plain.shape == (LAYERS, 1, HEADS, 32)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_numba_takes_every_width(dtype):
    from kernels.tiles import Tiles

    pages = np.random.default_rng(0).integers(0, 255, (2, 4, 3, 8, 10)).astype(dtype)
    plain = np.zeros((2, 2, 3, 10), dtype)
    gather_slots(Tiles(pages), np.array([9, 30]), plain=plain)
    np.testing.assert_array_equal(plain, np.stack([pages[:, 1, :, 1], pages[:, 3, :, 6]], axis=1))


def test_bad_arguments_are_refused():
    cache = Cache("fused", 8, 32).fill()
    plain = np.zeros((LAYERS, 1, HEADS, 32), np.uint16)
    with pytest.raises(ValueError, match="allowed are -1"):
        gather_slots(cache.tiles(), np.array([BLOCKS * 8]), plain=plain)
    with pytest.raises(ValueError, match="must be int64"):
        gather_slots(cache.tiles(), np.array([1], np.int32), plain=plain)
    with pytest.raises(ValueError, match="plain array is"):
        scatter_slots(cache.tiles(), np.array([1, 2]), plain=plain)
