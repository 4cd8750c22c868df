"""Two runs side by side: what was set differently, and what that did to the same requests.

settings_difference(a, b)   # every setting that is not the same
paired_difference(a, b)     # TTFT of b over TTFT of a, request by request, with its interval
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from experiments.intervals import Interval, mean_interval
from experiments.plots._style import PALETTE, REFERENCE_COLOR, label_text, new_figure, no_data_figure
from experiments.runs import Run
from experiments.summary import PHASE_TEXT, answered

__all__ = ["paired_difference", "plot_paired_difference", "ratio_interval", "settings_difference"]

_TITLE = "TTFT of the second run over the first, same requests"
_OF_THE_MOMENT = ("time", "load_average")  # differ between any two runs


def ratio_interval(numerators: pl.Series, denominators: pl.Series) -> Interval:
    """The geometric mean of paired ratios with its 95 % interval, by Student's t on their logarithms."""
    logs = mean_interval(np.log(numerators.to_numpy()) - np.log(denominators.to_numpy()))
    if logs.n == 0:
        return logs
    return Interval(math.exp(logs.mean), math.exp(logs.low), _exp(logs.high), logs.n)


def settings_difference(first: Run, second: Run) -> pl.DataFrame:
    """setting, first, second: what the two runs did not have in common, "–" where one lacks it."""
    mine, other = dict(_flat(first.environment)), dict(_flat(second.environment))
    rows = [
        (name, mine.get(name, "–"), other.get(name, "–"))
        for name in dict.fromkeys([*mine, *other])
        if mine.get(name) != other.get(name) and name.partition(".")[0] not in _OF_THE_MOMENT
    ]
    return pl.DataFrame(rows, schema=dict.fromkeys(["setting", "first", "second"], pl.String), orient="row")


def paired_difference(first: Run, second: Run, *, measure: str = "ttft_s") -> pl.DataFrame:
    """A measure of the second run divided by the first's, over requests with the same id, arm and prompt length.

    Args:
        first, second: Runs.
        measure: A column of times: ttft_s, load_s, prefill_s, e2e_s.

    Returns:
        arm, phase, n pairs, first_median, second_median, ratio (geometric mean), low, high (95 % interval), verdict.
    """
    keys = ["arm", "phase", "request_id", "repeat", "prompt_tokens"]
    ours, theirs = (
        answered(run.requests).filter(pl.col(measure) > 0).select(*keys, measure) for run in (first, second)
    )
    pairs = ours.join(theirs, on=keys, suffix="_second")
    rows = []
    for (arm, phase), group in pairs.group_by("arm", "phase", maintain_order=True):
        ratio = ratio_interval(group[f"{measure}_second"], group[measure])
        medians = group[measure].median(), group[f"{measure}_second"].median()
        rows.append((arm, phase, ratio.n, *medians, ratio.mean, ratio.low, ratio.high, _verdict(ratio)))
    names = ["arm", "phase", "n", "first_median", "second_median", "ratio", "low", "high", "verdict"]
    types = [pl.String, pl.String, pl.Int64, *[pl.Float64] * 5, pl.String]
    return pl.DataFrame(rows, schema=dict(zip(names, types, strict=True)), orient="row")


def plot_paired_difference(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """The ratios with their intervals, a row an arm and phase; left of 1 the second run is sooner."""
    data = data.filter(pl.col("n") > 1)
    if data.is_empty():
        return no_data_figure(_TITLE, "the two runs share no two requests of an arm", template=template, badge=badge)
    figure = new_figure(
        _TITLE,
        f"{label_text(badge)} · mean ratio and 95 % interval · left of 1: the second is sooner",
        template=template,
        height=190 + 34 * data.height,
    )
    rows = [
        f"{row['arm']}, {PHASE_TEXT.get(row['phase'], row['phase'])}, n = {row['n']}"
        for row in data.iter_rows(named=True)
    ]
    figure.add_scatter(
        x=data["ratio"].to_list(),
        y=[label_text(row) for row in rows],
        mode="markers",
        marker={"size": 11, "color": PALETTE[5], "symbol": "diamond"},
        hovertext=data["verdict"].to_list(),
        hoverinfo="x+y+text",
        error_x={
            "array": (data["high"] - data["ratio"]).to_list(),
            "arrayminus": (data["ratio"] - data["low"]).to_list(),
            "color": PALETTE[5],
            "thickness": 2,
        },
    )
    figure.add_vline(x=1, line={"color": REFERENCE_COLOR, "dash": "dash"})
    figure.update_xaxes(
        title="ratio of TTFT (1 = equal)", type="log", tickvals=_TICKS, ticktext=[f"{t:g}" for t in _TICKS]
    )
    figure.update_yaxes(autorange="reversed")
    return figure


_TICKS = [0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20]


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "–" if value is None else str(value)


def _verdict(ratio: Interval) -> str:
    if ratio.n < 2:
        return "one pair says nothing about chance"
    if ratio.low <= 1 <= ratio.high:
        return "no difference shown"
    return "second is sooner" if ratio.high < 1 else "second is later"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
