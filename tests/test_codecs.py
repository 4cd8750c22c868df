"""The contract of every codec: a new file in workbench/codecs is held to it unasked."""

import itertools

import numpy as np
import pytest

from kernels.floats import decode16, encode16
from workbench.codecs import CorruptDataError, UnrepresentableError, codec_names, resolve_codec
from workbench.errors import InvalidInputError, UnknownNameError
from workbench.layout import KVLayout

VARIANTS = [
    "kivi(bits=2)",
    "rotated(bits=3)",
    "rotated(bits=2, group=32)",
    "turboquant(bits=3)",
    "int8(keys='token')",
    "fp8(kind='e5m2')",
    "int4(sink_tokens=4)",
    "int4(group=32)",
    "ecsq(step=2.0, value_step=0.1)",
    "ecsq(sink_tokens=0)",
    "ecsq(rope_theta=10000.0)",
    "lossless(coder='zstd')",
    "cachegen(key_bins=(64, 32, 32))",
]
EVERY = [*codec_names(), *VARIANTS]
LOSSLESS = [spec for spec in EVERY if resolve_codec(spec).tolerance == 0]
LOSSY = [spec for spec in EVERY if spec not in LOSSLESS]
FORMATS = ("token-major", "vllm-cpu-vec")


def layout_of(page_format: str = "token-major", dtype: str = "bfloat16", **sizes) -> KVLayout:
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_size": 64, "block_size": 32, "chunk_tokens": 128}
    return KVLayout(page_format=page_format, dtype=dtype, **(shape | sizes))


def chunk_of(layout: KVLayout, seed: int = 0) -> np.ndarray:
    """Keys with a mean a channel and loud channels, values without, as real ones have."""
    rng = np.random.default_rng(seed)
    chunk = np.zeros(layout.chunk_shape, np.uint8)
    keys, values = layout.keys_and_values(chunk)
    loud = np.exp(rng.standard_normal((1, 1, *keys.shape[2:3], 1, keys.shape[4])))
    key_numbers = (rng.standard_normal(keys.shape) + rng.standard_normal(loud.shape)) * loud
    keys[...] = encode16(key_numbers.astype("f4"), layout.dtype)
    values[...] = encode16(rng.standard_normal(values.shape).astype("f4") * 0.3, layout.dtype)
    return chunk


def numbers(chunk: np.ndarray, layout: KVLayout) -> list[np.ndarray]:
    return [decode16(np.ascontiguousarray(part), layout.dtype) for part in layout.keys_and_values(chunk)]


def round_trip(spec: str, chunk: np.ndarray, layout: KVLayout) -> tuple[bytes, np.ndarray]:
    codec, out = resolve_codec(spec), np.full_like(chunk, 0xAB)
    data = bytes(codec.encode(chunk, layout))
    codec.decode(data, layout, out)
    return data, out


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("spec", EVERY)
def test_what_is_declared_is_kept(spec, page_format):
    for dtype in ("bfloat16", "float16") if spec in codec_names() else ("bfloat16",):
        layout = layout_of(page_format, dtype)
        chunk, codec = chunk_of(layout), resolve_codec(spec)
        before = chunk.copy()
        data, out = round_trip(spec, chunk, layout)
        np.testing.assert_array_equal(chunk, before, err_msg="encode changed its input")
        assert len(data) <= codec.max_nbytes(layout)
        assert bytes(codec.encode(chunk, layout)) == data, "two encodes differ"
        for got, want in zip(numbers(out, layout), numbers(chunk, layout), strict=True):
            error = np.abs(got - want).max((1, 2, 3, 4)) / np.abs(want).max((1, 2, 3, 4))
            assert codec.tolerance is None or (error <= codec.tolerance).all()
            relative = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert relative <= (0.6 if "2" in spec else 0.3), "numbers that have little to do with the chunk"


@pytest.mark.parametrize("spec", [spec for spec in LOSSY if not spec.startswith(("ecsq", "cachegen"))])
def test_declared_bits_are_the_bits(spec):
    layout = layout_of()
    data, _ = round_trip(spec.replace("sink_tokens=4", "sink_tokens=0"), chunk_of(layout), layout)
    codec = resolve_codec(spec.replace("sink_tokens=4", "sink_tokens=0"))
    assert len(data) * 8 / (layout.chunk_nbytes // 2) == codec.bits_per_value(layout)


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("spec", LOSSLESS)
def test_every_bit_pattern_survives(spec, page_format):
    layout = layout_of(page_format, num_layers=1)
    every = np.resize(np.random.default_rng(0).permutation(1 << 16).astype(np.uint16), layout.chunk_nbytes // 2)
    chunk = every.view(np.uint8).reshape(layout.chunk_shape)
    data, out = round_trip(spec, chunk, layout)
    np.testing.assert_array_equal(out, chunk)
    assert len(data) <= resolve_codec(spec).max_nbytes(layout)
    constant = np.zeros_like(chunk)
    np.testing.assert_array_equal(round_trip(spec, constant, layout)[1], constant)


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3", "uint8", "bfloat16"])
@pytest.mark.parametrize("spec", LOSSLESS)
def test_lossless_takes_any_dtype_and_page(spec, dtype):
    for page_format in ("opaque", "token-major"):
        layout = layout_of(page_format, dtype)
        chunk = np.random.default_rng(0).integers(0, 90, layout.chunk_shape, dtype=np.uint8)
        np.testing.assert_array_equal(round_trip(spec, chunk, layout)[1], chunk)


@pytest.mark.parametrize("spec", LOSSY)
def test_lossy_refuses_what_it_cannot_see_into(spec):
    for page_format, dtype in (("opaque", "bfloat16"), ("token-major", "fp8_e4m3")):
        layout = layout_of(page_format, dtype)
        with pytest.raises(InvalidInputError):
            resolve_codec(spec).encode(np.zeros(layout.chunk_shape, np.uint8), layout)


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("spec", LOSSY)
def test_nan_and_infinity_are_refused_by_name(spec, bits):
    layout = layout_of()
    for part in (0, 1):
        chunk = chunk_of(layout)
        layout.keys_and_values(chunk)[part][2, 1, 1, 7, 9] = bits
        with pytest.raises(UnrepresentableError, match="NaN or infinity"):
            resolve_codec(spec).encode(chunk, layout)


@pytest.mark.parametrize("spec", EVERY)
def test_part_of_a_chunk(spec):
    layout = layout_of()
    for blocks in (1, 3):
        chunk = chunk_of(layout)[:, :blocks].copy()
        _, out = round_trip(spec, chunk, layout)
        for got, want in zip(numbers(out, layout), numbers(chunk, layout), strict=True):
            assert np.linalg.norm(got - want) <= 0.6 * np.linalg.norm(want)


@pytest.mark.parametrize("spec", EVERY)
@pytest.mark.parametrize("sizes", [{"head_size": 96}, {"block_size": 16, "num_kv_heads": 1}], ids=["96", "16"])
def test_other_shapes(spec, sizes):
    for page_format in FORMATS:
        layout = layout_of(page_format, **sizes)
        chunk = chunk_of(layout)
        _, out = round_trip(spec, chunk, layout)
        for got, want in zip(numbers(out, layout), numbers(chunk, layout), strict=True):
            assert np.linalg.norm(got - want) <= 0.6 * np.linalg.norm(want)


@pytest.mark.parametrize("spec", EVERY)
def test_damaged_data_is_an_error_or_other_numbers_never_a_crash(spec):
    layout = layout_of(num_layers=1, num_kv_heads=1)
    codec, out = resolve_codec(spec), np.zeros(layout.chunk_shape, np.uint8)
    data = bytes(codec.encode(chunk_of(layout), layout))
    for cut in (b"", data[: len(data) // 2], data[:-1], data[:-8], data + bytes(8)):
        with pytest.raises(CorruptDataError):
            codec.decode(cut, layout, out)
    rng = np.random.default_rng(0)
    for _ in range(60):
        bad = bytearray(data)
        for place in rng.integers(0, min(len(bad), rng.choice([64, len(bad)])), 3):
            bad[place] ^= 1 << rng.integers(8)
        try:
            codec.decode(bytes(bad), layout, out)
        except CorruptDataError:
            pass


@pytest.mark.parametrize("spec", LOSSY)
def test_an_extreme_outlier_widens_nobodys_bytes(spec):
    """One value of 10^15 in one head: no crash, and other layers as before."""
    layout = layout_of()
    chunk = chunk_of(layout)
    layout.keys_and_values(chunk)[0][1, 0, 0, 0, 0] = 0x5863  # 1e15
    _, out = round_trip(spec, chunk, layout)
    codec = resolve_codec(spec)
    for got, want in zip(numbers(out, layout), numbers(chunk, layout), strict=True):
        assert np.isfinite(got).all()
        if codec.tolerance is not None:
            assert (np.abs(got - want).max((1, 2, 3, 4)) <= codec.tolerance * np.abs(want).max((1, 2, 3, 4))).all()


def test_sinks_are_kept_whole_and_found_by_themselves():
    layout = layout_of()
    chunk = chunk_of(layout)
    for part in layout.keys_and_values(chunk):
        part[:, 0, :, 0] = encode16(decode16(np.ascontiguousarray(part[:, 0, :, 0]), "bfloat16") / 8, "bfloat16")
    for spec in ("int4", "ecsq", "rotated"):
        whole, out = round_trip(f"{spec}(sink_tokens=4)", chunk, layout)
        for got, want in zip(layout.keys_and_values(out), layout.keys_and_values(chunk), strict=True):
            np.testing.assert_array_equal(got[:, 0, :, :4], want[:, 0, :, :4])
        usual, _ = round_trip(f"{spec}(sink_tokens=4)", chunk_of(layout), layout)
        assert len(usual) < len(whole), "a chunk without a sink pays for one"


def test_a_smaller_step_is_a_better_chunk_in_more_bytes():
    layout = layout_of()
    chunk = chunk_of(layout)
    sizes, errors = [], []
    for step in (1.6, 0.8, 0.4, 0.2):
        data, out = round_trip(f"ecsq(step={step})", chunk, layout)
        sizes.append(len(data) * 8 / (layout.chunk_nbytes / 2))
        errors.append(np.linalg.norm(numbers(out, layout)[0] - numbers(chunk, layout)[0]))
    assert all(b - a > 0.6 for a, b in itertools.pairwise(sizes)), sizes
    assert all(a / b > 1.7 for a, b in itertools.pairwise(errors)), errors


def test_names_and_parameters():
    assert {"raw", "lossless", "int8", "fp8", "int4", "kivi", "rotated", "turboquant", "cachegen", "ecsq"} <= set(
        codec_names()
    )
    for spec in EVERY:
        codec = resolve_codec(spec)
        assert repr(resolve_codec(repr(codec))) == repr(codec), "a repr that does not build the codec again"
        assert resolve_codec(codec) is codec
    assert repr(resolve_codec("int4(group=64)")) == "int4" and repr(resolve_codec("int4", group=32)) == "int4(group=32)"
    with pytest.raises(UnknownNameError, match="int8"):
        resolve_codec("int9")
    for spec in ("int4(32)", "int4(group=", "int4(group=open('x'))", "int4(size=3)", "kivi(bits=3)", "ecsq(step=0)"):
        with pytest.raises(InvalidInputError):
            resolve_codec(spec)
