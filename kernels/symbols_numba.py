"""`to_symbols` and `from_symbols` for CPUs: in place where tokens are contiguous, else through a small transpose."""

import functools

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.lanes_numba import Lanes, each_vector, step
from kernels.threads import run_units
from kernels.tiles import Tiles

__all__ = ["channel_moments", "from_symbols", "to_symbols"]

f32 = np.float32
_F32, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)


def channel_moments(
    tiles: Tiles, blocks: np.ndarray, *, sums: np.ndarray, squares: np.ndarray, dtype: str = "bfloat16"
) -> None:
    kernel = _moments_kernel(int(dtype == "float16"), tiles.token_major)
    shape = (tiles.num_heads, tiles.head_size, tiles.block_size)
    units = tiles.num_layers * tiles.num_heads
    nbytes = 2 * sums.size * blocks.size * tiles.block_size
    run_units(kernel, units, nbytes, (tiles.addresses, tiles.strides), blocks, shape, sums, squares)


def to_symbols(
    tiles: Tiles,
    blocks: np.ndarray,
    *,
    means: np.ndarray,
    steps: np.ndarray,
    symbols: np.ndarray,
    dtype: str = "bfloat16",
) -> None:
    _run(_encode_kernel, tiles, blocks, (means, f32(1) / steps), symbols, dtype)


def from_symbols(
    tiles: Tiles,
    blocks: np.ndarray,
    *,
    means: np.ndarray,
    steps: np.ndarray,
    symbols: np.ndarray,
    dtype: str = "bfloat16",
) -> None:
    _run(_decode_kernel, tiles, blocks, (means, steps), symbols, dtype)


def _run(make, tiles: Tiles, blocks: np.ndarray, floats, symbols: np.ndarray, dtype: str) -> None:
    kernel = make(int(dtype == "float16"), tiles.token_major)
    shape = (tiles.num_heads, tiles.head_size, tiles.block_size)
    means, scales = (np.ascontiguousarray(part) for part in floats)
    pointers = (tiles.addresses, tiles.strides, symbols.ctypes.data)
    units = tiles.num_layers * tiles.num_heads
    run_units(kernel, units, 3 * symbols.nbytes, pointers, blocks, shape, means, scales)


@intrinsic(prefer_literal=True)
def _to_row(typing_context, source, target, count, mean, inverse, float16):
    """`count` symbols of 16-bit values; `mean` and `inverse` are a float32, or the address of one a value."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            mean, inverse = _parameters(builder, emit, args[3:5], index)
            value = emit.value_of(emit.load(step(builder, args[0], index, 2), _I16), float16.literal_value)
            scaled = builder.fmul(builder.fsub(value, mean), inverse)
            number = emit.rounded(_between(builder, emit, scaled, 127.0))
            emit.store(emit.cast("trunc", emit.plus(number, 128), _I8), builder.add(args[1], index))

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, mean, inverse, float16), codegen


@intrinsic(prefer_literal=True)
def _from_row(typing_context, source, target, count, mean, scale, float16):
    """`count` 16-bit values of symbols, as above."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            mean, scale = _parameters(builder, emit, args[3:5], index)
            symbol = emit.cast("zext", emit.load(builder.add(args[0], index), _I8), _I32)
            number = emit.cast("sitofp", emit.plus(symbol, -128), _F32)
            value = builder.fadd(builder.fmul(number, scale), mean)
            emit.store(emit.bits_of(value, float16.literal_value), step(builder, args[1], index, 2))

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, mean, scale, float16), codegen


@intrinsic(prefer_literal=True)
def _add_row(typing_context, source, sums, squares, count, float16):
    """Add `count` values and their squares to float32 sums, one a value, at two addresses."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            value = emit.value_of(emit.load(step(builder, args[0], index, 2), _I16), float16.literal_value)
            for address, term in ((args[1], value), (args[2], builder.fmul(value, value))):
                place = step(builder, address, index, 4)
                emit.store(builder.fadd(emit.load(place, _F32), term), place)

        each_vector(context, builder, args[3], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, float16), codegen


def _parameters(builder, emit: Lanes, args, index):
    return [emit.parameter(a if a.type == _F32 else step(builder, a, index, 4)) for a in args]


def _between(builder, emit: Lanes, value, limit: float):
    """Clamp to [-limit, limit]."""
    for name, end in (("<", limit), (">", -limit)):
        bound = emit.constant(_F32, end)
        value = builder.select(builder.fcmp_ordered(name, value, bound), value, bound)
    return value


@functools.cache
def _moments_kernel(float16: int, token_major: bool):
    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(first, last, pointers, blocks, shape, sums, squares):
        addresses, strides = pointers
        heads, size, tokens = shape
        line, line_squares = (
            np.empty(size if token_major else tokens, f32),
            np.empty(size if token_major else tokens, f32),
        )
        one, other = line.ctypes.data, line_squares.ctypes.data
        for unit in range(first, last):
            layer, h = unit // heads, unit % heads
            head = addresses[layer] + h * strides[1]
            if token_major:
                line[:], line_squares[:] = f32(0), f32(0)
                for i in range(blocks.size):
                    for t in range(tokens):
                        _add_row(head + blocks[i] * strides[0] + t * strides[2], one, other, size, float16)
                sums[layer, h, :], squares[layer, h, :] = line, line_squares
                continue
            for d in range(size):
                line[:], line_squares[:] = f32(0), f32(0)
                for i in range(blocks.size):
                    _add_row(head + blocks[i] * strides[0] + d * strides[2], one, other, tokens, float16)
                total, total_squares = f32(0), f32(0)
                for t in range(tokens):
                    total += line[t]
                    total_squares += line_squares[t]
                sums[layer, h, d], squares[layer, h, d] = total, total_squares

    return kernel


@functools.cache
def _encode_kernel(float16: int, token_major: bool):
    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(first, last, pointers, blocks, shape, means, scales):
        addresses, strides, symbols = pointers
        heads, size, tokens = shape
        total = blocks.size * tokens
        line = np.empty((tokens, size), np.uint8)
        for unit in range(first, last):
            layer, h = unit // heads, unit % heads
            base = symbols + unit * size * total
            mean, scale = means.ctypes.data + 4 * unit * size, scales.ctypes.data + 4 * layer * total
            for i in range(blocks.size):
                page = addresses[layer] + blocks[i] * strides[0] + h * strides[1]
                if token_major:
                    for t in range(tokens):
                        inverse = scales[layer, i * tokens + t]
                        _to_row(page + t * strides[2], line.ctypes.data + t * size, size, mean, inverse, float16)
                    for d in range(size):
                        for t in range(tokens):
                            _store_byte(base + d * total + i * tokens + t, line[t, d])
                else:
                    for d in range(size):
                        row = base + d * total + i * tokens
                        inverses = scale + 4 * i * tokens
                        _to_row(page + d * strides[2], row, tokens, means[layer, h, d], inverses, float16)

    return kernel


@functools.cache
def _decode_kernel(float16: int, token_major: bool):
    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(first, last, pointers, blocks, shape, means, scales):
        addresses, strides, symbols = pointers
        heads, size, tokens = shape
        total = blocks.size * tokens
        line = np.empty((tokens, size), np.uint8)
        for unit in range(first, last):
            layer, h = unit // heads, unit % heads
            base = symbols + unit * size * total
            mean, scale = means.ctypes.data + 4 * unit * size, scales.ctypes.data + 4 * layer * total
            for i in range(blocks.size):
                page = addresses[layer] + blocks[i] * strides[0] + h * strides[1]
                if token_major:
                    for d in range(size):
                        for t in range(tokens):
                            line[t, d] = _load_byte(base + d * total + i * tokens + t)
                    for t in range(tokens):
                        width = scales[layer, i * tokens + t]
                        _from_row(line.ctypes.data + t * size, page + t * strides[2], size, mean, width, float16)
                else:
                    for d in range(size):
                        row = base + d * total + i * tokens
                        widths = scale + 4 * i * tokens
                        _from_row(row, page + d * strides[2], tokens, means[layer, h, d], widths, float16)

    return kernel


@intrinsic
def _store_byte(typing_context, address, value):
    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], _I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.uint8), codegen


@intrinsic
def _load_byte(typing_context, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _I8.as_pointer()))

    return types.uint8(types.int64), codegen
