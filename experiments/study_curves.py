"""A study's cells as curves: one measure against one of the settings that were swept, a line for the others."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import polars as pl

from experiments.intervals import mean_interval
from experiments.plots._style import PALETTE, label_text, new_figure, no_data_figure

__all__ = ["MEASURES", "Measure", "plot_sweep", "sweep_axes", "sweep_data"]


@dataclass(frozen=True)
class Measure:
    """What stands on the vertical axis.

    Args:
        column: Of `Study.frame`.
        title: With its unit.
        scale: Multiplies the column into that unit.
        short: The same for the head of a table.
    """

    column: str
    title: str
    scale: float = 1.0
    short: str = ""


MEASURES = {
    "replay": (
        Measure("hit_rate", "hit rate by tokens (%)", 100, "hit rate (%)"),
        Measure("hit_rate_by_chunks", "hit rate by chunks (%)", 100, "by chunks (%)"),
        Measure("hit_rate_by_requests", "hit rate by requests (%)", 100, "by requests (%)"),
        Measure("evictions", "evicted chunks", 1, "evictions"),
    ),
    "serving": (
        Measure("ttft_warm_mean_s", "time to first token of repeated prompts, mean (ms)", 1e3, "warm TTFT (ms)"),
        Measure("ttft_mean_s", "time to first token, mean (ms)", 1e3, "TTFT (ms)"),
        Measure("hit_rate", "hit rate by tokens (%)", 100, "hit rate (%)"),
        Measure("hit_rate_bound", "most that could hit (%)", 100, "at most (%)"),
        Measure("bytes_per_token", "stored KV (bytes a token)", 1, "bytes a token"),
        Measure("evictions", "evicted chunks", 1, "evictions"),
    ),
    "model": (
        Measure("ttft_s", "time to first token (ms)", 1e3, "TTFT (ms)"),
        Measure("speedup", "time to first token without reuse over with it", 1, "speed-up"),
        Measure("break_even_tokens", "break-even prefix (tokens)", 1, "break-even (tokens)"),
        Measure("dollars_per_million_tokens", "dollars per million prompt tokens", 1, "$ per 1M tokens"),
    ),
}
_BADGES = {"serving": "measured"}  # the other kinds are simulated
# Settings that make a good horizontal axis, the best first; then any other number, then names.
_HORIZONTAL = ("chunk_tokens", "capacity_chunks", "memory_bytes", "disk_bytes", "prompt_tokens")
_TITLES = {
    "chunk_tokens": "chunk (tokens)",
    "capacity_chunks": "capacity (chunks)",
    "memory_bytes": "memory (bytes)",
    "disk_bytes": "disk (bytes)",
    "prompt_tokens": "prompt (tokens)",
}
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_COLORS = tuple(PALETTE[place] for place in (5, 6, 3, 1, 7, 2, 8))


def sweep_axes(space: Mapping[str, Sequence[Any]]) -> tuple[str, list[str]]:
    """The setting for the horizontal axis, and those that tell the lines apart."""
    swept = [name for name, values in space.items() if len(values) > 1] or list(space)[:1]
    numbers = [name for name in swept if all(_is_number(value) for value in space[name])]
    across = next((name for name in _HORIZONTAL if name in numbers), (numbers or swept)[0])
    return across, [name for name in swept if name != across]


def sweep_data(frame: pl.DataFrame, space: Mapping[str, Sequence[Any]], measure: Measure) -> pl.DataFrame:
    """line, place (of the line among all there will be), x, mean, half_interval (95 %, None for one value), n.

    Args:
        frame: From `Study.frame`; cells that failed and values that are missing are left out.
        space: The study's.
        measure: One of `MEASURES`.
    """
    across, others = sweep_axes(space)
    numbers = all(_is_number(value) for value in space[across])
    schema = {"line": pl.String, "place": pl.Int64, "x": pl.Float64 if numbers else pl.String, "mean": pl.Float64,
              "half_interval": pl.Float64, "n": pl.Int64}  # fmt: skip
    if measure.column not in frame.columns:  # no cell has come so far
        return pl.DataFrame(schema=schema)
    places = {key: place for place, key in enumerate(itertools.product(*(space[name] for name in others)))}
    found = frame.filter(pl.col("error").fill_null("") == "", pl.col(measure.column).is_not_null())
    rows = []
    for (*key, x), group in found.group_by(*others, across, maintain_order=True):
        interval = mean_interval(group[measure.column].cast(pl.Float64).to_numpy() * measure.scale)
        half = interval.high - interval.mean if interval.n > 1 else None
        line = " · ".join(str(value) for value in key)
        rows.append((line, places[tuple(key)], x if numbers else str(x), interval.mean, half, interval.n))
    order = {value if numbers else str(value): place for place, value in enumerate(space[across])}
    rows.sort(key=lambda row: (row[1], row[2] if numbers else order[row[2]]))
    return pl.DataFrame(rows, schema=schema, orient="row")


def plot_sweep(data: pl.DataFrame, *, kind: str, measure: Measure, across: str, title: str = "Sweep",
               template: str = "light") -> go.Figure:  # fmt: skip
    """The points found so far, a line for each combination of the settings that are not across.

    Args:
        data: From `sweep_data`.
        kind: Of the study; says whether figures are measured or simulated.
        measure: What `data` holds.
        across: The setting on the horizontal axis.
        title: Of the plot.
        template: "light" or "dark".
    """
    badge = _BADGES.get(kind, "simulated")
    if data.is_empty():
        return no_data_figure(title, "no cell is finished yet", template=template, badge=badge)
    n = int(data["n"].to_numpy().max())
    bars = " · bars: 95 % interval" if n > 1 else ""
    figure = new_figure(label_text(title), f"{badge} · n = {n} a point{bars}", template=template, height=420)
    for line in data.partition_by("line", maintain_order=True):
        _add_line(figure, line, across)
    figure.update_xaxes(title=label_text(_TITLES.get(across, across)), **_horizontal(data["x"]))
    figure.update_yaxes(title=measure.title, rangemode="tozero")
    figure.update_layout(margin_b=70, showlegend=data["line"].n_unique() > 1)
    return figure


def _add_line(figure: go.Figure, line: pl.DataFrame, across: str) -> None:
    place, name = line["place"][0], label_text(line["line"][0] or "all")
    color = _COLORS[place % len(_COLORS)]
    hover = [
        f"<b>{name}</b><br>{label_text(across)} {label_text(x)}<br>{mean:.4g}{_spread(half)}, n = {n}"
        for x, mean, half, n in line.select("x", "mean", "half_interval", "n").iter_rows()
    ]
    halves = [half or 0.0 for half in line["half_interval"]]
    figure.add_scatter(
        x=line["x"].to_list(), y=line["mean"].to_list(), name=name, mode="lines+markers",
        line={"color": color, "dash": _DASHES[place % len(_DASHES)], "width": 2},
        marker={"symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 9, "color": color},
        error_y={"array": halves, "color": color, "thickness": 1.2, "width": 3} if any(halves) else None,
        hovertext=hover, hoverinfo="text",
    )  # fmt: skip


def _spread(half: float | None) -> str:
    return "" if half is None else f" ± {half:.2g}"


def _horizontal(values: pl.Series) -> dict[str, Any]:
    """A logarithmic axis with a tick at each value that was set; names stand as they are."""
    if values.dtype != pl.Float64:
        return {"type": "category"}
    ticks = sorted(set(values.to_list()))
    if ticks[0] <= 0 or len(ticks) > 12:
        return {}
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,g}" for tick in ticks], "minor": {"ticks": ""},
            "range": [math.log10(ticks[0]) - 0.08, math.log10(ticks[-1]) + 0.08]}  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
