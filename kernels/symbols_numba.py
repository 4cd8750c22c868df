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
    _run(tiles, blocks, (means, f32(1) / steps), symbols, (int(dtype == "float16"), True))


def from_symbols(
    tiles: Tiles,
    blocks: np.ndarray,
    *,
    means: np.ndarray,
    steps: np.ndarray,
    symbols: np.ndarray,
    dtype: str = "bfloat16",
) -> None:
    _run(tiles, blocks, (means, steps), symbols, (int(dtype == "float16"), False))


def _run(tiles: Tiles, blocks: np.ndarray, floats, symbols: np.ndarray, options: tuple[int, bool]) -> None:
    kernel = _kernel(*options, tiles.token_major)
    shape = (tiles.num_heads, tiles.head_size, tiles.block_size)
    means, factors = (np.ascontiguousarray(part) for part in floats)
    units = tiles.num_layers * tiles.num_heads
    run_units(
        kernel, units, 3 * symbols.nbytes, (tiles.addresses, tiles.strides), blocks, shape, means, factors, symbols
    )


@intrinsic(prefer_literal=True)
def _code_row(typing_context, values, symbols, count, mean, factor, float16, encode):
    """`count` symbols at an address of 16-bit values at another (`encode`), or the values of the symbols.

    `mean` and `factor`, the step or to encode its inverse, are each a float32, or the address of one a value.
    """

    def codegen(context, builder, signature, args):
        def body(emit, index):
            mean, factor = (
                emit.parameter(arg if arg.type == _F32 else step(builder, arg, index, 4)) for arg in args[3:5]
            )
            place, symbol_place = step(builder, args[0], index, 2), builder.add(args[1], index)
            if encode.literal_value:
                value = emit.value_of(emit.load(place, _I16), float16.literal_value)
                scaled = builder.fmul(builder.fsub(value, mean), factor)
                number = emit.rounded(_between(builder, emit, scaled, 127.0))
                emit.store(emit.cast("trunc", emit.plus(number, 128), _I8), symbol_place)
            else:
                symbol = emit.cast("zext", emit.load(symbol_place, _I8), _I32)
                number = emit.cast("sitofp", emit.plus(symbol, -128), _F32)
                value = builder.fadd(builder.fmul(number, factor), mean)
                emit.store(emit.bits_of(value, float16.literal_value), place)

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, mean, factor, float16, encode), codegen


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
def _kernel(float16: int, encode: bool, token_major: bool):
    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(first, last, pointers, blocks, shape, means, factors, symbols):
        addresses, strides = pointers
        heads, size, tokens = shape
        line = np.empty((tokens, size), np.uint8)
        for unit in range(first, last):
            layer, h = unit // heads, unit % heads
            mean = means.ctypes.data + 4 * unit * size
            for i in range(blocks.size):
                page, start = addresses[layer] + blocks[i] * strides[0] + h * strides[1], i * tokens
                part = symbols[layer, h * size : (h + 1) * size, start : start + tokens]
                if not token_major:
                    for d in range(size):
                        own, each = part[d].ctypes.data, factors[layer, start:].ctypes.data
                        _code_row(page + d * strides[2], own, tokens, means[layer, h, d], each, float16, encode)
                    continue
                if not encode:
                    line[:] = part.T
                for t in range(tokens):
                    own, all_of = line.ctypes.data + t * size, factors[layer, start + t]
                    _code_row(page + t * strides[2], own, size, mean, all_of, float16, encode)
                if encode:
                    for d in range(size):
                        for t in range(tokens):
                            part[d, t] = line[t, d]

    return kernel
