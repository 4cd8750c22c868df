"""What the plots of a study share: which settings vary, how a line is called, means with their intervals."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl

from experiments.intervals import mean_interval
from experiments.plots._style import REFERENCE_COLOR, label_text, line_style, new_figure, no_data_figure

__all__ = ["CAPACITIES", "MEASURES", "line_data", "plot_lines", "power_ticks", "series_label", "varied_settings"]

# What a plot can show of a cell: column -> title with its unit, factor into that unit.
MEASURES: dict[str, tuple[str, float]] = {
    "hit_rate": ("hit rate by tokens (%)", 100),
    "hit_rate_by_chunks": ("hit rate by chunks (%)", 100),
    "hit_rate_by_requests": ("hit rate by requests (%)", 100),
    "hit_rate_second_half": ("hit rate by tokens, second half (%)", 100),
    "ttft_s": ("TTFT, median (ms)", 1e3),
    "ttft_warm_s": ("TTFT of repeated prompts, median (ms)", 1e3),
    "ttft_cold_s": ("TTFT of new prompts, median (ms)", 1e3),
    "ttft_mean_s": ("TTFT, mean (ms)", 1e3),
    "ttft_warm_mean_s": ("TTFT of repeated prompts, mean (ms)", 1e3),
    "load_s": ("load, median (ms)", 1e3),
    "prefill_s": ("prefill, median (ms)", 1e3),
    "bytes_per_token": ("stored bytes (KiB a token)", 1 / 1024),
    "equal_answers": ("answers equal to no reuse (%)", 100),
    "evictions": ("evicted chunks", 1),
    "prompt_tokens_per_s": ("prompt tokens (1/s)", 1),
    "speedup": ("TTFT without reuse / with (times)", 1),
}

# Settings that say how much fits, with the title of their axis.
CAPACITIES = {
    "capacity_tokens": "capacity (tokens, log scale)",
    "capacity_chunks": "capacity (chunks, log scale)",
    "memory_bytes": "memory tier (bytes, log scale)",
    "disk_bytes": "disk tier (bytes, log scale)",
}


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


def line_data(study: pl.DataFrame, x: str, measure: str, bound: str | None = None) -> pl.DataFrame:
    """A measure against a numeric setting: mean and 95 % interval over whatever was repeated.

    Args:
        study: Cells.
        x: The setting of the horizontal axis.
        measure: The column that is averaged.
        bound: A column that the measure cannot pass, averaged as well.

    Returns:
        series, x, mean, low, high (null below two values), n, bound; sorted by x inside each series.
    """
    schema = {"series": pl.String, "x": pl.Float64, "mean": pl.Float64, "low": pl.Float64, "high": pl.Float64,
              "n": pl.Int64, "bound": pl.Float64}  # fmt: skip
    if study.is_empty() or x not in study.columns or measure not in study.columns:
        return pl.DataFrame(schema=schema)
    others = [name for name in varied_settings(study) if name != x]
    rows = []
    for key, group in study.drop_nulls([x, measure]).group_by([*others, x], maintain_order=True):
        interval = mean_interval(group[measure].to_numpy())
        low, high = (interval.low, interval.high) if interval.n > 1 else (None, None)
        ceiling = group[bound].mean() if bound in group.columns else None
        label = series_label(dict(zip(others, key[:-1], strict=True)))
        rows.append((label, float(key[-1]), interval.mean, low, high, interval.n, ceiling))
    return pl.DataFrame(rows, schema=schema, orient="row").sort("x", maintain_order=True)


def plot_lines(data: pl.DataFrame, *, title: str, x_title: str, measure: str, template: str, badge: str) -> go.Figure:
    """A line a series with its confidence band; the bound, where one is known, is dotted and grey."""
    if data.is_empty():
        return no_data_figure(title, "no finished cell has these settings", template=template, badge=badge)
    y_title, factor = MEASURES.get(measure, (measure, 1))
    least, most = min(data["n"]), max(data["n"])
    n = f"n = {least}" if least == most else f"n = {least} to {most}"
    said = "bands: 95 % interval" if most > 1 else "one value a point, so no interval"
    names = data["series"].unique(maintain_order=True).to_list()
    figure = new_figure(title, f"{label_text(badge)} · {n} repeats a point · {said}", template=template,
                        height=430 + 24 * (len(names) // 3))  # fmt: skip
    for number, name in enumerate(names):
        _add_series(figure, data.filter(pl.col("series") == name), name, line_style(number), factor)
    bounds = data.drop_nulls("bound").unique("x", keep="first", maintain_order=True).sort("x")
    if bounds.height:
        figure.add_scatter(x=bounds["x"].to_list(), y=(factor * bounds["bound"]).to_list(), mode="lines",
                           name="most that the workload allows", hoverinfo="x+y+name",
                           line={"color": REFERENCE_COLOR, "dash": "dot", "width": 2})  # fmt: skip
    figure.update_xaxes(title=x_title, type="log", **power_ticks(data["x"].unique().sort().to_list()))
    figure.update_yaxes(title=y_title, rangemode="tozero", **({"range": [0, 104]} if factor == 100 else {}))
    return figure.update_layout(margin_b=96 + 22 * (len(names) // 3), hovermode="closest")


def _add_series(figure: go.Figure, line: pl.DataFrame, name: str, style: tuple[str, str, str], factor: float) -> None:
    color, symbol, dash = style
    x, mean = line["x"].to_list(), (factor * line["mean"]).to_list()
    band = line.drop_nulls(["low", "high"])
    if band.height > 1:
        around = [*band["x"], *band["x"].reverse()]
        edges = [*(factor * band["high"]), *(factor * band["low"].reverse())]
        figure.add_scatter(x=around, y=edges, fill="toself", fillcolor=color, opacity=0.16, mode="lines",
                           line={"width": 0}, hoverinfo="skip", showlegend=False, legendgroup=name)  # fmt: skip
    shown = label_text(name or "all cells")
    hover = [
        f"<b>{shown}</b><br>{at:,.0f}: {value:.4g}{_interval_text(row, factor)}<br>n = {row['n']}"
        for at, value, row in zip(x, mean, line.iter_rows(named=True), strict=True)
    ]
    figure.add_scatter(x=x, y=mean, name=shown, legendgroup=name, mode="lines+markers",
                       line={"color": color, "dash": dash, "width": 2}, hovertext=hover, hoverinfo="text",
                       marker={"symbol": symbol, "size": 9, "color": color})  # fmt: skip


def _interval_text(row: dict[str, Any], factor: float) -> str:
    return "" if row["low"] is None else f" ({factor * row['low']:.4g} to {factor * row['high']:.4g})"


def power_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Ticks of a logarithmic axis: the values themselves where they are few, else some of them."""
    shown = list(values) if len(values) <= 9 else list(values)[:: -(-len(values) // 8)]
    return {"tickvals": shown, "ticktext": [f"{value:,.0f}" for value in shown]}
