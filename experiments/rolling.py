"""A rolling replacement: two servers behind a router share Redis, and one is replaced while requests run.

servers A and B, requests without a pause -> C starts -> the router sends to B and C -> A answers what it has, and ends
-> more requests

run = roll("smollm2")
run.environment["rolling"]      # failed requests, and the tokens that each server found of what others had computed
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from experiments.arms import arm_by_name, ready
from experiments.cache_state import read_events
from experiments.client import ENGINE_NAME, send_requests
from experiments.demo import engine_room, shared_tokens
from experiments.environment import describe_environment
from experiments.models import ModelSource, resolve_model
from experiments.router import Router
from experiments.runs import RUNS_FOLDER, Run, new_run_folder, requests_frame
from experiments.server import ServerProcess
from experiments.serving import Progress
from experiments.workloads import Request, Workload, make_workload

__all__ = ["found_of_others", "roll"]

_MEMORY = "256MiB"  # of each server's own, before the shared tier
_ROUNDS = 2  # before the replacement begins, and after it is done
_LABELS = {"a": "server A, replaced", "b": "server B", "c": "server C, in A's place"}


def roll(model: str | ModelSource = "smollm2", workload: Workload | None = None, *, runs: Path = RUNS_FOLDER,
         threads: int = 0, requests_per_s: float = 4.0,
         watch: Callable[[Progress], None] = lambda _: None) -> Run:  # fmt: skip
    """Replace one of two servers under load.

    Args:
        model: What `resolve_model` takes.
        workload: Its requests are sent again and again, a round for each question; some shared prefixes by default.
        runs: Folder of the run store.
        threads: Compute threads of each server; 0 for all cores.
        requests_per_s: At which they come, in even steps.
        watch: Called with `Progress` before each step.

    Returns:
        The run, with the arms "a", "b" and "c"; `environment["rolling"]` has failed requests, the moments of the
        replacement in seconds, and for each server the tokens that it found of what others had computed.

    Raises:
        ArmUnavailableError: redis-server is not installed.
    """
    source = model if isinstance(model, ModelSource) else resolve_model(model)
    workload = workload if workload is not None else _prefixes(source)
    folder = new_run_folder("rolling", runs)
    rolling = _Rolling(source, workload, folder, threads, watch)
    with ExitStack() as stack:
        rolling.cache = dict(stack.enter_context(ready(arm_by_name("redis"), folder)).cache or {})
        first, second = (stack.enter_context(rolling.server(name)) for name in ("a", "b"))
        router = stack.enter_context(Router([first.url, second.url]))
        load = stack.enter_context(_Load(workload, router.url, str(source.path), requests_per_s))
        load.wait_for_rounds(_ROUNDS)
        third = stack.enter_context(rolling.server("c"))  # while requests run
        rolling.mark("started")
        router.set_servers([second.url, third.url])
        rolling.mark("switched")
        rolling.drained = router.drain(first.url)
        rolling.mark("drained")
        first.close()
        load.wait_for_rounds(_ROUNDS)
        rows = load.end()
        names = {first.url: "a", second.url: "b", third.url: "c"}
    return rolling.save([{**row, "arm": names.get(row["served_by"], "")} for row in rows])


def _prefixes(source: ModelSource) -> Workload:
    from transformers import AutoTokenizer

    # An odd number: a router that takes turns sends each prefix to the one server and to the other, round by round.
    return make_workload("shared_prefix", AutoTokenizer.from_pretrained(str(source.path)), prefixes=7,
                         prefix_tokens=800, questions=4, max_tokens=8)  # fmt: skip


class _Load:
    """Sends the workload round after round, from a thread of its own, until `end`."""

    def __init__(self, workload: Workload, url: str, model: str, requests_per_s: float):
        self._url, self._model = url, model
        self._rounds = _rounds(workload, requests_per_s)
        self._ending, self._executor = threading.Event(), ThreadPoolExecutor(1)
        self._done = 0
        self._rows: Future[list[dict[str, Any]]] | None = None

    def __enter__(self) -> "_Load":
        self._rows = self._executor.submit(self._send)
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        self._executor.shutdown()

    def wait_for_rounds(self, rounds: int) -> None:
        """Until so many more rounds have begun and ended; raises what ended the load, if anything did."""
        target = self._done + 1 + rounds  # the one under way has begun before
        while self._done < target:
            if self._rows.done():
                self._rows.result()
            time.sleep(0.05)

    def end(self) -> list[dict[str, Any]]:
        """End after this round; the rows of all of them."""
        self._ending.set()
        return self._rows.result()

    def _send(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, requests in enumerate(itertools.cycle(self._rounds)):
            if self._ending.is_set():
                return rows
            answered = send_requests(requests, self._url, open_loop=True, model=self._model)
            rows += [{**row, "round": number} for row in answered]
            self._done = number + 1
        raise AssertionError("a cycle does not end")


def _rounds(workload: Workload, requests_per_s: float) -> list[list[Request]]:
    """The requests of each question, with the times at which they are due in their round."""
    rounds: dict[int, list[Request]] = {}
    for request in workload.requests:
        due = rounds.setdefault(request.question, [])
        due.append(replace(request, arrival_s=len(due) / requests_per_s))
    return list(rounds.values())


class _Rolling:
    """What is collected meanwhile."""

    def __init__(self, source: ModelSource, workload: Workload, folder: Path, threads: int,
                 watch: Callable[[Progress], None]):  # fmt: skip
        self.source, self.workload, self.folder, self.threads, self.watch = source, workload, folder, threads, watch
        self.cache: dict[str, Any] = {}
        self.drained = False
        self._moments: dict[str, float] = {}
        self._began = time.monotonic()

    def server(self, name: str) -> ServerProcess:
        """A server with memory of its own over the shared tier, not started."""
        self.watch(Progress(list(_LABELS).index(name), len(_LABELS), f"starting {_LABELS[name]}", None))
        self.mark(f"start_{name}")
        cache = {**self.cache, "memory_bytes": _MEMORY, "events_path": str(self._events_path(name))}
        room = engine_room(self.workload, self.source)
        return ServerProcess(str(self.source.path), cache=cache, threads=self.threads, vllm=room,
                             log=self.folder / f"server-{name}.log")  # fmt: skip

    def mark(self, what: str) -> None:
        self._moments[what] = round(time.monotonic() - self._began, 3)

    def save(self, answers: Sequence[dict[str, Any]]) -> Run:
        rows = [_row(answer, order) for order, answer in enumerate(answers)]
        events = pl.concat([self._events(name) for name in _LABELS])
        requests = requests_frame(self.folder.name, rows, events, shared_tokens(self.workload))
        failed = [row["error"] for row in rows if row["error"]]
        return Run.save(self.folder, requests, events, {
            **describe_environment(),
            "model": {"name": self.source.name, "licence": self.source.licence, "sha256": self.source.sha256,
                      "dtype": self.source.dtype, "bytes_per_token": self.source.bytes_per_token},
            "workload": {"name": self.workload.name, "seed": self.workload.seed,
                         "description": self.workload.description, "requests": len(rows)},
            "arms": {name: {"label": label, "cache": self.cache} for name, label in _LABELS.items()},
            "rolling": {"requests": len(rows), "failed": len(failed), "errors": failed[:5], "drained": self.drained,
                        "moments_s": self._moments, "found_of_others": found_of_others(rows),
                        "answered": {name: sum(row["arm"] == name for row in rows) for name in _LABELS}},
            "method": "two servers behind a round-robin router over one Redis; one replaced while requests run; greedy",
        })  # fmt: skip

    def _events(self, name: str) -> pl.DataFrame:
        events = read_events(self._events_path(name)).with_columns(arm=pl.lit(name))
        return events.with_columns(pl.col("request").str.replace(ENGINE_NAME, "${1}"))

    def _events_path(self, name: str) -> Path:
        return self.folder / f"events-{name}.jsonl"


def _row(answer: dict[str, Any], order: int) -> dict[str, Any]:
    return {
        **answer, "order": order, "repeat": answer["round"], "engine_request": answer["sent_as"],
        "arm_label": _LABELS.get(answer["arm"], "no server"), "document": str(answer["document"]),
        "question": str(answer["question"]), "phase": "again" if answer["round"] else "first",
        "cached_tokens": answer["cached_tokens"] or 0, "queue_s": answer["server_queue_s"],
        "load_and_prefill_s": answer["server_ttft_s"],
    }  # fmt: skip


def found_of_others(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """For each server, the tokens that it found the first time it was asked about a document which only others had
    been asked about before. Beyond the words that every prompt begins with, nobody but they can have computed them.

    Args:
        rows: In the order in which they were sent, with arm, group, document, cached_tokens and error.
    """
    asked: dict[tuple[Any, Any], set[str]] = {}
    found: dict[str, int] = {}
    for row in rows:
        if row["error"]:
            continue
        before = asked.setdefault((row["group"], row["document"]), set())
        if row["arm"] not in before:
            found[row["arm"]] = found.get(row["arm"], 0) + (row["cached_tokens"] if before else 0)
        before.add(row["arm"])
    return found
