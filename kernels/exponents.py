"""The exponents of 16-bit floats in levels of two bits, everything else as it is: lossless, and in whole vectors.

    encode_exponents(values, rest=..., bases=..., symbols=..., left=..., codes=...) -> bytes of codes
    decode_exponents(values, rest=..., bases=..., symbols=..., left=..., codes=...)    values <- the others

values   (layers, heads, blocks, outer, channels, run) uint16, the last three dimensions without gaps
rest     of the same shape, uint8, the last three without gaps: the low byte of the value rotated left by one
bases    (layers, heads, channels) uint8: the mean exponent of a channel plus 3/4, rounded down
symbols  (layers, heads, 12) uint8: the commonest differences (base - exponent) mod 256, three a level
left     (layers, heads, 4) uint32: how many differences are none of the symbols up to each level; or `WHOLE`, 0, 0, 0
codes    (bytes,) uint8: `capacity_nbytes` to encode into, `coded_nbytes(left)` of all heads to decode
dtype    "bfloat16" or "float16"

The differences of one (layer, head), in memory order, are cut into groups of 64; the last of a block may be shorter.
In the first level a group is two words of 64 bits, value i in bit i of each, the low bit in the first word: 0, 1 and 2
are the level's symbols, 3 is a difference left to the next level. A float16 has three more words a group: the mantissa
bits in its high byte. What the first level leaves, side by side, is the second level, and so on to the fourth; what
that leaves follows as bytes. Where the high bytes of the rotated values are shorter than all this, they are the codes.
Words are little-endian, bits of values that a group lacks are zero. Symbols are counted in about 32 of a head's groups:
every n-th of a block, n being a 32nd of them all, made odd so that no half of the channels is left out.

A code by levels: N. Brisaboa, S. Ladra, G. Navarro, "DACs: Bringing direct access to variable-length codes"
(Information Processing & Management 49, 2013).
"""

import math

import numpy as np

from kernels.dispatch import dispatch

__all__ = ["LEVELS", "SYMBOLS", "WHOLE", "capacity_nbytes", "coded_nbytes", "decode_exponents", "encode_exponents"]

GROUP = 64
WORD_NBYTES = GROUP // 8
LEVELS = 4
SYMBOLS = 3 * LEVELS
SAMPLED = 32  # groups of a head whose differences are counted
WHOLE = 0xFFFFFFFF


def mantissa_bits(dtype: str) -> int:
    """Bits of the mantissa in the high byte of a rotated value."""
    return {"bfloat16": 0, "float16": 3}[dtype]


def _num_groups(shape: tuple[int, ...]) -> int:
    """Groups of one (layer, head) of values of that shape."""
    return shape[2] * -(-math.prod(shape[3:]) // GROUP)


def head_capacity(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of codes that one (layer, head) needs at most: no level has more groups than the first."""
    return _num_groups(shape) * (2 * LEVELS + mantissa_bits(dtype)) * WORD_NBYTES


def capacity_nbytes(shape: tuple[int, ...], dtype: str = "bfloat16") -> int:
    """Bytes that codes of values of that shape need while they are written; done, they are at most one a value."""
    return shape[0] * shape[1] * head_capacity(shape, dtype)


def coded_nbytes(left: np.ndarray, shape: tuple[int, ...], dtype: str = "bfloat16") -> np.ndarray:
    """(layers, heads) int64: bytes of codes of each (layer, head) of values of that shape.

    Raises:
        ValueError: More is left than there was.
    """
    count, left = math.prod(shape[2:]), left.astype(np.int64)
    whole = left[..., 0] == WHOLE
    before = np.concatenate([np.full_like(left[..., :1], count), left[..., :-1]], axis=-1)
    if not np.where(whole, (left[..., 1:] == 0).all(-1), (left <= before).all(-1)).all():
        raise ValueError(f"a level leaves more than it has, of {count} values: it is not what was encoded")
    groups = -(-left[..., :-1] // GROUP)
    words = _num_groups(shape) * (2 + mantissa_bits(dtype)) + 2 * groups.sum(-1)
    return np.where(whole, count, words * WORD_NBYTES + left[..., -1])


def _check(values: np.ndarray, *, rest, bases, symbols, left, codes, dtype: str = "bfloat16") -> None:
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r} is not bfloat16 or float16")
    if values.ndim != 6 or rest.shape != values.shape:
        raise ValueError(f"values {values.shape} and rest {rest.shape} must be of one 6-dimensional shape")
    sizes = {"bases": values.shape[4], "symbols": SYMBOLS, "left": LEVELS}
    for name, array in (("bases", bases), ("symbols", symbols), ("left", left)):
        if array.shape != (*values.shape[:2], sizes[name]) or not array.flags.c_contiguous:
            raise ValueError(f"{name} are {array.shape}; they must be contiguous {(*values.shape[:2], sizes[name])}")
    kinds = {"values": values, "rest": rest, "bases": bases, "symbols": symbols, "left": left, "codes": codes}
    for name, array in kinds.items():
        kind = {"values": np.uint16, "left": np.uint32}.get(name, np.uint8)
        if array.dtype != kind:
            raise ValueError(f"{name} are {array.dtype}; they must be {np.dtype(kind)}")
    if values.size and not (values[0, 0, 0].flags.c_contiguous and rest[0, 0, 0].flags.c_contiguous):
        raise ValueError("the last three dimensions of values and of rest must have no gaps")
    if min(*values.strides, *rest.strides) < 0:
        raise ValueError("values and rest must not run backwards")
    if codes.ndim != 1 or not codes.flags.c_contiguous:
        raise ValueError(f"codes are {codes.shape}; they must be contiguous, of one dimension")


def _check_encode(values: np.ndarray, *, codes: np.ndarray, dtype: str = "bfloat16", **arrays: np.ndarray) -> None:
    _check(values, codes=codes, dtype=dtype, **arrays)
    if codes.size < capacity_nbytes(values.shape, dtype):
        raise ValueError(f"codes have room for {codes.size} bytes; {capacity_nbytes(values.shape, dtype)} are needed")


def _check_decode(
    values: np.ndarray, *, left: np.ndarray, codes: np.ndarray, dtype: str = "bfloat16", **arrays: np.ndarray
) -> None:
    _check(values, left=left, codes=codes, dtype=dtype, **arrays)
    expected = int(coded_nbytes(left, values.shape, dtype).sum())
    if codes.size != expected:
        raise ValueError(f"{codes.size} bytes of codes; {expected} were expected")


def _encode_exponents_reference(
    values: np.ndarray, *, rest, bases, symbols, left, codes, dtype: str = "bfloat16"
) -> int:
    extra, end = mantissa_bits(dtype), 0
    for place in np.ndindex(values.shape[:2]):
        rotated = (values[place] << 1) | (values[place] >> 15)
        rest[place], high = rotated & 0xFF, (rotated >> 8).astype(np.uint8)
        exponents = high >> extra
        count = max(1, exponents.size // max(1, exponents.shape[2]))
        bases[place] = (4 * exponents.sum((0, 1, 3), dtype=np.int64) + 3 * count) // (4 * count)
        differences, there = _grouped(bases[place][:, None] - exponents)
        apart = math.prod(there.shape[:2]) // SAMPLED | 1
        counts = np.bincount(differences[:, ::apart][there[:, ::apart]], minlength=256)
        symbols[place] = np.argsort(-counts, kind="stable")[:SYMBOLS]
        parts, left[place] = _levels(differences, there, symbols[place], _grouped(high)[0], extra)
        if sum(map(len, parts)) > high.size:
            parts, left[place] = [high.reshape(-1)], (WHOLE, 0, 0, 0)
        for part in parts:
            codes[end : end + len(part)] = part
            end += len(part)
    return end


def _grouped(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(blocks, ...) as (blocks, groups, 64) with zeros at the end, and where there is a value."""
    lines = values.reshape(len(values), math.prod(values.shape[1:]))
    missing = ((0, 0), (0, -lines.shape[1] % GROUP))
    shape = (len(lines), -1, GROUP) if lines.size else (len(lines), 0, GROUP)
    there = np.pad(np.ones(lines.shape, bool), missing)
    return np.pad(lines, missing).reshape(shape), there.reshape(shape)


def _levels(
    differences: np.ndarray, there: np.ndarray, symbols: np.ndarray, high: np.ndarray, extra: int
) -> tuple[list[np.ndarray], list[int]]:
    """(bytes of each level and of what is left after all, how many each level leaves)."""
    parts, left = [], []
    for level in range(LEVELS):
        first, second, third = (differences == symbol for symbol in symbols[3 * level : 3 * level + 3])
        others = there & ~(first | second | third)
        words = [there & (second | others), there & (third | others)]
        if level == 0:
            words += [there & (high >> i & 1 > 0) for i in range(extra)]
        parts.append(np.packbits(np.stack(words, axis=-2), axis=-1, bitorder="little").reshape(-1))
        left.append(int(others.sum()))
        rest = differences[others]
        differences, there = _grouped(rest[None])
    return [*parts, rest], left


def _decode_exponents_reference(
    values: np.ndarray, *, rest, bases, symbols, left, codes, dtype: str = "bfloat16"
) -> None:
    extra, shape, end = mantissa_bits(dtype), values.shape[2:], 0
    _, there = _grouped(np.zeros(shape, np.uint8))
    for place, nbytes in np.ndenumerate(coded_nbytes(left, values.shape, dtype)):
        own, end = codes[end : end + nbytes], end + nbytes
        if left[place][0] == WHOLE:
            high = own.reshape(shape)
        else:
            differences, mantissa = _join_levels(own, there, symbols[place], left[place], extra)
            exponents = bases[place][:, None] - differences.reshape(shape)
            high = exponents << extra | mantissa.reshape(shape)
        rotated = high.astype(np.uint16) << 8 | rest[place]
        values[place] = (rotated >> 1) | (rotated << 15)


def _join_levels(
    codes: np.ndarray, there: np.ndarray, symbols: np.ndarray, left: np.ndarray, extra: int
) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `_levels`: the differences, and the bits of the mantissa, where there is a value."""
    levels, begin = [], 0
    for level in range(LEVELS):
        words = 2 + extra * (level == 0)
        if level:
            _, there = _grouped(np.zeros((1, left[level - 1]), np.uint8))
        nbytes = there.size // 8 * words
        bits = np.unpackbits(codes[begin : begin + nbytes].reshape(-1, words, WORD_NBYTES), axis=-1, bitorder="little")
        levels.append(bits.swapaxes(1, 2)[there.reshape(-1, GROUP)])
        begin += nbytes
    found = codes[begin:]
    for level, bits in reversed(list(enumerate(levels))):
        which = bits[:, 0] | bits[:, 1] << 1
        if (which == 3).sum() != len(found):
            raise ValueError(f"level {level} leaves another number than was said: it is not what was encoded")
        whole = np.append(symbols[3 * level : 3 * level + 3], np.uint8(0))[which]
        whole[which == 3] = found
        found = whole
    return found, (levels[0][:, 2:] << np.arange(extra, dtype=np.uint8)).sum(1, dtype=np.uint8)


encode_exponents = dispatch(
    _encode_exponents_reference, check=_check_encode, numba="kernels.exponents_numba:encode_exponents"
)
decode_exponents = dispatch(
    _decode_exponents_reference, check=_check_decode, numba="kernels.exponents_numba:decode_exponents"
)
