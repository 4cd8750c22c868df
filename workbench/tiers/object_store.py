"""Object stores through obstore: S3 and its kin, Google Cloud Storage, Azure, a local directory, memory.

    contains  HEAD x n, side by side
    read      one ranged GET a record: its first bytes, and the object's size with them
    write     PUT if there is none yet (first writer wins); a store that knows no condition is asked before

Requests run in an event loop of the tier's own, so that each one can be given up at its deadline, whatever the server
does; a transfer under way is watched piece by piece. obstore's own retries are off: the breaker decides when to ask
again. Records are copied once in each direction, out of and into obstore's memory.
"""

import asyncio
import os
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore import exceptions
from obstore.store import from_url

from workbench.chunks import Chunk
from workbench.errors import InvalidInputError
from workbench.record import header_nbytes
from workbench.tiers.remote import Pace, RemoteError, RemoteTier, Written
from workbench.tiers.sealed import Seal

__all__ = ["ObjectStoreTier"]

_PIECE = 256 << 10  # a download is watched in steps of this size
_TRANSFERS_AT_ONCE = 8
_QUESTIONS_AT_ONCE = 64  # HEAD and DELETE
# What obstore's error texts hold -> our name for it; anything else is a connection that broke.
_SIGNS = {
    "kind: Timeout": "timeout",
    "TimedOut": "timeout",
    "ConnectionRefused": "refused",
    "kind: Connect": "unreachable",
    "UnexpectedRange": "not the range asked for",
    "NotPartial": "not the range asked for",
}
_STATUS = re.compile(r"status code: (\d{3})")


class ObjectStoreTier(RemoteTier):
    """Records under `<prefix>/<first two hex digits>/<key in hex>.kv` in one bucket or directory.

    Credentials come from the environment, as each provider's own tools take them, or from `options`.

    Args:
        url: s3://bucket/prefix, gs://, az://, file:///directory, memory:///.
        identity: Digest that is written into each header.
        options: Settings of the store by obstore's names, as in {"endpoint": "http://127.0.0.1:9000"}.
        client_options: Settings of the HTTP client by obstore's names, as in {"allow_http": True}.
        timeout_seconds: The longest that a call waits for a silent server, connecting included.
        seal: Signs records; see `workbench.tiers.sealed`.

    Raises:
        InvalidInputError: A URL or an option that obstore does not know.
    """

    name = "object_store"

    def __init__(self, url: str, *, identity: bytes = bytes(32), options: dict[str, Any] | None = None,
                 client_options: dict[str, Any] | None = None, timeout_seconds: float = 0.25,
                 seal: Seal | None = None):  # fmt: skip
        super().__init__(identity=identity, timeout_seconds=timeout_seconds, seal=seal)
        self.url = url
        self._store = _open_store(url, options or {}, client_options or {}, timeout_seconds)
        self._conditional = True  # until the store says that it knows no condition
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- the five methods of a medium

    def _find(self, keys: Sequence[bytes], found: list[bool]) -> None:
        async def find(i: int, pace: Pace) -> None:
            try:
                found[i] = (await self._size(keys[i], pace)) is not None
            except RemoteError as fault:
                if fault.outage:
                    raise

        self._run([lambda pace, i=i: find(i, pace) for i in range(len(keys))], at_once=_QUESTIONS_AT_ONCE)

    def _fetch(self, chunks: Sequence[Chunk], outs: Sequence[np.ndarray], reasons: list[str | None],
               at_most: bool) -> None:  # fmt: skip
        ends = [(bytearray(header_nbytes(c.num_tokens)), bytearray(self._tag_nbytes)) for c in chunks]
        arrived: dict[int, np.ndarray] = {}

        async def fetch(i: int, pace: Pace) -> None:
            head, tag = ends[i]
            try:
                got = await self._get(chunks[i], head, outs[i], tag, pace=pace, at_most=at_most)
            except RemoteError as fault:
                reasons[i] = fault.reason
                if fault.outage:
                    raise
            else:
                if isinstance(got, str):
                    reasons[i] = got
                else:
                    arrived[i] = got

        try:
            self._run([lambda pace, i=i: fetch(i, pace) for i in range(len(chunks))])
        finally:
            for i, payload in arrived.items():
                head, tag = ends[i]
                reasons[i] = self._judge(chunks[i], head, payload, tag)

    def _send(self, chunks: Sequence[Chunk], payloads: Sequence[np.ndarray], outcomes: list[Written | None]) -> None:
        try:
            for i, (chunk, payload) in enumerate(zip(chunks, payloads, strict=True)):
                outcomes[i] = self._store_one(chunk, payload)  # one after the other: each takes a copy of its record
        except RemoteError as fault:
            if not fault.outage:
                self._rest_writes(fault.reason)
            raise

    def _store_one(self, chunk: Chunk, payload: np.ndarray) -> Written:
        nbytes = self.nbytes_of(payload.nbytes, chunk.num_tokens)
        present: list[int | None] = []

        async def look(pace: Pace) -> None:
            present.append(await self._size(chunk.key, pace))

        self._run([look])
        if present[0] == nbytes:
            return "dedup", 0
        header, tag = self._record(chunk, payload)
        record = b"".join((header, payload.data, tag))
        try:
            self._run([lambda pace: self._put(chunk.key, record, present[0] is None, pace)])
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return "dedup", 0
        return "", nbytes

    def _remove(self, keys: Sequence[bytes]) -> None:
        async def remove(key: bytes, pace: Pace) -> None:
            try:
                await _within(pace.left(), obstore.delete_async(self._store, _path(key)))
            except FileNotFoundError:
                pass  # a directory says so, a bucket does not

        self._run([lambda pace, key=key: remove(key, pace) for key in keys], at_once=_QUESTIONS_AT_ONCE)

    def _release(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_wind_up(), loop)

    # ---------------------------------------------------------------- requests

    async def _size(self, key: bytes, pace: Pace) -> int | None:
        """Size of a record, None if there is none."""
        try:
            return (await _within(pace.left(), obstore.head_async(self._store, _path(key))))["size"]
        except FileNotFoundError:
            return None

    async def _get(self, chunk: Chunk, head: bytearray, out: np.ndarray, tag: bytearray, *, pace: Pace,
                   at_most: bool) -> np.ndarray | str:  # fmt: skip
        """Fill the parts of a record, one after the other; the part of `out` that is filled, or the reason why none."""
        expected = self.nbytes_of(out.nbytes, chunk.num_tokens)
        try:
            request = obstore.get_async(self._store, _path(chunk.key), options={"range": (0, expected)})
            result = await _within(pace.left(), request)
        except FileNotFoundError:
            return "absent"
        payload = self._payload(chunk, out, result.meta["size"], at_most)
        if not isinstance(payload, str):
            parts = [memoryview(head), memoryview(payload), memoryview(tag)]
            await _scatter(aiter(result.stream(min_chunk_size=_PIECE)), parts, pace)
        return payload

    async def _put(self, key: bytes, record: bytes, only_new: bool, pace: Pace) -> None:
        """Store a record; what is there but of the wrong length is replaced. Raises AlreadyExistsError if beaten."""
        seconds = pace.left(unheard_bytes=len(record))

        def upload(mode: Literal["create", "overwrite"]) -> Awaitable[Any]:
            request = obstore.put_async(self._store, _path(key), record, mode=mode, use_multipart=False)
            return _within(seconds, request)

        try:
            await upload("create" if only_new and self._conditional else "overwrite")
        except exceptions.NotSupportedError:
            self._conditional = False
            await upload("overwrite")
        except FileNotFoundError:
            raise RemoteError("no such bucket", outage=False) from None

    # ---------------------------------------------------------------- the event loop

    def _run(self, requests: Sequence[Callable[[Pace], Coroutine]], *, at_once: int = _TRANSFERS_AT_ONCE) -> None:
        """Run requests side by side and wait for all; raises what the first that failed raised."""

        async def run_all() -> None:
            places = asyncio.Semaphore(at_once)

            async def run_one(request: Callable[[Pace], Coroutine]) -> None:
                async with places:
                    await request(self._pace(sharing=min(at_once, len(requests))))

            for outcome in await asyncio.gather(*map(run_one, requests), return_exceptions=True):
                if outcome is not None:
                    raise outcome

        with self._lock:
            if self._closed.is_set():
                raise RemoteError("closed", outage=False)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="kv-object-store", daemon=True).start()
            future = asyncio.run_coroutine_threadsafe(run_all(), self._loop)
        try:
            future.result()
        except CancelledError:
            raise RemoteError("closed", outage=False) from None
        except BaseException:
            future.cancel()  # after an interrupt nothing may go on writing into the caller's buffer
            raise


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _wind_up() -> None:
    """Give up what is still under way and stop the loop."""
    under_way = asyncio.all_tasks() - {asyncio.current_task()}
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    asyncio.get_running_loop().stop()


async def _within(seconds: float, request: Awaitable[Any]) -> Any:
    """Await one answer of the store, at most so long; its errors by our names.

    What says only that something is or is not there is passed on: the caller knows what it means.
    """
    try:
        return await asyncio.wait_for(request, seconds)
    except TimeoutError:
        raise RemoteError("timeout", outage=True) from None
    except (FileNotFoundError, exceptions.AlreadyExistsError, exceptions.PreconditionError,
            exceptions.NotSupportedError):  # fmt: skip
        raise
    except (exceptions.BaseError, OSError) as error:
        raise _fault(error) from None


async def _scatter(stream, views: list[memoryview], pace: Pace) -> None:
    """Copy a stream into buffers one after the other; it must fill them and end."""
    views = [view.cast("B") for view in views if view.nbytes]
    while True:
        piece = await _within(pace.left(unheard_bytes=_PIECE), _next(stream))
        if piece is None:
            break
        pace.moved(len(piece))
        left = memoryview(piece)
        while len(left):
            if not views:
                raise RemoteError("not the range asked for", outage=True)
            n = min(len(left), len(views[0]))
            views[0][:n] = left[:n]
            left, views = left[n:], [views[0][n:], *views[1:]] if n < len(views[0]) else views[1:]
    if views:
        raise RemoteError("disconnected", outage=True)


async def _next(stream) -> Any:
    return await anext(stream, None)


def _fault(error: Exception) -> RemoteError:
    """A named fault for an error of obstore; of its text only the status and the kind are used."""
    text = str(error)
    if isinstance(error, exceptions.PermissionDeniedError):
        return RemoteError("http 403", outage=False)
    if isinstance(error, exceptions.UnauthenticatedError):
        return RemoteError("http 401", outage=False)
    status = _STATUS.search(text)
    if "StartTooLarge" in text or (status and status[1] == "416"):
        return RemoteError("corrupt", outage=False)  # an empty object has no first byte
    if status:
        return RemoteError(f"http {status[1]}", outage=status[1].startswith("5") or status[1] == "429")
    if isinstance(error, OSError):
        return RemoteError(type(error).__name__, outage=False)
    return RemoteError(next((name for sign, name in _SIGNS.items() if sign in text), "disconnected"), outage=True)


def _path(key: bytes) -> str:
    digits = key.hex()
    return f"{digits[:2]}/{digits}.kv"


def _open_store(url: str, options: dict[str, Any], client_options: dict[str, Any], timeout_seconds: float):
    remote = not url.startswith(("file:", "memory:"))
    limits = {"connect_timeout": timedelta(seconds=timeout_seconds), "timeout": timedelta(seconds=600)}
    settings: dict[str, Any] = {}
    if remote:
        settings = {"client_options": {**limits, **client_options}, "retry_config": {"max_retries": 0}}
    try:
        if url.startswith("file:"):  # obstore would make it readable by all
            os.makedirs(unquote(urlsplit(url).path), mode=0o700, exist_ok=True)
        return from_url(url, config=options, **settings) if remote else from_url(url, **settings)  # pyright: ignore
    except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
        name = type(error).__name__  # the text may repeat options, and with them secrets
        raise InvalidInputError(
            f"object store tier: {url} with options {', '.join(sorted(options)) or 'none'} cannot be opened ({name}); "
            f"allowed are s3://, gs://, az://, file:/// and memory:/// with obstore's names of options"
        ) from None
