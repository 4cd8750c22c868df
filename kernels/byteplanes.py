"""Split 16-bit floats into a plane that compresses and one that does not, and join them again. Lossless.

    split_planes(values, high=..., low=...)    r = rotate left by one(value);  high = r >> 8,  low = r & 0xFF
    join_planes(values, high=..., low=...)     the inverse, into values

The rotation moves the sign out of the way: of a bfloat16 `high` is the exponent and `low` the mantissa and the sign;
of a float16 `high` is the exponent and three bits of the mantissa.

values  (n,) uint16, contiguous; high, low  (n,) uint8, contiguous
"""

import numpy as np

from kernels.dispatch import dispatch

__all__ = ["join_planes", "split_planes"]


def _check(values: np.ndarray, *, high: np.ndarray, low: np.ndarray) -> None:
    if values.ndim != 1 or not values.shape == high.shape == low.shape:
        raise ValueError(f"values {values.shape}, high {high.shape} and low {low.shape} must be of one length")


def _split_planes_reference(values: np.ndarray, *, high: np.ndarray, low: np.ndarray) -> None:
    rotated = (values << 1) | (values >> 15)
    high[:] = rotated >> 8
    low[:] = rotated & 0xFF


def _join_planes_reference(values: np.ndarray, *, high: np.ndarray, low: np.ndarray) -> None:
    rotated = (high.astype(np.uint16) << 8) | low
    values[:] = (rotated >> 1) | (rotated << 15)


split_planes = dispatch(
    _split_planes_reference,
    check=_check,
    numba="kernels.byteplanes_numba:split_planes",
    triton="kernels.byteplanes_triton:split_planes",
)
join_planes = dispatch(
    _join_planes_reference,
    check=_check,
    numba="kernels.byteplanes_numba:join_planes",
    triton="kernels.byteplanes_triton:join_planes",
)
