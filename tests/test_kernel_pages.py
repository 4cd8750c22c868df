"""Every implementation of the page moves equals the reference, and touches nothing beside its target."""

import interpreted  # noqa: F401 - before any kernel
import numpy as np
import pytest

from kernels.pages import PageTable, gather_pages, scatter_pages

GUARD = 128
FAST = [name for name in gather_pages.impls if name != "reference"]


class Guarded:
    """A uint8 array with a wall of random bytes before, behind and, for pages, between its rows."""

    def __init__(self, shape: tuple[int, ...], rng: np.random.Generator, *, offset: int = 0, row_gap: int = 0):
        row = shape[-1] + row_gap
        count = int(np.prod(shape[:-1]))
        self.memory = rng.integers(0, 256, 64 + 2 * GUARD + offset + count * row, np.uint8)
        begin = -self.memory.ctypes.data % 64 + GUARD + offset
        rows = self.memory[begin : begin + count * row].reshape(count, row)
        self.array = rows[:, : shape[-1]] if row_gap else rows.reshape(shape)
        self.array[:] = rng.integers(0, 256, self.array.shape, np.uint8)  # not what happens to lie where it begins
        self._inside = np.zeros(self.memory.size, bool)
        inside = self._inside[begin : begin + count * row].reshape(count, row)
        inside[:, : shape[-1]] = True
        self._before = self.memory.copy()

    def wall_stands(self) -> bool:
        return np.array_equal(self.memory[~self._inside], self._before[~self._inside])

    def is_untouched(self) -> bool:
        return np.array_equal(self.memory, self._before)


SHAPES = [  # layers, blocks, blocks per chunk, page bytes, chunks, offset of the arrays, gap between rows
    (1, 1, 1, 1, 1, 0, 0),
    (2, 8, 2, 64, 3, 0, 0),
    (2, 8, 2, 64, 3, 1, 0),
    (3, 9, 1, 63, 4, 0, 0),
    (3, 9, 2, 65, 4, 0, 1),
    (2, 16, 4, 4096, 4, 0, 64),
    (2, 16, 4, 4096, 4, 32, 0),
    (1, 40, 3, 192, 12, 0, 7),
    (5, 7, 1, 128, 7, 63, 0),
    (2, 8, 2, 64, 0, 0, 0),
    (30, 4, 2, 256, 2, 0, 0),
    (2, 6, 3, 1000, 2, 16, 24),
]


@pytest.mark.parametrize("skip", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_reference(shape, impl, skip):
    layers, num_blocks, width, nbytes, count, offset, gap = shape
    rng = np.random.default_rng(SHAPES.index(shape))
    blocks = np.full(count * width, -1)
    filled = min(num_blocks, count * width)  # no block twice in a scatter
    blocks[rng.permutation(count * width)[:filled]] = rng.permutation(num_blocks)[:filled]
    blocks = blocks.reshape(count, width)
    blocks = np.where(rng.random(blocks.shape) < skip, -1, blocks).astype(np.int64)
    slots = rng.permutation(count + 2)[:count].astype(np.int64)
    results = []
    for name in ("reference", impl):
        seed = np.random.default_rng(1)
        pages = [Guarded((num_blocks, nbytes), seed, offset=offset, row_gap=gap) for _ in range(layers)]
        arena = Guarded((count + 2, layers, width, nbytes), seed, offset=offset)
        table = PageTable([guarded.array for guarded in pages])
        moved = gather_pages(table, blocks, arena.array, slots, impl=name)
        assert all(guarded.is_untouched() for guarded in pages), "a gather wrote to the pages"
        after_gather = arena.array.copy()
        other = Guarded((count + 2, layers, width, nbytes), seed, offset=offset)
        back = scatter_pages(other.array, slots, table, blocks, impl=name)
        assert other.is_untouched(), "a scatter wrote to the arena"
        assert arena.wall_stands() and all(guarded.wall_stands() for guarded in pages)
        assert moved == back == (blocks >= 0).sum() * layers
        results.append((after_gather, np.stack([guarded.array for guarded in pages])))
    for expected, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("impl", gather_pages.impls)
def test_the_contract_itself(impl):
    """Against index arithmetic written out, so that the reference is tested, too."""
    pages = [np.arange(8 * 4, dtype=np.uint8).reshape(8, 4) + 100 * layer for layer in range(2)]
    arena = np.zeros((3, 2, 2, 4), np.uint8)
    assert gather_pages(PageTable(pages), np.array([[5, -1], [0, 7]]), arena, np.array([2, 0]), impl=impl) == 6
    for layer in range(2):
        np.testing.assert_array_equal(arena[2, layer, 0], pages[layer][5])
        np.testing.assert_array_equal(arena[0, layer], pages[layer][[0, 7]])
    assert not arena[2, :, 1].any() and not arena[1].any()
    target = [np.zeros((8, 4), np.uint8) for _ in range(2)]
    assert scatter_pages(arena, np.array([0]), PageTable(target), np.array([[3, 1]]), impl=impl) == 4
    for layer in range(2):
        np.testing.assert_array_equal(target[layer][[3, 1]], pages[layer][[0, 7]])
        assert not target[layer][[0, 2, 4, 5, 6, 7]].any()


def test_pages_inside_one_tensor_with_layers_last():
    """Rows of one layer lie apart by all layers' pages: the stride is not the page size."""
    whole = np.random.default_rng(0).integers(0, 256, (6, 3, 64), np.uint8)
    table = PageTable([whole[:, layer] for layer in range(3)])
    arena = np.zeros((1, 3, 2, 64), np.uint8)
    gather_pages(table, np.array([[4, 1]]), arena, np.array([0]))
    np.testing.assert_array_equal(arena[0], whole[[4, 1]].transpose(1, 0, 2))


GOOD = {"blocks": np.array([[0, 1]]), "slots": np.array([0]), "arena": np.zeros((2, 2, 2, 8), np.uint8)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": np.array([[0, 4]])},
        {"blocks": np.array([[-2, 0]])},
        {"blocks": np.array([0, 1])},
        {"blocks": np.array([[0.0, 1.0]])},
        {"blocks": np.array([[0]])},
        {"slots": np.array([2])},
        {"slots": np.array([-1])},
        {"slots": np.array([0, 1])},
        {"slots": np.array([0], np.int32)},
        {"arena": np.zeros((2, 2, 2, 9), np.uint8)},
        {"arena": np.zeros((2, 2, 2, 8), np.int8)},
        {"arena": np.zeros((2, 2, 2, 16), np.uint8)[..., ::2]},
    ],
)
@pytest.mark.parametrize("impl", gather_pages.impls)
def test_what_does_not_fit_is_refused(impl, wrong):
    table, given = PageTable([np.zeros((4, 8), np.uint8)] * 2), {**GOOD, **wrong}
    with pytest.raises(ValueError):
        gather_pages(table, given["blocks"], given["arena"], given["slots"], impl=impl)
    with pytest.raises(ValueError):
        scatter_pages(given["arena"], given["slots"], table, given["blocks"], impl=impl)


def test_read_only_targets_are_refused():
    frozen = np.zeros((4, 8), np.uint8)
    frozen.flags.writeable = False
    arena = GOOD["arena"].copy()
    gather_pages(PageTable([frozen] * 2), GOOD["blocks"], arena, GOOD["slots"])
    with pytest.raises(ValueError, match="read-only"):
        scatter_pages(arena, GOOD["slots"], PageTable([frozen] * 2), GOOD["blocks"])
    arena.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        gather_pages(PageTable([frozen] * 2), GOOD["blocks"], arena, GOOD["slots"])


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [np.zeros((4, 8))],
        [np.zeros(8, np.uint8)],
        [np.zeros((4, 16), np.uint8)[:, ::2]],
        [np.zeros((4, 8), np.uint8), np.zeros((4, 9), np.uint8)],
        [np.zeros((8, 4), np.uint8).T],
    ],
)
def test_layers_that_are_no_page_table(layers):
    with pytest.raises(ValueError):
        PageTable(layers)


def test_an_unknown_implementation_lists_the_known():
    with pytest.raises(ValueError, match="numba, reference"):
        gather_pages(PageTable([np.zeros((4, 8), np.uint8)] * 2), impl="cuda", **GOOD)


def test_chunks_pass_the_gpu_in_portions(monkeypatch):
    """However many chunks move at once, the memory for them on the GPU is bounded."""
    import kernels.pages_triton

    monkeypatch.setattr(kernels.pages_triton, "_STAGING_NBYTES", 2 * 2 * 2 * 64)
    rng = np.random.default_rng(0)
    table = PageTable([rng.integers(0, 256, (10, 64), np.uint8) for _ in range(2)])
    blocks, slots = rng.permutation(10).reshape(5, 2), rng.permutation(5)
    arenas = [np.zeros((5, 2, 2, 64), np.uint8) for _ in range(2)]
    for arena, impl in zip(arenas, ("reference", "triton"), strict=True):
        assert gather_pages(table, blocks, arena, slots, impl=impl) == 20
    np.testing.assert_array_equal(*arenas)


@pytest.mark.gpu
def test_pages_on_a_gpu():
    """Pages lie on the GPU, the arena in locked memory of the host: the way that vLLM takes with CUDA."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from kernels.pages_triton import pin

    rng = np.random.default_rng(0)
    layers = [rng.integers(0, 256, (12, 4096), np.uint8) for _ in range(3)]
    on_gpu = PageTable([torch.from_numpy(layer).cuda() for layer in layers])
    arena, expected = aligned(np.zeros((4, 3, 2, 4096), np.uint8)), np.zeros((4, 3, 2, 4096), np.uint8)
    pin(arena)
    blocks, slots = rng.permutation(12)[:6].reshape(3, 2), np.array([3, 0, 2])
    gather_pages(on_gpu, blocks, arena, slots)
    gather_pages(PageTable(layers), blocks, expected, slots, impl="reference")
    np.testing.assert_array_equal(arena, expected)
    empty = PageTable([torch.zeros(12, 4096, dtype=torch.uint8, device="cuda") for _ in range(3)])
    scatter_pages(arena, slots, empty, blocks)
    for layer, got in zip(layers, empty.pages, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy()[blocks], layer[blocks])


@pytest.mark.parametrize("stream_nbytes", [0, 1 << 60])
def test_streamed_or_not_the_bytes_are_the_same(monkeypatch, stream_nbytes):
    """Large scatters use other stores than small ones; both must move every byte."""
    import kernels.pages

    monkeypatch.setattr(kernels.pages, "STREAM_NBYTES", stream_nbytes)
    rng = np.random.default_rng(0)
    layers = [aligned(rng.integers(0, 256, (5, 128), np.uint8)) for _ in range(2)]
    arena = aligned(rng.integers(0, 256, (3, 2, 2, 128), np.uint8))
    blocks, slots = np.array([[4, 0], [-1, 2]]), np.array([2, 0])
    expected = [layer.copy() for layer in layers]
    for chunk, slot in zip(blocks, slots, strict=True):
        for i, block in enumerate(chunk):
            for number, layer in enumerate(expected):
                if block >= 0:
                    layer[block] = arena[slot, number, i]
    scatter_pages(arena, slots, PageTable(layers), blocks)
    assert all(np.array_equal(layer, want) for layer, want in zip(layers, expected, strict=True))


def aligned(array):
    """The same bytes, beginning on a cache line."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    place = memory[start : start + array.nbytes].reshape(array.shape)
    place[:] = array
    return place
