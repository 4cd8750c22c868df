"""Exponents in levels: the same bytes everywhere, every pattern back, near the entropy, damage noticed or harmless."""

import ctypes
import hashlib
import mmap
import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.exponents import (
    LEVELS,
    SYMBOLS,
    WHOLE,
    capacity_nbytes,
    coded_nbytes,
    decode_exponents,
    encode_exponents,
)
from kernels.floats import encode16
from kernels.threads import thread_limit

HOST = llvmlite.binding.get_host_cpu_features()
SHAPES = [  # layers, heads, blocks, outer, channels, run
    (2, 3, 2, 1, 64, 128),  # keys of vllm-cpu-vec pages
    (1, 2, 2, 32, 64, 1),  # its values
    (1, 2, 3, 16, 160, 1),  # token-major
    (2, 1, 2, 1, 1, 700),  # opaque
    (2, 1, 3, 3, 5, 7),
    (1, 1, 2, 1, 96, 5),
    (1, 1, 1, 1, 1, 3),
    (1, 1, 2, 1, 1, 64),
    (1, 2, 0, 4, 8, 1),
    (0, 2, 1, 4, 8, 1),
]
KINDS = ["numbers", "loud", "bits", "zeros", "half zeros"]


def sample(kind: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "bits":
        return rng.integers(0, 1 << 16, shape).astype(np.uint16)
    numbers = rng.standard_normal(shape).astype(np.float32)
    if kind == "loud":
        numbers *= np.exp(2 * rng.standard_normal((*shape[:2], 1, 1, shape[4], 1))).astype(np.float32)
    if kind.endswith("zeros"):
        numbers *= rng.random(shape) < (0.5 if kind == "half zeros" else 0)
    return encode16(numbers, dtype)


def room(shape: tuple[int, ...], dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    heads = shape[:2]
    return {
        "rest": np.full(shape, 0xEE, np.uint8),
        "bases": np.full((*heads, shape[4]), 0xEE, np.uint8),
        "symbols": np.full((*heads, SYMBOLS), 0xEE, np.uint8),
        "left": np.full((*heads, LEVELS), 0xEE, np.uint32),
        "codes": np.full(capacity_nbytes(shape, dtype), 0xEE, np.uint8),
    }


def encoded(values: np.ndarray, dtype: str = "bfloat16", impl: str = "numba") -> dict[str, np.ndarray]:
    arrays = room(values.shape, dtype)
    nbytes = encode_exponents(values, **arrays, dtype=dtype, impl=impl)
    return arrays | {"codes": arrays["codes"][:nbytes]}


def decoded(arrays: dict[str, np.ndarray], dtype: str = "bfloat16", impl: str = "numba") -> np.ndarray:
    out = np.full(arrays["rest"].shape, 0xEEEE, np.uint16)
    decode_exponents(out, **arrays, dtype=dtype, impl=impl)
    return out


def assert_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_implementation_gives_the_references_bytes_and_values(shape, kind, dtype):
    values = sample(kind, shape, dtype)
    want = encoded(values, dtype, "reference")
    for impl in encode_exponents.impls:
        assert_equal(encoded(values, dtype, impl), want)
        np.testing.assert_array_equal(decoded(want, dtype, impl), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_pattern_comes_back(dtype):
    every = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    for shape in ((1, 2, 2, 1, 128, 128), (1, 1, 4, 128, 128, 1), (1, 1, 1, 1, 1, 1 << 16)):
        values = every.reshape(shape)
        for impl in encode_exponents.impls:
            np.testing.assert_array_equal(decoded(encoded(values, dtype, impl), dtype, impl), values)
    # With an exponent that is as common as can be, so that the others go through every level.
    values = np.where(np.arange(1 << 18) % 4, np.uint16(0x3F80), np.repeat(every, 4)).reshape(1, 1, 4, 1, 512, 128)
    arrays = encoded(values, dtype)
    assert arrays["left"].max() < WHOLE and arrays["left"][..., -1] > 1000
    np.testing.assert_array_equal(decoded(arrays, dtype), values)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_values_of_any_shape_come_back(data):
    heads, blocks, outer, channels, run = (data.draw(st.integers(1, most)) for most in (2, 3, 4, 9, 70))
    size = heads * blocks * outer * channels * run
    few = data.draw(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40))
    dtype = data.draw(st.sampled_from(["bfloat16", "float16"]))
    places = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, len(few), size)
    values = np.array(few, np.uint16)[places].reshape(1, heads, blocks, outer, channels, run)
    want = encoded(values, dtype, "reference")
    assert_equal(encoded(values, dtype), want)
    for impl in decode_exponents.impls:
        np.testing.assert_array_equal(decoded(want, dtype, impl), values)


def test_views_of_pages_are_enough():
    """Keys and values of a page apart, as a codec hands them over, and nothing beside them is touched."""
    pages = sample("loud", (2, 3, 2, 1, 2 * 64 * 16, 1), "bfloat16").reshape(2, 2, 3, 2, 1024)
    keys = pages.swapaxes(1, 2)[:, :, :, 0].reshape(2, 3, 2, 1, 64, 16)
    assert keys.base is not None and not keys.flags.c_contiguous
    rest = np.full(pages.shape, 0xEE, np.uint8)
    arrays = room(keys.shape) | {"rest": rest.swapaxes(1, 2)[:, :, :, 0].reshape(keys.shape)}
    nbytes = encode_exponents(keys, **arrays)
    assert_equal(arrays | {"codes": arrays["codes"][:nbytes]}, encoded(np.ascontiguousarray(keys)))
    assert (rest.swapaxes(1, 2)[:, :, :, 1] == 0xEE).all()
    out = np.full_like(pages, 0xEEEE)
    target = out.swapaxes(1, 2)[:, :, :, 0].reshape(keys.shape)
    decode_exponents(target, **arrays | {"codes": arrays["codes"][:nbytes]})
    np.testing.assert_array_equal(target, keys)
    assert (out.swapaxes(1, 2)[:, :, :, 1] == 0xEEEE).all()


def test_threads_change_no_byte():
    values = sample("loud", (4, 5, 2, 1, 64, 128), "bfloat16")
    with thread_limit(1):
        want = encoded(values)
    with thread_limit(3):
        assert_equal(encoded(values), want)
        np.testing.assert_array_equal(decoded(want), values)


def test_size_is_near_the_entropy_of_each_channel():
    values = sample("loud", (1, 4, 2, 1, 64, 128), "bfloat16")
    arrays = encoded(values)
    exponents = (values >> 7 & 0xFF)[0].transpose(0, 3, 1, 2, 4).reshape(4 * 64, -1)
    entropy = 0.0
    for channel in exponents:
        share = np.bincount(channel, minlength=256) / channel.size
        entropy -= (share[share > 0] * np.log2(share[share > 0])).sum() / len(exponents)
    bits = 8 * (arrays["codes"].size + sum(arrays[n].nbytes for n in ("bases", "symbols", "left"))) / values.size
    assert entropy < bits < 1.1 * entropy, (bits, entropy)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_cannot_be_coded_is_stored_in_its_own_size(dtype):
    values = sample("bits", (2, 2, 2, 1, 64, 50), dtype)
    arrays = encoded(values, dtype)
    assert (arrays["left"][..., 0] == WHOLE).all() or dtype == "float16"
    assert arrays["codes"].size <= values.size


def behind_a_wall(array: np.ndarray) -> np.ndarray:
    """A copy whose last byte is the last of a page that no readable page follows."""
    pages = -(-max(array.nbytes, 1) // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + pages * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    end = pages * mmap.PAGESIZE
    copy = np.frombuffer(memory, np.uint8)[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def decode_damaged_behind_walls(seed: int = 0) -> None:
    """Run in a process of its own: a read or write outside of any array ends it."""
    rng = np.random.default_rng(seed)
    noticed = 0
    for shape in ((1, 2, 2, 1, 64, 128), (1, 1, 3, 3, 5, 7), (1, 2, 1, 16, 128, 1)):
        for kind in KINDS:
            values = sample(kind, shape, "bfloat16")
            good = encoded(behind_a_wall(values))
            arrays = {name: behind_a_wall(array) for name, array in good.items()}
            out = behind_a_wall(np.zeros(shape, np.uint16))
            decode_exponents(out, **arrays)
            np.testing.assert_array_equal(out, values)
            for _ in range(60):
                name = rng.choice(["bases", "symbols", "left", "codes", "codes"])
                array = arrays[name].reshape(-1).view(np.uint8)
                places = rng.integers(0, array.size, rng.integers(1, 5))
                before = array[places].copy()
                array[places] ^= rng.integers(1, 256, len(places)).astype(np.uint8)
                try:
                    decode_exponents(out, **arrays)
                except ValueError:
                    noticed += 1
                array[places[::-1]] = before[::-1]
    print("noticed", noticed)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **environment},
    )


def test_damage_never_leads_out_of_an_array():
    result = python("import test_kernel_exponents as t; t.decode_damaged_behind_walls()")
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.split()[-1]) > 200


@pytest.mark.parametrize("impl", decode_exponents.impls)
def test_damage_to_the_words_is_noticed_where_it_moves_what_was_left(impl):
    values = sample("numbers", (1, 1, 2, 1, 64, 128), "bfloat16")
    good = encoded(values)
    for level in range(LEVELS - 1):
        bad = good | {"symbols": good["symbols"].copy(), "left": good["left"].copy()}
        bad["left"][0, 0, level + 1] -= 1
        missing = good["codes"].size - int(coded_nbytes(bad["left"], values.shape).sum())
        bad["codes"] = good["codes"][: good["codes"].size - missing]
        with pytest.raises(ValueError, match="not what was encoded"):
            decoded(bad, impl=impl)
    word = int.from_bytes(good["codes"][:8].tobytes(), "little") ^ int.from_bytes(good["codes"][8:16], "little")
    one_sided = np.flatnonzero([word >> i & 1 for i in range(64)])[0]
    bad = good | {"codes": good["codes"].copy()}
    for first in (0, 8):  # a difference more is left
        bad["codes"][first + one_sided // 8] |= 1 << one_sided % 8
    with pytest.raises(ValueError, match="not what was encoded"):
        decoded(bad, impl=impl)


def test_numbers_left_that_cannot_be_are_refused():
    values = sample("numbers", (1, 1, 2, 1, 64, 128), "bfloat16")
    good = encoded(values)
    for left in ([20000, 1, 1, 1], [10, 11, 1, 1], [WHOLE, 1, 0, 0], [5, 4, 3, WHOLE]):
        with pytest.raises(ValueError, match="leaves more"):
            decoded(good | {"left": np.array(left, np.uint32).reshape(1, 1, LEVELS)})


def test_bad_arguments_are_refused():
    values = sample("numbers", (1, 1, 2, 1, 64, 16), "bfloat16")
    arrays, good = room(values.shape), encoded(values)
    for change, message in (
        ({"codes": arrays["codes"][1:]}, "have room for"),
        ({"bases": arrays["bases"][..., 1:]}, "bases are"),
        ({"left": arrays["left"].astype(np.int32)}, "left are int32"),
        ({"rest": arrays["rest"][..., 1:]}, "one 6-dimensional shape"),
        ({"dtype": "float32"}, "dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_exponents(values, **arrays | change)
    with pytest.raises(ValueError, match="no gaps"):
        encode_exponents(values.repeat(2, -1)[..., ::2], **arrays)
    with pytest.raises(ValueError, match="backwards"):
        encode_exponents(values[:, :, ::-1], **arrays)
    with pytest.raises(ValueError, match="bytes of codes"):
        decoded(good | {"codes": good["codes"][:-1]})


def digest_of_everything() -> str:
    digest = hashlib.sha256()
    for dtype in ("bfloat16", "float16"):
        for kind in KINDS:
            values = sample(kind, (2, 2, 2, 1, 33, 70), dtype)
            arrays = encoded(values, dtype)
            np.testing.assert_array_equal(decoded(arrays, dtype), values)
            for name in sorted(arrays):
                digest.update(arrays[name].tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("cpu", "features"), [("x86-64", ""), ("haswell", "+avx2,+bmi,+bmi2,+popcnt")], ids=["plain", "bmi2"]
)
@pytest.mark.skipif(not HOST.get("bmi2"), reason="code for x86 CPUs with BMI2 does not run here")
def test_a_lesser_cpu_gives_the_same_bytes(cpu, features, tmp_path):
    code = "import test_kernel_exponents as t; print(t.digest_of_everything())"
    choice = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    result = python(code, **choice)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split()[-1] == digest_of_everything()
