"""A directory of records, one file a chunk. Survives restarts; several processes may share it.

    write   temporary file, allocated in full -> payload and header -> link to the final name (first writer wins)
    read    open -> header checked -> payload straight into the caller's buffer -> checksum

A file is never changed or shortened once it has its name, only unlinked, so a reader that has it open is safe. There is
no index file: the directory is the index, and each record describes itself.
"""

import errno
import itertools
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
import xxhash

from workbench.chunks import Chunk
from workbench.errors import InvalidInputError
from workbench.files import Beside, Files
from workbench.record import ALIGNMENT, MAX_HEADER, header_nbytes, pack_header, parse_header
from workbench.tiers.base import Changes, StoredChunk, Tier
from workbench.tiers.breaker import CircuitBreaker

__all__ = ["DiskTier"]

_SUFFIX = ".kv"
_TEMPORARY = ".tmp"
_serials = itertools.count(1)
_in_flight: set[str] = set()  # names of temporary files that this process writes just now
_AWAY = ("EIO", "ESTALE", "ENXIO", "ENODEV", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN")  # faults of a medium that is lost
_STAMP_GRAIN_NS = 1_000_000_000  # a folder's time is as coarse as the kernel's clock tick, or a remote server's
_SPLIT_NBYTES = 8 << 20  # from here on a payload is worth a second thread
_TOKENS_OF_LATEST = 16384  # records whose tokens a scan tells: 16 MiB of them
_ABANDONED_SECONDS = 3600.0  # a temporary file of a process that cannot be asked whether it lives


class DiskTier(Tier):
    """Records in `<path>/<first two hex digits>/<key in hex>.kv`.

    Args:
        path: Directory; made, with access for this user alone, if it is not there.
        identity: Digest that is written into each header, so that a listing can tell whose a record is.
        durable: Sync each file before it gets its name. Without it a power loss may cost recent chunks, never give
            wrong ones.
        files: The operating system, or a stand-in that fails on purpose.

    Raises:
        InvalidInputError: The path is not a directory, cannot be written, belongs to somebody else or is open to all.
    """

    name = "disk"
    survives = True
    faults_in_a_row = 3  # that open the breaker; one or two may be about a single file

    def __init__(self, path: str | Path, *, identity: bytes = bytes(32), durable: bool = False,
                 files: Files | None = None):  # fmt: skip
        self.path = Path(path)
        self.durable = durable
        self._identity = identity
        self._files = files or Files()
        self._beside = Beside("kv-disk-read")
        self._made: set[str] = set()
        self._seen: dict[str, tuple[int, int]] = {}  # folder -> (its time, records) when `changes` found nothing new
        self._strangers: set[bytes] = set()  # keys that `changes` saw for the first time
        self._closed = False
        self._check_directory()
        self._faults = 0  # in a row, without a call that went well in between
        self.breaker = CircuitBreaker(self.name, self._works)

    def _check_directory(self) -> None:
        try:
            self._files.mkdir(str(self.path))
            status = os.stat(self.path)
        except OSError as error:
            raise InvalidInputError(f"disk tier: {self.path} cannot be used: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode) or not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise InvalidInputError(f"disk tier: {self.path} is not a directory that this user can read and write")
        if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
            raise InvalidInputError(
                f"disk tier: {self.path} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}; "
                f"it must belong to user {os.getuid()} and not be writable by all"
            )

    def nbytes_of(self, payload_nbytes: int, tokens: int) -> int:
        return header_nbytes(tokens) + -(-payload_nbytes // ALIGNMENT) * ALIGNMENT

    def read(self, chunk: Chunk, out: np.ndarray, *, at_most: bool = False) -> str:
        if not self.breaker.allows:
            return "breaker open"
        return self._noted(self._read(chunk, out, at_most))

    def _read(self, chunk: Chunk, out: np.ndarray, at_most: bool) -> str:
        try:
            fd = self._files.open(self._file(chunk.key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link at our name: nothing that we wrote, and in the way of what we write
                self.erase(chunk.key)
                return "corrupt"
            return "absent" if error.errno == errno.ENOENT else _fault(error)
        try:
            reason = self._read_open(fd, chunk, out, at_most)
        except OSError as error:
            reason = _fault(error)
        finally:
            _quietly(self._files.close, fd)
        if reason in ("corrupt", "mismatch"):
            self.erase(chunk.key)
        elif not reason:
            self._touch(chunk.key)
        return reason

    def _touch(self, key: bytes) -> None:
        """The file's time is its last use: the order that a restart finds."""
        _quietly(self._files.utime, self._file(key))  # evicted meanwhile by another process: the bytes were read

    def _read_open(self, fd: int, chunk: Chunk, out: np.ndarray, at_most: bool) -> str:
        size = header_nbytes(chunk.num_tokens)
        if at_most:
            out = out[: max(0, self._files.stat_fd(fd).st_size - size)]
        head = bytearray(size)
        header = parse_header(head) if self._fill(fd, [head], 0) else None
        if header is None:
            return "corrupt"
        if not header.describes(chunk) or header.payload_nbytes != out.nbytes:
            return "mismatch"
        if self._files.stat_fd(fd).st_size != size + out.nbytes:
            return "corrupt"
        return "" if self._read_payload(fd, out, size) == header.payload_digest else "corrupt"

    def _read_payload(self, fd: int, out: np.ndarray, offset: int) -> bytes:
        """Fill `out`, a large one with two threads; returns the digest of what was read, b"" if the file ends early."""
        if out.nbytes < _SPLIT_NBYTES:
            return xxhash.xxh3_128_digest(out) if self._fill(fd, [out], offset) else b""
        half, whole = out.nbytes // 2, False
        rest = self._beside.start(lambda: self._fill(fd, [out[half:]], offset + half))
        try:
            whole = self._fill(fd, [out[:half]], offset)
            digest = xxhash.xxh3_128(out[:half])  # while the other half may still be under way
        finally:
            whole = rest() and whole  # after a fault, too: nothing may read from `fd` or into `out` any more
        digest.update(out[half:])
        return digest.digest() if whole else b""

    def _fill(self, fd: int, buffers: list, offset: int) -> bool:
        """Read until every buffer is full; False at a premature end of the file."""
        views = [memoryview(b).cast("B") for b in buffers]
        while views:
            got = self._files.preadv(fd, views, offset)
            if got == 0:
                return False
            offset += got
            views = _advance(views, got)
        return True

    def write(self, chunk: Chunk, payload: np.ndarray) -> tuple[str, int]:
        if not self.breaker.allows:
            return "breaker open", 0
        reason, nbytes = self._write(chunk, payload)
        return self._noted(reason), nbytes

    def _noted(self, reason: str) -> str:
        """Take note of how a call went: a medium that fails again and again is left alone until it works."""
        if reason not in _AWAY:
            self._faults = 0
            return reason
        self._faults += 1
        if self._faults >= self.faults_in_a_row:
            self.breaker.trip(reason)
        return reason

    def _works(self) -> bool:
        """Whether a small file can be written, read and removed: the breaker's probe."""
        probe = f"{self.path}/probe.{os.getpid()}.{next(_serials)}{_TEMPORARY}"
        try:
            fd = self._files.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._files.pwritev(fd, [memoryview(b"probe")], 0)
                self._files.fsync(fd)
                return self._fill(fd, [bytearray(5)], 0)
            finally:
                _quietly(self._files.close, fd)
                _quietly(self._files.unlink, probe)
        except OSError:
            return False

    def _write(self, chunk: Chunk, payload: np.ndarray) -> tuple[str, int]:
        target = self._file(chunk.key)
        temporary = self._temporary_name(chunk.key)
        _in_flight.add(os.path.basename(temporary))
        try:
            self._make_folder(os.path.dirname(target))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = self._files.open(temporary, flags)
        except OSError as error:
            self._made.discard(os.path.dirname(target))  # the folder may have been removed
            _in_flight.discard(os.path.basename(temporary))
            return _fault(error), 0
        try:
            nbytes = self._write_open(fd, chunk, payload)
            self._files.link(temporary, target)
            return "", nbytes
        except FileExistsError:
            return "dedup", 0
        except OSError as error:
            return _fault(error), 0
        finally:
            self._discard(fd, temporary)

    def _write_open(self, fd: int, chunk: Chunk, payload: np.ndarray) -> int:
        """Write the record into an open file, its header last; returns the bytes it takes on the disk.

        A large payload is hashed beside the writing, which is why its header comes after it.
        """
        size = header_nbytes(chunk.num_tokens)
        self._files.allocate(fd, size + payload.nbytes)  # ENOSPC comes here, not half-way
        if payload.nbytes < _SPLIT_NBYTES:
            self._put(fd, [pack_header(chunk, self._identity, payload), payload], 0)
        else:
            hashed = self._beside.start(lambda: xxhash.xxh3_128_digest(payload))
            try:
                self._put(fd, [payload], size)
            finally:
                digest = hashed()  # after a fault, too: the payload goes back to its owner
            self._put(fd, [pack_header(chunk, self._identity, payload, digest=digest)], 0)
        if self.durable:
            self._files.fsync(fd)
        return self._files.stat_fd(fd).st_blocks * 512

    def _put(self, fd: int, buffers: list, offset: int) -> None:
        """Write every buffer to its end."""
        views = [memoryview(b).cast("B") for b in buffers]
        while views:
            put = self._files.pwritev(fd, views, offset)
            offset += put
            views = _advance(views, put)

    def _discard(self, fd: int, temporary: str) -> None:
        """Close the temporary file and take its name away; the record lives on under its own name."""
        _quietly(self._files.close, fd)
        _quietly(self._files.unlink, temporary)  # the janitor of the next start takes what is left
        _in_flight.discard(os.path.basename(temporary))

    def erase(self, key: bytes) -> None:
        if self.breaker.allows:  # else it stays, and `changes` tells of it once the medium works again
            _quietly(self._files.unlink, self._file(key))  # gone already, or not ours to remove: not counted any more

    def scan(self) -> Iterator[StoredChunk]:
        """Every record here, oldest first; removes temporary files of processes that are gone and broken records."""
        found: list[tuple[float, StoredChunk]] = []
        latest: list[tuple[float, bytes, bytes]] = []  # (time, key, tokens), a heap
        for entry in self._entries(str(self.path)):
            if entry.name.startswith("probe.") and entry.name.endswith(_TEMPORARY):
                self._sweep(entry)
        for folder in sorted(self._folders()):
            if self._closed:
                break
            for entry in self._entries(folder):
                if entry.name.endswith(_TEMPORARY):
                    self._sweep(entry)
                elif entry.name.endswith(_SUFFIX) and (described := self._describe(entry)):
                    used, stored = described
                    heappush(latest, (used, stored.key, stored.tokens))
                    if len(latest) > _TOKENS_OF_LATEST:
                        heappop(latest)
                    found.append((used, stored._replace(tokens=b"")))
        found.sort(key=lambda item: item[0])
        tokens = {key: own for _, key, own in latest}
        return (stored._replace(tokens=tokens.get(stored.key, b"")) for _, stored in found)

    def changes(self, resident: Collection[bytes]) -> Changes:
        """What came and went. A folder is looked into only if its own time, or how much is counted there, has changed.

        A record is told of at the second look that finds it: a first one may have met what this process itself is
        about to count, or to erase.
        """
        arrived: list[StoredChunk] = []
        gone: list[bytes] = []
        strangers: set[bytes] = set()
        expected: dict[str, set[bytes]] = {}
        for key in resident:
            expected.setdefault(key[:1].hex(), set()).add(key)
        try:
            if not self.breaker.allows or self._closed:
                return Changes([], [])
            folders = {entry.name: entry for entry in self._files.scan(str(self.path)) if len(entry.name) == 2}
        except OSError:
            return Changes([], [])
        gone += [key for name, keys in expected.items() if name not in folders for key in keys]
        for name, folder in folders.items():
            mine = expected.get(name, set())
            if (listing := self._changed(folder, len(mine))) is None:
                continue
            stamp, records = listing
            new = records.keys() - mine
            gone += mine - records.keys()
            arrived += [found[1] for key in new & self._strangers if (found := self._describe(records[key]))]
            strangers |= new
            if not new and time.time_ns() - stamp > _STAMP_GRAIN_NS:
                self._seen[name] = stamp, len(mine)
        self._strangers = strangers
        return Changes(sorted(arrived, key=lambda stored: stored.start), gone)

    def _changed(self, folder: os.DirEntry, count: int) -> tuple[int, dict[bytes, os.DirEntry]] | None:
        """(time of a folder, its records by key), or None if nothing was added or removed there or it cannot be read.

        The time is asked for first: what comes while the folder is listed changes it once more.
        """
        entries: dict[str, os.DirEntry] = {}
        try:
            stamp = folder.stat(follow_symlinks=False).st_mtime_ns
            if self._seen.get(folder.name) == (stamp, count):
                return None
            for entry in self._files.scan(folder.path):
                if entry.name.endswith(_TEMPORARY):
                    self._sweep(entry)  # one whose removal failed, or of a process that was killed
                elif entry.name.endswith(_SUFFIX):
                    entries[entry.name] = entry
        except OSError:
            return None
        keys = {name: _key_of(name) for name in entries}
        return stamp, {key: entries[name] for name, key in keys.items() if key is not None}

    def close(self) -> None:
        self._closed = True
        self._beside.close()
        self.breaker.close()

    def _folders(self) -> list[str]:
        return [e.path for e in self._entries(str(self.path)) if len(e.name) == 2 and e.is_dir(follow_symlinks=False)]

    def _entries(self, folder: str) -> list[os.DirEntry]:
        try:
            return list(self._files.scan(folder))
        except OSError:
            return []

    def _describe(self, entry: os.DirEntry) -> tuple[float, StoredChunk] | None:
        """(time of last use, what the header says) of one file; erases a file that is no record."""
        key = _key_of(entry.name)
        try:
            status = entry.stat(follow_symlinks=False)
            header = self._read_header(entry.path)
        except OSError:
            return None
        if key is None or entry.path != self._file(key):
            return None  # not where we would look for it
        if header is None or header.key != key or status.st_size != header.header_nbytes + header.payload_nbytes:
            _quietly(self._files.unlink, entry.path)
            return None
        stored = StoredChunk(key, header.parent, header.start, header.stop, status.st_blocks * 512, header.tokens)
        return status.st_mtime, stored

    def _read_header(self, path: str):
        fd = self._files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            head = bytearray(ALIGNMENT)
            whole = self._fill(fd, [head], 0)
            needed = int.from_bytes(head[12:16], "little")
            if whole and ALIGNMENT < needed <= MAX_HEADER:
                head = bytearray(needed)
                whole = self._fill(fd, [head], 0)
            return parse_header(head) if whole else None
        finally:
            _quietly(self._files.close, fd)

    def _sweep(self, entry: os.DirEntry) -> None:
        """Remove a temporary file unless the process that writes it may still be alive."""
        try:
            owner = int(entry.name.split(".")[1])
            alive = entry.name in _in_flight if owner == os.getpid() else _alive(owner)
            if not alive or time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                self._files.unlink(entry.path)
        except (OSError, ValueError, IndexError):
            pass

    def _make_folder(self, folder: str) -> None:
        if folder not in self._made:
            self._files.mkdir(folder)
            self._made.add(folder)

    def _file(self, key: bytes) -> str:
        digits = key.hex()
        return f"{self.path}/{digits[:2]}/{digits}{_SUFFIX}"

    def _temporary_name(self, key: bytes) -> str:
        digits = key.hex()
        return f"{self.path}/{digits[:2]}/{digits[:16]}.{os.getpid()}.{next(_serials)}{_TEMPORARY}"


def _key_of(name: str) -> bytes | None:
    """The key that a file's name spells, None if it spells none."""
    try:
        key = bytes.fromhex(name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return key if len(key) == 32 else None


def _quietly(call: Callable, argument: int | str) -> None:
    """A call whose failure changes nothing for the caller."""
    try:
        call(argument)
    except OSError:
        pass


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, so it lives
    return True


def _advance(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after so many bytes."""
    while views and done >= len(views[0]):
        done -= len(views[0])
        views = views[1:]
    return [views[0][done:], *views[1:]] if views else []


def _fault(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
