"""`rotate` and `unrotate` for CPUs. Butterflies inside a vector are shuffles, written out; those between are plain."""

import functools

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.lanes_numba import Lanes, each_vector, step
from kernels.threads import run_units
from kernels.tiles import Tiles

__all__ = ["rotate", "unrotate"]

f32 = np.float32
_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_LANES = 32
_TOKENS_AT_ONCE = 32  # of a tile whose rows are channels: 32 x 128 floats fit the first-level cache


def rotate(tiles: Tiles, blocks: np.ndarray, *, signs, turned: np.ndarray, dtype: str = "bfloat16") -> None:
    _run(tiles, blocks, (signs * f32(len(signs) ** -0.5), np.ones_like(signs)), turned, (dtype == "float16", True))


def unrotate(tiles: Tiles, blocks: np.ndarray, *, signs, turned: np.ndarray, dtype: str = "bfloat16") -> None:
    _run(tiles, blocks, (np.full_like(signs, len(signs) ** -0.5), signs), turned, (dtype == "float16", False))


def _run(tiles: Tiles, blocks: np.ndarray, factors, turned: np.ndarray, options: tuple[bool, bool]) -> None:
    kernel = (_rows_of_tokens if tiles.token_major else _rows_of_channels)(*map(int, options))
    shape = (tiles.num_layers, tiles.num_heads, tiles.rows, tiles.columns)
    pointers = (tiles.addresses, tiles.strides, turned.ctypes.data)
    run_units(kernel, blocks.size * tiles.num_layers, 2 * turned.nbytes, pointers, blocks, shape, *factors)


@intrinsic(prefer_literal=True)
def _load_row(typing_context, source, target, count, factor, float16):
    """float32 target = 16-bit source * factor: a float32, or the address of one a value."""
    each = isinstance(factor, types.Integer)

    def codegen(context, builder, signature, args):
        def body(emit, index):
            value = emit.value_of(emit.load(step(builder, args[0], index, 2), _I16), float16.literal_value)
            by = emit.parameter(step(builder, args[3], index, 4) if each else args[3])
            emit.store(builder.fmul(value, by), step(builder, args[1], index, 4))

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, factor, float16), codegen


@intrinsic(prefer_literal=True)
def _store_row(typing_context, source, target, count, factor, float16):
    """16-bit target = rounded float32 source * factor, as above."""
    each = isinstance(factor, types.Integer)

    def codegen(context, builder, signature, args):
        def body(emit, index):
            by = emit.parameter(step(builder, args[3], index, 4) if each else args[3])
            value = builder.fmul(emit.load(step(builder, args[0], index, 4), _F32), by)
            emit.store(emit.bits_of(value, float16.literal_value), step(builder, args[1], index, 2))

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, factor, float16), codegen


@intrinsic
def _butterfly(typing_context, top, bottom, count):
    """(top, bottom) = (top + bottom, top - bottom) over `count` float32 at two addresses."""

    def codegen(context, builder, signature, args):
        def body(emit, index):
            places = [step(builder, address, index, 4) for address in args[:2]]
            a, b = (emit.load(place, _F32) for place in places)
            emit.store(builder.fadd(a, b), places[0])
            emit.store(builder.fsub(a, b), places[1])

        each_vector(context, builder, args[2], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _butterflies_inside(typing_context, address, count):
    """The butterflies at distances 1 to 16 of every 32 float32 at an address; `count` is a multiple of 32."""

    def codegen(context, builder, signature, args):
        emit = Lanes(builder, _LANES)
        width = ir.Constant(args[1].type, _LANES)
        with cgutils.for_range_slice(builder, ir.Constant(args[1].type, 0), args[1], width, args[1].type) as (index, _):
            place = step(builder, args[0], index, 4)
            value = emit.load(place, _F32)
            for distance in (1, 2, 4, 8, 16):
                partners = ir.Constant(ir.VectorType(_I32, _LANES), [i ^ distance for i in range(_LANES)])
                other = builder.shuffle_vector(value, value, partners)
                signs = [0x80000000 if i & distance else 0 for i in range(_LANES)]
                flip = ir.Constant(ir.VectorType(_I32, _LANES), signs)
                own = emit.cast("bitcast", builder.xor(emit.cast("bitcast", value, _I32), flip), _F32)
                value = builder.fadd(other, own)
            emit.store(value, place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@functools.cache
def _rows_of_tokens(float16: int, forward: int):
    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(first, last, pointers, blocks, shape, before, after):
        addresses, strides, turned = pointers
        layers, heads, rows, columns = shape
        width, size = blocks.shape[1], before.size
        line = np.empty(size, f32)
        before_address, after_address = before.ctypes.data, after.ctypes.data
        for unit in range(first, last):
            work = line.ctypes.data  # inside the loop: numba frees an array after the last use of its name
            c, layer, i = unit // (layers * width), unit // width % layers, unit % width
            if blocks[c, i] < 0:
                continue
            page = addresses[layer] + blocks[c, i] * strides[0]
            for row in range(heads * rows):
                paged = page + row // rows * strides[1] + row % rows * strides[2]
                plain = turned + 2 * (unit * heads * rows + row) * columns
                source, target = (paged, plain) if forward else (plain, paged)
                for offset in range(0, 2 * columns, 2 * size):
                    _load_row(source + offset, work, size, before_address, float16)
                    _butterflies_inside(work, size)
                    distance = 32
                    while distance < size:
                        for start in range(0, size, 2 * distance):
                            _butterfly(work + 4 * start, work + 4 * (start + distance), distance)
                        distance *= 2
                    _store_row(work, target + offset, size, after_address, float16)

    return kernel


@functools.cache
def _rows_of_channels(float16: int, forward: int):
    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(first, last, pointers, blocks, shape, before, after):
        addresses, strides, turned = pointers
        layers, heads, rows, columns = shape
        width, size = blocks.shape[1], before.size
        tile = np.empty((size, _TOKENS_AT_ONCE), f32)
        pitch = 4 * _TOKENS_AT_ONCE
        for unit in range(first, last):
            work = tile.ctypes.data  # inside the loop, as above
            c, layer, i = unit // (layers * width), unit // width % layers, unit % width
            if blocks[c, i] < 0:
                continue
            for h in range(heads):
                paged, paged_step = addresses[layer] + blocks[c, i] * strides[0] + h * strides[1], strides[2]
                plain, plain_step = turned + 2 * (unit * heads + h) * rows * columns, 2 * columns
                source, source_step = (paged, paged_step) if forward else (plain, plain_step)
                target, target_step = (plain, plain_step) if forward else (paged, paged_step)
                for start in range(0, rows, size):
                    for t in range(0, columns, _TOKENS_AT_ONCE):
                        tokens = min(_TOKENS_AT_ONCE, columns - t)
                        for r in range(size):
                            place = source + (start + r) * source_step + 2 * t
                            _load_row(place, work + r * pitch, tokens, before[r], float16)
                        distance = 1
                        while distance < size:
                            for r in range(size):
                                if r & distance == 0:
                                    _butterfly(work + r * pitch, work + (r + distance) * pitch, tokens)
                            distance *= 2
                        for r in range(size):
                            place = target + (start + r) * target_step + 2 * t
                            _store_row(work + r * pitch, place, tokens, after[r], float16)

    return kernel
