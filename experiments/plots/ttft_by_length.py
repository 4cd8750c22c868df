"""Time to first token against the length of the prompt: what reuse saves grows with it."""

import plotly.graph_objects as go
import polars as pl

from experiments.plots._style import (
    arm_styles,
    label_text,
    new_figure,
    no_data_figure,
    phase_text,
    point_marker,
    seconds_axis,
)
from experiments.summary import answered, arm_rank, phase_rank
from experiments.units import seconds_text

__all__ = ["plot_ttft_by_length", "ttft_by_length_data"]

_TITLE = "Time to first token against prompt length"


def ttft_by_length_data(requests: pl.DataFrame) -> pl.DataFrame:
    """One row an answered request, in order of arm, phase and length.

    Returns:
        arm, arm_label, phase, kind, request_id, prompt_tokens, cached_tokens, computed_tokens (the rest of the prompt),
        ttft_s, n of its arm and phase.
    """
    return (
        answered(requests)
        .with_columns(
            computed_tokens=pl.col("prompt_tokens") - pl.col("cached_tokens").fill_null(0),
            n=pl.len().over("arm", "phase"),
        )
        .sort(arm_rank(requests), phase_rank(), "phase", "prompt_tokens")
        .select("arm", "arm_label", "phase", "kind", "request_id", "prompt_tokens", "cached_tokens", "computed_tokens",
                "ttft_s", "n")
    )  # fmt: skip


def plot_ttft_by_length(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A point a request; open marks are first questions."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no request was answered", template=template, badge=badge)
    styles = arm_styles(data["arm"].unique(maintain_order=True).to_list())
    figure = new_figure(_TITLE, f"{label_text(badge)} · n = {data.height} requests", template=template, height=500)
    for group in data.partition_by("arm", "phase", maintain_order=True):
        phase = phase_text(group["phase"][0])
        hover = [
            f"<b>{label_text(row['arm_label'])}</b>, {phase}<br>{label_text(row['request_id'])}<br>"
            f"{row['prompt_tokens']:,} prompt tokens, {row['computed_tokens']:,} of them computed"
            f" ({label_text(row['kind'])})<br>TTFT {seconds_text(row['ttft_s'])}<br>n = {row['n']}"
            for row in group.iter_rows(named=True)
        ]
        figure.add_scatter(x=group["prompt_tokens"].to_list(), y=group["ttft_s"].to_list(), mode="markers",
                           name=f"{label_text(group['arm_label'][0])}, {phase} (n = {group.height})",
                           hovertext=hover, hoverinfo="text",
                           marker=point_marker(styles[group["arm"][0]], group["phase"][0]))  # fmt: skip
    figure.update_xaxes(title="prompt length (tokens)", tickformat=",", range=_around(data["prompt_tokens"].to_list()))
    figure.update_yaxes(seconds_axis(data["ttft_s"].to_list(), title="time to first token (log scale)"))
    return figure


def _around(lengths: list[int]) -> list[float]:
    """A range that does not make a trend out of prompts of almost one length."""
    low, high = min(lengths), max(lengths)
    room = max(0.05 * (high - low), 0.15 * high if high - low < 0.1 * high else 0)
    return [low - room, high + room]
