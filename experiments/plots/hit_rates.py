"""The three hit rates of each arm: by tokens, by chunks and by requests, each under its own name."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from experiments.plots._style import arm_styles, bar_fill, label_text, new_figure, no_data_figure, phase_text
from experiments.summary import answered, arm_labels, arm_rank, hit_rates, phase_rank
from experiments.units import share_text

__all__ = ["hit_rates_data", "plot_hit_rates"]

_TITLE = "Hit rates: by tokens, by chunks, by requests"


def hit_rates_data(requests: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """The rates of `experiments.summary.hit_rates`, in order of phase and arm, with arm_label."""
    labels = arm_labels(requests)
    label = pl.col("arm").replace_strict(labels, default=pl.col("arm"), return_dtype=pl.String)
    rates = hit_rates(answered(requests), events)
    return rates.with_columns(arm_label=label).sort(phase_rank(), arm_rank(requests), maintain_order=True)


def plot_hit_rates(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A panel a phase, a group of bars a rate, a bar an arm; a rate that an arm does not have says so."""
    if data.is_empty():
        return no_data_figure(
            _TITLE, "no request was answered and nothing was looked up", template=template, badge=badge
        )
    phases = data.partition_by("phase", maintain_order=True)
    figure = make_subplots(rows=1, cols=len(phases), shared_yaxes=True, horizontal_spacing=0.04,
                           subplot_titles=[phase_text(p["phase"][0]) for p in phases])  # fmt: skip
    new_figure(_TITLE, f"{label_text(badge)} · {_counts_text(data)}", template=template, height=430, figure=figure)
    styles = arm_styles(data["arm"].unique(maintain_order=True).to_list())
    for column, phase in enumerate(phases, 1):
        for group in phase.partition_by("arm", maintain_order=True):
            style = styles[group["arm"][0]]
            figure.add_bar(
                x=[f"by {measure}" for measure in group["measure"]], y=[_percent(r) for r in group["hit_rate"]],
                name=label_text(group["arm_label"][0]), legendgroup=group["arm"][0], showlegend=column == 1,
                text=[_bar_text(rate) for rate in group["hit_rate"]], textposition="outside", cliponaxis=False,
                textfont={"size": 11}, textangle=0, hovertext=_hover(group), hoverinfo="text",
                marker=bar_fill(style.color, style.pattern),
                row=1, col=column,
            )  # fmt: skip
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.05, margin_t=124)
    figure.update_annotations(font_size=14)
    figure.update_yaxes(range=[0, 112], tickvals=[0, 25, 50, 75, 100])
    figure.update_yaxes(title="hit rate (%)", col=1)
    return figure


def _counts_text(data: pl.DataFrame) -> str:
    n = data.filter(pl.col("measure") == "requests")["whole"].min()
    return f"n = {n} or more requests a bar; “–” where an arm knows no chunks"


def _percent(rate: float | None) -> float:
    return 100 * (rate or 0.0)


def _bar_text(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.0f}"


def _hover(group: pl.DataFrame) -> list[str]:
    texts = []
    for row in group.iter_rows(named=True):
        name = f"<b>{label_text(row['arm_label'])}</b>, {phase_text(row['phase'])}<br>by {row['measure']}: "
        if row["whole"] is None:
            texts.append(f"{name}not known, for want of events")
        else:
            texts.append(
                f"{name}{share_text(row['hit_rate'])}<br>{row['part']:,} of {row['whole']:,}<br>from {row['source']}"
            )
    return texts
