"""How many times sooner the first token came than without reuse, request by request."""

from math import log10

import plotly.graph_objects as go
import polars as pl

from experiments.plots._style import (
    REFERENCE_COLOR,
    arm_styles,
    label_text,
    new_figure,
    no_data_figure,
    phase_text,
    point_marker,
    row_label,
)
from experiments.summary import MEDIAN_SAMPLES, arm_rank, median_if_enough, paired_requests, phase_rank
from experiments.units import seconds_text, times_text

__all__ = ["plot_speedup", "speedup_data"]

_TITLE = "Times sooner than without reuse, for the same request"


def speedup_data(requests: pl.DataFrame) -> pl.DataFrame:
    """The pairs of `paired_requests`, in order of arm and phase.

    Returns:
        Its columns, n pairs of the arm and phase, and median_speedup, null if n is too small for it.
    """
    return (
        paired_requests(requests)
        .with_columns(n=pl.len().over("arm", "phase"), median_speedup=median_if_enough("speedup").over("arm", "phase"))
        .sort(arm_rank(requests), phase_rank(), "phase", "speedup")
    )  # fmt: skip


def plot_speedup(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A row an arm and phase, a point a pair, a bar at the median; left of the line is slower than no reuse."""
    if data.is_empty():
        why = "no request was answered both with and without reuse"
        return no_data_figure(_TITLE, why, template=template, badge=badge)
    groups = data.partition_by("arm", "phase", maintain_order=True)
    styles = arm_styles(data["arm"].unique(maintain_order=True).to_list())
    figure = new_figure(_TITLE, f"{label_text(badge)} · {data.height} pairs; the bar is the median, given from "
                        f"n = {MEDIAN_SAMPLES}", template=template, height=92 + 40 * len(groups) + 70)  # fmt: skip
    for place, group in enumerate(groups):
        figure.add_scatter(x=group["speedup"].to_list(), y=[place] * group.height, mode="markers", showlegend=False,
                           hovertext=_hover(group), hoverinfo="text",
                           marker=point_marker(styles[group["arm"][0]], group["phase"][0]))  # fmt: skip
        _mark_median(figure, group, place)
    figure.add_vline(x=1, line={"color": REFERENCE_COLOR, "width": 1.5, "dash": "dash"})
    low, high = min(*data["speedup"].to_list(), 0.8), max(*data["speedup"].to_list(), 1.25)
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
    figure.update_xaxes(type="log", range=[log10(low) - 0.06, log10(high) + 0.06], tickvals=ticks,
                        ticktext=[f"{t:g}×" for t in ticks],
                        title="TTFT without reuse / TTFT of the arm (log scale)")  # fmt: skip
    figure.update_layout(margin_r=84)
    names = [row_label(g["arm_label"][0], g["phase"][0], g.height) for g in groups]
    figure.update_yaxes(tickvals=list(range(len(groups))), ticktext=names, range=[len(groups) - 0.4, -0.6])
    return figure


def _hover(group: pl.DataFrame) -> list[str]:
    return [
        f"<b>{label_text(row['arm_label'])}</b>, {phase_text(row['phase'])}<br>{label_text(row['request_id'])}<br>"
        f"{row['speedup']:.2f}× = {seconds_text(row['baseline_ttft_s'])} / {seconds_text(row['ttft_s'])}"
        f" ({label_text(row['kind'])})<br>n = {row['n']} pairs"
        for row in group.iter_rows(named=True)
    ]


def _mark_median(figure: go.Figure, group: pl.DataFrame, place: int) -> None:
    median = group["median_speedup"][0]
    if median is None:
        text = "n too small"
    else:
        text = f"{times_text(median)}×"
        figure.add_shape(type="line", x0=median, x1=median, y0=place - 0.4, y1=place + 0.4, layer="below",
                         line={"color": REFERENCE_COLOR, "width": 4})  # fmt: skip
    figure.add_annotation(text=text, x=1, xref="paper", xanchor="left", xshift=8, y=place, yref="y", showarrow=False,
                          font={"size": 12})  # fmt: skip
