"""Redis and Valkey: one string value a record, shared by every engine that reaches the server.

    contains  STRLEN x n                                one round trip
    read      GET x n -> header, payload straight into the caller's buffer, seal
    write     STRLEN x n -> SET NX x those not there    first writer wins

redis-py opens, authenticates and encrypts the connection; replies are parsed here, because its parser copies a large
reply several times. Each reply must be of the kind that its command gives; after anything else the connection is
dropped, so that no reply is ever taken for that of another call. One server, no cluster: its MOVED is a miss.
"""

import logging
import os
import re
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import redis
from redis.connection import parse_url
from redis.exceptions import BusyLoadingError

from workbench.chunks import Chunk
from workbench.errors import InvalidInputError
from workbench.record import header_nbytes
from workbench.tiers.remote import Pace, RemoteError, RemoteTier, Written
from workbench.tiers.sealed import Seal

__all__ = ["PASSWORD_VARIABLE", "RedisTier"]

logger = logging.getLogger(__name__)

PASSWORD_VARIABLE = "KVWORKBENCH_REDIS_PASSWORD"
_MAX_VALUE = 512 << 20  # of a string, Redis' proto-max-bulk-len
_BUFFER = 64 << 10
_SETS_IN_FLIGHT = 16  # an early refusal stops the rest
_GETS_IN_FLIGHT = 128 << 20  # bytes: the server holds in its own memory what was asked for and not taken yet

# The server answers but serves nobody, or not us; other refusals concern one command.
_OUTAGES = {"LOADING", "MASTERDOWN", "CLUSTERDOWN", "BUSY", "NOAUTH", "WRONGPASS", "NOPERM"}
_ERROR_WORD = re.compile(rb"-([A-Z][A-Z0-9]{1,23})\b")


class RedisTier(RemoteTier):
    """Records under `kvworkbench:<key in hex>` on one Redis or Valkey server.

    The password comes from `KVWORKBENCH_REDIS_PASSWORD` or from a file, never from the URL, which gets printed.
    Capacity and eviction of the server are its own (maxmemory, allkeys-lru); what it evicts is a miss.

    Args:
        url: redis://host:port/db, rediss:// for TLS, unix:///path; with user@ for an access-control user.
        identity: Digest that is written into each header.
        password_file: File whose first line is the password.
        ca_file: Certificates that TLS trusts instead of the system's.
        timeout_seconds: The longest that a call waits for a silent server, connecting included.
        expire_seconds: The server forgets a record so long after it was stored; 0 for never.
        seal: Signs records; see `workbench.tiers.sealed`.

    Raises:
        InvalidInputError: A URL that is none, or that holds a password; a file that cannot be read.
    """

    name = "redis"

    def __init__(self, url: str = "redis://127.0.0.1:6379/0", *, identity: bytes = bytes(32),
                 password_file: str | Path | None = None, ca_file: str | Path | None = None,
                 timeout_seconds: float = 0.25, expire_seconds: int = 0, seal: Seal | None = None):  # fmt: skip
        super().__init__(identity=identity, timeout_seconds=timeout_seconds, seal=seal)
        self.url, self.expire_seconds = url, expire_seconds
        self._class, self._settings = _connection_settings(url, _password(password_file), ca_file)
        self._idle: list[_Wire] = []
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- the five methods of a medium

    def _find(self, keys: Sequence[bytes], found: list[bool]) -> None:
        with self._wire() as wire:
            wire.send(b"".join(_command(b"STRLEN", _name(key)) for key in keys))
            refusals = set()
            for i in range(len(keys)):
                found[i], refusal = _answer(lambda: wire.integer() > 0, False)
                refusals.add(refusal)
        _raise_outage(refusals)

    def _fetch(self, chunks: Sequence[Chunk], outs: Sequence[np.ndarray], reasons: list[str | None],
               at_most: bool) -> None:  # fmt: skip
        sizes = [self.nbytes_of(out.nbytes, chunk.num_tokens) for chunk, out in zip(chunks, outs, strict=True)]
        asked = waiting = 0
        with self._wire() as wire:
            for i, (chunk, out) in enumerate(zip(chunks, outs, strict=True)):
                questions = []
                while asked < len(chunks) and (asked == i or waiting + sizes[asked] <= _GETS_IN_FLIGHT):
                    questions.append(_command(b"GET", _name(chunks[asked].key)))
                    waiting, asked = waiting + sizes[asked], asked + 1
                wire.send(b"".join(questions))
                reason, refusal = _answer(lambda c=chunk, o=out: self._receive(wire, c, o, at_most), "")
                reasons[i], waiting = reason or refusal, waiting - sizes[i]
        _raise_outage(reasons)

    def _receive(self, wire: "_Wire", chunk: Chunk, out: np.ndarray, at_most: bool) -> str:
        """One reply to GET: the record into its places, or past it."""
        nbytes = wire.bulk_nbytes()
        if nbytes is None:
            return "absent"
        payload = self._payload(chunk, out, nbytes, at_most)
        if isinstance(payload, str):
            wire.skip(nbytes)
            return payload
        head, tag = bytearray(header_nbytes(chunk.num_tokens)), bytearray(self._tag_nbytes)
        for part in (memoryview(head), payload.data, memoryview(tag)):
            wire.fill(part)
        wire.end_of_bulk()
        return self._judge(chunk, head, payload, tag)

    def _send(self, chunks: Sequence[Chunk], payloads: Sequence[np.ndarray], outcomes: list[Written | None]) -> None:
        sizes = [self.nbytes_of(p.nbytes, c.num_tokens) for c, p in zip(chunks, payloads, strict=True)]
        with self._wire() as wire:
            there = self._lengths(wire, chunks)
            wanted = []
            for i, (size, present) in enumerate(zip(sizes, there, strict=True)):
                if size > _MAX_VALUE:
                    outcomes[i] = ("too large", 0)
                elif present == size:
                    outcomes[i] = ("dedup", 0)
                else:
                    wanted.append(i)
            sent = 0
            for done, i in enumerate(wanted):
                while sent < len(wanted) and sent - done < _SETS_IN_FLIGHT:
                    self._send_set(wire, chunks[wanted[sent]], payloads[wanted[sent]], there[wanted[sent]] == 0)
                    sent += 1
                outcomes[i] = self._stored(wire, sizes[i])
                if outcomes[i][0] not in ("", "dedup"):
                    raise RemoteError(outcomes[i][0], outage=outcomes[i][0] in _OUTAGES)

    def _lengths(self, wire: "_Wire", chunks: Sequence[Chunk]) -> list[int]:
        """Bytes that lie under each key, 0 for none, -1 for a value that is not a string."""
        wire.send(b"".join(_command(b"STRLEN", _name(chunk.key)) for chunk in chunks))
        answers = [_answer(wire.integer, -1) for _ in chunks]
        if refusal := next((word for _, word in answers if word not in ("", "WRONGTYPE")), ""):
            self._rest_writes(refusal)
            raise RemoteError(refusal, outage=refusal in _OUTAGES)
        return [length for length, _ in answers]

    def _send_set(self, wire: "_Wire", chunk: Chunk, payload: np.ndarray, only_new: bool) -> None:
        """SET one record; what is there but no record of this length is replaced, whole in one step."""
        header, tag = self._record(chunk, payload)
        options = [b"NX"] if only_new else []
        if self.expire_seconds:
            options += [b"EX", b"%d" % self.expire_seconds]
        nbytes = len(header) + payload.nbytes + len(tag)
        before = b"*%d\r\n%s%s$%d\r\n" % (3 + len(options), _bulk(b"SET"), _bulk(_name(chunk.key)), nbytes)
        wire.send(before + header, payload.data, tag + b"\r\n" + b"".join(map(_bulk, options)))

    def _stored(self, wire: "_Wire", nbytes: int) -> Written:
        """The reply to SET: nil says that another engine was first."""
        stored, refusal = _answer(wire.stored, False)
        if refusal:
            self._rest_writes(refusal)
            return refusal, 0
        return ("", nbytes) if stored else ("dedup", 0)

    def _remove(self, keys: Sequence[bytes]) -> None:
        with self._wire() as wire:
            wire.send(_command(b"DEL", *map(_name, keys)))
            _, refusal = _answer(wire.integer, 0)
        if refusal:
            raise RemoteError(refusal, outage=refusal in _OUTAGES)

    def _release(self) -> None:
        self._release_idle()

    # ---------------------------------------------------------------- connections

    @contextmanager
    def _wire(self) -> Iterator["_Wire"]:
        """A connection for one call. It is kept for the next one only if this one read every reply to its end."""
        pace = self._pace()
        wire = self._idle_wire() or self._open(pace)
        wire.pace = pace
        try:
            yield wire
        except BaseException:  # an interrupt, too, leaves replies under way that must not meet another call
            wire.close()
            raise
        with self._lock:
            self._idle.append(wire)
        if self._closed.is_set():
            self._release_idle()

    def _idle_wire(self) -> "_Wire | None":
        """A connection that is open and silent; those that the server closed meanwhile are let go."""
        while True:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None or wire.is_silent():
                return wire
            wire.close()

    def _release_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def _open(self, pace: Pace) -> "_Wire":
        """A new connection. Made in a thread of its own, because looking up a name has no time-out."""
        future: Future[_Wire] = Future()
        seconds = pace.left()

        def connect() -> None:
            try:
                future.set_result(_Wire(self._connect(seconds)))
            except (redis.RedisError, OSError, ValueError) as error:
                future.set_exception(error)

        threading.Thread(target=connect, name="kv-redis-connect", daemon=True).start()
        try:
            return future.result(seconds)
        except FutureTimeout:
            future.add_done_callback(_close_late)
            raise RemoteError("timeout", outage=True) from None
        except (redis.RedisError, OSError) as error:
            raise RemoteError(_connect_reason(error), outage=True) from None

    def _connect(self, seconds: float) -> redis.Connection:
        connection = self._class(**self._settings, socket_timeout=seconds, socket_connect_timeout=seconds)
        connection.connect()
        return connection


class _Wire:
    """One open connection: sends commands, receives replies of the kind that is asked for.

    Every wait is bounded by `pace`. Whatever is not the reply it should be raises RemoteError, and so does an error
    reply: as `_RefusedError`, after which the connection is still in step.
    """

    def __init__(self, connection: redis.Connection):
        self._connection = connection
        # redis-py's own parsers take the socket the same way
        self._socket: socket.socket = connection._sock  # pyright: ignore[reportAttributeAccessIssue]
        self._bytes = bytearray(_BUFFER)
        self._buffer = memoryview(self._bytes)
        self._begin = self._end = 0
        self.pace: Pace

    def is_silent(self) -> bool:
        """Whether the connection is as an idle one should be. A closed one has an end to read, a foreign reply data."""
        if self._begin != self._end:
            return False
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        self._connection.disconnect()

    def send(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            left = memoryview(part)
            while left:
                sent = self._step(self._socket.send, left)
                left = left[sent:]

    def integer(self) -> int:
        """Reply to STRLEN and DEL."""
        line = self._line(b":")
        if not line.isdigit():
            raise _protocol_error()
        return int(line)

    def stored(self) -> bool:
        """Reply to SET: True for OK, False for nil."""
        line = self._line(b"+", b"$")
        if line not in (b"OK", b"-1"):
            raise _protocol_error()
        return line == b"OK"

    def bulk_nbytes(self) -> int | None:
        """Length of a bulk reply, whose bytes follow; None for nil."""
        line = self._line(b"$")
        if line == b"-1":
            return None
        if not line.isdigit() or int(line) > _MAX_VALUE:
            raise _protocol_error()
        return int(line)

    def fill(self, view: memoryview) -> None:
        """Receive until the view is full, straight into it but for what was received with the line before."""
        ready = min(len(view), self._end - self._begin)
        view[:ready] = self._buffer[self._begin : self._begin + ready]
        self._begin += ready
        left = view[ready:]
        while left:
            left = left[self._receive_into(left) :]

    def skip(self, nbytes: int) -> None:
        """Receive a bulk reply that nobody wants, to its end."""
        scratch = memoryview(bytearray(min(nbytes, _BUFFER)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            self.fill(part)
            nbytes -= len(part)
        self.end_of_bulk()

    def end_of_bulk(self) -> None:
        end = bytearray(2)
        self.fill(memoryview(end))
        if end != b"\r\n":
            raise _protocol_error()

    def _line(self, *kinds: bytes) -> bytes:
        """A line without its first byte, which must be one of `kinds`."""
        line = self._read_line()
        if line[:1] == b"-":
            word = _ERROR_WORD.match(line)
            raise _RefusedError(word[1].decode() if word else "error reply")
        if line[:1] not in kinds:
            raise _protocol_error()
        return line[1:]

    def _read_line(self) -> bytes:
        """The next line without its end. One that does not fit into the buffer is no reply of Redis."""
        while (at := self._bytes.find(b"\r\n", self._begin, self._end)) < 0:
            kept = self._end - self._begin
            if kept == len(self._buffer):
                raise _protocol_error()
            self._buffer[:kept] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, kept + self._receive_into(self._buffer[kept:])
        line = bytes(self._buffer[self._begin : at])
        self._begin = at + 2
        return line

    def _receive_into(self, view: memoryview) -> int:
        received = self._step(self._socket.recv_into, view)
        if not received:
            raise RemoteError("disconnected", outage=True)
        return received

    def _step(self, call, view: memoryview) -> int:
        """One send or receive within the time that is left."""
        self._socket.settimeout(self.pace.left())
        try:
            moved = call(view)
        except TimeoutError:
            raise RemoteError("timeout", outage=True) from None
        except OSError:
            raise RemoteError("disconnected", outage=True) from None
        self.pace.moved(moved)
        return moved


class _RefusedError(RemoteError):
    """An error reply: complete, so the next reply can be read after it."""

    def __init__(self, word: str):
        super().__init__(word, outage=word in _OUTAGES)


def _answer(read, otherwise):
    """(what was read, "") or, after an error reply, (otherwise, its first word)."""
    try:
        return read(), ""
    except _RefusedError as refused:
        return otherwise, refused.reason


def _raise_outage(reasons) -> None:
    for reason in reasons:
        if reason in _OUTAGES:
            raise RemoteError(reason, outage=True)


def _protocol_error() -> RemoteError:
    return RemoteError("not the reply asked for", outage=True)


def _name(key: bytes) -> bytes:
    return b"kvworkbench:" + key.hex().encode()


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n%s" % (len(words), b"".join(map(_bulk, words)))


def _close_late(future: "Future[_Wire]") -> None:
    """A connection that came after its caller had gone."""
    if future.exception() is None:
        future.result().close()


def _connect_reason(error: Exception) -> str:
    """Reason of a connection that was not made; never the server's text, which may repeat what was sent."""
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return "timeout"
    if isinstance(error, BusyLoadingError):
        return "LOADING"
    if isinstance(error, redis.AuthenticationError):
        return error.status_code or "NOAUTH"
    if isinstance(error, redis.ResponseError):
        return error.status_code or "error reply"
    if isinstance(error, redis.InvalidResponse):
        return "not the reply asked for"
    return "refused" if isinstance(error.__context__, ConnectionRefusedError) else "unreachable"


def _password(file: str | Path | None) -> str | None:
    if file is None:
        return os.environ.get(PASSWORD_VARIABLE) or None
    try:
        return Path(file).read_text().partition("\n")[0].rstrip("\r") or None
    except OSError as error:
        raise InvalidInputError(f"redis tier: password file {file} cannot be read: {error.strerror}") from None


def _connection_settings(url: str, password: str | None, ca_file: str | Path | None):
    """(connection class of redis-py, its arguments) for a URL. Raises InvalidInputError."""
    try:
        parts = urlsplit(url)
        if parts.password is not None or parts.query:
            raise InvalidInputError(
                f"redis tier: the URL holds a password or options; put the password into {PASSWORD_VARIABLE} or a file"
            )
        settings = parse_url(url)
    except InvalidInputError:
        raise
    except ValueError:
        raise InvalidInputError(
            "redis tier: not the URL of a server; allowed are redis://host:port/db, rediss://host:port/db "
            "and unix:///path"
        ) from None
    cls = settings.pop("connection_class", redis.Connection)
    if parts.scheme == "rediss" and ca_file is not None:
        settings["ssl_ca_certs"] = str(ca_file)
    if password is None and parts.scheme != "unix" and not _is_loopback(parts.hostname):
        logger.warning(
            "redis tier: no password for %s, which is not this machine: whoever reaches it can read and write the "
            "cache; set %s", parts.hostname, PASSWORD_VARIABLE
        )  # fmt: skip
    # RESP2 and no CLIENT SETINFO: the fewest round trips and the fewest commands that a server must allow.
    return cls, {**settings, "password": password, "protocol": 2, "driver_info": None}


def _is_loopback(host: str | None) -> bool:
    return host in (None, "localhost", "::1") or str(host).startswith("127.")
