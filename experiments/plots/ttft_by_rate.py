"""Time to first token against the rate of requests, by arm: how much load an engine bears before its queue grows."""

import plotly.graph_objects as go
import polars as pl

from experiments.intervals import PERCENTILE_SAMPLES, percentile
from experiments.plots._study import series_label, varied_settings
from experiments.plots._style import (
    ArmStyle,
    arm_styles,
    label_text,
    line_style,
    new_figure,
    no_data_figure,
    seconds_axis,
)
from experiments.units import seconds_text

__all__ = ["plot_ttft_by_rate", "ttft_by_rate_data"]

_TITLE = "Time to first token against the rate of requests"
_SATURATED = 0.9  # answered below this share of what came: the queue grows as long as requests come
_SCHEMA = {"arm": pl.String, "arm_label": pl.String, "series": pl.String, "request_rate": pl.Float64, "n": pl.Int64,
           "failed": pl.Int64, **{f"p{percent}": pl.Float64 for percent in PERCENTILE_SAMPLES},
           "queue_p50": pl.Float64, "answered_per_s": pl.Float64, "kept_up": pl.Boolean}  # fmt: skip


def ttft_by_rate_data(study_requests: pl.DataFrame) -> pl.DataFrame:
    """Percentiles of each arm, rate and combination of the other settings that vary; repeats are pooled.

    Times run from when a request was due, so that waiting for a client or a server that fell behind is in them.

    Args:
        study_requests: Requests of a study with `request_rate`.

    Returns:
        arm, arm_label, series (what else varies, "" for nothing), request_rate, n answered, failed, p50, p90, p95, p99
        (seconds, null where n is too small), queue_p50 (seconds in the server's queue), answered_per_s, kept_up (the
        answers came almost as fast as the requests); sorted by rate inside each arm and series.
    """
    if study_requests.is_empty() or not {"request_rate", "scheduled_s"} <= set(study_requests.columns):
        return pl.DataFrame(schema=_SCHEMA)
    others = [name for name in varied_settings(study_requests) if name not in ("arm", "request_rate")]
    keys = ["arm", "arm_label", *others, "request_rate"]
    timed = study_requests.drop_nulls(["request_rate", "scheduled_s"])
    rows = []
    for (arm, label, *values, rate), group in timed.group_by(keys, maintain_order=True):
        good = group.filter(pl.col("error") == "")
        ttft = good["ttft_s"].to_list()
        answered = _answered_per_s(group)
        rows.append((arm, label, series_label(dict(zip(others, values, strict=True))), float(rate), good.height,
                     group.height - good.height, *(percentile(ttft, percent) for percent in PERCENTILE_SAMPLES),
                     percentile(good["queue_s"].to_list(), 50), answered,
                     answered is not None and answered >= _SATURATED * float(rate)))  # fmt: skip
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row").sort("request_rate", maintain_order=True)


def _answered_per_s(requests: pl.DataFrame) -> float | None:
    """Answered requests a second from the first that was due to the last answer: the mean over cells."""
    rates = []
    for cell in requests.partition_by("cell"):
        good = cell.filter(pl.col("error") == "")
        if good.height:
            ends = (good["scheduled_s"] + good["e2e_s"]).to_list()
            rates.append(good.height / (max(ends) - min(cell["scheduled_s"].to_list())))
    return sum(rates) / len(rates) if rates else None


def plot_ttft_by_rate(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """The median as a line an arm, the highest percentile that every point bears as a thinner one; open marks where
    answers came slower than requests."""
    if data.drop_nulls("p50").is_empty():
        return no_data_figure(_TITLE, "no finished cell has a request rate", template=template, badge=badge)
    data = data.drop_nulls("p50")
    high = next((p for p in sorted(PERCENTILE_SAMPLES, reverse=True) if data[f"p{p}"].null_count() == 0), 50)
    least, most = data["n"].min(), data["n"].max()
    n = f"n = {least}" if least == most else f"n = {least} to {most}"
    said = f"{label_text(badge)} · {n} requests a point · from when a request was due · open: slower than they came"
    groups = data.partition_by("arm", "series", maintain_order=True)
    figure = new_figure(_TITLE, said, template=template, height=480 + 24 * (len(groups) // 2))
    for group, style in zip(groups, _styles(groups), strict=True):
        _add_line(figure, group, style, 50, width=2.4)
        if high != 50:
            _add_line(figure, group, style, high, width=1.2)
    rates = data["request_rate"].unique().sort().to_list()
    figure.update_xaxes(title="requests that come (1/s, log scale)", type="log", tickvals=rates,
                        ticktext=[f"{rate:g}" for rate in rates])  # fmt: skip
    times = [time for percent in {50, high} for time in data[f"p{percent}"].to_list()]
    figure.update_yaxes(seconds_axis(times, title="time to first token (log scale)"))
    return figure.update_layout(margin_b=100 + 24 * (len(groups) // 2), hovermode="closest")


def _styles(groups: list[pl.DataFrame]) -> list[ArmStyle]:
    """An arm's own style where there is one line an arm, else one style a line."""
    arms = [group["arm"][0] for group in groups]
    if len(set(arms)) == len(arms):
        return list(arm_styles(arms).values())
    return [ArmStyle(*line_style(number), pattern="") for number in range(len(groups))]


def _add_line(figure: go.Figure, group: pl.DataFrame, style: ArmStyle, percent: int, *, width: float) -> None:
    name = ", ".join(text for text in (label_text(group["arm_label"][0]), label_text(group["series"][0])) if text)
    times = group[f"p{percent}"].to_list()
    hover = [
        f"<b>{name}</b><br>{row['request_rate']:g} requests/s come, {row['answered_per_s']:.3g} are answered"
        f"<br>TTFT p{percent} {seconds_text(time)}, in the queue {seconds_text(row['queue_p50'])} (median)"
        f"<br>n = {row['n']}, {row['failed']} failed"
        for row, time in zip(group.iter_rows(named=True), times, strict=True)
    ]
    symbols = [style.symbol if kept_up else f"{style.symbol}-open" for kept_up in group["kept_up"]]
    figure.add_scatter(x=group["request_rate"].to_list(), y=times, mode="lines+markers",
                       name=f"{name}, {'median' if percent == 50 else f'p{percent}'}",
                       line={"color": style.color, "dash": style.dash if percent == 50 else "dot", "width": width},
                       marker={"symbol": symbols, "size": 11 if percent == 50 else 7, "color": style.color,
                               "line": {"color": style.color, "width": 1.6}},
                       hovertext=hover, hoverinfo="text")  # fmt: skip
