"""A network link of a chosen bandwidth on one machine: a relay that forwards no faster than that, each way.

with LimitedLink(port=6379, bytes_per_second=125e6) as link:      # 1 Gbit/s
    redis.Redis(port=link.port)
    link.bytes_per_second = 1.25e9                                # 10 Gbit/s from now on
"""

import socket
import threading
import time
from contextlib import suppress

from workbench.errors import InvalidInputError

__all__ = ["GBIT", "LimitedLink"]

GBIT = 1e9 / 8  # bytes per second of one Gbit/s
_PIECE = 1 << 16
_BURST_SECONDS = 2e-3  # of the link's bandwidth: sleeps shorter than this are not kept


class LimitedLink:
    """Relays TCP connections on 127.0.0.1. Bandwidth is shared by all connections, and each way has its own.

    Args:
        port: Where the server listens on 127.0.0.1.
        bytes_per_second: The most that passes each way; infinity for no limit. May be changed while in use.

    Raises:
        InvalidInputError: A bandwidth that is not over 0.
    """

    def __init__(self, *, port: int, bytes_per_second: float):
        if not bytes_per_second > 0:
            raise InvalidInputError(f"bytes_per_second is {bytes_per_second}; it must be over 0")
        self.bytes_per_second = bytes_per_second
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ways = [_Way(self), _Way(self)]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="link-accept", daemon=True).start()

    def close(self) -> None:
        """Cut every connection. Twice is fine."""
        for end in (self._listener, *self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> "LimitedLink":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(("127.0.0.1", self._server_port), timeout=1)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(end)
            for way, source, target in ((0, near, far), (1, far, near)):
                threading.Thread(target=self._relay, args=(self._ways[way], source, target), daemon=True).start()

    def _relay(self, way: "_Way", source: socket.socket, target: socket.socket) -> None:
        buffer = memoryview(bytearray(_PIECE))
        try:
            while got := source.recv_into(buffer):
                way.pass_bytes(got)
                target.sendall(buffer[:got])
        except OSError:
            pass  # one end is gone: so is the other
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            self._open.discard(end)
            end.close()


class _Way:
    """One direction: time that the link is still busy with what was sent."""

    def __init__(self, link: LimitedLink):
        self._link, self._lock, self._busy_until = link, threading.Lock(), 0.0

    def pass_bytes(self, nbytes: int) -> None:
        """Return when the link has room for the next bytes."""
        with self._lock:
            now = time.monotonic()
            self._busy_until = max(now, self._busy_until) + nbytes / self._link.bytes_per_second
            wait = self._busy_until - now
        if wait > _BURST_SECONDS:
            time.sleep(wait)
