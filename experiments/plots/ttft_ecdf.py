"""How many requests got their first token within a time, a curve an arm, with the percentiles that n bears."""

import numpy as np
import plotly.graph_objects as go
import polars as pl

from experiments.intervals import PERCENTILE_SAMPLES
from experiments.plots._style import REFERENCE_COLOR, arm_styles, label_text, new_figure, no_data_figure, seconds_axis
from experiments.summary import answered, arm_rank
from experiments.units import seconds_text

__all__ = ["plot_ttft_ecdf", "ttft_ecdf_data"]

_TITLE = "Time to first token: share of requests served within a time"
_PHASES = {"": "all requests", "first": "new prompts", "again": "repeated prompts"}


def ttft_ecdf_data(study_requests: pl.DataFrame, *, phase: str = "again") -> pl.DataFrame:
    """One row an answered request, arm by arm, fastest first.

    Args:
        study_requests: Requests of a study, or of a run.
        phase: "again" for repeated prompts, "first" for new ones, "" for all.

    Returns:
        arm, arm_label, phase, ttft_s, served_share, n of the arm.
    """
    if study_requests.is_empty():
        return pl.DataFrame()
    good = answered(study_requests)
    chosen = good.filter(pl.col("phase") == phase) if phase else good
    return (
        chosen.sort(arm_rank(study_requests), "ttft_s")
        .with_columns(n=pl.len().over("arm"), phase=pl.lit(phase),
                      served_share=pl.col("ttft_s").rank("max").over("arm") / pl.len().over("arm"))
        .select("arm", "arm_label", "phase", "ttft_s", "served_share", "n")
    )  # fmt: skip


def plot_ttft_ecdf(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """Steps over a logarithmic axis; marks stand at the percentiles."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no request was answered", template=template, badge=badge)
    arms = data.partition_by("arm", maintain_order=True)
    styles = arm_styles([arm["arm"][0] for arm in arms])
    said = f"{label_text(badge)} · {_PHASES[data['phase'][0]]}, n = {data['n'].min()} or more an arm · {_borne(data)}"
    figure = new_figure(_TITLE, said, template=template, height=460)
    for arm in arms:
        style, name = styles[arm["arm"][0]], f"{label_text(arm['arm_label'][0])} (n = {arm.height})"
        times, shares = arm["ttft_s"].to_list(), (100 * arm["served_share"]).to_list()
        hover = [f"<b>{name}</b><br>{share:.1f} % within {seconds_text(time)}"
                 for time, share in zip(times, shares, strict=True)]  # fmt: skip
        figure.add_scatter(x=[times[0], *times], y=[0, *shares], mode="lines", name=name, legendgroup=name,
                           line={"shape": "hv", "color": style.color, "dash": style.dash, "width": 2},
                           hovertext=[hover[0], *hover], hoverinfo="text")  # fmt: skip
        marks = {percent: float(np.percentile(times, percent, method="inverted_cdf"))
                 for percent, enough in PERCENTILE_SAMPLES.items() if len(times) >= enough}  # fmt: skip
        figure.add_scatter(
            x=list(marks.values()), y=list(marks), mode="markers", showlegend=False, legendgroup=name,
            marker={"symbol": style.symbol, "size": 10, "color": style.color},
            hovertext=[f"<b>{name}</b><br>p{percent}: {seconds_text(time)}" for percent, time in marks.items()],
            hoverinfo="text",
        )  # fmt: skip
    for percent in (50, 90, 99):
        figure.add_hline(y=percent, line={"color": REFERENCE_COLOR, "dash": "dot", "width": 1})
    figure.update_xaxes(seconds_axis(data["ttft_s"].to_list(), title="time to first token (log scale)"))
    figure.update_yaxes(title="requests served (%)", range=[-2, 103], tickvals=[0, 25, 50, 75, 90, 99])
    return figure.update_layout(margin_b=100)


def _borne(data: pl.DataFrame) -> str:
    n = min(data["n"])
    borne = [f"p{percent}" for percent, enough in PERCENTILE_SAMPLES.items() if n >= enough]
    return f"marks: {', '.join(borne)}" if borne else "n too small for a percentile"
