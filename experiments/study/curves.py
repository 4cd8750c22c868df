"""A study's cells as curves: one measure against one of the settings that were swept, a line for the others."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl

from experiments.plots._study import MEASURES, Measure, is_number, line_data, plot_lines
from experiments.plots._style import label_text, no_data_figure

__all__ = ["plot_sweep", "sweep_axes", "sweep_data", "sweep_measures"]

_SHOWN = {
    "replay": ("hit_rate", "hit_rate_by_chunks", "hit_rate_by_requests", "evictions"),
    "serving": ("ttft_warm_mean_s", "ttft_mean_s", "hit_rate", "hit_rate_bound", "bytes_per_token", "evictions",
                "requests_per_s"),
    "model": ("ttft_s", "speedup", "break_even_tokens", "dollars_per_million_tokens"),
}  # fmt: skip
_BADGES = {"serving": "measured"}  # the other kinds are simulated
# Settings that make a good horizontal axis, the best first; then any other number, then names.
_HORIZONTAL = {
    "request_rate": "requests that come (1/s)",
    "chunk_tokens": "chunk (tokens)",
    "capacity_chunks": "capacity (chunks)",
    "memory_bytes": "memory (bytes)",
    "disk_bytes": "disk (bytes)",
    "prompt_tokens": "prompt (tokens)",
}


def sweep_measures(kind: str) -> tuple[Measure, ...]:
    """What can stand on the vertical axis for a kind of study, the main one first."""
    return tuple(MEASURES[column] for column in _SHOWN[kind])


def sweep_axes(space: Mapping[str, Sequence[Any]]) -> tuple[str, list[str]]:
    """The setting for the horizontal axis, and those that tell the lines apart."""
    swept = [name for name, values in space.items() if len(values) > 1] or list(space)[:1]
    numbers = [name for name in swept if all(is_number(value) for value in space[name])]
    across = next((name for name in _HORIZONTAL if name in numbers), (numbers or swept)[0])
    return across, [name for name in swept if name != across]


def sweep_data(frame: pl.DataFrame, space: Mapping[str, Sequence[Any]], measure: Measure) -> pl.DataFrame:
    """`line_data` of the cells that are there so far, each line at its place among all that there will be.

    Args:
        frame: From `Study.frame`; cells that failed and values that are missing are left out.
        space: The study's.
        measure: One of `sweep_measures`.
    """
    across, _ = sweep_axes(space)
    good = frame.filter(pl.col("error").fill_null("") == "") if "error" in frame.columns else frame
    return line_data(good, across, measure.column, space=space)


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
    return plot_lines(data, title=label_text(title), x_title=label_text(_HORIZONTAL.get(across, across)),
                      measure=measure.column, template=template, badge=badge)  # fmt: skip
