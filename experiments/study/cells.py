"""Running one cell: settings in, a row out. Also the process that does it, started by `experiments.study.executors`.

    parent -> {"description": {...}, "folder": ...}
    parent -> {"cell": {...}, "keep": [...]}
    child  -> {"results": {...}, "effective": {...}, "error": "", ...}

The end of the parent's pipe, which comes with the parent's death as well, ends this process and its engines at once.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TextIO

import psutil

from experiments.environment import describe_environment
from experiments.study.points import Cell
from workbench.errors import InvalidInputError

__all__ = ["CellResult", "CellRunner", "end_with_children", "main", "mismatches", "settings_below", "trace_by_name"]

GENERATED_TRACES = ("agent", "chat", "rag", "zipf")


@dataclass
class CellResult:
    """What a cell gave.

    Args:
        results: Figures by name; None where there were too few values.
        effective: What really ran, as the engine, the trace or the model reports it.
        asked: The same names as they were asked for; each must equal its effective value.
        requests: One dictionary a request, for real runs.
        contaminated: Why the cell was not cold, "" if it was.
    """

    results: dict[str, Any]
    effective: dict[str, Any]
    asked: dict[str, Any]
    requests: list[dict[str, Any]] = field(default_factory=list)
    contaminated: str = ""


class CellRunner:
    """Runs cells of one study in this process and keeps what several of them share: traces, workloads, engines.

    Args:
        description: Of the study, as `Study.description` gives it.
        folder: Of the study; disk tiers and logs of engines go there.
        worker: Name of this worker.
    """

    def __init__(self, description: dict[str, Any], folder: Path, *, worker: str):
        self.kind, self.worker = description["kind"], worker
        self._engines: Any = None
        if self.kind == "serving":
            from experiments.study.serving import ServingCells

            self._engines = ServingCells(description, folder, worker=worker)
        elif self.kind == "replay":
            import experiments.replay  # noqa: F401  so that the first cell's time is its own
        self._run: Callable[[Cell], CellResult] = {"replay": run_replay, "model": run_model}.get(self.kind, self._serve)
        self._keep: Sequence[str] = ()

    def run(self, cell: Cell, keep: Sequence[str] = ()) -> dict[str, Any]:
        """Run a cell. Whatever goes wrong in it is part of the row.

        Args:
            cell: What to run.
            keep: Names of the engines that later cells need; others are closed.
        """
        self._keep = keep
        row: dict[str, Any] = {
            "results": {}, "effective": {}, "requests": [], "contaminated": "", "error": "", "traceback": "",
            "started": time.time(),
        }  # fmt: skip
        began = time.perf_counter()
        try:
            found = self._run(cell)
            row |= {name: getattr(found, name) for name in ("results", "effective", "requests", "contaminated")}
            row["error"] = mismatches(found.asked, found.effective)
        except Exception as error:  # a failed cell is a row, and the study goes on
            row["error"] = f"{type(error).__name__}: {error}"
            row["traceback"] = traceback.format_exc(limit=-8)
        return row | {"seconds": time.perf_counter() - began, "provenance": self._provenance()}

    def _serve(self, cell: Cell) -> CellResult:
        return self._engines.run(cell, self._keep)

    def _provenance(self) -> dict[str, Any]:
        badge = "measured" if self.kind == "serving" else "simulated"
        return {**_environment(), "badge": badge, "host": socket.gethostname(), "pid": os.getpid(),
                "worker": self.worker, "load_average": [round(load, 2) for load in os.getloadavg()]}  # fmt: skip

    def close(self) -> None:
        """Stop the engines."""
        if self._engines is not None:
            self._engines.close()


@cache
def _environment() -> dict[str, Any]:
    return describe_environment()


def mismatches(asked: dict[str, Any], effective: dict[str, Any]) -> str:
    """How what ran differs from what was asked; "" if it does not."""
    wrong = [
        f"{name} is {effective.get(name)!r}, asked was {value!r}"
        for name, value in asked.items()
        if effective.get(name) != value
    ]
    return f"runs with other settings: {'; '.join(wrong)}" if wrong else ""


# ---------------------------------------------------------------- replay


def run_replay(cell: Cell) -> CellResult:
    """Simulate: a trace through a policy."""
    from experiments.replay import replay

    settings = cell.settings
    trace = _chunked_trace(settings, cell.seed)
    semantics, touch_order = settings.get("semantics", "prefix"), settings.get("touch_order", "tail_first")
    capacity = _capacity_chunks(settings, trace.block_tokens)
    result = replay(trace, settings.get("policy", "lru"), capacity_chunks=capacity, semantics=semantics,
                    touch_order=touch_order)  # fmt: skip
    effective = {
        "trace": result.trace.name, "policy": repr(result.policy), "semantics": result.semantics,
        "touch_order": result.touch_order if semantics == "prefix" else None, "notes": "; ".join(result.trace.notes),
        "chunk_tokens": result.trace.block_tokens, "capacity_chunks": result.capacity_chunks,
        "capacity_tokens": result.capacity_chunks * result.trace.block_tokens, "compiled": result.compiled,
    }  # fmt: skip
    asked = {"chunk_tokens": settings.get("chunk_tokens", trace.block_tokens), "capacity_chunks": capacity,
             "semantics": semantics}  # fmt: skip
    results = {
        "hit_rate": result.hit_rate, "hit_rate_by_chunks": result.hit_rate_by_chunks,
        "hit_rate_by_requests": result.hit_rate_by_requests, "hit_rate_second_half": result.second_half(),
        "hit_tokens": int(result.hit_tokens.sum()), "prompt_tokens": int(result.trace.input_tokens.sum()),
        "evictions": result.evictions, "requests": result.trace.requests, "cpu_seconds": result.seconds,
    }  # fmt: skip
    return CellResult(results, effective, asked)


def trace_by_name(name: str, *, seed: int = 0, **settings: Any) -> Any:
    """A generated trace (chat, rag, agent, zipf), a known one or a file.

    Args:
        name: See above.
        seed: Of a generated trace.
        settings: Arguments of the generator or of `load_trace`; `requests` cuts any trace after so many.
    """
    from experiments.traces import generators, load_trace

    if name in GENERATED_TRACES:
        own = {"requests"} if name == "rag" else set()  # the generator's own argument of that name
        most = None if "requests" in own else settings.pop("requests", None)
        trace = getattr(generators, name)(**{"seed": seed, **settings})
    else:
        most = settings.pop("requests", None)
        trace = load_trace(name, **settings)
    return trace if most is None else trace.head(requests=most)


def _chunked_trace(settings: dict[str, Any], seed: int) -> Any:
    if "trace" not in settings:
        raise InvalidInputError("a replay needs the setting 'trace': chat, rag, agent, zipf, a known trace or a file")
    name = settings["trace"]
    seed = seed if name in GENERATED_TRACES else 0  # a file is the same in every repeat
    return _cached_trace(name, seed, json.dumps(settings_below(settings, "trace.")), settings.get("chunk_tokens"))


@lru_cache(maxsize=16)  # traces are large, and a study goes through their chunk sizes again and again
def _cached_trace(name: str, seed: int, settings: str, chunk_tokens: int | None) -> Any:
    if chunk_tokens is None:
        return trace_by_name(name, seed=seed, **json.loads(settings))
    trace = _cached_trace(name, seed, settings, None)
    blocks, rest = divmod(chunk_tokens, trace.block_tokens)
    if rest or blocks < 1:
        raise InvalidInputError(f"chunk_tokens is {chunk_tokens}; the blocks of {name} have {trace.block_tokens} "
                                "tokens, and a chunk is a whole number of them")  # fmt: skip
    return trace.coarsen(blocks)


def _capacity_chunks(settings: dict[str, Any], chunk_tokens: int) -> int:
    if ("capacity_chunks" in settings) == ("capacity_tokens" in settings):
        raise InvalidInputError("a replay needs capacity_chunks or capacity_tokens, one of them")
    return settings.get("capacity_chunks") or max(1, settings["capacity_tokens"] // chunk_tokens)


def settings_below(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Settings whose name starts with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


# ---------------------------------------------------------------- cost model


def run_model(cell: Cell) -> CellResult:
    """Predict: the cost model's figures for these settings."""
    from experiments.cost import predict

    return CellResult(results=predict(**cell.settings), effective={}, asked={})


# ---------------------------------------------------------------- the process


def main() -> None:
    """Serve cells over the two file descriptors named on the command line."""
    orders, answers = os.fdopen(int(sys.argv[1]), "r"), os.fdopen(int(sys.argv[2]), "w")
    todo: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_orders, args=(orders, todo), daemon=True).start()
    first = json.loads(todo.get())
    runner = CellRunner(first["description"], Path(first["folder"]), worker=first["worker"])
    while True:
        order = json.loads(todo.get())
        if "close" in order:
            runner.close()
            return
        row = runner.run(Cell(**order["cell"]), order["keep"])
        answers.write(json.dumps(row, default=lambda value: value.item()) + "\n")  # NumPy's numbers become plain
        answers.flush()


def _read_orders(orders: TextIO, todo: "queue.Queue[str]") -> None:
    for line in orders:
        todo.put(line)
        if "close" in json.loads(line):
            return
    end_with_children()  # the parent is gone, or wants this to end now


def end_with_children() -> None:
    """End this process and all that it has started, at once."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(1)


if __name__ == "__main__":
    main()
