"""The one place where files are touched, so that a test can make any single call fail.

`Files` is the real thing. A test subclasses it and raises, shortens or delays the call it is about.
"""

import os
from collections.abc import Iterator, Sequence

__all__ = ["Files"]


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
