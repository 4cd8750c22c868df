"""The contract of every codec: a new file in workbench/codecs is held to it unasked."""

import itertools

import numpy as np
import pytest

from kernels.floats import decode16, encode16
from kernels.rope import angles_of
from workbench.codecs import CorruptDataError, codec_names, resolve_codec
from workbench.codecs.int8 import Int8
from workbench.codecs.raw import Raw
from workbench.errors import InvalidInputError, UnknownNameError
from workbench.layout import KVLayout
from workbench.testing_codecs import check_codec, sample_chunk, sample_layout

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
    "lossless(coder='rans')",
    "echo(step=1.0, sink_tokens=0)",
    "echo(rope_theta=10000.0)",
    "echo(focus=0)",
    "selected(kept_fraction=0.9, step=0.2)",
    "ecsq(rope_theta=None)",
    "cachegen(key_bins=(64, 32, 32))",
]
EVERY = [*codec_names(), *VARIANTS]
LOSSY = [spec for spec in EVERY if resolve_codec(spec).tolerance != 0]
VARIABLE = ("ecsq", "echo", "selected", "cachegen")


def numbers(chunk: np.ndarray, layout: KVLayout) -> list[np.ndarray]:
    return [decode16(np.ascontiguousarray(part), layout.dtype) for part in layout.keys_and_values(chunk)]


def round_trip(spec: str, chunk: np.ndarray, layout: KVLayout) -> tuple[bytes, np.ndarray]:
    codec, out = resolve_codec(spec), np.full_like(chunk, 0xAB)
    data = bytes(codec.encode(chunk, layout))
    codec.decode(data, layout, out)
    return data, out


@pytest.mark.parametrize("spec", EVERY)
def test_every_codec_keeps_the_contract(spec):
    check_codec(spec)


class Doubled(Raw):
    """Twice the bytes it said."""

    def encode(self, chunk, layout):
        return bytes(super().encode(chunk, layout)) * 2

    def decode(self, data, layout, out):
        super().decode(data[: len(data) // 2], layout, out)


class Rounded(Raw):
    """Not lossless, as it claims."""

    def encode(self, chunk, layout):
        return super().encode(chunk & 0xFE, layout)


class Greedy(Raw):
    """Clears the chunk it was given."""

    def encode(self, chunk, layout):
        data = bytes(super().encode(chunk, layout))
        chunk[...] = 0
        return data


class Restless(Raw):
    """Other bytes each time."""

    count = 0

    def encode(self, chunk, layout):
        Restless.count += 1
        return bytes(super().encode(chunk, layout)) + Restless.count.to_bytes(8)

    def decode(self, data, layout, out):
        super().decode(data[:-8], layout, out)

    def max_nbytes(self, layout):
        return super().max_nbytes(layout) + 8


class Careless(Raw):
    """Takes whatever comes."""

    def decode(self, data, layout, out):
        out[...] = np.resize(np.frombuffer(data, np.uint8) if len(data) else np.zeros(1, np.uint8), out.shape)


class Credulous(Int8):
    """Stores NaN as if it were a number."""

    def encode(self, chunk, layout):
        bits = chunk.view(np.uint16)
        special = (bits & 0x7F80) == 0x7F80 if layout.dtype == "bfloat16" else np.zeros(bits.shape, bool)
        return super().encode(np.where(special, np.uint16(0), bits).view(np.uint8), layout)


class Sloppy(Int8):
    """An error above its tolerance."""

    def decode(self, data, layout, out):
        super().decode(data, layout, out)
        layout.keys_and_values(out)[1][-1, 0, 0, 3] ^= 0x8000


@pytest.mark.parametrize(
    ("codec", "clause"),
    [
        (Doubled, "max_nbytes"),
        (Rounded, "tolerance"),
        (Greedy, "changed its input"),
        (Restless, "two encodes"),
        (Careless, "without a CorruptDataError"),
        (Credulous, "no UnrepresentableError"),
        (Sloppy, "tolerance"),
    ],
)
def test_the_contract_names_what_a_codec_broke(codec, clause):
    with pytest.raises(AssertionError, match=clause):
        check_codec(codec())


@pytest.mark.parametrize("spec", [spec for spec in LOSSY if not spec.startswith(VARIABLE)])
def test_declared_bits_are_the_bits(spec):
    layout = sample_layout()
    data, _ = round_trip(spec.replace("sink_tokens=4", "sink_tokens=0"), sample_chunk(layout), layout)
    codec = resolve_codec(spec.replace("sink_tokens=4", "sink_tokens=0"))
    assert len(data) * 8 / (layout.chunk_nbytes // 2) == codec.bits_per_value(layout)


def test_sinks_are_kept_whole_and_found_by_themselves():
    layout = sample_layout()
    chunk = sample_chunk(layout)
    for part in layout.keys_and_values(chunk):
        part[:, 0, :, 0] = encode16(decode16(np.ascontiguousarray(part[:, 0, :, 0]), "bfloat16") / 8, "bfloat16")
    for spec in ("int4", "ecsq", "echo", "rotated"):
        whole, out = round_trip(f"{spec}(sink_tokens=4)", chunk, layout)
        for got, want in zip(layout.keys_and_values(out), layout.keys_and_values(chunk), strict=True):
            np.testing.assert_array_equal(got[:, 0, :, :4], want[:, 0, :, :4])
        usual, _ = round_trip(f"{spec}(sink_tokens=4)", sample_chunk(layout), layout)
        assert len(usual) < len(whole), "a chunk without a sink pays for one"


def test_a_smaller_step_is_a_better_chunk_in_more_bytes():
    layout = sample_layout()
    chunk = sample_chunk(layout)
    sizes, errors = [], []
    for step in (1.6, 0.8, 0.4, 0.2):
        data, out = round_trip(f"ecsq(step={step})", chunk, layout)
        sizes.append(len(data) * 8 / (layout.chunk_nbytes / 2))
        errors.append(np.linalg.norm(numbers(out, layout)[0] - numbers(chunk, layout)[0]))
    assert all(b - a > 0.6 for a, b in itertools.pairwise(sizes)), sizes
    assert all(a / b > 1.7 for a, b in itertools.pairwise(errors)), errors


def test_an_echo_is_ecsq_in_fewer_bytes_where_tokens_recur():
    layout = sample_layout(num_layers=9, block_size=64)
    chunk, rng = np.zeros(layout.chunk_shape, np.uint8), np.random.default_rng(1)
    recurring = rng.integers(0, 40, layout.chunk_tokens)
    for part in layout.keys_and_values(chunk):
        layers, blocks, heads, tokens, size = part.shape
        of_token = rng.standard_normal((layers, heads, 40, size))[:, :, recurring]
        mixed = of_token + 0.3 * rng.standard_normal(of_token.shape)
        by_block = mixed.reshape(layers, heads, blocks, tokens, size).swapaxes(1, 2)
        part[...] = encode16(by_block.astype(np.float32), layout.dtype)
    plain, same = round_trip("ecsq(step=0.45)", chunk, layout)
    echo, out = round_trip("echo(rope_theta=0.0, focus=0)", chunk, layout)
    np.testing.assert_array_equal(out, same)
    assert len(echo) < 0.8 * len(plain)


def test_an_echo_is_finer_where_keys_are_loud():
    """Layers whose keys are 1/4, 1 and 1.3 times as loud as the median, at focus 2: steps 1.5, 1 and 1 / 1.69 times."""
    layout = sample_layout(num_layers=5, block_size=64)
    chunk, rng = np.zeros(layout.chunk_shape, np.uint8), np.random.default_rng(3)
    loudness = np.array([0.25, 1, 1, 1, 1.3], np.float32)[:, None, None, None, None]
    keys, values = layout.keys_and_values(chunk)
    keys[...] = encode16(rng.standard_normal(keys.shape, np.float32) * loudness, layout.dtype)
    values[...] = encode16(rng.standard_normal(values.shape, np.float32), layout.dtype)
    errors = {}
    for focus in (0, 2):
        _, out = round_trip(f"echo(rope_theta=0.0, sink_tokens=0, focus={focus}, step=0.5)", chunk, layout)
        errors[focus] = [np.sqrt(np.square(a - b).mean((1, 2, 3, 4)))
                         for a, b in zip(numbers(chunk, layout), numbers(out, layout), strict=True)]  # fmt: skip
    for with_focus, without in zip(errors[2], errors[0], strict=True):
        np.testing.assert_allclose(with_focus / without, [1.5, 1, 1, 1, 1 / 1.69], rtol=0.06)


def test_the_rotary_base_is_found():
    layout = sample_layout(block_size=64)
    chunk, rng = np.zeros(layout.chunk_shape, np.uint8), np.random.default_rng(2)
    keys, values = layout.keys_and_values(chunk)
    plain = rng.standard_normal(keys.shape) + 3 * rng.standard_normal((3, 1, 2, 1, 64))
    angles = angles_of(128, 64, 1e5).reshape(1, 2, 1, 64, 32)
    pairs = (plain[..., :32] + 1j * plain[..., 32:]) * np.exp(1j * angles)
    keys[...] = encode16(np.concatenate([pairs.real, pairs.imag], -1).astype(np.float32), layout.dtype)
    values[...] = encode16(rng.standard_normal(values.shape).astype(np.float32), layout.dtype)
    found, out = round_trip("ecsq(rope_theta=None)", chunk, layout)
    told, same = round_trip("ecsq(rope_theta=100000.0)", chunk, layout)
    np.testing.assert_array_equal(out, same)
    assert len(found) == len(told) + 8
    other = round_trip("ecsq(rope_theta=None)", sample_chunk(layout), layout)[1]
    np.testing.assert_array_equal(other, round_trip("ecsq", sample_chunk(layout), layout)[1])


@pytest.mark.parametrize("page_format", ["token-major", "vllm-cpu-vec", "opaque"])
@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(64, 256), (6, 18), (1, 3)])
def test_lossless_pages_of_any_size(page_format, block_size, chunk_tokens):
    sizes = {"block_size": block_size, "chunk_tokens": chunk_tokens, "head_size": 80}
    for dtype in ("bfloat16", "float16"):
        layout, codec = sample_layout(page_format, dtype, **sizes), resolve_codec("lossless")
        numbers_ = sample_chunk(sample_layout("token-major", dtype, **sizes))
        bits = np.random.default_rng(0).integers(0, 256, layout.chunk_shape, np.uint8)
        for chunk in (numbers_, bits):
            data, out = round_trip("lossless", chunk, layout)
            np.testing.assert_array_equal(out, chunk)
            assert len(data) <= codec.max_nbytes(layout)


def test_lossless_is_two_thirds_and_never_much_more_than_raw():
    sizes = {"num_layers": 2, "head_size": 128, "block_size": 128, "chunk_tokens": 256}
    for page_format in ("token-major", "vllm-cpu-vec"):
        layout = sample_layout(page_format, **sizes)
        chunk = sample_chunk(layout)
        assert chunk.nbytes / len(round_trip("lossless", chunk, layout)[0]) > 1.48
        bits = np.random.default_rng(0).integers(0, 256, chunk.shape, np.uint8)
        assert len(round_trip("lossless", bits, layout)[0]) < 1.01 * bits.nbytes
        assert resolve_codec("lossless").max_nbytes(layout) < 1.01 * layout.chunk_nbytes


def test_one_lossless_coder_refuses_what_another_wrote():
    layout, chunk = sample_layout(), sample_chunk(sample_layout())
    coders = [resolve_codec("lossless", coder=coder) for coder in ("levels", "rans", "zstd")]
    for writer, reader in itertools.permutations(coders, 2):
        with pytest.raises(CorruptDataError):
            reader.decode(bytes(writer.encode(chunk, layout)), layout, np.empty_like(chunk))


@pytest.mark.slow
def test_lossless_on_the_kv_of_a_real_model():
    pytest.importorskip("transformers")
    from experiments.benchmarks.codecs import real_chunk

    chunk, layout = real_chunk()
    data, out = round_trip("lossless", chunk, layout)
    np.testing.assert_array_equal(out, chunk)
    assert chunk.nbytes / len(data) >= 1.48


def test_names_and_parameters():
    known = {"raw", "lossless", "int8", "fp8", "int4", "kivi", "rotated", "turboquant", "cachegen", "ecsq", "echo"}
    assert known <= set(codec_names())
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


@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(64, 512), (6, 18), (1, 3)])
@pytest.mark.parametrize(
    "spec", ["echo(rope_theta=0.0, step=0.2, focus=0)", "selected(kept_fraction=1.0, rope_theta=0.0)"]
)
def test_an_echo_of_any_number_of_tokens(spec, block_size, chunk_tokens):
    layout = sample_layout(block_size=block_size, chunk_tokens=chunk_tokens, num_layers=5)
    data, out = round_trip(spec, sample_chunk(layout), layout)
    step = resolve_codec(spec).step
    np.testing.assert_array_equal(out, round_trip(f"ecsq(step={step})", sample_chunk(layout), layout)[1])
    assert len(data) <= resolve_codec(spec).max_nbytes(layout)
