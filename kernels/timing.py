"""One timer for every kernel and codec: seconds of this thread's CPU, and a ratio to a plain copy in the same run.

On a shared machine the wall clock measures the neighbours. `thread_time` does not, and a copy of the same source bytes,
timed in turn with the work, takes out what is left (clock speed, caches, memory traffic of others).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Timing", "time_against_copy"]


@dataclass(frozen=True, slots=True)
class Timing:
    """The best of several runs.

    Attributes:
        seconds: Of the work.
        copy_seconds: Of a plain copy of `nbytes`, interleaved with the work.
        nbytes: Source bytes that both went over.
    """

    seconds: float
    copy_seconds: float
    nbytes: int

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds

    @property
    def copy_fraction(self) -> float:
        """Speed of the work over the speed of the copy: 1 is as fast as copying."""
        return self.copy_seconds / self.seconds


def time_against_copy(
    work: Callable[[], object],
    nbytes: int,
    *,
    repeats: int = 7,
    clock: Callable[[], float] = time.thread_time,
) -> Timing:
    """Time `work` and a NumPy copy of `nbytes` in turn, after one run of each that is not counted.

    Args:
        clock: `time.thread_time` for work on the calling thread; `time.perf_counter` where work uses more threads.
    """
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    best_work = best_copy = float("inf")
    for run in range(repeats + 1):
        start = clock()
        np.copyto(target, source)
        middle = clock()
        work()
        end = clock()
        if run:
            best_copy, best_work = min(best_copy, middle - start), min(best_work, end - middle)
    return Timing(best_work, best_copy, nbytes)
