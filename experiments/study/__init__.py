"""A study: a grid of settings, each measured in its own cell, in a folder that survives whoever runs it.

    study = Study("chunk-size", kind="replay", fixed={"trace": "chat", "capacity_tokens": 50_000}, repeats=5,
                  space={"chunk_tokens": [64, 128, 256], "policy": ["lru", "s3fifo"]})
    study.run()                        # here; again after a stop or a kill: what is finished stays
    study.start()                      # or in a process that outlives this one: status(), wait(), stop()
    study.frame()                      # polars, one row a cell
    Study.open(study.folder)           # from anywhere, at any time

description -> points -> cells in rotating order -> workers -> one file a cell -> frame

A study of real vLLM asks one request at a time, so that times are comparable; with the setting `request_rate` (or
`concurrency`) its requests go to a server when they are due, and TTFT runs from then.

A finished cell is kept, a half-finished one is run again, a failed one is a row with its error and is tried again when
the study is run again. `python -m experiments.study FOLDER` runs what is left of a study.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runs import RUNS_FOLDER, new_run_folder
from experiments.study.points import Cell, grid_size, in_blocks, make_cell, parse_objective, space_points
from experiments.study.running import Running
from experiments.study.settings import KINDS, check_setting, plain_value, plain_values
from experiments.study.store import StudyStatus, StudyStore
from workbench.errors import InvalidInputError, UnknownNameError

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

__all__ = ["KINDS", "Cell", "Study", "StudyStatus", "list_studies"]

SEARCHES = ("grid", "random", "bayes")

# Engines of real runs that are alive together: arms side by side, without filling the machine's memory.
ENGINES_AT_ONCE = 3

_DESCRIPTION = ("name", "kind", "space", "fixed", "repeats", "search", "trials", "objective", "seed")


@dataclass
class Study:
    """A description of what to measure, and the folder in which it is measured.

    Args:
        name: Part of the folder's name.
        space: Values of each setting that is varied. See `KINDS` for the settings of each kind.
        fixed: Settings that all cells share.
        kind: "serving" (real vLLM, measured), "replay" (traces through policies, simulated) or "model" (the cost
            model, simulated).
        repeats: How often each point is measured, each time with a seed of its own.
        search: "grid" (all points), "random" (`trials` of them) or "bayes" (`trials` of them, one after another).
        trials: Points to measure; all by default.
        objective: For "bayes": "min" or "max" and a result, as "min ttft_s".
        seed: Of workloads, traces and searches.
        runs: Folder of the run store.

    Raises:
        InvalidInputError: A setting that the kind does not have, no values, or values that are not plain.
    """

    name: str
    _: KW_ONLY
    space: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "serving"
    repeats: int = 1
    search: str = "grid"
    trials: int | None = None
    objective: str | None = None
    seed: int = 0
    runs: Path = field(default=RUNS_FOLDER, compare=False)

    def __post_init__(self):
        self.runs = Path(self.runs)
        if self.kind not in KINDS:
            raise UnknownNameError("kind of study", self.kind, KINDS)
        if self.search not in SEARCHES:
            raise UnknownNameError("search", self.search, SEARCHES)
        self.space = {name: plain_values(name, values) for name, values in self.space.items()}
        self.fixed = {name: plain_value(name, value) for name, value in self.fixed.items()}
        self._check()
        self._store: StudyStore | None = None
        self._process: subprocess.Popen | None = None

    def _check(self) -> None:
        for name in [*self.space, *self.fixed]:
            check_setting(name, self.kind)
        if both := sorted(set(self.space) & set(self.fixed)):
            raise InvalidInputError(f"{', '.join(both)} stand in space and in fixed; a setting stands in one of them")
        if self.repeats < 1 or (self.trials is not None and self.trials < 1):
            raise InvalidInputError(f"repeats is {self.repeats}, trials is {self.trials}; each is at least 1")
        if self.search != "grid" and self.trials is None:
            raise InvalidInputError(f"search={self.search!r} needs trials, the number of points to measure")
        if self.search == "bayes":
            parse_objective(self.objective or "")

    # ---------------------------------------------------------------- where it lies

    @property
    def folder(self) -> Path:
        """The study's folder in the run store; made, with the description in it, when it is first asked for."""
        return self.store.folder

    @property
    def store(self) -> StudyStore:
        """The files of the folder, which is made with the description in it if it is not there yet."""
        if self._store is None:
            folder = new_run_folder(f"study-{self.name}", self.runs)
            (folder / "study.yaml").write_text(self.to_yaml())
            self._store = StudyStore(folder)
        return self._store

    @classmethod
    def open(cls, folder: str | Path) -> "Study":
        """The study of a folder, running or not."""
        folder = Path(folder)
        if not (folder / "study.yaml").exists():
            raise InvalidInputError(f"{folder} is not a study; it has no study.yaml")
        study = cls.from_yaml(folder / "study.yaml", runs=folder.parent)
        study._store = StudyStore(folder)
        return study

    @classmethod
    def from_yaml(cls, source: str | Path, *, runs: Path = RUNS_FOLDER) -> "Study":
        """A new study from a file, or from a text that holds what `to_yaml` gives."""
        from experiments.study.texts import read_yaml

        return cls(**read_yaml(source), runs=runs)

    @property
    def description(self) -> dict[str, Any]:
        """What the study is, as plain values."""
        return {name: getattr(self, name) for name in _DESCRIPTION}

    def to_yaml(self) -> str:
        """The whole description: `Study.from_yaml` makes an equal study of it."""
        from experiments.study.texts import yaml_text

        return yaml_text(self)

    def to_python(self) -> str:
        """The notebook call that makes and runs this study."""
        from experiments.study.texts import python_text

        return python_text(self)

    def to_command(self) -> str:
        """The command line that makes and runs this study."""
        from experiments.study.texts import command_text

        return command_text(self)

    # ---------------------------------------------------------------- cells

    def cells(self) -> list[Cell]:
        """Every cell, in running order. Of a Bayesian search, those of the points that were chosen so far."""
        return [cell for block in self.blocks(self.points()) for cell in block]

    def points(self) -> list[dict[str, Any]]:
        """The points of the space that are measured; of a Bayesian search, those that were chosen so far."""
        if self.search == "bayes":
            return self.store.trials() if self._store is not None else []
        return space_points(self.space, trials=self.trials if self.search == "random" else None, seed=self.seed)

    @property
    def total(self) -> int:
        """How many cells the study has when it is finished."""
        points = grid_size(self.space)
        return self.repeats * (points if self.trials is None or self.search == "grid" else min(points, self.trials))

    def blocks(self, points: Sequence[dict[str, Any]]) -> list[list[Cell]]:
        """The cells of these points in running order, cut into what one worker runs in a row."""
        cells = [make_cell({**self.fixed, **p}, repeat, self.seed) for p in points for repeat in range(self.repeats)]
        return in_blocks(cells, engine_of=self.engine_of, engines_at_once=ENGINES_AT_ONCE)

    @property
    def engine_of(self) -> Callable[[Cell], str] | None:
        """Gives the name of the serving engine that a cell needs; None for simulations."""
        if self.kind != "serving":
            return None
        from experiments.study.engines import engine_name

        return engine_name

    # ---------------------------------------------------------------- running

    def run(
        self,
        executor: str = "local",
        watch: Callable[[StudyStatus], None] | None = None,
        *,
        workers: int | None = None,
    ) -> "Study":
        """Run what is not finished yet, and return when that is done or somebody has called for a stop.

        Args:
            executor: "local" (processes of this machine) or "ray" (a Ray cluster).
            watch: Called with the status whenever it changes.
            workers: Cells that run at the same time; by default one a machine for real engines, else one a core.

        Raises:
            InvalidInputError: Another process runs this study.
        """
        self.store.clear_stop()
        return self.run_left(executor, watch, workers=workers)

    def run_left(
        self,
        executor: str = "local",
        watch: Callable[[StudyStatus], None] | None = None,
        *,
        workers: int | None = None,
    ) -> "Study":
        """What `run` does, but a stop that somebody has called for already counts."""
        with self.store.running():
            self.store.remove_parts()
            Running(self, executor, workers, watch or (lambda status: None)).run()
        return self

    def start(self, executor: str = "local", *, workers: int | None = None) -> int:
        """Run in a process of its own, which outlives this one; returns its id at once."""
        if self.store.is_running():
            raise InvalidInputError(f"{self.folder} is being run by process {self.status().pid}")
        self.store.clear_stop()
        self.store.write_status(self._counted(StudyStatus("starting", updated=time.time())))
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        with open(self.folder / "log.txt", "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiments.study", str(self.folder), "--executor", executor, "--obey-stop",
                 *(["--workers", str(workers)] if workers else [])],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        return self._process.pid

    def stop(self) -> None:
        """Ask whoever runs the study to end; it does within a second. Finished cells stay."""
        self.store.request_stop()

    def wait(self, timeout: float | None = None) -> StudyStatus:
        """Wait until nobody runs the study any more, at most so many seconds; returns where it stands then."""
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (status := self.status()).state == "running" and time.monotonic() < end:
            time.sleep(0.1)
        return status

    def status(self) -> StudyStatus:
        """Where the study stands, whichever process runs it."""
        if self._store is None:
            return StudyStatus(total=self.total)
        status = self._store.read_status()
        if self._process is not None and self._process.poll() is not None and not self._store.is_running():
            self._process = None  # it has ended, perhaps before it could say so
            if status.state == "running":
                status = replace(status, state="stopped", seconds_left=None, current="")
        return self._counted(status) if status.state in ("new", "stopped") else status

    def _counted(self, status: StudyStatus) -> StudyStatus:
        """A status with the rows that are there, whatever its writer could still say."""
        rows = self.store.rows()
        failed = sum(bool(row["error"]) for row in rows)
        return replace(status, done=len(rows), failed=failed, total=self.total)

    # ---------------------------------------------------------------- what was found

    def rows(self) -> list[dict[str, Any]]:
        """Every finished cell as it lies in its file."""
        return self.store.rows() if self._store is not None else []

    def frame(self) -> "pl.DataFrame":
        """One row a finished cell: settings, results, effective settings, error, seconds, provenance."""
        from experiments.study.tables import cells_frame

        return cells_frame(self)

    def requests(self) -> "pl.DataFrame":
        """One row a request of every finished cell of real runs, with the cell's settings."""
        from experiments.study.tables import requests_frame

        return requests_frame(self)

    def plot(self, name: str, *, template: str = "light", **options: Any) -> "go.Figure":
        """One of the study's plots; a wrong name lists those there are."""
        from experiments.plots import plot_study

        return plot_study(name, self.frame(), self.requests(), template=template, **options)


def list_studies(runs: str | Path = RUNS_FOLDER) -> list[Study]:
    """Every study below a folder, oldest first."""
    return [Study.open(path.parent) for path in sorted(Path(runs).glob("*/study.yaml"))]
