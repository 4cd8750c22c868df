"""`split_planes` and `join_planes` for CPUs."""

import numpy as np
from numba import njit

from kernels.threads import run_units

__all__ = ["join_planes", "split_planes"]

_VALUES_PER_UNIT = 1 << 16


def split_planes(values: np.ndarray, *, high: np.ndarray, low: np.ndarray) -> None:
    run_units(_split, -(-values.size // _VALUES_PER_UNIT), 2 * values.nbytes, values, high, low)


def join_planes(values: np.ndarray, *, high: np.ndarray, low: np.ndarray) -> None:
    run_units(_join, -(-values.size // _VALUES_PER_UNIT), 2 * values.nbytes, values, high, low)


@njit(nogil=True, cache=True)
def _split(first, last, values, high, low):
    for i in range(first * _VALUES_PER_UNIT, min(values.size, last * _VALUES_PER_UNIT)):
        high[i] = np.uint8((values[i] >> np.uint16(7)) & np.uint16(0xFF))
        low[i] = np.uint8(((values[i] << np.uint16(1)) | (values[i] >> np.uint16(15))) & np.uint16(0xFF))


@njit(nogil=True, cache=True)
def _join(first, last, values, high, low):
    for i in range(first * _VALUES_PER_UNIT, min(values.size, last * _VALUES_PER_UNIT)):
        top = np.uint16(np.uint16(high[i]) << np.uint16(7)) | np.uint16(low[i] >> np.uint8(1))
        values[i] = np.uint16(top | np.uint16(np.uint16(low[i]) << np.uint16(15)))
