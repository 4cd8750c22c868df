"""Every cell of a study as a line through its settings and results; drag along an axis to select."""

import plotly.graph_objects as go
import polars as pl

from experiments.plots._study import MEASURES, measure_of, varied_settings
from experiments.plots._style import COLOR_SCALE, TEMPLATES, label_text, new_figure, no_data_figure

__all__ = ["parallel_coordinates_data", "plot_parallel_coordinates"]

_TITLE = "Settings and results of every cell"
_RESULTS = ("hit_rate", "ttft_warm_s", "ttft_s", "ttft_warm_mean_s", "bytes_per_token", "equal_answers", "evictions",
            "speedup")  # fmt: skip
_MOST_RESULTS = 4


def parallel_coordinates_data(study: pl.DataFrame, *, results: tuple[str, ...] = (), color: str = "") -> pl.DataFrame:
    """The settings that vary and the main results, a row a cell; settings first, the colour last.

    Args:
        study: Cells.
        results: Columns to show; by default those of the main ones that the study has.
        color: The result that colours the lines; the first by default.
    """
    there = [name for name in (results or _RESULTS) if name in study.columns]
    known = [name for name in there if study[name].null_count() < study.height]
    chosen = known if results else known[:_MOST_RESULTS]
    if study.is_empty() or not chosen:
        return pl.DataFrame()
    color = color or chosen[0]
    ordered = [name for name in chosen if name != color]
    return study.select(*varied_settings(study), *ordered, color).drop_nulls()


def plot_parallel_coordinates(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A line a cell, coloured by the last column."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no finished cell has a result", template=template, badge=badge)
    color = data.columns[-1]
    shown = measure_of(color)
    said = f"{label_text(badge)} · n = {data.height} cells · colour: {shown.title} · drag along an axis to select"
    figure = new_figure(_TITLE, said, template=template, height=490)
    ink = TEMPLATES[template].layout.font.color if template in TEMPLATES else None
    figure.add_trace(go.Parcoords(
        dimensions=[_axis(data[name]) for name in data.columns],
        line={"color": (shown.scale * data[color].cast(pl.Float64)).to_list(), "colorscale": COLOR_SCALE,
              "showscale": True, "colorbar": {"title": {"text": shown.title, "side": "right"}, "thickness": 14}},
        labelfont={"size": 13, "color": ink}, tickfont={"size": 12, "color": ink}, rangefont={"size": 11, "color": ink},
        labelangle=-20, labelside="top",
    ))  # fmt: skip
    return figure.update_layout(margin={"t": 210, "l": 70, "r": 60, "b": 40})


def _axis(column: pl.Series) -> dict:
    """An axis: results in their unit, settings as the values they have, evenly spaced."""
    if column.name in MEASURES:
        shown = MEASURES[column.name]
        return {"label": shown.title, "values": (shown.scale * column.cast(pl.Float64)).to_list()}
    values = column.unique().sort().to_list()
    texts = [f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) for value in values]
    return {"label": column.name.rpartition(".")[2], "values": [values.index(value) for value in column],
            "tickvals": list(range(len(values))), "ticktext": [label_text(text) for text in texts],
            "range": [-0.15, len(values) - 0.85]}  # fmt: skip
