"""A study's folder: what one process writes there and any other may read, at any moment.

study.yaml          the whole description
cells/<key>.json    one finished cell, whole or not there at all
trials.json         the points that a Bayesian search has chosen so far
status.json         where the study stands, and who runs it
stop                flag: whoever runs the study ends within a second
runner.lock         held by the process that runs the study
log.txt             what a detached process printed
cells.parquet, requests.parquet     the tables, written when the study ends
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from workbench.errors import InvalidInputError

__all__ = ["StudyStatus", "StudyStore"]

_PART = ".partial"
# A process that was started for the study has this long until it holds the lock.
_STARTING_SECONDS = 60.0


@dataclass(frozen=True)
class StudyStatus:
    """Where a study stands.

    Args:
        state: "new", "running", "stopped" (also: was killed) or "finished".
        done: Cells with a row, failed ones among them.
        failed: Cells whose row is an error.
        total: Cells in all.
        seconds_left: Estimate for the rest; None where nothing is known yet.
        current: What is being done, for people.
        pid: The process that runs it, or ran it last.
        updated: When this was written, seconds since 1970.
    """

    state: str = "new"
    done: int = 0
    failed: int = 0
    total: int = 0
    seconds_left: float | None = None
    current: str = ""
    pid: int | None = None
    updated: float = 0.0


class StudyStore:
    """Reads and writes one study's folder. A file is replaced whole, so that a reader never meets half of one."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.cells = self.folder / "cells"
        self._read: dict[Path, tuple[int, dict[str, Any]]] = {}

    # ---------------------------------------------------------------- rows

    def write_row(self, row: dict[str, Any]) -> None:
        """Keep the row of a cell; one that is there already is replaced."""
        self._replace(self.cells / f"{row['key']}.json", json.dumps(row, indent=1, allow_nan=False))

    def rows(self) -> list[dict[str, Any]]:
        """Every finished cell's row, in the order in which they were finished."""
        found = []
        for path in self.cells.glob("*.json"):
            changed = path.stat().st_mtime_ns
            if self._read.get(path, (0, None))[0] != changed:
                self._read[path] = changed, json.loads(path.read_text())
            found.append(dict(self._read[path][1]))
        return sorted(found, key=lambda row: (row["finished"], row["key"]))

    def remove_parts(self) -> None:
        """Remove what a killed writer left. Only the process that holds the lock may."""
        for path in self.folder.rglob(f"*{_PART}"):
            path.unlink(missing_ok=True)

    # ---------------------------------------------------------------- trials

    def trials(self) -> list[dict[str, Any]]:
        """The points that a Bayesian search has chosen, oldest first."""
        path = self.folder / "trials.json"
        return json.loads(path.read_text()) if path.exists() else []

    def write_trials(self, points: list[dict[str, Any]]) -> None:
        self._replace(self.folder / "trials.json", json.dumps(points, indent=1))

    # ---------------------------------------------------------------- one runner at a time

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the study: while inside, no other process can run it.

        Raises:
            InvalidInputError: Another process does.
        """
        lock = self._lock()
        try:
            lock.acquire(timeout=2)  # longer than anybody looks whether it is held
        except Timeout:
            raise InvalidInputError(f"{self.folder} is being run by process {self.read_status().pid}") from None
        try:
            yield
        finally:
            lock.release()

    def is_running(self) -> bool:
        """True while some process holds the study."""
        lock = self._lock()
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return True
        lock.release()
        return False

    def _lock(self) -> FileLock:
        return FileLock(self.folder / "runner.lock")

    # ---------------------------------------------------------------- stop flag

    @property
    def stop_requested(self) -> bool:
        return (self.folder / "stop").exists()

    def request_stop(self) -> None:
        (self.folder / "stop").touch()

    def clear_stop(self) -> None:
        (self.folder / "stop").unlink(missing_ok=True)

    # ---------------------------------------------------------------- status

    def write_status(self, status: StudyStatus) -> None:
        self._replace(self.folder / "status.json", json.dumps(asdict(status)))

    def read_status(self) -> StudyStatus:
        """What was written last, corrected where its writer is gone."""
        path = self.folder / "status.json"
        status = StudyStatus(**json.loads(path.read_text())) if path.exists() else StudyStatus()
        if status.state == "starting":
            alive = self.is_running() or 0 <= time.time() - status.updated < _STARTING_SECONDS
            return replace(status, state="running" if alive else "stopped")
        if status.state == "running" and not self.is_running():
            return replace(status, state="stopped", seconds_left=None, current="")
        return status

    def _replace(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}{_PART}")
        with open(part, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
