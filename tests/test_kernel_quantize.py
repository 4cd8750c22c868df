"""quantize and dequantize: every implementation gives the reference's bytes, and keeps within half a step."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from interpreted import DEVICE, torch
from paged_caches import LAYOUTS, Cache, block_ids

from kernels import floats
from kernels.quantize import CODES, Coded, Scheme, allocate, dequantize, has_unrepresentable, quantize
from kernels.tiles import Tiles

GROUPS = [("channels", 32), ("channels", 16), ("tokens", 8), ("tokens", 32)]
ALL = [
    Scheme(code=code, along=along, group=group, dtype=dtype)
    for (along, group), code, dtype in itertools.product(GROUPS, CODES, floats.EXPONENT_MASK)
]
SOME = [s for s in ALL if (s.code, s.dtype) in {("int8", "bfloat16"), ("uint4", "bfloat16"), ("uint3", "float16")}]
QUICK = [s for s in ALL if s.dtype == "bfloat16" and s.group in (32, 8)]


def name(scheme: Scheme) -> str:
    return f"{scheme.code}-{scheme.along}{scheme.group}-{scheme.dtype}"


def round_trip(cache: Cache, scheme: Scheme, impl: str, blocks=None) -> tuple[list[np.ndarray], Cache]:
    """(codes, scales, zeros) and the cache that dequantize filled, by one implementation."""
    blocks = block_ids() if blocks is None else blocks
    coded, target = allocate(cache.tiles(), scheme, *blocks.shape), cache.empty()
    if impl != "triton":
        quantize(cache.tiles(), blocks, scheme=scheme, coded=coded, impl=impl)
        dequantize(target.tiles(), blocks, scheme=scheme, coded=coded, impl=impl)
        return list(coded), target
    tensors = Coded(*(torch.from_numpy(a.view(np.int16) if a.itemsize == 2 else a).to(DEVICE) for a in coded))
    tiles, _ = cache.on_device(DEVICE)
    quantize(tiles, blocks, scheme=scheme, coded=tensors, impl=impl)
    tiles, fetch = target.on_device(DEVICE)
    dequantize(tiles, blocks, scheme=scheme, coded=tensors, impl=impl)
    fetch()
    return [t.cpu().numpy().view(a.dtype) for t, a in zip(tensors, coded, strict=True)], target


def assert_same(cache: Cache, scheme: Scheme, impl: str) -> None:
    want, want_cache = round_trip(cache, scheme, "reference")
    got, got_cache = round_trip(cache, scheme, impl)
    for part, one, other in zip(("codes", "scales", "zeros"), got, want, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=part)
    np.testing.assert_array_equal(got_cache.buffer, want_cache.buffer)
    got_cache.assert_guards()


@pytest.mark.parametrize("scheme", QUICK, ids=name)
def test_numba_gives_the_references_bytes(scheme):
    assert_same(Cache("fused", 16, 32).fill(), scheme, "numba")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numba_in_every_layout(layout):
    for scheme in SOME:
        assert_same(Cache(layout, 16, 64, scheme.dtype).fill(), scheme, "numba")


@pytest.mark.parametrize("tokens, size", [(8, 40), (24, 96), (32, 80), (40, 16)])
def test_numba_odd_shapes(tokens, size):
    for code, along in itertools.product(("int8", "uint4"), ("channels", "tokens")):
        scheme = Scheme(code=code, along=along, group=8)
        for layout in ("fused", "cpu vec"):
            assert_same(Cache(layout, tokens, size).fill(), scheme, "numba")


@pytest.mark.parametrize("along, group", [("channels", 64), ("tokens", 4)])
def test_numba_in_the_widest_vectors(along, group):
    for code in CODES:
        assert_same(Cache("fused", 4, 512).fill(), Scheme(code=code, along=along, group=group), "numba")


@pytest.mark.parametrize("along, group", [("channels", 9), ("channels", 3), ("tokens", 5)])
def test_numba_in_rows_that_hold_no_vector(along, group):
    for code in ("int8", "uint8", "e4m3"):
        assert_same(Cache("fused", 5, 9).fill(), Scheme(code=code, along=along, group=group), "numba")


def at_line(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy that starts `offset` bytes beyond a multiple of 64."""
    raw = np.zeros(array.nbytes + 64, np.uint8)
    copy = raw[(offset - raw.ctypes.data) % 64 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("layout, tokens", [("fused", 16), ("cpu vec", 64)])
def test_numba_past_the_cache(layout, tokens, monkeypatch):
    """What is large is written by other stores, whole lines at a time; codes may lie at any address."""
    monkeypatch.setattr("kernels.quantize_numba._STREAM_FROM", 0)
    cache = Cache(layout, tokens, 64).fill()
    for code, along in itertools.product(("int8", "uint4"), ("channels", "tokens")):
        scheme = Scheme(code=code, along=along, group=16)
        want, want_cache = round_trip(cache, scheme, "reference")
        for codes_at, pages_at in ((0, 0), (1, 2), (40, 32)):
            coded, target = allocate(cache.tiles(), scheme, *block_ids().shape), cache.empty()
            coded = coded._replace(codes=at_line(coded.codes, codes_at))
            target.buffer = at_line(target.buffer, pages_at)
            quantize(cache.tiles(), block_ids(), scheme=scheme, coded=coded, impl="numba")
            dequantize(target.tiles(), block_ids(), scheme=scheme, coded=coded, impl="numba")
            np.testing.assert_array_equal(coded.codes, want[0])
            np.testing.assert_array_equal(target.buffer, want_cache.buffer)


@pytest.mark.parametrize("code, largest", [("e4m3", 0x43E0), ("e5m2", 0x4760)])
def test_every_value_has_the_references_fp8_code(code, largest):
    """With a scale of 1: every bfloat16 up to the largest code, so every tie and every subnormal."""
    magnitudes = np.arange(largest + 1, dtype=np.uint16)
    rows = np.full((144, 256), largest, np.uint16)
    rows[:, 1:] = np.resize(np.concatenate([magnitudes, magnitudes | 0x8000]), (144, 255))
    assert len(np.unique(rows)) == 2 * len(magnitudes)
    tiles, blocks = Tiles(rows[None, None, None]), np.array([[0]])
    coded = {}
    for impl in ("reference", "numba"):
        coded[impl] = allocate(tiles, Scheme(code=code, along="channels", group=256), 1, 1)
        quantize(tiles, blocks, scheme=Scheme(code=code, along="channels", group=256), coded=coded[impl], impl=impl)
    assert (coded["numba"].scales == 0x3F80).all()
    np.testing.assert_array_equal(coded["numba"].codes, coded["reference"].codes)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["", "+avx2"])
def test_numba_on_lesser_cpus(features):
    """The same bytes from what LLVM makes of the vectors where there is no AVX-512."""
    only = "test_numba_in_the_widest_vectors or test_numba_past_the_cache"
    lesser = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", only]
    done = subprocess.run(command, env=lesser, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


@pytest.mark.parametrize("scheme", [s for s in QUICK if s.group == 32 or s.along == "tokens"], ids=name)
def test_triton_gives_the_references_bytes(scheme):
    assert_same(Cache("fused", 16, 32).fill(), scheme, "triton")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton_in_every_layout(layout):
    for code, along, group, dtype in (
        ("int8", "tokens", 32, "bfloat16"),
        ("uint4", "channels", 16, "bfloat16"),
        ("uint3", "tokens", 8, "float16"),
    ):
        scheme = Scheme(code=code, along=along, group=group, dtype=dtype)
        assert_same(Cache(layout, 16, 32, dtype).fill(), scheme, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["numba", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", ALL, ids=name)
def test_every_scheme_in_every_layout(scheme, layout, impl):
    assert_same(Cache(layout, 16, 32, scheme.dtype).fill(), scheme, impl)


@pytest.mark.parametrize("code", CODES)
def test_error_is_at_most_half_a_step(code):
    """The budget of every value, from its own scale: half a step (an ulp of fp8), and the rounding of the dtype."""
    cache = Cache("fused", 16, 32).fill()
    for along, group in GROUPS:
        scheme = Scheme(code=code, along=along, group=group)
        blocks = np.array([[0, 1, 2, 3]])
        coded, target = allocate(cache.tiles(), scheme, 1, 4), cache.empty()
        quantize(cache.tiles(), blocks, scheme=scheme, coded=coded)
        dequantize(target.tiles(), blocks, scheme=scheme, coded=coded)
        got, want = (floats.decode16(np.stack(c.tiles().pages)[:, :4], "bfloat16") for c in (target, cache))
        step = floats.decode16(coded.scales, "bfloat16").max()
        widest = {"e4m3": 16, "e5m2": 4096}.get(code, 0.5)  # half an ulp at the largest code
        assert np.abs(got - want).max() <= step * widest + np.abs(want).max() * 2.0**-8


def test_tokens_of_several_blocks_share_a_scale():
    cache, scheme = Cache("fused", 8, 32).fill(), Scheme(code="uint8", along="tokens", group=32)
    coded = allocate(cache.tiles(), scheme, 1, 4)
    quantize(cache.tiles(), np.array([[0, 1, 2, 3]]), scheme=scheme, coded=coded)
    assert coded.scales.shape == (1, 2, 1, 2, 1, 32)
    values = floats.decode16(np.stack(cache.tiles().pages)[:, :4], "bfloat16")
    np.testing.assert_array_equal(floats.decode16(coded.zeros, "bfloat16")[0, :, 0, :, 0], values.min((1, 3)))


@pytest.mark.parametrize("impl", ["reference", "numba", "triton"])
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF], ids=["inf", "-inf", "nan", "-nan"])
def test_what_cannot_be_represented_is_named(impl, bits):
    cache = Cache("fused", 8, 32).fill()
    clean = round_trip(cache, Scheme(code="uint4", along="channels", group=32), impl)[0][1]
    assert not has_unrepresentable(clean)
    cache.tiles().pages[1][block_ids()[1, 0], 1, 3, 5] = bits
    for code in ("uint4", "int8", "e4m3"):
        scales = round_trip(cache, Scheme(code=code, along="channels", group=32), impl)[0][1]
        assert has_unrepresentable(scales)
        assert (floats.EXPONENT_MASK["bfloat16"] <= (scales & 0x7FFF)).sum() == 1


def test_constant_and_tiny_groups_survive():
    cache = Cache("fused", 8, 32).empty()
    cache.tiles().pages[0][:] = 0x3F80  # 1.0
    cache.tiles().pages[1][:] = 0x0001  # the smallest subnormal
    for code in CODES:
        _, target = round_trip(cache, Scheme(code=code, along="channels", group=32), "numba", np.array([[0]]))
        got = floats.decode16(np.stack(target.tiles().pages)[:, 0], "bfloat16")
        np.testing.assert_allclose(got[0], 1.0, rtol=0.02)
        assert np.abs(got[1]).max() <= 2.0**-99


def test_nothing_to_do():
    cache, scheme = Cache("fused", 8, 32).fill(), Scheme(code="int8", along="channels", group=32)
    before = cache.buffer.copy()
    for blocks in (np.zeros((0, 2), np.int64), np.zeros((2, 0), np.int64), np.full((1, 2), -1)):
        for impl in ("reference", "numba", "triton"):
            coded, target = round_trip(cache, scheme, impl, blocks)
            assert not coded[0].any() and (target.buffer == cache.empty().buffer).all()
    np.testing.assert_array_equal(cache.buffer, before)


@pytest.mark.parametrize(
    "scheme, message",
    [
        (Scheme(code="uint4", along="channels", group=24), "neither divides 32"),
        (Scheme(code="uint4", along="channels", group=64), "does not fit"),
        (Scheme(code="uint4", along="tokens", group=24), "does not fit"),
        (Scheme(code="uint4", along="tokens", group=12), "neither divides 8"),
    ],
    ids=["channels", "wide channels", "blocks", "tokens"],
)
def test_groups_that_do_not_fit_are_refused(scheme, message):
    with pytest.raises(ValueError, match=message):
        allocate(Cache("fused", 8, 32).tiles(), scheme, 1, 2)


def test_bad_arguments_are_refused():
    cache, scheme = Cache("fused", 8, 32).fill(), Scheme(code="int8", along="channels", group=32)
    coded = allocate(cache.tiles(), scheme, 1, 2)
    with pytest.raises(ValueError, match="allowed are -1"):
        quantize(cache.tiles(), np.array([[0, 5]]), scheme=scheme, coded=coded)
    with pytest.raises(ValueError, match="codes are"):
        quantize(cache.tiles(), np.array([[0, 1, 2]]), scheme=scheme, coded=coded)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        quantize(cache.tiles(), np.array([[0, 1]]), scheme=scheme, coded=coded, impl="cuda")
    with pytest.raises(ValueError, match="not one of"):
        Scheme(code="int9", along="channels", group=32)
    with pytest.raises(ValueError, match="neither tokens nor channels"):
        Tiles(np.zeros((2, 3, 2, 8, 64), np.uint16)[..., ::2])


def test_fp8_tables_are_torchs():
    codes = np.arange(256, dtype=np.uint8)
    for code, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        want = torch.from_numpy(codes).view(dtype).float().numpy()
        np.testing.assert_array_equal(floats.decode_fp8(codes, code), want)
        values = np.random.default_rng(0).standard_normal(20000).astype(np.float32) * 10.0 ** np.linspace(-6, 2, 20000)
        values = values.clip(-floats.FP8_MAX[code], floats.FP8_MAX[code]).astype(np.float32)
        got = floats.encode_fp8(values, code)
        np.testing.assert_array_equal(got, torch.from_numpy(values).to(dtype).view(torch.uint8).numpy())


def test_16_bit_rounding_is_torchs():
    values = np.random.default_rng(0).standard_normal(20000).astype(np.float32)
    for name_, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        want = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(floats.encode16(values, name_), want)
        np.testing.assert_array_equal(floats.decode16(want, name_), torch.from_numpy(values).to(dtype).float().numpy())
