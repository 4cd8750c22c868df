"""Requests to an OpenAI-compatible server, timed as a user sees them.

    rows = send_requests(workload.requests, server.url, concurrency=4)      # closed loop: each waits for a free place
    rows = send_requests(workload.requests, server.url, open_loop=True)     # at their arrival times
    load_summary(rows)

    scheduled ---- queue_s ----> sent ---> role, empty chunks ---> first token ---> ... ---> last token ---> end
    |<--------------------------- ttft_s ------------------------->|
    |<------------------------------------------------ e2e_s ---------------------------------------------->|

TTFT runs from the scheduled sending time to the first chunk that holds a generated token. A chunk with nothing but a
role, or with empty content, holds none; reasoning does, and the first token of the answer proper is `first_answer_s`.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from experiments.intervals import PERCENTILE_SAMPLES, percentile
from experiments.router import SERVED_BY
from experiments.workloads import Request
from workbench.errors import CacheError, InvalidInputError

__all__ = ["ENGINE_NAME", "load_summary", "send_requests", "stream"]

# What vLLM makes of a request's name: the server's words around `sent_as`, a number in process, and a suffix.
ENGINE_NAME = r"^(?:cmpl-)?(.+?)(?:-0)?-[0-9a-f]{8}$"

_REQUEST_SECONDS = 600.0


def send_requests(
    requests: Sequence[Request],
    url: str,
    *,
    concurrency: int | None = None,
    open_loop: bool = False,
    model: str | None = None,
    cache_salt: str | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Send requests and return one row each, in the order given. Works inside a running event loop, too.

    Args:
        requests: Prompts as token ids, sent to /v1/completions, greedy.
        url: Of the server or router.
        concurrency: The most under way at a time; 1 in a closed loop unless told, without a limit in an open one.
        open_loop: Each request is due at its `arrival_s`, whether the ones before are done or not. In a closed loop it
            is due when one of the places is free.
        model: Name that the server serves; asked for by default.
        cache_salt: Keeps what these prompts reuse apart from all others.
        watch: Called with (done, total) after each request.

    Returns:
        request_id, group, document, question, kind, prompt_tokens, sent_as (the name under which the server and its
        engine know the request), scheduled_s and the times above in seconds, itl_s (mean between tokens),
        output_tokens, cached_tokens, server_queue_s and server_ttft_s (from the end of its queue) where the server
        tells, served_by (the server behind a router, "" without one), token_ids, text, finish_reason, error ("" for an
        answer that is whole).

    Raises:
        InvalidInputError: An open loop without arrival times, or concurrency below 1.
        CacheError: Nobody answers at that address. What goes wrong later is a row's `error`.
    """
    if open_loop and any(request.arrival_s is None for request in requests):
        raise InvalidInputError("an open loop needs an arrival time for each request: see Workload.with_arrivals")
    places = concurrency if concurrency is not None else (len(requests) or 1) if open_loop else 1
    if places < 1:
        raise InvalidInputError(f"concurrency is {places}; at least 1 is needed")
    load = _Load(list(requests), url.rstrip("/"), open_loop, places, model, cache_salt, watch, token_hex(4))
    return _in_its_own_loop(load.run)


@dataclass
class _Load:
    requests: list[Request]
    url: str
    open_loop: bool
    places: int
    model: str | None
    cache_salt: str | None
    watch: Callable[[int, int], None]
    name: str  # of this load: the same workload may be sent twice at the same time

    async def run(self) -> list[dict[str, Any]]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)  # places are handed out here, where the waiting is counted
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            model, places = self.model or await _served_model(session, self.url), asyncio.Semaphore(self.places)
            rows: list[dict[str, Any]] = []
            start = time.perf_counter()

            async def send(request: Request, scheduled: float) -> None:
                name = f"{self.name}.{request.request_id}"
                try:
                    body = _completion_body(request, model, self.cache_salt)
                    timed = await stream(session, f"{self.url}/v1/completions", body, scheduled=scheduled, name=name)
                finally:
                    places.release()
                rows.append({**_labels(request), "sent_as": name, "scheduled_s": scheduled - start, **timed})
                self.watch(len(rows), len(self.requests))

            async with asyncio.TaskGroup() as group:
                for request in self._in_order():
                    scheduled = await self._due(request, start)
                    await places.acquire()
                    group.create_task(send(request, scheduled or time.perf_counter()))
        order = {request.request_id: place for place, request in enumerate(self.requests)}
        return sorted(rows, key=lambda row: order[row["request_id"]])

    def _in_order(self) -> list[Request]:
        return sorted(self.requests, key=lambda r: r.arrival_s) if self.open_loop else self.requests

    async def _due(self, request: Request, start: float) -> float | None:
        """Wait until a request is due; its time on this process's clock, or None if that is when it has a place."""
        if not self.open_loop or request.arrival_s is None:
            return None
        await asyncio.sleep(max(0.0, start + request.arrival_s - time.perf_counter()))
        return start + request.arrival_s


def _labels(request: Request) -> dict[str, Any]:
    return {"request_id": request.request_id, "group": request.group, "document": request.document,
            "question": request.question, "kind": request.kind, "prompt_tokens": len(request.token_ids)}  # fmt: skip


def _completion_body(request: Request, model: str, cache_salt: str | None) -> dict[str, Any]:
    body = {"model": model, "prompt": request.token_ids.tolist(), "max_tokens": request.max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}  # fmt: skip
    return body | ({"cache_salt": cache_salt} if cache_salt else {})


async def _served_model(session: Any, url: str) -> str:
    import aiohttp

    try:
        async with session.get(f"{url}/v1/models") as answer:
            answer.raise_for_status()
            return (await answer.json())["data"][0]["id"]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise CacheError(f"{url} does not tell which model it serves: {error}") from None


def _in_its_own_loop(work: Callable[[], Any]) -> Any:
    """Run a coroutine function in a thread of its own: a notebook's thread has a running loop already."""
    outcome: dict[str, Any] = {}

    def target() -> None:
        try:
            outcome["value"] = asyncio.run(work())
        except BaseException as error:  # carried over to the thread that waits
            outcome["error"] = error

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


# ---------------------------------------------------------------- one answer


@dataclass
class _Answer:
    """What has come of a streamed answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)  # of chunks that hold a generated token
    first_answer: float | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    served_by: str = ""
    error: str = ""

    def take(self, chunk: Mapping[str, Any], now: float) -> None:
        """Add a chunk of either kind: completion or chat."""
        if "error" in chunk:
            self.error = str(chunk["error"])
        self.usage, self.metrics = chunk.get("usage") or self.usage, chunk.get("metrics") or self.metrics
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            content = choice.get("text") or delta.get("content") or ""
            ids = choice.get("token_ids") or []
            thought = delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
            if content or ids or thought:
                self.token_times.append(now)
            if content and self.first_answer is None:
                self.first_answer = now
            self.text += content
            self.token_ids += ids
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


async def stream(session: Any, url: str, body: Mapping[str, Any], *, scheduled: float | None = None,
                 name: str = "") -> dict[str, Any]:  # fmt: skip
    """Send one request and time its streamed answer.

    Args:
        session: An aiohttp.ClientSession.
        url: Of /v1/completions or /v1/chat/completions.
        body: With "stream": true.
        scheduled: When it was due, as `time.perf_counter()` tells; now by default.
        name: What the server shall call it; its own choice by default.

    Returns:
        queue_s, ttft_s, first_answer_s, itl_s, e2e_s, output_tokens, cached_tokens, ... as `send_requests` has them.
    """
    import aiohttp

    sent = time.perf_counter()
    scheduled, answer = sent if scheduled is None else scheduled, _Answer()
    try:
        async with session.post(url, json=body, headers={"X-Request-Id": name} if name else {}) as response:
            answer.served_by = response.headers.get(SERVED_BY, "")
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:500]}"
            else:
                await _read(response, answer)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return _row(answer, scheduled, sent, time.perf_counter())


async def _read(response: Any, answer: _Answer) -> None:
    """Read server-sent events to the end, which "[DONE]" marks."""
    done, rest = False, b""
    async for piece in response.content.iter_any():  # not by lines: the first holds the whole prompt's ids
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                done = True
            else:
                answer.take(json.loads(data), now)
    if not done:
        answer.error = answer.error or "the answer ended before its end mark"


def _row(answer: _Answer, scheduled: float, sent: float, end: float) -> dict[str, Any]:
    times = answer.token_times
    generated = answer.usage.get("completion_tokens") or len(answer.token_ids)
    details = answer.usage.get("prompt_tokens_details") or {}
    error = answer.error or ("" if times else "no token was generated")
    return {
        "queue_s": sent - scheduled,
        "ttft_s": times[0] - scheduled if times else None,
        "first_answer_s": None if answer.first_answer is None else answer.first_answer - scheduled,
        "itl_s": (times[-1] - times[0]) / (generated - 1) if times and generated > 1 else None,
        "e2e_s": end - scheduled,
        "output_tokens": generated,
        "cached_tokens": details.get("cached_tokens"),
        "server_ttft_s": _seconds(answer.metrics.get("time_to_first_token_ms")),
        "server_queue_s": _seconds(answer.metrics.get("queue_time_ms")),
        "served_by": answer.served_by,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "error": error,
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


# ---------------------------------------------------------------- figures of a run


def load_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Throughput and latencies of what `send_requests` returned.

    Returns:
        requests, failed, seconds (first request due to last answer), requests_per_s, output_tokens_per_s,
        prompt_tokens_per_s, and <time>_p50 ... <time>_p99 for ttft_s, itl_s, e2e_s and queue_s: seconds, or "n too
        small", or "no data" where nothing was answered.
    """
    good = [row for row in rows if not row["error"]]
    found: dict[str, Any] = {"requests": len(rows), "failed": len(rows) - len(good)}
    rates = ("seconds", "requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s")
    if good:
        start = min(row["scheduled_s"] for row in rows)
        seconds = max(row["scheduled_s"] + row["e2e_s"] for row in good) - start
        amounts = (len(good), *(sum(row[name] for row in good) for name in ("output_tokens", "prompt_tokens")))
        found |= dict(zip(rates, (seconds, *(amount / seconds for amount in amounts)), strict=True))
    else:
        found |= dict.fromkeys(rates, "no data")
    for name in ("ttft_s", "itl_s", "e2e_s", "queue_s"):
        values = [row[name] for row in good if row[name] is not None]
        for percent in PERCENTILE_SAMPLES:
            value = percentile(values, percent)
            found[f"{name}_p{percent}"] = "no data" if not values else "n too small" if value is None else value
    return found
