"""Free TCP ports on 127.0.0.1 that stay free until the process they are for has taken them."""

import socket

__all__ = ["ReservedPort", "reserved_port"]


class ReservedPort:
    """Holds a port without listening on it; another process that binds with SO_REUSEADDR gets it, the kernel gives it
    to nobody else. Use as a context manager, or call `release`.
    """

    def __init__(self, number: int = 0):
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", number))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Let go of it. Twice is fine."""
        self._socket.close()

    def __enter__(self) -> "ReservedPort":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def reserved_port(number: int = 0) -> ReservedPort:
    """A free port, or that very one. Raises OSError if it is taken."""
    return ReservedPort(number)
