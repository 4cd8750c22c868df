"""Reused tokens of each request against the most that its workload allows."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from experiments.plots._style import (
    REFERENCE_COLOR,
    arm_styles,
    label_text,
    new_figure,
    no_data_figure,
    phase_text,
    point_marker,
)
from experiments.summary import answered, arm_rank, phase_rank

__all__ = ["hit_tokens_data", "plot_hit_tokens"]

_TITLE = "Reused tokens against the most possible"
_COLUMNS = 4


def hit_tokens_data(requests: pl.DataFrame) -> pl.DataFrame:
    """One row an answered request of which both figures are known.

    Returns:
        arm, arm_label, phase, kind, request_id, repeat, prompt_tokens, expected_hit_tokens, cached_tokens and
        `unused_tokens`, how many of the expected ones were not reused; below 0 where an arm finds more, as one with
        chunks smaller than the bound's does.
    """
    known = pl.col("expected_hit_tokens").is_not_null() & pl.col("cached_tokens").is_not_null()
    return (
        answered(requests)
        .filter(known)
        .with_columns(unused_tokens=pl.col("expected_hit_tokens") - pl.col("cached_tokens"))
        .sort(arm_rank(requests), phase_rank(), "expected_hit_tokens")
        .select("arm", "arm_label", "phase", "kind", "request_id", "repeat", "prompt_tokens", "expected_hit_tokens",
                "cached_tokens", "unused_tokens")
    )  # fmt: skip


def plot_hit_tokens(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A panel an arm; on the dashed line a request reused all that it could."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no request with a known bound was answered", template=template, badge=badge)
    arms = data.partition_by("arm", maintain_order=True)
    styles = arm_styles([group["arm"][0] for group in arms])
    columns = min(_COLUMNS, len(arms))
    rows = -(-len(arms) // columns)
    titles = [label_text(g["arm_label"][0]) for g in arms]
    figure = make_subplots(rows=rows, cols=columns, shared_yaxes=True, subplot_titles=titles,
                           horizontal_spacing=0.03, vertical_spacing=0.16)  # fmt: skip
    new_figure(_TITLE, f"{label_text(badge)} · {data.height} requests; dashed: the workload's upper bound",
               template=template, height=140 + 300 * rows, figure=figure)  # fmt: skip
    most = max(*data["expected_hit_tokens"].to_list(), *data["cached_tokens"].to_list(), 1)
    shown: set[str] = set()
    for number, group in enumerate(arms):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        figure.add_scatter(x=[0, most], y=[0, most], mode="lines", hoverinfo="skip", showlegend=False,
                           line={"color": REFERENCE_COLOR, "width": 1.5, "dash": "dash"}, **place)  # fmt: skip
        for part in group.partition_by("phase", maintain_order=True):
            phase = part["phase"][0]
            figure.add_scatter(x=part["expected_hit_tokens"].to_list(), y=part["cached_tokens"].to_list(),
                               mode="markers", hovertext=_hover(part), hoverinfo="text", showlegend=False,
                               marker=point_marker(styles[group["arm"][0]], phase), **place)  # fmt: skip
            if phase not in shown:
                figure.add_trace(_legend_entry(phase), row=place["row"], col=place["col"])
                shown.add(phase)
    figure.update_layout(margin_t=124)
    figure.update_annotations(font_size=12.5)
    figure.update_xaxes(range=[-0.06 * most, 1.06 * most], tickformat=",", nticks=5)
    figure.update_yaxes(range=[-0.06 * most, 1.06 * most], tickformat=",")
    figure.update_xaxes(title="most possible (tokens)", row=rows)
    figure.update_yaxes(title="reused (tokens)", col=1)
    return figure


def _legend_entry(phase: str) -> go.Scatter:
    symbol = "circle-open" if phase == "first" else "circle"
    marker = {"symbol": symbol, "size": 10, "color": REFERENCE_COLOR, "line": {"width": 1.6, "color": REFERENCE_COLOR}}
    return go.Scatter(x=[None], y=[None], mode="markers", name=phase_text(phase), marker=marker)


def _hover(part: pl.DataFrame) -> list[str]:
    return [
        f"<b>{label_text(row['arm_label'])}</b>, {phase_text(row['phase'])}<br>{label_text(row['request_id'])}<br>"
        f"{row['cached_tokens']:,} of {row['expected_hit_tokens']:,} tokens reused, "
        f"prompt of {row['prompt_tokens']:,} ({label_text(row['kind'])})"
        for row in part.iter_rows(named=True)
    ]
