"""What a first token waited for: queue, load and prefill, medians of each arm, as bars that add up."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from experiments.plots._style import PART_STYLES, bar_fill, label_text, new_figure, no_data_figure, phase_text
from experiments.summary import NO_REUSE, answered, arm_rank, median_if_enough, phase_rank
from experiments.units import seconds_text

__all__ = ["plot_ttft_parts", "ttft_parts_data"]

_TITLE = "What the first token waited for"
_PARTS = ("queue", "load", "prefill", "rest")
# Arms with reuse get a panel of their own when the longest bar is this many times theirs.
_ENLARGE_FROM = 3
_TEXT_ROOM = 2.1  # width of a panel in longest bars; the texts take the rest


def ttft_parts_data(requests: pl.DataFrame) -> pl.DataFrame:
    """One row for each arm and phase.

    Returns:
        arm, arm_label, phase, n, and the medians queue_s, load_s, prefill_s, rest_s (TTFT less the three, request by
        request: tokenising and handing over) and ttft_s; null where n is too small for a median. Medians of parts need
        not add up to the median of the whole.
    """
    known = pl.sum_horizontal(pl.col("queue_s", "load_s", "prefill_s").fill_null(0))
    return (
        answered(requests)
        .with_columns(rest_s=(pl.col("ttft_s") - known).clip(0))
        .group_by("arm", "phase")
        .agg(pl.col("arm_label").first(), n=pl.len(), ttft_s=median_if_enough("ttft_s"),
             **{f"{part}_s": median_if_enough(f"{part}_s") for part in _PARTS})
        .sort(phase_rank(), "phase", arm_rank(requests))
        .select("arm", "arm_label", "phase", "n", *(f"{part}_s" for part in _PARTS), "ttft_s")
    )  # fmt: skip


def plot_ttft_parts(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """Stacked bars, one panel a phase; arms with reuse once more, enlarged, if they are small beside the others."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no request was answered", template=template, badge=badge)
    panels = _panels(data)
    bars = [frame.height for _, frame in panels]
    height = 92 + sum(34 * n + 76 for n in bars) + 50
    spacing = 76 / (height - 142) if len(panels) > 1 else 0
    figure = make_subplots(rows=len(panels), cols=1, subplot_titles=[title for title, _ in panels], row_heights=bars,
                           vertical_spacing=min(spacing, 0.9 / len(panels)))  # fmt: skip
    smallest = data["n"].min()
    new_figure(_TITLE, f"{label_text(badge)} · medians, n = {smallest} or more a bar", template=template, height=height,
               figure=figure)  # fmt: skip
    for row, (_, frame) in enumerate(panels, 1):
        for part in _PARTS:
            figure.add_trace(_bars(frame, part, legend=row == 1), row=row, col=1)
        _label_bars(figure, frame, row)
    figure.update_layout(barmode="stack", bargap=0.35, margin_t=118)
    figure.update_annotations(selector={"name": "subplot"}, font_size=14)
    figure.update_xaxes(title="seconds", row=len(panels), col=1)
    return figure


def _panels(data: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    panels = [(phase_text(f["phase"][0]), f) for f in data.partition_by("phase", maintain_order=True)]
    reused = data.filter(pl.col("phase") == "again", pl.col("arm") != NO_REUSE)
    again = data.filter(pl.col("phase") == "again")
    longest, longest_reused = (max(f["ttft_s"].drop_nulls().to_list(), default=0.0) for f in (again, reused))
    if longest > _ENLARGE_FROM * longest_reused > 0:
        panels.append(("asked again, arms with reuse, enlarged", reused))
    return panels


def _bars(frame: pl.DataFrame, part: str, *, legend: bool) -> go.Bar:
    color, pattern = PART_STYLES[part]
    values = frame[f"{part}_s"].to_list()
    hover = [
        f"<b>{label_text(row['arm_label'])}</b><br>{part} {seconds_text(row[f'{part}_s'])}<br>n = {row['n']}"
        for row in frame.iter_rows(named=True)
    ]
    return go.Bar(x=values, y=[label_text(label) for label in frame["arm_label"]], orientation="h", name=part,
                  legendgroup=part, showlegend=legend, hovertext=hover, hoverinfo="text",
                  marker=bar_fill(color, pattern))  # fmt: skip


def _label_bars(figure: go.Figure, frame: pl.DataFrame, row: int) -> None:
    """The figures behind each bar, to its right."""
    totals = [sum(r[f"{part}_s"] or 0 for part in _PARTS) for r in frame.iter_rows(named=True)]
    longest = max(totals) or 1
    for place, total in zip(frame.iter_rows(named=True), totals, strict=True):
        figure.add_annotation(text=_parts_text(place), x=total, y=label_text(place["arm_label"]), row=row, col=1,
                              showarrow=False, xanchor="left", xshift=6, font={"size": 12})  # fmt: skip
    figure.update_xaxes(range=[0, longest * _TEXT_ROOM], row=row, col=1)
    figure.update_yaxes(autorange="reversed", row=row, col=1)


def _parts_text(row: dict) -> str:
    if row["ttft_s"] is None:
        return f"n too small for a median ({row['n']})"
    parts = [f"{part} {seconds_text(row[f'{part}_s'])}" for part in _PARTS if (row[f"{part}_s"] or 0) > 0]
    return f"<b>{seconds_text(row['ttft_s'])}</b>: {', '.join(parts)}"
