"""The other end of `_lmcache_peer.py`: a peer that works in turns with us, in an interpreter of its own.

KVWORKBENCH_LMCACHE_PYTHON names the interpreter; how to make one stands in `_lmcache_peer.py`. Without it there is no
peer, and its column stays empty.
"""

import contextlib
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.peer_process import PeerError, PeerProcess

__all__ = ["Peer", "lmcache_peer"]

PYTHON_VARIABLE = "KVWORKBENCH_LMCACHE_PYTHON"


class Peer(PeerProcess):
    """A process that does the same work as we do, when it is asked.

    Args:
        python: Its interpreter.
    """

    def __init__(self, python: str):
        script = Path(__file__).with_name("_lmcache_peer.py")
        super().__init__(python, script, PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
        self._rounds: list[dict[str, Any]] = []

    def open(self, source: str, chunks: int, **tier: Any) -> None:
        """Begin a row of rounds."""
        self._rounds = []
        self.ask("open", source=source, chunks=chunks, **tier)

    def round(self) -> None:
        """Let it do its part of one round; the times are kept for `close`. Raises PeerError for wrong bytes."""
        found = self.ask("round")
        if not found.pop("exact"):
            raise PeerError("the peer gave back other bytes than it was given")
        self._rounds.append(found)

    def close(self) -> dict[str, float]:
        """End the row: medians of seconds over its rounds but the first, and each move over its own copy."""
        self.ask("close")
        rounds = self._rounds[1:]
        found = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        for name in ("store", "retrieve"):
            found[f"{name}_over_copy"] = statistics.median(r["copy_s"] / r[f"{name}_s"] for r in rounds)
        return found


@contextlib.contextmanager
def lmcache_peer() -> Iterator[Peer | None]:
    """LMCache, where an interpreter with it is named; None otherwise."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        yield None
        return
    peer = Peer(python)
    try:
        yield peer
    finally:
        peer.end()
