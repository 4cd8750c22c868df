"""What every remote tier does the same: breaker, deadlines, the record's form, bad records removed once.

    contains  breaker -> one round trip -> which keys are there
    read      breaker -> record straight into the caller's buffer -> header, checksum and seal checked
    write     breaker -> what is there already is left alone -> header, payload and seal sent
    record    header (workbench/record.py) | payload | seal (workbench/tiers/sealed.py), the last only with a key

A tier of this kind is shared: other engines store into it and evict from it, so nothing is known of it but by asking.
A medium is a subclass with five methods that raise `RemoteError`.
"""

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from workbench.chunks import Chunk
from workbench.errors import InvalidInputError
from workbench.record import header_nbytes, pack_header, parse_header
from workbench.tiers.base import Tier
from workbench.tiers.breaker import CircuitBreaker
from workbench.tiers.sealed import Seal

__all__ = ["Pace", "RemoteError", "RemoteTier", "Written"]

Written = tuple[str, int]  # (reason, bytes taken), as `Tier.write` returns it

# The record under the key is no good, now and later: it is taken away so that a good one can be stored.
_BAD_RECORD = ("corrupt", "mismatch", "mac", "WRONGTYPE")

_WRITE_REST_SECONDS = 1.0


class RemoteError(Exception):
    """Why a remote call gave nothing.

    Args:
        reason: As in events; never holds what a server wrote beyond its error word.
        outage: Whether the server is away, which opens the breaker, or only said no.
    """

    def __init__(self, reason: str, *, outage: bool):
        super().__init__(reason)
        self.reason, self.outage = reason, outage


class Pace:
    """How long one call may still take: a bound on silence, and one on the whole that grows with what has moved.

    A server that sends a byte now and then keeps within the first bound for ever, and breaks the second at once.

    Args:
        patience_seconds: The longest silence, and the longest that the first byte may take.
        min_bytes_per_second: A transfer slower than this is given up.
    """

    def __init__(self, patience_seconds: float, min_bytes_per_second: float):
        self._patience, self._slowest = patience_seconds, min_bytes_per_second
        self._start = time.monotonic()
        self._moved = 0

    def moved(self, nbytes: int) -> None:
        self._moved += nbytes

    def left(self, unheard_bytes: int = 0) -> float:
        """Seconds that the next step may take; one that moves `unheard_bytes` before anything is heard may take longer.

        Raises RemoteError when there are none.
        """
        unheard = unheard_bytes / self._slowest
        whole = self._start + self._patience + self._moved / self._slowest + unheard - time.monotonic()
        if whole <= 0:
            raise RemoteError("timeout", outage=True)
        return min(self._patience + unheard, whole)


class RemoteTier(Tier):
    """Base of the remote tiers. See `Tier` for the contract; here it is kept for a medium that may be away or lie.

    Args:
        identity: Digest that is written into each header.
        timeout_seconds: The longest that a call waits for a server that is silent.
        seal: Signs records and refuses those that are not signed; see `workbench.tiers.sealed`.
    """

    shared = True  # other engines store here too: `contains` is the only way to know
    min_bytes_per_second = 10e6  # a transfer slower than this counts as silence; KV is computed anew as fast

    def __init__(self, *, identity: bytes, timeout_seconds: float, seal: Seal | None):
        if timeout_seconds <= 0:
            raise InvalidInputError(f"timeout_seconds is {timeout_seconds}; it must be over 0")
        self.timeout_seconds = timeout_seconds
        self.breaker = CircuitBreaker(self.name, self._answers)
        self._identity, self._seal = identity, seal
        self._tag_nbytes = seal.nbytes if seal is not None else 0
        self._writes_rest_until = -_WRITE_REST_SECONDS
        self._write_refusal = ""
        self._process = os.getpid()
        self._closed = threading.Event()

    # ---------------------------------------------------------------- the contract

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys are there now, in one round trip; all False while the server is away.

        Takes at most `timeout_seconds`, and no time while the breaker is open.
        """
        found = [False] * len(keys)
        self._attempt(lambda: self._find(keys, found))
        return found

    def read(self, chunk: Chunk, out: np.ndarray, *, at_most: bool = False) -> str:
        return self.read_many([chunk], [out], at_most=at_most)[0]

    def read_many(self, chunks: Sequence[Chunk], outs: Sequence[np.ndarray], *, at_most: bool = False) -> list[str]:
        """`read` for several chunks in one pipeline; one reason each."""
        reasons: list[str | None] = [None] * len(chunks)
        fault = self._attempt(lambda: self._fetch(chunks, outs, reasons, at_most))
        done = [fault if reason is None else reason for reason in reasons]
        bad = [chunk.key for chunk, reason in zip(chunks, done, strict=True) if reason in _BAD_RECORD]
        if bad:
            self._attempt(lambda: self._remove(bad))
        return done

    def write(self, chunk: Chunk, payload: np.ndarray) -> Written:
        return self.write_many([chunk], [payload])[0]

    def write_many(self, chunks: Sequence[Chunk], payloads: Sequence[np.ndarray]) -> list[Written]:
        """`write` for several chunks in one pipeline; one outcome each."""
        outcomes: list[Written | None] = [None] * len(chunks)
        if time.monotonic() < self._writes_rest_until:
            return [(self._write_refusal, 0)] * len(chunks)
        fault = self._attempt(lambda: self._send(chunks, payloads, outcomes))
        return [(fault, 0) if outcome is None else outcome for outcome in outcomes]

    def erase(self, key: bytes) -> None:
        """Remove a chunk if it is there; while the server is away nothing happens, and the record stays."""
        self._attempt(lambda: self._remove([key]))

    def nbytes_of(self, payload_nbytes: int, tokens: int) -> int:
        return header_nbytes(tokens) + payload_nbytes + self._tag_nbytes

    def close(self) -> None:
        """Let go of the connections; later calls are misses. Twice is fine."""
        self._closed.set()
        self.breaker.close()
        if os.getpid() == self._process:
            self._release()

    # ---------------------------------------------------------------- what a medium supplies

    @abstractmethod
    def _find(self, keys: Sequence[bytes], found: list[bool]) -> None:
        """Set `found` where a key is there. Raises RemoteError."""

    @abstractmethod
    def _fetch(self, chunks: Sequence[Chunk], outs: Sequence[np.ndarray], reasons: list[str | None],
               at_most: bool) -> None:  # fmt: skip
        """Fill each `out` and set its reason, "" for a good one. Raises RemoteError for all that have none yet."""

    @abstractmethod
    def _send(self, chunks: Sequence[Chunk], payloads: Sequence[np.ndarray], outcomes: list[Written | None]) -> None:
        """Store each record and set its outcome. Raises RemoteError for all that have none yet."""

    @abstractmethod
    def _remove(self, keys: Sequence[bytes]) -> None:
        """Remove what is there of the keys. Raises RemoteError."""

    @abstractmethod
    def _release(self) -> None:
        """Close connections and threads."""

    # ---------------------------------------------------------------- parts

    def _attempt(self, call: Callable[[], None]) -> str:
        """Make a call unless the server is known to be away; "" or the reason why not."""
        if self._closed.is_set():
            return "closed"
        if os.getpid() != self._process:
            return "forked"  # sockets and threads belong to the parent
        if not self.breaker.allows:
            return "breaker open"
        try:
            call()
        except RemoteError as fault:
            if fault.outage and not self._closed.is_set():
                self._release_idle()
                self.breaker.trip(fault.reason)
            return fault.reason
        return ""

    def _answers(self) -> bool:
        """Whether the server answers the simplest question: the breaker's probe."""
        try:
            self._find([bytes(32)], [False])
        except RemoteError:
            return False
        return True

    def _release_idle(self) -> None:
        """Drop connections that a failure has made doubtful."""

    def _rest_writes(self, reason: str) -> None:
        """The server refuses to store: send it nothing for a moment, records are large."""
        self._write_refusal, self._writes_rest_until = reason, time.monotonic() + _WRITE_REST_SECONDS

    def _pace(self, sharing: int = 1) -> Pace:
        """The pace of one of so many transfers that share the line."""
        return Pace(self.timeout_seconds, self.min_bytes_per_second / sharing)

    def _record(self, chunk: Chunk, payload: np.ndarray) -> tuple[bytes, bytes]:
        """Header and tag that go before and after a payload."""
        header = pack_header(chunk, self._identity, payload)
        return header, self._seal.tag(header, payload) if self._seal is not None else b""

    def _payload(self, chunk: Chunk, out: np.ndarray, nbytes: int, at_most: bool) -> np.ndarray | str:
        """The part of `out` that the payload of a record of so many bytes fills, or why it cannot be this chunk's."""
        expected = self.nbytes_of(out.nbytes, chunk.num_tokens)
        if nbytes == expected:
            return out
        if at_most and expected - out.nbytes <= nbytes < expected:
            return out[: out.nbytes - (expected - nbytes)]
        return self._judge_length(nbytes, expected)

    def _judge_length(self, nbytes: int, expected: int) -> str:
        """Reason for a record of the wrong length; one that is whole but for the seal is unsigned, not damaged."""
        return "mac" if self._seal is not None and nbytes == expected - self._tag_nbytes else "corrupt"

    def _judge(self, chunk: Chunk, head: bytearray, payload: np.ndarray, tag: bytes | bytearray) -> str:
        """Whether what was received is this chunk's record: "" or the reason why not.

        Checksums come first, so that "mac" means a record that is sound and signed by nobody who may.
        """
        header = parse_header(memoryview(head))
        if header is None:
            return "corrupt"
        if not header.describes(chunk) or header.payload_nbytes != payload.nbytes:
            return "mismatch"
        if xxhash.xxh3_128_digest(payload.data) != header.payload_digest:
            return "corrupt"
        return "" if self._seal is None or self._seal.holds(tag, head, payload) else "mac"
