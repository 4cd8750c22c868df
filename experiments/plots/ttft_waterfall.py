"""What each request waited for, one bar a request: queue, lookup, load, prefill, one after the other."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from experiments.plots._style import PART_STYLES, bar_fill, label_text, new_figure, no_data_figure
from experiments.summary import answered, arm_rank
from experiments.units import seconds_text

__all__ = ["plot_ttft_waterfall", "ttft_waterfall_data"]

_TITLE = "Each request's way to its first token"
_PARTS = ("queue", "lookup", "load", "prefill")
_MOST = 16  # bars of an arm
_ROW, _BETWEEN = 16, 62  # pixels


def ttft_waterfall_data(requests: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """One row for each part of each answered request, arm by arm in the order in which they were asked.

    The lookup's time stands in the engine's event of that name; it passes while the request waits in the queue, and is
    taken from there. Where it is not recorded, it is part of the queue.

    Returns:
        arm, arm_label, phase, request_id, repeat, prompt_tokens, cached_tokens, part, start_s (since it came), seconds.
    """
    schema = {
        "arm": pl.String, "arm_label": pl.String, "phase": pl.String, "request_id": pl.String, "repeat": pl.Int64,
        "prompt_tokens": pl.Int64, "cached_tokens": pl.Int64, "part": pl.String, "start_s": pl.Float64,
        "seconds": pl.Float64,
    }  # fmt: skip
    lookups = _lookup_seconds(events)
    rows = []
    for row in answered(requests).sort(arm_rank(requests), "order").iter_rows(named=True):
        queue = row["queue_s"] or 0.0
        lookup = min(queue, lookups.get((row["arm"], row.get("engine_request")), 0.0))
        parts = {"queue": queue - lookup, "lookup": lookup, "load": row["load_s"] or 0.0,
                 "prefill": row["prefill_s"] or 0.0}  # fmt: skip
        start = 0.0
        for part in _PARTS:
            rows.append({**{name: row[name] for name in list(schema)[:7]}, "part": part, "start_s": start,
                         "seconds": parts[part]})  # fmt: skip
            start += parts[part]
    return pl.DataFrame(rows, schema=schema)


def _lookup_seconds(events: pl.DataFrame) -> dict[tuple[str, str], float]:
    found = events.filter(pl.col("kind") == "lookup").group_by("arm", "request").agg(pl.col("seconds").sum())
    return {(arm, request): seconds for arm, request, seconds in found.iter_rows()}


def plot_ttft_waterfall(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A panel an arm, each on a scale of its own; of more than 16 requests some are shown, evenly chosen."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no request was answered", template=template, badge=badge)
    arms = [_thinned(arm) for arm in data.partition_by("arm", maintain_order=True)]
    bars = [arm["bar"].n_unique() for arm in arms]
    height = 150 + sum(_ROW * n + _BETWEEN for n in bars)
    spacing = min(0.9 / len(arms), _BETWEEN / (height - 150))
    figure = make_subplots(rows=len(arms), cols=1, row_heights=bars, vertical_spacing=spacing,
                           subplot_titles=[label_text(arm["arm_label"][0]) for arm in arms])  # fmt: skip
    requests = data.height // len(_PARTS)
    said = f"{label_text(badge)} · {sum(bars)} of {requests} requests · each panel has a scale of its own"
    new_figure(_TITLE, said, template=template, height=height, figure=figure)
    for row, arm in enumerate(arms, 1):
        for part in _PARTS:
            figure.add_trace(_bars(arm.filter(pl.col("part") == part), part, legend=row == 1), row=row, col=1)
        figure.update_xaxes(title="seconds" if row == len(arms) else None, rangemode="tozero", row=row, col=1)
        figure.update_yaxes(autorange="reversed", tickfont={"size": 11}, type="category", row=row, col=1)
    figure.update_layout(barmode="stack", bargap=0.2, margin_t=124, margin_b=80)
    return figure.update_annotations(font_size=14)


def _thinned(arm: pl.DataFrame) -> pl.DataFrame:
    """At most 16 requests, evenly chosen; each is a bar with a number."""
    numbered = arm.with_columns(bar=pl.int_range(pl.len()) // len(_PARTS))
    count = numbered["bar"].n_unique()
    shown = [number * (count - 1) // max(1, min(_MOST, count) - 1) for number in range(min(_MOST, count))]
    return numbered.filter(pl.col("bar").is_in(shown))


def _bars(rows: pl.DataFrame, part: str, *, legend: bool) -> go.Bar:
    color, pattern = PART_STYLES[part]
    names = [f"{label_text(request)} ({repeat})" if repeat else label_text(request)
             for request, repeat in rows.select("request_id", "repeat").iter_rows()]  # fmt: skip
    hover = [
        f"<b>{label_text(row['arm_label'])}</b>, {label_text(row['request_id'])}<br>"
        f"{part} {seconds_text(row['seconds'])}, from {seconds_text(row['start_s'])} on<br>"
        f"{row['prompt_tokens']:,} prompt tokens, {row['cached_tokens'] or 0:,} reused<br>n = 1"
        for row in rows.iter_rows(named=True)
    ]
    return go.Bar(x=rows["seconds"].to_list(), y=names, orientation="h", name=part, legendgroup=part,
                  showlegend=legend, hovertext=hover, hoverinfo="text", marker=bar_fill(color, pattern))  # fmt: skip
