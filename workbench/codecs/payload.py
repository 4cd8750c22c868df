"""A payload as a row of typed sections: written once, read back with every length checked."""

import math

import numpy as np

from workbench.codecs.base import CorruptDataError

__all__ = ["PayloadReader", "PayloadWriter", "sections_nbytes"]

_ALIGNMENT = 8


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def sections_nbytes(*sections: tuple[tuple[int, ...], int]) -> int:
    """Bytes that sections of (shape, itemsize) take, padding included."""
    return sum(_padded(math.prod(shape) * itemsize) for shape, itemsize in sections)


class PayloadWriter:
    """Hands out views of a growing payload. Padding is zero, so that equal chunks give equal bytes."""

    def __init__(self, capacity: int):
        self._buffer = np.empty(_padded(capacity), np.uint8)
        self._end = 0

    def section(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """The next section, to be filled in place."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        start, stop = self._end, self._end + nbytes
        self._end += _padded(nbytes)
        self._buffer[stop : self._end] = 0
        return self._buffer[start:stop].view(dtype).reshape(shape)

    def shorten(self, section: np.ndarray, nbytes: int) -> None:
        """Keep the first bytes of the section that was handed out last."""
        start = self._end - _padded(section.nbytes)
        self._end = start + _padded(nbytes)
        self._buffer[start + nbytes : self._end] = 0

    def append(self, array: np.ndarray) -> None:
        self.section(array.shape, array.dtype.type)[...] = array

    def finish(self) -> memoryview:
        return self._buffer[: self._end].data


class PayloadReader:
    """Hands out the sections of a payload in the order they were written; short data raises CorruptDataError."""

    def __init__(self, data: bytes | memoryview):
        buffer = np.frombuffer(data, np.uint8)
        # Kernels read 16-bit sections; data in the middle of a record may lie at an odd address.
        self._buffer = buffer if buffer.ctypes.data % _ALIGNMENT == 0 else buffer.copy()
        self._end = 0

    def section(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        start = self._end
        self._end += _padded(nbytes)
        if self._end > len(self._buffer):
            raise CorruptDataError(f"{len(self._buffer)} bytes of data; at least {self._end} were expected")
        return self._buffer[start : start + nbytes].view(dtype).reshape(shape)

    def finish(self) -> None:
        if self._end != len(self._buffer):
            raise CorruptDataError(f"{len(self._buffer)} bytes of data; {self._end} were expected")
