"""Time to first token: each request as a mark beside its arm's median, and how many were served within a time."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from experiments.plots._style import (
    REFERENCE_COLOR,
    ArmStyle,
    arm_styles,
    label_text,
    new_figure,
    no_data_figure,
    phase_text,
    point_marker,
    row_label,
    seconds_axis,
)
from experiments.summary import answered, arm_rank, median_if_enough, phase_rank
from experiments.units import seconds_text

__all__ = ["plot_ttft", "ttft_data"]

_TITLE = "Time to first token"


def ttft_data(requests: pl.DataFrame) -> pl.DataFrame:
    """One row an answered request, arm by arm, phase by phase, fastest first.

    Returns:
        arm, arm_label, phase, kind, request_id, repeat, prompt_tokens, cached_tokens, ttft_s; n of its arm and phase;
        `served_share`, the share of these n with this TTFT or a lower one; median_s, null if n is too small for it.
    """
    group = ["arm", "phase"]
    return (
        answered(requests)
        .sort(arm_rank(requests), phase_rank(), "phase", "ttft_s")
        .with_columns(
            n=pl.len().over(group),
            served_share=pl.col("ttft_s").rank("max").over(group) / pl.len().over(group),
            median_s=median_if_enough("ttft_s").over(group),
        )
        .select("arm", "arm_label", "phase", "kind", "request_id", "repeat", "prompt_tokens", "cached_tokens", "ttft_s",
                "n", "served_share", "median_s")
    )  # fmt: skip


def plot_ttft(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """Points above, cumulative shares below, over one logarithmic axis; open marks are first questions."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no request was answered", template=template, badge=badge)
    groups = data.partition_by("arm", "phase", maintain_order=True)
    styles = arm_styles(data["arm"].unique(maintain_order=True).to_list())
    rows_height = 30 * len(groups)
    height = 92 + rows_height + 280 + 90
    share = rows_height / (rows_height + 280)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[share, 1 - share])
    new_figure(_TITLE, f"{label_text(badge)} · {_counts_text(data)}", template=template, height=height, figure=figure)
    for place, group in enumerate(groups):
        style = styles[group["arm"][0]]
        figure.add_trace(_points(group, place, style), row=1, col=1)
        figure.add_trace(_curve(group, style), row=2, col=1)
        _mark_median(figure, group, place)
    names = [row_label(g["arm_label"][0], g["phase"][0], g.height) for g in groups]
    axis = seconds_axis(data["ttft_s"].to_list(), title="time to first token (log scale)")
    figure.update_xaxes(axis | {"title": None}, row=1, col=1)
    figure.update_xaxes(axis, row=2, col=1)
    figure.update_yaxes(
        tickvals=list(range(len(groups))), ticktext=names, range=[len(groups) - 0.4, -0.6], row=1, col=1
    )
    figure.update_layout(showlegend=False, margin_r=84)
    figure.update_yaxes(title="requests served (%)", range=[-3, 104], dtick=25, row=2, col=1)
    return figure


def _counts_text(data: pl.DataFrame) -> str:
    return f"{data.height} requests, n = {data['n'].min()} or more in each row"


def _points(group: pl.DataFrame, place: int, style: ArmStyle) -> go.Scatter:
    hover = [
        f"<b>{label_text(row['arm_label'])}</b>, {phase_text(group['phase'][0])}<br>{label_text(row['request_id'])}<br>"
        f"TTFT {seconds_text(row['ttft_s'])}, {row['prompt_tokens']:,} prompt tokens, "
        f"{row['cached_tokens'] or 0:,} reused ({label_text(row['kind'])})<br>n = {row['n']}"
        for row in group.iter_rows(named=True)
    ]
    return go.Scatter(x=group["ttft_s"].to_list(), y=[place] * group.height, mode="markers", hovertext=hover,
                      hoverinfo="text", marker=point_marker(style, group["phase"][0]), showlegend=False)  # fmt: skip


def _curve(group: pl.DataFrame, style: ArmStyle) -> go.Scatter:
    """The share served within a time; it starts from 0 at the first request."""
    times, shares = group["ttft_s"].to_list(), (100 * group["served_share"]).to_list()
    name = f"{label_text(group['arm_label'][0])}, {phase_text(group['phase'][0])}"
    hover = [f"<b>{name}</b><br>{s:.0f} % within {seconds_text(t)}<br>n = {group.height}"
             for t, s in zip(times, shares, strict=True)]  # fmt: skip
    line = {"shape": "hv", "color": style.color, "dash": style.dash, "width": 1.8}
    return go.Scatter(x=[times[0], *times], y=[0, *shares], hovertext=[hover[0], *hover], hoverinfo="text", name=name,
                      mode="lines+markers", line=line, marker=point_marker(style, group["phase"][0], 6))  # fmt: skip


def _mark_median(figure: go.Figure, group: pl.DataFrame, place: int) -> None:
    median = group["median_s"][0]
    if median is None:
        text = "n too small"
    else:
        text = seconds_text(median)
        figure.add_shape(type="line", x0=median, x1=median, y0=place - 0.42, y1=place + 0.42, xref="x", yref="y",
                         line={"color": REFERENCE_COLOR, "width": 4}, layer="below")  # fmt: skip
    figure.add_annotation(text=text, x=1, xref="paper", xanchor="left", xshift=8, y=place, yref="y", showarrow=False,
                          font={"size": 12})  # fmt: skip
