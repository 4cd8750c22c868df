"""Who runs a study's cells: worker processes of this machine, or Ray actors on many. One loop for both.

blocks -> an idle worker takes the next one, cell by cell -> rows
a worker that dies in a cell is replaced, the cell is given out again, and its row says so
a stop flag -> every worker and engine ends at once
"""

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from experiments.study.points import Cell
from workbench.errors import CacheError, UnknownNameError

__all__ = ["EXECUTORS", "Died", "Finished", "LocalWorkers", "RayWorkers", "Workers", "make_workers", "run_blocks"]

# A cell whose worker dies is given out this many times in all: once more for bad luck, once more for bad neighbours.
_ATTEMPTS = 3
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True)
class Died:
    """A worker ended in the middle of a cell; `why` in words."""

    why: str


@dataclass(frozen=True)
class Finished:
    """A cell and its row's part that the worker knows, with how often it was given out and how earlier workers died."""

    cell: Cell
    row: dict[str, Any]
    attempts: int
    worker_deaths: tuple[str, ...]


class Workers(Protocol):
    """Workers that each run one cell at a time."""

    size: int

    def give(self, place: int, cell: Cell, keep: Sequence[str]) -> None:
        """Start a cell on an idle worker; a worker that died is started anew."""

    def wait(self, seconds: float) -> list[tuple[int, "dict[str, Any] | Died"]]:
        """What workers answered, after at most so many seconds."""
        ...

    def close(self) -> None:
        """End idle workers in good order."""

    def kill(self) -> None:
        """End everything now."""


@dataclass
class _Place:
    """One worker's work: its block, and the cell that it runs."""

    block: deque[Cell] = field(default_factory=deque)
    cell: Cell | None = None
    deaths: list[str] = field(default_factory=list)


def run_blocks(
    blocks: Sequence[Sequence[Cell]],
    workers: Workers,
    *,
    stopped: Callable[[], bool],
    engine_of: Callable[[Cell], str] | None,
    on_start: Callable[[Cell], None],
) -> Iterator[Finished]:
    """Give every cell to a worker and yield what comes back, in the order in which it does.

    Args:
        blocks: Each runs on one worker, in order.
        workers: Stay up; to close or to kill them is the caller's.
        stopped: True to end at once, with cells still running; asked ten times a second.
        engine_of: Name of the engine that a cell needs, which a worker keeps as long as cells to come need it; None
            where there are no engines.
        on_start: Called when a cell is given out.
    """
    waiting, places = deque(deque(block) for block in blocks), [_Place() for _ in range(workers.size)]
    while waiting or any(place.cell or place.block for place in places):
        if stopped():
            return
        for number, place in enumerate(places):
            if place.cell is None and _next_cell(place, waiting):
                workers.give(number, place.cell, _needed(engine_of, places, waiting))
                on_start(place.cell)
        for number, answer in workers.wait(_POLL_SECONDS):
            finished = _take(places[number], answer)
            if finished is not None:
                yield finished


def _next_cell(place: _Place, waiting: deque[deque[Cell]]) -> bool:
    if not place.block and waiting:
        place.block = waiting.popleft()
    if place.block:
        place.cell = place.block.popleft()
    return place.cell is not None


def _needed(
    engine_of: Callable[[Cell], str] | None, places: Sequence[_Place], waiting: deque[deque[Cell]]
) -> list[str]:
    """Engines of the cells that run or are still to come."""
    if engine_of is None:
        return []
    to_come = [cell for place in places for cell in (place.cell, *place.block) if cell is not None]
    to_come += itertools.chain.from_iterable(waiting)
    return list(dict.fromkeys(map(engine_of, to_come)))


def _take(place: _Place, answer: "dict[str, Any] | Died") -> Finished | None:
    cell, place.cell = place.cell, None
    assert cell is not None
    if isinstance(answer, Died):
        place.deaths.append(answer.why)
        if len(place.deaths) < _ATTEMPTS:
            place.block.appendleft(cell)
            return None
        answer = {"results": {}, "effective": {}, "requests": [], "contaminated": "", "seconds": 0.0,
                  "started": time.time(), "provenance": {}, "traceback": "",
                  "error": f"the worker died {_ATTEMPTS} times in this cell: {answer.why}"}  # fmt: skip
    deaths, place.deaths = place.deaths, []
    lost = 1 if len(deaths) == _ATTEMPTS else 0
    return Finished(cell, answer, attempts=len(deaths) + 1 - lost, worker_deaths=tuple(deaths))


# ---------------------------------------------------------------- processes of this machine


class LocalWorkers:
    """Processes of `experiments.study.cells`.

    Args:
        description: Of the study.
        folder: Of the study; what the processes print goes to its log.txt.
        size: How many.
    """

    def __init__(self, description: dict[str, Any], folder: Path, *, size: int):
        self.description, self.folder, self.size = description, folder, size
        self._answers: queue.Queue[tuple[_CellProcess, dict[str, Any] | Died]] = queue.Queue()
        self._processes: dict[int, _CellProcess] = {}
        self._busy: dict[_CellProcess, int] = {}  # -> its place; what an idle process says concerns no cell

    def give(self, place: int, cell: Cell, keep: Sequence[str]) -> None:
        process = self._processes.get(place)
        if process is None or process.dead:
            process = _CellProcess(self.description, self.folder, place, self._answers)
            self._processes[place] = process
        self._busy[process] = place
        process.send({"cell": asdict(cell), "keep": list(keep)})

    def wait(self, seconds: float) -> list[tuple[int, dict[str, Any] | Died]]:
        said = []
        with contextlib.suppress(queue.Empty):
            said.append(self._answers.get(timeout=seconds))
            while True:
                said.append(self._answers.get_nowait())
        return [(self._busy.pop(process), answer) for process, answer in said if process in self._busy]

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()


class _CellProcess:
    """One process, and the thread that waits for its answers."""

    def __init__(self, description: dict[str, Any], folder: Path, place: int, answers: queue.Queue):
        root = Path(__file__).parents[2]
        path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)
        to_child, to_parent = os.pipe(), os.pipe()
        with open(folder / "log.txt", "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiments.study.cells", str(to_child[0]), str(to_parent[1])],
                pass_fds=(to_child[0], to_parent[1]), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        os.close(to_child[0])
        os.close(to_parent[1])
        self._orders, self._lines = os.fdopen(to_child[1], "w"), os.fdopen(to_parent[0], "r")
        self.dead, self._closing = False, False
        self._reader = threading.Thread(target=self._read, args=(answers,), daemon=True)
        self._reader.start()
        self.send({"description": description, "folder": str(folder), "worker": f"local-{place}"})

    def send(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader reports its death
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()

    def _read(self, answers: queue.Queue) -> None:
        for line in self._lines:
            answers.put((self, json.loads(line)))
        code = self._process.wait()
        self.dead = True
        if not self._closing:
            answers.put((self, Died(f"process {self._process.pid} ended with code {code}")))

    def close(self) -> None:
        self._closing = True
        self.send({"close": True})
        self._reader.join(_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        self._closing = True
        kill_tree(self._process.pid)
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):  # closing flushes what the process no longer reads
            self._orders.close()
        self._lines.close()


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started, engines in sessions of their own among them."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


# ---------------------------------------------------------------- Ray


class RayWorkers:
    """Ray actors, one for each worker, spread over the cluster's nodes.

    Connects to the cluster that this process is connected to, that RAY_ADDRESS names, or to one on this machine.

    Args:
        description: Of the study.
        folder: Of the study, on a file system that every node sees if cells have disk tiers.
        size: How many; by default one a node for real engines, one a core for simulations.
        cores: Cores that an actor claims.
    """

    def __init__(self, description: dict[str, Any], folder: Path, *, size: int | None = None, cores: float = 1.0):
        try:
            import ray
        except ImportError:
            raise CacheError("executor='ray' needs Ray: pip install 'kvworkbench[study]'") from None

        if not ray.is_initialized():
            ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False,
                     configure_logging=False)  # fmt: skip
        self._ray, self.description, self.folder, self._cores = ray, description, folder, cores
        nodes = [node for node in ray.nodes() if node["Alive"]]
        simulated = description["kind"] != "serving"
        self.size = size or (max(1, int(ray.cluster_resources().get("CPU", 1) / cores)) if simulated else len(nodes))
        self._actors: dict[int, Any] = {}
        self._running: dict[Any, int] = {}  # reference of a cell under way -> place of its worker

    def give(self, place: int, cell: Cell, keep: Sequence[str]) -> None:
        if place not in self._actors:
            # max_restarts and max_task_retries stay 0: a death is recorded and the cell given out again by `run_blocks`
            self._actors[place] = (
                self._ray.remote(_RayCells)
                .options(num_cpus=self._cores, scheduling_strategy="SPREAD")
                .remote(self.description, str(self.folder), place)
            )
        self._running[self._actors[place].run.remote(asdict(cell), list(keep))] = place

    def wait(self, seconds: float) -> list[tuple[int, dict[str, Any] | Died]]:
        if not self._running:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._running), timeout=seconds)
        return [self._answer(reference) for reference in ready]

    def _answer(self, reference: Any) -> tuple[int, dict[str, Any] | Died]:
        place = self._running.pop(reference)
        try:
            return place, self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._actors.pop(place, None)
            return place, Died(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")

    def close(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # one that died idle has nothing left to close
            self._ray.get([actor.close.remote() for actor in self._actors.values()], timeout=_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """An actor's engines end with it: they read the end of its pipe."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._running.clear()


class _RayCells:
    """The actor: a `CellRunner` on whatever node Ray puts it."""

    def __init__(self, description: dict[str, Any], folder: str, place: int):
        from experiments.study.cells import CellRunner

        self._runner = CellRunner(description, Path(folder), worker=f"ray-{place}")

    def run(self, cell: dict[str, Any], keep: list[str]) -> dict[str, Any]:
        return self._runner.run(Cell(**cell), keep)

    def close(self) -> None:
        self._runner.close()


EXECUTORS = {"local": LocalWorkers, "ray": RayWorkers}


def make_workers(
    executor: str, description: dict[str, Any], folder: Path, *, workers: int | None, most: int
) -> Workers:
    """Workers for a study.

    Args:
        executor: A key of `EXECUTORS`.
        description: Of the study.
        folder: Of the study.
        workers: How many; by default one a machine for real engines, whose times must not disturb one another, else one
            a core.
        most: More than these would have nothing to do.

    Raises:
        UnknownNameError: No such executor.
    """
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", executor, EXECUTORS)
    if executor == "ray":
        return RayWorkers(description, folder, size=workers)
    cores = 1 if description["kind"] == "serving" else os.cpu_count() or 1
    return LocalWorkers(description, folder, size=max(1, min(workers or cores, most)))
