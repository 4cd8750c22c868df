"""One call of `Study.run`: which cells are left, who runs them, and what the folder says meanwhile."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from experiments.study.executors import Finished, Workers, make_workers, run_blocks
from experiments.study.points import BayesianSearch, Cell, parse_objective
from experiments.study.store import StudyStatus
from workbench.errors import UnknownNameError

if TYPE_CHECKING:
    from experiments.study import Study

__all__ = ["Running"]

_STATUS_SECONDS = 0.2  # between two writes of the status


class Running:
    """Runs the cells of a study that are left.

    Args:
        study: The caller holds its lock.
        executor, workers: As `make_workers` takes them.
        watch: Called with the status whenever it changes.
    """

    def __init__(self, study: "Study", executor: str, workers: int | None, watch: Callable[[StudyStatus], None]):
        self.study, self.store, self.watch = study, study.store, watch
        self._executor, self._size = executor, workers
        self._rows = {row["key"]: row for row in self.store.rows()}
        self._failed = {key for key, row in self._rows.items() if row["error"]}
        self._began, self._done_here = time.monotonic(), 0
        self._current: dict[str, str] = {}
        self._workers: Workers | None = None
        self._status, self._written = StudyStatus(), 0.0

    def run(self) -> None:
        ended = False
        try:
            self._say("running")
            ended = self._search() if self.study.search == "bayes" else self._measure(self.study.points())
        finally:
            if self._workers is not None:
                self._workers.close() if ended else self._workers.kill()
            self._current.clear()
            self._say("finished" if ended else "stopped")
            self._write_status()
        self._write_tables()

    def _measure(self, points: Sequence[dict[str, Any]]) -> bool:
        """Run the cells of these points that have no good row; False if a stop came in between."""
        planned = self._unfinished(self.study.blocks(points))
        if planned and self._workers is None:
            most = len(planned) if self.study.search != "bayes" else self.study.repeats
            self._workers = make_workers(self._executor, self.study.description, self.store.folder,
                                         workers=self._size, most=most)  # fmt: skip
        left = sum(map(len, planned))
        if planned:
            for finished in run_blocks(planned, self._workers, stopped=self._stopped, engine_of=self.study.engine_of,
                                       on_start=self._started):  # fmt: skip
                self._finished(finished)
                left -= 1
        return not left

    def _unfinished(self, planned: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
        """Blocks without the cells that have a good row; those that failed come last."""
        fresh = [[cell for cell in block if cell.key not in self._rows] for block in planned]
        failed = [[cell for cell in block if cell.key in self._failed] for block in planned]
        return [block for block in [*fresh, *failed] if block]

    def _search(self) -> bool:
        """Ask for a point, measure it, tell what it gave; a point that was chosen before a kill is finished first."""
        column, maximize = parse_objective(self.study.objective or "")
        points = self.store.trials()
        if points and not self._measure(points):
            return False
        known = [(point, self._objective(point, column)) for point in points]
        search = BayesianSearch(self.study.space, maximize=maximize, seed=self.study.seed, known=known)
        while len(points) < (self.study.trials or 0) and (point := search.ask()) is not None:
            points.append(point)
            self.store.write_trials(points)
            if not self._measure([point]):
                return False
            search.tell(point, self._objective(point, column))
        return True

    def _objective(self, point: dict[str, Any], column: str) -> float | None:
        """Mean over the point's repeats; None if none has the result."""
        settings = {**self.study.fixed, **point}
        rows = [row for row in self._rows.values() if row["settings"] == settings and not row["error"]]
        if rows and column not in rows[0]["results"]:
            raise UnknownNameError("result", column, rows[0]["results"])
        found = [value for row in rows if (value := row["results"][column]) is not None]
        return sum(found) / len(found) if found else None

    # ---------------------------------------------------------------- bookkeeping

    def _stopped(self) -> bool:
        """Whether to end; asked often, so that a status which was held back gets written as well."""
        if self._status.updated > self._written and time.time() - self._written > _STATUS_SECONDS:
            self._write_status()
        return self.store.stop_requested

    def _started(self, cell: Cell) -> None:
        self._current[cell.key] = cell.label(self.study.space)
        self._say("running")

    def _finished(self, finished: Finished) -> None:
        cell = finished.cell
        earlier = self._rows.get(cell.key, {"attempts": 0, "worker_deaths": []})
        row = {**asdict(cell), **finished.row, "kind": self.study.kind, "finished": time.time(),
               "attempts": earlier["attempts"] + finished.attempts,
               "worker_deaths": [*earlier["worker_deaths"], *finished.worker_deaths]}  # fmt: skip
        row = _without_nan(row)
        self.store.write_row(row)
        self._rows[cell.key] = row
        (self._failed.add if row["error"] else self._failed.discard)(cell.key)
        self._current.pop(cell.key, None)
        self._done_here += 1
        self._say("running")

    def _say(self, state: str) -> None:
        elapsed = time.monotonic() - self._began
        total = self.study.total
        left = None
        if state == "running" and self._done_here:
            left = elapsed / self._done_here * (total - len(self._rows))
        current = "; ".join(self._current.values())
        self._status = StudyStatus(state, len(self._rows), len(self._failed), total, left, current, os.getpid(),
                                   time.time())  # fmt: skip
        self.watch(self._status)
        if time.time() - self._written > _STATUS_SECONDS:
            self._write_status()

    def _write_status(self) -> None:
        self.store.write_status(self._status)
        self._written = time.time()

    def _write_tables(self) -> None:
        self.study.frame().write_parquet(self.store.folder / "cells.parquet")
        requests = self.study.requests()
        if requests.height:
            requests.write_parquet(self.store.folder / "requests.parquet")


def _without_nan(value: Any) -> Any:
    """The same with None for what JSON cannot write."""
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
