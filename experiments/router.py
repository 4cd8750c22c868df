"""A round-robin router in front of several servers that share a tier.

    with Router([first.url, second.url]) as router:
        send_requests(requests, router.url)
        router.set_servers([second.url, third.url])         # rolling: the next request goes to the new pair
        router.drain(first.url)                             # what the first one still answers is waited for
        first.close()

One request goes to one server, whole; the answer's header `X-Served-By` names it. A server that cannot be reached is
passed over and the next one asked; once an answer has begun, its server's failure is the client's.
"""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from workbench.errors import CacheError, InvalidInputError

__all__ = ["SERVED_BY", "Router"]

SERVED_BY = "X-Served-By"

_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length")
_START_SECONDS = 10.0


class Router:
    """An HTTP server on 127.0.0.1 in a thread of its own. Use as a context manager, or call `start` and `close`.

    Args:
        servers: Their addresses, as http://127.0.0.1:8000.
        port: 0 for a free one.
    """

    def __init__(self, servers: Sequence[str], *, port: int = 0):
        self.port, self.requests_by_server = port, Counter()
        self._under_way: Counter[str] = Counter()
        self.set_servers(servers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_servers(self, servers: Sequence[str]) -> None:
        """Requests that begin from now on go to these, in turn; those under way end where they are."""
        if not servers:
            raise InvalidInputError("a router needs at least one server")
        self._servers = tuple(server.rstrip("/") for server in servers)
        self._turns = itertools.count()

    def drain(self, server: str, *, timeout_s: float = 60.0) -> bool:
        """Wait until no answer of a server is under way; False if one still is after that time.

        A server that new requests still go to is not drained by waiting: call `set_servers` without it first.
        """
        deadline = time.monotonic() + timeout_s
        while self._under_way[server.rstrip("/")]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def start(self) -> "Router":
        """Listen. Raises CacheError if the port cannot be had."""
        self._loop, started = asyncio.new_event_loop(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True, name="router")
        self._thread.start()
        if not started.wait(_START_SECONDS) or self._error is not None:
            raise CacheError(f"the router cannot listen on port {self.port}: {self._error}")
        return self

    def close(self) -> None:
        """Stop listening; answers under way are cut. Twice is fine."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> "Router":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
        finally:
            started.set()
            self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        import aiohttp
        from aiohttp import web

        self._stop = asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        try:
            await site.start()
        except OSError as error:
            self._error = error
            await runner.cleanup()
            return
        self.port = runner.addresses[0][1]
        timeout = aiohttp.ClientTimeout(total=None, connect=5.0)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._session:
            started.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _pass_on(self, request: Any) -> Any:
        import aiohttp
        from aiohttp import web

        body, servers, turn = await request.read(), self._servers, next(self._turns)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        for step in range(len(servers)):
            server = servers[(turn + step) % len(servers)]
            self._under_way[server] += 1
            try:
                answer = await self._session.request(request.method, server + str(request.rel_url), data=body,
                                                     headers=headers, allow_redirects=False)  # fmt: skip
                self.requests_by_server[server] += 1
                async with answer:
                    return await _copied(request, answer, server)
            except aiohttp.ClientConnectorError:
                continue
            finally:
                self._under_way[server] -= 1
        return web.json_response({"error": f"none of {len(servers)} servers can be reached"}, status=502)


async def _copied(request: Any, answer: Any, server: str) -> Any:
    """Hand an answer on piece by piece, as it comes."""
    from aiohttp import web

    headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
    response = web.StreamResponse(status=answer.status, headers={**headers, SERVED_BY: server})
    await response.prepare(request)
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response
