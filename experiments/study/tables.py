"""The tables of a study: one row a cell, one row a request."""

import json
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from experiments.study import Study

__all__ = ["cells_frame", "requests_frame"]

_OF_THE_ROW = ("kind", "error", "contaminated", "attempts", "seconds")
# Settings of what is reused and how, which a run without reuse does not have.
_OF_THE_CACHE = {"arm", "tier", "chunk_tokens", "codec", "policy", "memory_bytes", "disk_bytes", "redis_url",
                 "object_store_url"}  # fmt: skip
_OF_PROVENANCE = ("badge", "host", "worker", "cpu", "cores", "commit", "dirty", "time")


def cells_frame(study: "Study") -> pl.DataFrame:
    """One row a finished cell.

    Returns:
        cell (its key), settings by name, repeat; results by name; `effective.<name>`; error ("" if there is none),
        contaminated (why, "" if the cell was cold), attempts, seconds; provenance.
    """
    settings = [*study.space, *study.fixed]
    rows = _in_order(study)
    results = _names(rows, "results")
    effective = _names(rows, "effective")
    columns: dict[str, list[Any]] = {"cell": [row["key"] for row in rows]}
    columns |= {name: [row["settings"].get(name) for row in rows] for name in settings}
    columns["repeat"] = [row["repeat"] for row in rows]
    columns |= {name: [row["results"].get(name) for row in rows] for name in results}
    if (equal := _equal_answers(rows)) is not None:
        columns["equal_answers"] = equal
    columns |= {f"effective.{name}": [row["effective"].get(name) for row in rows] for name in effective}
    columns |= {name: [row[name] for row in rows] for name in _OF_THE_ROW}
    columns |= {name: [row["provenance"].get(name) for row in rows] for name in _OF_PROVENANCE}
    return pl.DataFrame({name: _series(name, values) for name, values in columns.items()})


def requests_frame(study: "Study") -> pl.DataFrame:
    """One row a request of every finished cell that was not contaminated: `cell`, the cell's settings, its repeat, and
    what was measured. Empty for simulations.

    A request's id carries the settings of its cell that vary, bar the arm: so arms are compared prompt by prompt, as in
    a run, and everything that takes a run's requests takes these.
    """
    others = [name for name in study.space if name != "arm"]
    rows = []
    for row in _in_order(study):
        if row["contaminated"] or row["error"]:
            continue
        cell = {"cell": row["key"], **row["settings"], "repeat": row["repeat"]}
        place = "".join(f"{name.rpartition('.')[2]} {row['settings'][name]}, " for name in others)
        rows += [{**cell, **request, "request_id": place + request["request_id"], "order": len(rows) + number}
                 for number, request in enumerate(row["requests"])]  # fmt: skip
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pl.DataFrame({name: _series(name, [row.get(name) for row in rows]) for name in names})


def _equal_answers(rows: list[dict[str, Any]]) -> list[float | None] | None:
    """For each cell, the share of its answers that are equal, token by token, to those without reuse to the same
    prompts; None where there is nothing to compare with, and altogether if no cell ran without reuse."""
    plain = {_prompts_of(row): row for row in rows if row["settings"].get("arm") == "none" and row["requests"]}
    if not plain:
        return None
    shares: list[float | None] = []
    for row in rows:
        baseline = plain.get(_prompts_of(row))
        if baseline is None or not row["requests"]:
            shares.append(None)
            continue
        answers = {request["request_id"]: request["token_ids"] for request in baseline["requests"]}
        equal = [answers.get(request["request_id"]) == request["token_ids"] for request in row["requests"]]
        shares.append(sum(equal) / len(equal))
    return shares


def _prompts_of(row: dict[str, Any]) -> str:
    """What decides the prompts and the computation, but not what is reused."""
    own = {name: value for name, value in row["settings"].items() if name not in _OF_THE_CACHE and "cache." not in name}
    return json.dumps([own, row["repeat"]], sort_keys=True)


def _in_order(study: "Study") -> list[dict[str, Any]]:
    """Rows in the order of the space's points, repeat by repeat: the same whoever finished first."""
    place = {cell.key: number for number, cell in enumerate(study.cells())}
    return sorted(study.rows(), key=lambda row: place.get(row["key"], len(place)))


def _names(rows: list[dict[str, Any]], part: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row[part]))


def _series(name: str, values: list[Any]) -> pl.Series:
    """A column; values of several types become texts."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and kinds != {int, float}:
        return pl.Series(name, [None if value is None else str(value) for value in values], pl.String)
    if kinds <= {dict}:
        return pl.Series(name, [None if value is None else str(value) for value in values], pl.String)
    return pl.Series(name, values, pl.Float64 if float in kinds else None, strict=False)
