"""What the plots of a study share: which settings vary, how a line is called, means with their intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import plotly.graph_objects as go
import polars as pl

from experiments.intervals import mean_interval
from experiments.plots._style import REFERENCE_COLOR, label_text, line_style, new_figure, no_data_figure

__all__ = ["CAPACITIES", "MEASURES", "Measure", "is_number", "line_data", "measure_of", "plot_lines", "power_ticks",
           "series_label", "varied_settings"]  # fmt: skip


@dataclass(frozen=True)
class Measure:
    """What a plot or a table can show of a cell.

    Args:
        column: Of `Study.frame`.
        title: With its unit.
        scale: Multiplies the column into that unit.
        short: The title for the head of a table.
    """

    column: str
    title: str
    scale: float = 1.0
    short: str = ""


MEASURES = {measure.column: measure for measure in (
    Measure("hit_rate", "hit rate by tokens (%)", 100, "hit rate (%)"),
    Measure("hit_rate_by_chunks", "hit rate by chunks (%)", 100, "by chunks (%)"),
    Measure("hit_rate_by_requests", "hit rate by requests (%)", 100, "by requests (%)"),
    Measure("hit_rate_second_half", "hit rate by tokens, second half (%)", 100, "second half (%)"),
    Measure("hit_rate_bound", "most that could hit (%)", 100, "at most (%)"),
    Measure("ttft_s", "TTFT, median (ms)", 1e3, "TTFT (ms)"),
    Measure("ttft_warm_s", "TTFT of repeated prompts, median (ms)", 1e3, "warm TTFT (ms)"),
    Measure("ttft_cold_s", "TTFT of new prompts, median (ms)", 1e3, "cold TTFT (ms)"),
    Measure("ttft_mean_s", "TTFT, mean (ms)", 1e3, "TTFT (ms)"),
    Measure("ttft_warm_mean_s", "TTFT of repeated prompts, mean (ms)", 1e3, "warm TTFT (ms)"),
    Measure("ttft_p95_s", "TTFT, 95th percentile (ms)", 1e3, "p95 TTFT (ms)"),
    Measure("queue_s", "queue, median (ms)", 1e3, "queue (ms)"),
    Measure("load_s", "load, median (ms)", 1e3, "load (ms)"),
    Measure("prefill_s", "prefill, median (ms)", 1e3, "prefill (ms)"),
    Measure("bytes_per_token", "stored bytes (KiB a token)", 1 / 1024, "KiB a token"),
    Measure("equal_answers", "answers equal to no reuse (%)", 100, "equal answers (%)"),
    Measure("evictions", "evicted chunks", 1, "evictions"),
    Measure("requests_per_s", "answered requests (1/s)", 1, "requests/s"),
    Measure("prompt_tokens_per_s", "prompt tokens (1/s)", 1, "tokens/s"),
    Measure("speedup", "TTFT without reuse / with (times)", 1, "speed-up"),
    Measure("break_even_tokens", "break-even prefix (tokens)", 1, "break-even (tokens)"),
    Measure("dollars_per_million_tokens", "dollars per million prompt tokens", 1, "$ per 1M tokens"),
)}  # fmt: skip

# Settings that say how much fits, with the title of their axis.
CAPACITIES = {
    "capacity_tokens": "capacity (tokens, log scale)",
    "capacity_chunks": "capacity (chunks, log scale)",
    "memory_bytes": "memory tier (bytes, log scale)",
    "disk_bytes": "disk tier (bytes, log scale)",
}


def measure_of(column: str) -> Measure:
    """What is known about a column; its own name and no unit if nothing is."""
    return MEASURES.get(column, Measure(column, column))


def varied_settings(study: pl.DataFrame) -> list[str]:
    """Settings with more than one value; in the frame they stand between `cell` and `repeat`."""
    if "repeat" not in study.columns:
        return []
    settings = study.columns[1 : study.columns.index("repeat")]
    return [name for name in settings if study[name].n_unique() > 1]


def series_label(values: dict[str, Any]) -> str:
    """The name of a line or a panel: "lru, memory_bytes 0"; texts speak for themselves."""
    return ", ".join(str(v) if isinstance(v, str) else f"{name.rpartition('.')[2]} {_number(v)}"
                     for name, v in values.items())  # fmt: skip


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _text(value: Any) -> str:
    """A value of a setting as every column shows it: one of several types holds texts, one with a fraction floats."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def line_data(study: pl.DataFrame, x: str, measure: str, bound: str | None = None, *,
              space: Mapping[str, Sequence[Any]] | None = None) -> pl.DataFrame:  # fmt: skip
    """A measure against a setting: mean and 95 % interval over whatever was repeated.

    Args:
        study: Cells.
        x: The setting of the horizontal axis.
        measure: The column that is averaged.
        bound: A column that the measure cannot pass, averaged as well.
        space: Every value of every setting, where cells are still to come; by default what the cells have.

    Returns:
        series, place (of the series among all there will be), x (numbers, or the setting's names), mean, low, high
        (null below two values), n, bound; sorted by x inside each series.
    """
    space = space or {name: study[name].unique(maintain_order=True).to_list()
                      for name in dict.fromkeys([*varied_settings(study), x]) if name in study.columns}  # fmt: skip
    numbers = all(is_number(value) for value in space.get(x, ()))
    schema = {"series": pl.String, "place": pl.Int64, "x": pl.Float64 if numbers else pl.String, "mean": pl.Float64,
              "low": pl.Float64, "high": pl.Float64, "n": pl.Int64, "bound": pl.Float64}  # fmt: skip
    if study.is_empty() or x not in study.columns or measure not in study.columns:
        return pl.DataFrame(schema=schema)
    others = [name for name, values in space.items() if name != x and len(values) > 1]
    places = {key: place for place, key in enumerate(product(*(map(_text, space[name]) for name in others)))}
    order, rows = {_text(value): place for place, value in enumerate(space[x])}, []
    for (*key, at), group in study.drop_nulls([x, measure]).group_by([*others, x], maintain_order=True):
        interval = mean_interval(group[measure].cast(pl.Float64).to_numpy())
        low, high = (interval.low, interval.high) if interval.n > 1 else (None, None)
        ceiling = group[bound].mean() if bound in group.columns else None
        row = (series_label(dict(zip(others, key, strict=True))), places[tuple(map(_text, key))],
               float(at) if numbers else str(at), interval.mean, low, high, interval.n, ceiling)  # fmt: skip
        rows.append((at if numbers else order[_text(at)], row))
    return pl.DataFrame([row for _, row in sorted(rows, key=lambda r: r[0])], schema=schema, orient="row")


def plot_lines(data: pl.DataFrame, *, title: str, x_title: str, measure: str, template: str, badge: str) -> go.Figure:
    """A line a series with its confidence band; the bound, where one is known, is dotted and grey.

    A series keeps its look whatever other series there are so far.
    """
    if data.is_empty():
        return no_data_figure(title, "no finished cell has these settings", template=template, badge=badge)
    shown = measure_of(measure)
    least, most = min(data["n"]), max(data["n"])
    n = f"n = {least}" if least == most else f"n = {least} to {most}"
    said = "bands: 95 % interval" if most > 1 else "one value a point, so no interval"
    lines = sorted(data.partition_by("series", maintain_order=True), key=lambda line: line["place"][0])
    figure = new_figure(title, f"{label_text(badge)} · {n} repeats a point · {said}", template=template,
                        height=430 + 24 * (len(lines) // 3))  # fmt: skip
    for line in lines:
        _add_series(figure, line, line_style(line["place"][0]), shown.scale)
    bounds = data.drop_nulls("bound").unique("x", keep="first", maintain_order=True).sort("x")
    if bounds.height:
        figure.add_scatter(x=bounds["x"].to_list(), y=(shown.scale * bounds["bound"]).to_list(), mode="lines",
                           name="most that the workload allows", hoverinfo="x+y+name",
                           line={"color": REFERENCE_COLOR, "dash": "dot", "width": 2})  # fmt: skip
    figure.update_xaxes(title=x_title, **_horizontal(data["x"]))
    figure.update_yaxes(title=shown.title, rangemode="tozero", **({"range": [0, 104]} if shown.scale == 100 else {}))
    return figure.update_layout(margin_b=96 + 22 * (len(lines) // 3), hovermode="closest")


def _add_series(figure: go.Figure, line: pl.DataFrame, style: tuple[str, str, str], factor: float) -> None:
    color, symbol, dash = style
    x, mean, name = line["x"].to_list(), (factor * line["mean"]).to_list(), line["series"][0]
    band, shown = line.drop_nulls(["low", "high"]), label_text(name or "all cells")
    if band.height > 1:
        around = [*band["x"], *band["x"].reverse()]
        edges = [*(factor * band["high"]), *(factor * band["low"].reverse())]
        figure.add_scatter(x=around, y=edges, name=shown, legendgroup=name, showlegend=False, hoverinfo="skip",
                           mode="lines", line={"width": 0}, fill="toself", fillcolor=color, opacity=0.16)  # fmt: skip
    hover = [
        f"<b>{shown}</b><br>{_place_text(at)}: {value:.4g}{_interval_text(row, factor)}<br>n = {row['n']}"
        for at, value, row in zip(x, mean, line.iter_rows(named=True), strict=True)
    ]
    alone = band.height == 1 and line.height == 1  # a band needs two points
    figure.add_scatter(x=x, y=mean, name=shown, legendgroup=name, mode="lines+markers",
                       line={"color": color, "dash": dash, "width": 2}, hovertext=hover, hoverinfo="text",
                       error_y=_error_bar(band, factor) if alone else None,
                       marker={"symbol": symbol, "size": 9, "color": color})  # fmt: skip


def _error_bar(point: pl.DataFrame, factor: float) -> dict[str, Any]:
    return {"array": (factor * (point["high"] - point["mean"])).to_list(), "thickness": 1.2, "width": 3}


def _place_text(at: float | str) -> str:
    return label_text(at) if isinstance(at, str) else f"{at:,g}"


def _horizontal(values: pl.Series) -> dict[str, Any]:
    """A logarithmic axis with ticks at values that were set; names stand as they are."""
    if values.dtype == pl.String:
        return {"type": "category", "tickvals": (names := values.unique(maintain_order=True).to_list()),
                "ticktext": [label_text(name) for name in names]}  # fmt: skip
    ticks = values.unique().sort().to_list()
    return {} if ticks[0] <= 0 else {"type": "log", **power_ticks(ticks)}


def _interval_text(row: dict[str, Any], factor: float) -> str:
    return "" if row["low"] is None else f" ({factor * row['low']:.4g} to {factor * row['high']:.4g})"


def power_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Ticks of a logarithmic axis: the values themselves where they are few, else some of them."""
    shown = list(values) if len(values) <= 9 else list(values)[:: -(-len(values) // 8)]
    return {"tickvals": shown, "ticktext": [f"{value:,g}" for value in shown]}
