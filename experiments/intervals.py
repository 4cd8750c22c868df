"""How sure a mean is, and which percentiles a sample bears: for as few values as experiments have."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["PERCENTILE_SAMPLES", "Interval", "enough_samples", "mean_interval", "percentile"]

# Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom; beyond, the normal distribution's 1.96 plus the
# first term of its expansion in 1/n is within 0.001.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean and the 95 % confidence interval around it.

    Args:
        mean: Of the values; NaN without any.
        low, high: The interval's ends; infinite below two values.
        n: How many values.
    """

    mean: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """True if the values show a difference from zero."""
        return self.low > 0 or self.high < 0


def mean_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """The mean of independent values with its 95 % interval by Student's t."""
    found = np.asarray(values, np.float64)
    n = len(found)
    if n == 0:
        return Interval(math.nan, -math.inf, math.inf, 0)
    mean = float(found.mean())
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = _t95(n - 1) * float(found.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def _t95(freedom: int) -> float:
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.37 / freedom


def enough_samples(percent: int) -> int:
    """The fewest samples whose greatest lies above that percentile with a probability of 95 %: 1 - p^n >= 0.95."""
    return math.ceil(math.log(0.05) / math.log(percent / 100))


PERCENTILE_SAMPLES = {percent: enough_samples(percent) for percent in (50, 90, 95, 99)}


def percentile(values: Iterable[float | None], percent: int) -> float | None:
    """A percentile of the values that are known, by linear interpolation; None if they are too few for it."""
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percent)) if len(known) >= enough_samples(percent) else None
