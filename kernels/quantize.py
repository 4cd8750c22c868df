"""Quantise paged KV while gathering it, and dequantise it while scattering it back. One launch for many chunks.

    quantize(tiles, blocks, scheme=..., coded=coded)      codes, scales, zeros <- tiles of blocks
    dequantize(tiles, blocks, scheme=..., coded=coded)    tiles of blocks <- codes, scales, zeros

tiles   `Tiles` of 16-bit values (K or V of L layers)
blocks  (m, n) int64: the n blocks of m chunks; -1 = skip (its codes, or its page, are left as they are)
scheme  how values become codes; a group shares one scale, along the channels of a token or the tokens of a channel

A group along tokens may span several blocks of a chunk. With x a value, s the group's scale, z its zero, Q the
largest code, and every step rounded to float32 (no fused multiply-add):

    int8                    s = up(max|x| / 127)           code = rne(x * (1/s))         x' = code * s
    e4m3, e5m2              s = up(max|x| / largest)       code = fp8(x * (1/s))         x' = code * s
    uint8, uint4/3/2        s = up((max x - min x) / Q)    code = rne((x - z) * (1/s))   x' = code * s + z,  z = min x

`up` rounds to the next bfloat16 above, so no code can exceed its range and none is clipped; zeros keep the dtype of
the values, exactly. x' is rounded to the dtype. A group that holds NaN or infinity (or spans more than float32 does)
gets a scale that is not finite, and unspecified codes: `has_unrepresentable` finds it.

codes   (m, L, n, H, rows, columns * bits / 8) uint8, tiles in memory order, rows packed in halves, quarters (eighths):
        4 bits: byte j = q[j] | q[j + C/2] << 4; 2 bits: quarters; 3 bits: C/4 bytes of the low two bits in quarters,
        then C/8 bytes of the third bit in eighths
scales  bfloat16 bits, uint16. Groups along a row (of the tile in memory order): (m, L, n/span, H, rows, groups);
        groups down the columns: (m, L, n/span, H, groups, columns)
zeros   like scales, bits of the dtype; empty for the symmetric schemes
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kernels.dispatch import dispatch
from kernels.floats import (
    EXPONENT_MASK,
    FP8_MAX,
    decode16,
    decode_fp8,
    encode16,
    encode_fp8,
    order_key,
    round_up_bf16,
)
from kernels.tiles import Tiles

__all__ = [
    "CODES",
    "Coded",
    "Scheme",
    "allocate",
    "dequantize",
    "has_unrepresentable",
    "pack",
    "quantize",
    "shapes",
    "unpack",
]

# Bits of one code.
CODES = {"int8": 8, "e4m3": 8, "e5m2": 8, "uint8": 8, "uint4": 4, "uint3": 3, "uint2": 2}
# Scales below this are raised to it, so that 1/s stays finite: groups of (nearly) equal values.
SMALLEST_SCALE = np.float32(2.0**-100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How values become codes.

    Args:
        code: A key of `CODES`. int8, e4m3 and e5m2 are symmetric; the others have a zero.
        along: "channels": a group is `group` channels of one token and head. "tokens": `group` tokens of one channel.
        group: Values that share a scale. Along channels it divides the head size. Along tokens it divides the block
            size, or is a multiple of it.
        dtype: Of the values: "bfloat16" or "float16".

    Raises:
        ValueError: A name that is not allowed.
    """

    code: str
    along: str
    group: int
    dtype: str = "bfloat16"

    def __post_init__(self):
        for got, allowed in ((self.code, CODES), (self.along, ("channels", "tokens")), (self.dtype, EXPONENT_MASK)):
            if got not in allowed:
                raise ValueError(f"{got!r} is not one of {', '.join(allowed)}")

    @property
    def bits(self) -> int:
        return CODES[self.code]

    @property
    def has_zeros(self) -> bool:
        return self.code.startswith("uint")


class Coded(NamedTuple):
    """What `quantize` writes and `dequantize` reads; see the module for shapes."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


class Grouping(NamedTuple):
    """How a scheme's groups lie in tiles.

    Attributes:
        along_rows: Groups run along a row (contiguous); else down the columns.
        length: Values of a group inside one tile.
        span: Consecutive blocks of a chunk that a group runs over.
    """

    along_rows: bool
    length: int
    span: int


def grouping(tiles: Tiles, scheme: Scheme, num_blocks: int) -> Grouping:
    """Where the groups lie; ValueError where the scheme's group does not fit the tiles."""
    extent = tiles.head_size if scheme.along == "channels" else tiles.block_size
    length, span = min(scheme.group, extent), max(1, scheme.group // extent)
    if length < 1 or extent % length or scheme.group != length * span:
        raise ValueError(f"a group of {scheme.group} {scheme.along} neither divides {extent} nor is a multiple of it")
    if span > 1 and (scheme.along == "channels" or num_blocks % span):
        raise ValueError(f"a group of {scheme.group} {scheme.along} does not fit {num_blocks} blocks of {extent}")
    split = {8: 1, 4: 2, 3: 8, 2: 4}[scheme.bits]
    if tiles.columns % split:
        raise ValueError(f"{scheme.code} packs rows in {split} parts; {tiles.columns} values do not divide")
    return Grouping((scheme.along == "channels") == tiles.token_major, length, span)


def shapes(tiles: Tiles, scheme: Scheme, num_chunks: int, num_blocks: int) -> dict[str, tuple[int, ...]]:
    """Shape of `codes` (uint8), `scales` and `zeros` (uint16) for chunks of `num_blocks` blocks."""
    along_rows, length, span = grouping(tiles, scheme, num_blocks)
    lead = (num_chunks, tiles.num_layers, num_blocks // span, tiles.num_heads)
    inner = (tiles.rows, tiles.columns // length) if along_rows else (tiles.rows // length, tiles.columns)
    codes = (num_chunks, tiles.num_layers, num_blocks, tiles.num_heads, tiles.rows, tiles.columns * scheme.bits // 8)
    return {"codes": codes, "scales": lead + inner, "zeros": lead + inner if scheme.has_zeros else (0,) * 6}


def allocate(tiles: Tiles, scheme: Scheme, num_chunks: int, num_blocks: int) -> Coded:
    """Zeroed NumPy arrays of the right shapes."""
    sizes = shapes(tiles, scheme, num_chunks, num_blocks)
    return Coded(
        np.zeros(sizes["codes"], np.uint8), np.zeros(sizes["scales"], np.uint16), np.zeros(sizes["zeros"], np.uint16)
    )


def has_unrepresentable(scales: np.ndarray) -> bool:
    """Whether any group held NaN or infinity, or a range beyond float32."""
    return bool(scales.size) and int((scales & 0x7FFF).max()) >= EXPONENT_MASK["bfloat16"]


def _check(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    if tiles.itemsize != 2:
        raise ValueError(f"values are {tiles.itemsize} bytes wide; {scheme.dtype} is 2")
    tiles.check_blocks(blocks)
    for name, shape in shapes(tiles, scheme, *blocks.shape).items():
        if tuple(getattr(coded, name).shape) != shape:
            raise ValueError(f"{name} are {tuple(getattr(coded, name).shape)}; they must be {shape}")


def _quantize_reference(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    groups = grouping(tiles, scheme, blocks.shape[1])
    gathered = [page[np.maximum(blocks, 0)] for page in tiles.in_memory_order()]
    bits = _group(np.stack(gathered, axis=1).view(np.uint16), groups)
    spans = blocks.shape[1] // groups.span
    skipped = (blocks < 0).reshape(len(blocks), 1, spans, groups.span, *(1,) * 4)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scales, zeros = _scales_and_zeros(bits, skipped, scheme, _reduced_axes(groups))
        numbers = decode16(bits, scheme.dtype)
        if scheme.has_zeros:
            numbers = numbers - decode16(zeros, scheme.dtype)
        codes = _encode(numbers * (np.float32(1) / decode16(scales, "bfloat16")), scheme)
    chunk, block = np.nonzero(blocks >= 0)
    coded.codes[chunk, :, block] = pack(_ungroup(codes, tiles, groups), scheme.bits)[chunk, :, block]
    chunk, block = np.nonzero(~skipped.all(axis=3).reshape(len(blocks), spans))
    for out, params in ((coded.scales, scales), (coded.zeros, zeros))[: 1 + scheme.has_zeros]:
        out[chunk, :, block] = params.squeeze(_reduced_axes(groups))[chunk, :, block]


def _dequantize_reference(tiles: Tiles, blocks: np.ndarray, *, scheme: Scheme, coded: Coded) -> None:
    groups = grouping(tiles, scheme, blocks.shape[1])
    numbers = _decode(unpack(coded.codes, scheme.bits), scheme)
    numbers = _group(numbers, groups)
    reduced = _reduced_axes(groups)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = numbers * decode16(np.expand_dims(coded.scales, reduced), "bfloat16")
        if scheme.has_zeros:
            numbers = numbers + decode16(np.expand_dims(coded.zeros, reduced), scheme.dtype)
        bits = _ungroup(encode16(numbers, scheme.dtype), tiles, groups)
    chunk, block = np.nonzero(blocks >= 0)
    for layer, page in enumerate(tiles.in_memory_order()):
        page[blocks[chunk, block]] = bits[chunk, layer, block]


def _scales_and_zeros(
    bits: np.ndarray, skipped: np.ndarray, scheme: Scheme, axes: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """bfloat16 bits of the scales, and dtype bits of the zeros; reduced axes are kept with length 1."""
    key = order_key(bits) if scheme.has_zeros else order_key(bits & 0x7FFF)
    high = np.where(skipped, np.int16(-0x8000), key).max(axes, keepdims=True)
    low = np.where(skipped, np.int16(0x7FFF), key).min(axes, keepdims=True) if scheme.has_zeros else np.zeros_like(high)
    mask = EXPONENT_MASK[scheme.dtype]
    finite = (high < mask) & (low > ~mask)
    zeros = np.where(finite, order_key(low).view(np.uint16), 0)
    span = decode16(order_key(high).view(np.uint16), scheme.dtype) - decode16(zeros, scheme.dtype)
    scale = np.maximum(span * np.float32(1 / _largest_code(scheme)), SMALLEST_SCALE)
    return np.where(finite, round_up_bf16(scale), np.uint16(0x7FC0)), zeros


def _largest_code(scheme: Scheme) -> float:
    return FP8_MAX.get(scheme.code) or (127 if scheme.code == "int8" else 2**scheme.bits - 1)


def _encode(scaled: np.ndarray, scheme: Scheme) -> np.ndarray:
    """float32 in units of the scale -> uint8 codes."""
    if scheme.code in FP8_MAX:
        return encode_fp8(scaled, scheme.code)
    return np.rint(scaled).astype(np.int8 if scheme.code == "int8" else np.uint8).view(np.uint8)


def _decode(codes: np.ndarray, scheme: Scheme) -> np.ndarray:
    """uint8 codes -> float32 in units of the scale."""
    if scheme.code in FP8_MAX:
        return decode_fp8(codes, scheme.code)
    return (codes.view(np.int8) if scheme.code == "int8" else codes).astype(np.float32)


# Grouped arrays: (m, L, n/span, span, H, rows, groups, length) or (m, L, n/span, span, H, groups, length, columns).
def _reduced_axes(groups: Grouping) -> tuple[int, int]:
    return (3, 7) if groups.along_rows else (3, 6)


def _group(array: np.ndarray, groups: Grouping) -> np.ndarray:
    chunks, layers, blocks, heads, rows, columns = array.shape
    inner = (rows, columns // groups.length, groups.length)
    if not groups.along_rows:
        inner = (rows // groups.length, groups.length, columns)
    return array.reshape(chunks, layers, blocks // groups.span, groups.span, heads, *inner)


def _ungroup(array: np.ndarray, tiles: Tiles, groups: Grouping) -> np.ndarray:
    chunks, layers, spans = array.shape[:3]
    return array.reshape(chunks, layers, spans * groups.span, tiles.num_heads, tiles.rows, tiles.columns)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """(.., columns) uint8 codes -> (.., columns * bits / 8) bytes."""
    if bits == 8:
        return codes
    low_bits = 4 if bits == 4 else 2
    parts = np.split(codes & ((1 << low_bits) - 1), 8 // low_bits, axis=-1)
    packed = sum(part << (low_bits * i) for i, part in enumerate(parts)).astype(np.uint8)
    if bits != 3:
        return packed
    eighths = np.split(codes >> 2, 8, axis=-1)
    third = sum(part << i for i, part in enumerate(eighths)).astype(np.uint8)
    return np.concatenate([packed, third], axis=-1)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`."""
    if bits == 8:
        return packed
    low_bits = 4 if bits == 4 else 2
    columns = packed.shape[-1] * 8 // bits
    low = packed[..., : columns * low_bits // 8]
    mask = (1 << low_bits) - 1
    codes = np.concatenate([(low >> (low_bits * i)) & mask for i in range(8 // low_bits)], axis=-1)
    if bits == 3:
        third = packed[..., columns // 4 :]
        codes = codes | np.concatenate([((third >> i) & 1) << 2 for i in range(8)], axis=-1)
    return codes


quantize = dispatch(
    _quantize_reference,
    check=_check,
    numba="kernels.quantize_numba:quantize",
    triton="kernels.quantize_triton:quantize",
)
dequantize = dispatch(
    _dequantize_reference,
    check=_check,
    numba="kernels.quantize_numba:dequantize",
    triton="kernels.quantize_triton:dequantize",
)
