"""Contract suite of codecs, also for a class of your own: `check_codec(MyCodec())`."""

from collections.abc import Iterator

import numpy as np

from kernels.floats import decode16, encode16
from workbench.codecs import Codec, CorruptDataError, UnrepresentableError, codec_names, resolve_codec
from workbench.errors import InvalidInputError
from workbench.layout import KVLayout

__all__ = ["check_codec", "sample_chunk", "sample_layout"]

_NOT_FINITE = (0x7FC0, 0x7F80, 0xFF80)  # bfloat16's NaN, infinity and its negative
_FARTHEST = 0.6  # relative error above which what comes back has little to do with the chunk


def sample_layout(page_format: str = "token-major", dtype: str = "bfloat16", **sizes: int) -> KVLayout:
    """A small layout; any size given replaces its own."""
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_size": 64, "block_size": 32, "chunk_tokens": 128}
    return KVLayout(page_format=page_format, dtype=dtype, **(shape | sizes))


def sample_chunk(layout: KVLayout, seed: int = 0) -> np.ndarray:
    """Keys with a mean a channel and loud channels, values without, as real ones have: `layout.chunk_shape` uint8."""
    rng = np.random.default_rng(seed)
    chunk = np.zeros(layout.chunk_shape, np.uint8)
    keys, values = layout.keys_and_values(chunk)
    loud = np.exp(rng.standard_normal((1, 1, keys.shape[2], 1, keys.shape[4])))
    key_numbers = (rng.standard_normal(keys.shape) + rng.standard_normal(loud.shape)) * loud
    keys[...] = encode16(key_numbers.astype(np.float32), layout.dtype)
    values[...] = encode16(rng.standard_normal(values.shape).astype(np.float32) * np.float32(0.3), layout.dtype)
    return chunk


def check_codec(spec: Codec | str, *, seed: int = 0) -> None:
    """Hold a codec to its contract. Raises AssertionError that names the clause.

    Every chunk comes back within the declared tolerance, in whole and in part, from both page formats and of other
    shapes; sizes keep to the declared most; encoding twice gives the same bytes and leaves its input alone; what cannot
    be kept (NaN, infinity, pages without a view of tokens) is refused by name, or kept whole by a lossless codec;
    damaged data is an error or other numbers, never a crash; the repr builds the codec again if it has a name here.

    Args:
        spec: A codec, or its name; see `workbench.codecs.resolve_codec`.
        seed: Of the numbers.
    """
    codec = resolve_codec(spec)
    if codec.name in codec_names():
        assert repr(resolve_codec(repr(codec))) == repr(codec), f"{codec!r} does not build the codec again"
    for layout in _layouts():
        _check_round_trip(codec, sample_chunk(layout, seed), layout)
    layout = sample_layout()
    for blocks in (1, 3):
        _check_round_trip(codec, sample_chunk(layout, seed)[:, :blocks].copy(), layout)
    if codec.tolerance == 0:
        _check_lossless(codec, seed)
    else:
        _check_refusals(codec, seed)
        _check_outlier(codec, seed)
    _check_damage(codec, seed)


def _layouts() -> Iterator[KVLayout]:
    for page_format in ("token-major", "vllm-cpu-vec"):
        for dtype in ("bfloat16", "float16"):
            yield sample_layout(page_format, dtype)
        yield sample_layout(page_format, head_size=96)
        yield sample_layout(page_format, block_size=16, num_kv_heads=1)


def _numbers(chunk: np.ndarray, layout: KVLayout) -> list[np.ndarray]:
    return [decode16(np.ascontiguousarray(part), layout.dtype) for part in layout.keys_and_values(chunk)]


def _round_trip(codec: Codec, chunk: np.ndarray, layout: KVLayout) -> tuple[bytes, np.ndarray]:
    out = np.full_like(chunk, 0xAB)
    data = bytes(codec.encode(chunk, layout))
    codec.decode(data, layout, out)
    return data, out


def _check_round_trip(codec: Codec, chunk: np.ndarray, layout: KVLayout) -> None:
    before = chunk.copy()
    data, out = _round_trip(codec, chunk, layout)
    assert np.array_equal(chunk, before), "encode changed its input"
    assert len(data) <= codec.max_nbytes(layout), f"{len(data)} bytes; max_nbytes is {codec.max_nbytes(layout)}"
    assert bytes(codec.encode(chunk, layout)) == data, "two encodes of one chunk differ"
    _check_close(codec, chunk, out, layout)
    for got, want in zip(_numbers(out, layout), _numbers(chunk, layout), strict=True):
        relative = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert relative <= _FARTHEST, f"a relative error of {relative:.2f}: it has little to do with the chunk"


def _check_close(codec: Codec, chunk: np.ndarray, out: np.ndarray, layout: KVLayout) -> None:
    if codec.tolerance is None:
        return
    for got, want in zip(_numbers(out, layout), _numbers(chunk, layout), strict=True):
        error = np.abs(got - want).max((1, 2, 3, 4)) / np.abs(want).max((1, 2, 3, 4))
        assert (error <= codec.tolerance).all(), (
            f"an error of {error.max():.4g}; the tolerance is {codec.tolerance:.4g}"
        )


def _check_lossless(codec: Codec, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = sample_layout(num_layers=1)
    every = np.resize(rng.permutation(1 << 16).astype(np.uint16), layout.chunk_nbytes // 2)
    cases = [(layout, every.view(np.uint8).reshape(layout.chunk_shape))]
    cases.append((layout, np.zeros(layout.chunk_shape, np.uint8)))
    for dtype in ("float32", "fp8_e4m3", "uint8", "bfloat16"):
        opaque = sample_layout("opaque", dtype)
        cases.append((opaque, rng.integers(0, 90, opaque.chunk_shape, dtype=np.uint8)))
    for layout, chunk in cases:
        data, out = _round_trip(codec, chunk, layout)
        assert np.array_equal(out, chunk), f"bits were lost of {layout.dtype} in {layout.page_format} pages"
        assert len(data) <= codec.max_nbytes(layout), "more bytes than max_nbytes"


def _check_refusals(codec: Codec, seed: int) -> None:
    for page_format, dtype in (("opaque", "bfloat16"), ("token-major", "fp8_e4m3")):
        layout = sample_layout(page_format, dtype)
        _check_raises(InvalidInputError, codec, np.zeros(layout.chunk_shape, np.uint8), layout)
    layout = sample_layout()
    for bits in _NOT_FINITE:
        for part in (0, 1):
            chunk = sample_chunk(layout, seed)
            layout.keys_and_values(chunk)[part][2, 1, 1, 7, 9] = bits
            _check_raises(UnrepresentableError, codec, chunk, layout)


def _check_raises(error: type[Exception], codec: Codec, chunk: np.ndarray, layout: KVLayout) -> None:
    try:
        codec.encode(chunk, layout)
    except error:
        return
    raise AssertionError(
        f"no {error.__name__} for {layout.dtype} in {layout.page_format} pages, or for NaN or infinity"
    )


def _check_outlier(codec: Codec, seed: int) -> None:
    """One value of 10^15 in one head: no crash, and every layer within its tolerance."""
    layout = sample_layout()
    chunk = sample_chunk(layout, seed)
    layout.keys_and_values(chunk)[0][1, 0, 0, 0, 0] = 0x5863  # 1e15
    _, out = _round_trip(codec, chunk, layout)
    assert all(np.isfinite(part).all() for part in _numbers(out, layout)), "an outlier became NaN or infinity"
    _check_close(codec, chunk, out, layout)


def _check_damage(codec: Codec, seed: int) -> None:
    layout = sample_layout(num_layers=1, num_kv_heads=1)
    out = np.zeros(layout.chunk_shape, np.uint8)
    data = bytes(codec.encode(sample_chunk(layout, seed), layout))
    for cut in (b"", data[: len(data) // 2], data[:-1], data[:-8], data + bytes(8)):
        try:
            codec.decode(cut, layout, out)
        except CorruptDataError:
            continue
        raise AssertionError(f"{len(cut)} of {len(data)} bytes were decoded without a CorruptDataError")
    rng = np.random.default_rng(seed)
    for _ in range(60):
        bad = bytearray(data)
        for place in rng.integers(0, min(len(bad), rng.choice([64, len(bad)])), 3):
            bad[place] ^= 1 << rng.integers(8)
        try:
            codec.decode(bytes(bad), layout, out)
        except CorruptDataError:
            pass  # noticed; other numbers are allowed, a crash or another error is not
