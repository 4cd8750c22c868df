"""`unrope` and `rope` for CPUs: whole rows at once, over channels or over tokens, whichever are contiguous."""

import functools

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.lanes_numba import each_vector, step
from kernels.rope import cosines_and_sines
from kernels.threads import run_units
from kernels.tiles import Tiles

__all__ = ["rope", "unrope"]

_F32, _I16 = ir.FloatType(), ir.IntType(16)


def unrope(tiles: Tiles, blocks: np.ndarray, *, angles, plain: np.ndarray, dtype: str = "bfloat16") -> None:
    _run(tiles, blocks, cosines_and_sines(angles, -1), plain, (dtype == "float16", True))


def rope(tiles: Tiles, blocks: np.ndarray, *, angles, plain: np.ndarray, dtype: str = "bfloat16") -> None:
    _run(tiles, blocks, cosines_and_sines(angles, 1), plain, (dtype == "float16", False))


def _run(tiles: Tiles, blocks: np.ndarray, factors, plain: np.ndarray, options: tuple[bool, bool]) -> None:
    kernel = _kernel(int(options[0]), tiles.token_major, options[1])
    # In the order of a tile: (tokens, pairs), or (pairs, tokens of the chunk).
    factors = [np.ascontiguousarray(part if tiles.token_major else part.T) for part in factors]
    shape = (tiles.num_heads, tiles.rows, tiles.columns)
    pointers = (tiles.addresses, tiles.strides, plain.ctypes.data)
    run_units(kernel, tiles.num_layers * blocks.size, 2 * plain.nbytes, pointers, blocks, shape, *factors)


@intrinsic(prefer_literal=True)
def _turn_row(typing_context, sources, targets, factors, count, float16):
    """Turn `count` pairs of values; addresses of the first and second of each, and of their cosines and sines."""

    def codegen(context, builder, signature, args):
        addresses = [[builder.extract_value(arg, i) for i in range(2)] for arg in args[:3]]

        def body(emit, index):
            first, second = (
                emit.value_of(emit.load(step(builder, place, index, 2), _I16), float16.literal_value)
                for place in addresses[0]
            )
            cosine, sine = (emit.load(step(builder, place, index, 4), _F32) for place in addresses[2])
            turned = (
                builder.fsub(builder.fmul(first, cosine), builder.fmul(second, sine)),
                builder.fadd(builder.fmul(second, cosine), builder.fmul(first, sine)),
            )
            for value, place in zip(turned, addresses[1], strict=True):
                emit.store(emit.bits_of(value, float16.literal_value), step(builder, place, index, 2))

        each_vector(context, builder, args[3], body)
        return context.get_dummy_value()

    pair = types.UniTuple(types.int64, 2)
    return types.void(pair, pair, pair, types.int64, float16), codegen


@functools.cache
def _kernel(float16: int, token_major: bool, gather: bool):
    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(first, last, pointers, blocks, shape, cosines, sines):
        addresses, strides, plain = pointers
        heads, rows, columns = shape
        for unit in range(first, last):
            layer, i = unit // blocks.size, unit % blocks.size
            for h in range(heads):
                page = addresses[layer] + blocks[i] * strides[0] + h * strides[1]
                tile = plain + 2 * (unit * heads + h) * rows * columns
                source, source_step = (page, strides[2]) if gather else (tile, 2 * columns)
                target, target_step = (tile, 2 * columns) if gather else (page, strides[2])
                if token_major:
                    half = columns // 2
                    for r in range(rows):
                        at, to = source + r * source_step, target + r * target_step
                        turn = 4 * (i * rows + r) * half
                        factors = (cosines.ctypes.data + turn, sines.ctypes.data + turn)
                        _turn_row((at, at + columns), (to, to + columns), factors, half, float16)
                else:
                    half = rows // 2
                    for r in range(half):
                        at, to = source + r * source_step, target + r * target_step
                        turn = 4 * (r * blocks.size + i) * columns
                        factors = (cosines.ctypes.data + turn, sines.ctypes.data + turn)
                        pairs = (at, at + half * source_step), (to, to + half * target_step)
                        _turn_row(pairs[0], pairs[1], factors, columns, float16)

    return kernel
