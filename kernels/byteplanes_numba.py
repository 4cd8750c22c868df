"""`split_planes` and `join_planes` for CPUs."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.lanes_numba import each_vector, step
from kernels.threads import run_units

__all__ = ["join_planes", "split_planes"]

_I8, _I16 = ir.IntType(8), ir.IntType(16)
_VALUES_PER_UNIT = 1 << 16


def split_planes(values: np.ndarray, *, high: np.ndarray, low: np.ndarray) -> None:
    _run(_split, values, high, low)


def join_planes(values: np.ndarray, *, high: np.ndarray, low: np.ndarray) -> None:
    _run(_join, values, high, low)


def _run(kernel, values: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
    addresses = tuple(array.ctypes.data for array in (values, high, low))
    run_units(kernel, -(-values.size // _VALUES_PER_UNIT), 2 * values.nbytes, addresses, values.size)


@intrinsic
def _split_row(typing_context, values, high, low, count):
    def codegen(context, builder, signature, args):
        def body(emit, index):
            value = emit.load(step(builder, args[0], index, 2), _I16)
            rotated = builder.or_(emit.shifted("shl", value, 1), emit.shifted("lshr", value, 15))
            emit.store(emit.cast("trunc", emit.shifted("lshr", rotated, 8), _I8), builder.add(args[1], index))
            emit.store(emit.cast("trunc", rotated, _I8), builder.add(args[2], index))

        each_vector(context, builder, args[3], body)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def _join_row(typing_context, values, high, low, count):
    def codegen(context, builder, signature, args):
        def body(emit, index):
            top, bottom = (emit.cast("zext", emit.load(builder.add(a, index), _I8), _I16) for a in args[1:3])
            rotated = builder.or_(emit.shifted("shl", top, 8), bottom)
            value = builder.or_(emit.shifted("lshr", rotated, 1), emit.shifted("shl", rotated, 15))
            emit.store(value, step(builder, args[0], index, 2))

        each_vector(context, builder, args[3], body)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), codegen


@njit(nogil=True, cache=True)
def _split(first, last, addresses, size):
    start = first * _VALUES_PER_UNIT
    count = min(size, last * _VALUES_PER_UNIT) - start
    _split_row(addresses[0] + 2 * start, addresses[1] + start, addresses[2] + start, count)


@njit(nogil=True, cache=True)
def _join(first, last, addresses, size):
    start = first * _VALUES_PER_UNIT
    count = min(size, last * _VALUES_PER_UNIT) - start
    _join_row(addresses[0] + 2 * start, addresses[1] + start, addresses[2] + start, count)
