"""The run store: one folder a run, Parquet and JSON, readable without this package.

runs/<id>/requests.parquet   one row a request and arm
          events.parquet     what the engines did, chunk by chunk
          environment.json   machine, versions, commit, model, workload, effective settings of each arm
          report.html, report.png
"""

import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from workbench.errors import InvalidInputError

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["Run", "list_runs", "new_run_folder", "requests_frame"]

RUNS_FOLDER = Path("runs")

_SCHEMA = {
    "run_id": pl.String, "arm": pl.String, "arm_label": pl.String, "order": pl.Int64, "repeat": pl.Int64,
    "request_id": pl.String, "engine_request": pl.String, "group": pl.Int64, "document": pl.String,
    "question": pl.String, "kind": pl.String,
    "phase": pl.String, "prompt_tokens": pl.Int64, "output_tokens": pl.Int64, "cached_tokens": pl.Int64,
    "local_hit_tokens": pl.Int64, "external_hit_tokens": pl.Int64, "expected_hit_tokens": pl.Int64,
    "ttft_s": pl.Float64, "queue_s": pl.Float64, "load_s": pl.Float64, "prefill_s": pl.Float64, "itl_s": pl.Float64,
    "e2e_s": pl.Float64, "token_ids": pl.List(pl.Int64), "text": pl.String, "first_difference_none": pl.Int64,
    "first_difference_prefix_cache": pl.Int64, "error": pl.String,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A finished run on disk."""

    folder: Path

    def __post_init__(self):
        if not (self.folder / "environment.json").exists():
            raise InvalidInputError(f"{self.folder} is not a run: it has no environment.json")

    @property
    def run_id(self) -> str:
        return self.folder.name

    @cached_property
    def requests(self) -> pl.DataFrame:
        return pl.read_parquet(self.folder / "requests.parquet")

    @cached_property
    def events(self) -> pl.DataFrame:
        return pl.read_parquet(self.folder / "events.parquet")

    def plot(self, name: str = "ttft", *, template: str = "light") -> "go.Figure":
        """One of the run's plots; a wrong name lists those there are."""
        from experiments.plots import plot_run
        from experiments.report import machine_badge

        return plot_run(name, self.requests, self.events, template=template, badge=machine_badge(self.environment))

    @cached_property
    def environment(self) -> dict[str, Any]:
        return json.loads((self.folder / "environment.json").read_text())

    @classmethod
    def save(cls, folder: Path, requests: pl.DataFrame, events: pl.DataFrame, environment: dict[str, Any]) -> "Run":
        """Write a run into its folder; `environment.json` last, so that a folder with it is whole."""
        requests.write_parquet(folder / "requests.parquet")
        events.write_parquet(folder / "events.parquet")
        (folder / "environment.json").write_text(json.dumps(environment, indent=2, default=str) + "\n")
        return cls(folder)


def new_run_folder(name: str, root: Path = RUNS_FOLDER) -> Path:
    """A folder of its own for a new run, named by time; sorted names are in order of time."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(root) / f"{stamp}-{name}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    return folder


def list_runs(root: Path = RUNS_FOLDER) -> list[Run]:
    """Every whole run below a folder, oldest first."""
    return [Run(path.parent) for path in sorted(Path(root).glob("*/environment.json"))]


def requests_frame(run_id: str, rows: list[dict[str, Any]], events: pl.DataFrame,
                   shared_tokens: dict[str, int]) -> pl.DataFrame:  # fmt: skip
    """The rows of a comparison as a frame, completed from the events and compared across arms.

    Args:
        run_id: Goes into every row.
        rows: From `Comparison.run`.
        events: From `Comparison.events`.
        shared_tokens: Tokens before the document, by request; tells a reused document from a reused system prompt.
    """
    loads = _load_seconds(events)
    reference = {
        arm: {r["request_id"]: r["token_ids"] for r in rows if r["arm"] == arm} for arm in ("none", "prefix_cache")
    }
    full = []
    for row in rows:
        name, load_s = row["request_id"], loads.get((row["arm"], row["engine_request"]), 0.0)
        full.append({
            **{column: row.get(column) for column in _SCHEMA}, "run_id": run_id, "load_s": load_s,
            "prefill_s": None if row["load_and_prefill_s"] is None else row["load_and_prefill_s"] - load_s,
            "kind": _kind(row["cached_tokens"], shared_tokens[name]),
            "first_difference_none": _first_difference(row["token_ids"], reference["none"].get(name)),
            "first_difference_prefix_cache": _first_difference(row["token_ids"], reference["prefix_cache"].get(name)),
        })  # fmt: skip
    return pl.DataFrame(full, schema=_SCHEMA)


def _kind(cached_tokens: int, shared_tokens: int) -> str:
    """What the server's own counter proves: nothing reused, at most the part before the document, or the document."""
    if cached_tokens == 0:
        return "cold"
    return "document" if cached_tokens > shared_tokens else "system"


def _load_seconds(events: pl.DataFrame) -> dict[tuple[str, str], float]:
    """(arm, request as the engine numbered it) -> seconds of its loads."""
    loads = events.filter(pl.col("kind") == "load").group_by("arm", "request").agg(pl.col("seconds").sum())
    return {(arm, request): seconds for arm, request, seconds in loads.iter_rows()}


def _first_difference(tokens: list[int], reference: list[int] | None) -> int | None:
    """First position at which two answers differ; None if they are equal or there is nothing to compare with."""
    if reference is None or tokens == reference:
        return None
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(reference)))
