"""The one place where files are touched, so that a test can make any single call fail.

`Files` is the real thing. A test subclasses it and raises, shortens or delays the call it is about. `Beside` is a
second thread for one of two halves of a large transfer.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Beside", "Files"]

T = TypeVar("T")


class Files:
    """Calls of the operating system, by the names of `os`; each raises OSError as that one does."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence, offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence, offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def stat_fd(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def utime(self, path: str) -> None:
        os.utime(path)

    def mkdir(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def scan(self, path: str) -> Iterator[os.DirEntry]:
        with os.scandir(path) as entries:
            yield from entries


class Beside:
    """A thread that takes one half of a piece of work while the caller does the other.

    Args:
        name: Of the thread, which starts with the first work.
    """

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def start(self, call: Callable[[], T]) -> Callable[[], T]:
        """Begin a call beside the caller's own work; what is returned gives its result, or raises as it did.

        A thread that did not come to it, because the machine is busy, or that is closed does no harm: then the caller
        makes the call itself when it asks for the result. It must ask, for until then the call may be under way.
        """
        try:
            later = self._pool.submit(call)
        except RuntimeError:  # closed
            return call
        return lambda: call() if later.cancel() else later.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
