"""`gather_slots` and `scatter_slots` for CPUs: a copy a head where channels are contiguous, else a strided copy."""

import functools

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.threads import run_units
from kernels.tiles import Tiles

__all__ = ["gather_slots", "scatter_slots"]

_TOKENS_PER_UNIT = 64


def gather_slots(tiles: Tiles, slots: np.ndarray, *, plain: np.ndarray) -> None:
    _run(tiles, slots, plain, True)


def scatter_slots(tiles: Tiles, slots: np.ndarray, *, plain: np.ndarray) -> None:
    _run(tiles, slots, plain, False)


def _run(tiles: Tiles, slots: np.ndarray, plain: np.ndarray, gather: bool) -> None:
    pieces = -(-len(slots) // _TOKENS_PER_UNIT)
    shape = (tiles.num_heads, tiles.head_size, tiles.block_size)
    pointers = (tiles.addresses, tiles.strides, plain.ctypes.data)
    kernel = _kernel(tiles.itemsize, tiles.token_major, gather)
    run_units(kernel, tiles.num_layers * pieces, 2 * plain.nbytes, pointers, slots, shape)


@intrinsic(prefer_literal=True)
def _copy(typing_context, target, source, count, target_step, source_step, itemsize):
    """Copy `count` elements of `itemsize` bytes; steps are bytes from one element to the next."""

    def codegen(context, builder, signature, args):
        size = itemsize.literal_value
        if target_step == source_step:  # the same literal: both contiguous
            dst, src = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
            cgutils.raw_memcpy(builder, dst, src, args[2], context.get_constant(types.intp, size), align=1)
            return context.get_dummy_value()
        element = ir.IntType(8 * size).as_pointer()
        with cgutils.for_range(builder, args[2]) as loop:
            dst, src = (
                builder.inttoptr(builder.add(base, builder.mul(loop.index, step)), element)
                for base, step in zip(args[:2], args[3:5], strict=True)
            )
            builder.store(builder.load(src, align=size), dst, align=size)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, target_step, source_step, itemsize), codegen


@functools.cache
def _kernel(itemsize: int, token_major: bool, gather: bool):
    @njit(nogil=True, cache=True, error_model="numpy")
    def kernel(first, last, pointers, slots, shape):
        addresses, strides, plain = pointers
        heads, size, block_size = shape
        pieces = (slots.size + _TOKENS_PER_UNIT - 1) // _TOKENS_PER_UNIT
        for unit in range(first, last):
            layer, piece = unit // pieces, unit % pieces
            for t in range(piece * _TOKENS_PER_UNIT, min(slots.size, (piece + 1) * _TOKENS_PER_UNIT)):
                if slots[t] < 0:
                    continue
                page = addresses[layer] + slots[t] // block_size * strides[0]
                offset = slots[t] % block_size
                for h in range(heads):
                    row = plain + ((layer * slots.size + t) * heads + h) * size * itemsize
                    if token_major:
                        place = page + h * strides[1] + offset * strides[2]
                        if gather:
                            _copy(row, place, size, itemsize, itemsize, itemsize)
                        else:
                            _copy(place, row, size, itemsize, itemsize, itemsize)
                    else:
                        place = page + h * strides[1] + offset * itemsize
                        if gather:
                            _copy(row, place, size, itemsize, strides[2], itemsize)
                        else:
                            _copy(place, row, size, strides[2], itemsize, itemsize)

    return kernel
