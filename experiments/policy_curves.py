"""Hit-rate curves of policies: what a comparison found, as one mean and interval a point, and the figure of it."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from experiments.intervals import mean_interval
from experiments.plots._style import PALETTE, REFERENCE_COLOR, label_text, new_figure, no_data_figure

__all__ = ["CEILING", "OPTIMUM", "curve_data", "plot_curves"]

CEILING, OPTIMUM = "unlimited cache", "knows the future"
_STYLES = (
    (PALETTE[5], "square", "dash"),
    (PALETTE[3], "diamond", "dot"),
    (PALETTE[7], "triangle-up", "dashdot"),
    (PALETTE[1], "cross", "longdash"),
    (PALETTE[2], "x", "longdashdot"),
    (PALETTE[8], "star", "dash"),
)


def curve_data(frame: pl.DataFrame) -> pl.DataFrame:
    """The mean and 95 % interval of the hit rate for each policy and capacity."""
    rows = []
    for (name, chunks, gib), group in frame.group_by("policy", "capacity_chunks", "capacity_gib", maintain_order=True):
        weights = group["tokens"].fill_null(1).to_numpy()
        rates = group["hit_rate"].to_numpy()
        interval = mean_interval(rates)
        half = interval.high - interval.mean if interval.n > 1 else None
        rows.append((name, chunks, gib, float(np.average(rates, weights=weights)), half, interval.n))
    names = ["policy", "capacity_chunks", "capacity_gib", "hit_rate", "half_interval", "n"]
    types = [pl.String, pl.Int64, pl.Float64, pl.Float64, pl.Float64, pl.Int64]
    return pl.DataFrame(rows, schema=dict(zip(names, types, strict=True)), orient="row")


def plot_curves(
    data: pl.DataFrame,
    *,
    own: str,
    title: str,
    samples_are: str = "seeds",
    bytes_per_token: int = 131072,
    template: str = "light",
) -> go.Figure:
    """Hit rate against capacity, a line a policy; the bars are 95 % intervals over samples.

    Args:
        data: From `curve_data`.
        own: The policy to stress.
        title: Of the plot.
        samples_are: What n counts.
        bytes_per_token: What the axis assumes.
        template: "light" or "dark".
    """
    if data.is_empty():
        return no_data_figure(title, "no point has been computed yet", template=template, badge="simulated")
    n = data["n"].max()
    figure = new_figure(
        title,
        f"simulated · n = {n} {samples_are} · bars: 95 % interval · touched tail first",
        template=template,
        height=440,
    )
    styles = _styles(data["policy"].unique(maintain_order=True).to_list(), own)
    for (name,), group in data.group_by("policy", maintain_order=True):
        _add_line(figure, str(name), group, styles[str(name)], own=own)
    kib = bytes_per_token / 1024
    figure.update_xaxes(title=f"capacity (GiB, at {kib:g} KiB a token)", type="log", **_doubling(data["capacity_gib"]))
    top = min(100, 10 * (int(10 * data["hit_rate"].to_numpy().max()) + 2))
    figure.update_yaxes(title="hit rate by tokens (%)", range=[0, top])
    figure.update_layout(margin_b=70, hovermode="closest")
    return figure


def _styles(names: list[str], own: str) -> dict[str, tuple[str, str, str]]:
    """Colour, symbol and dash of each line; the reader's own policy, the bound and the ceiling have fixed ones."""
    rivals = [name for name in names if name not in (own, CEILING, OPTIMUM)]
    return {name: _STYLES[number % len(_STYLES)] for number, name in enumerate(rivals)} | {
        own: (PALETTE[6], "circle", "solid"),
        OPTIMUM: (REFERENCE_COLOR, "circle-open", "dot"),
        CEILING: (REFERENCE_COLOR, "line-ew", "dash"),
    }


def _add_line(figure: go.Figure, name: str, group: pl.DataFrame, style: tuple[str, str, str], *, own: str) -> None:
    color, symbol, dash = style
    rates, bare = [100 * rate for rate in group["hit_rate"]], name in (CEILING, OPTIMUM)
    halves = [100 * (half or 0.0) for half in group["half_interval"]]
    hover = [
        f"<b>{label_text(name)}</b><br>{gib:.3g} GiB = {chunks:,} chunks<br>hit rate {rate:.1f} % ± {half:.1f}, n = {n}"
        for gib, chunks, rate, half, n in zip(
            group["capacity_gib"], group["capacity_chunks"], rates, halves, group["n"], strict=True
        )
    ]
    figure.add_scatter(
        x=group["capacity_gib"].to_list(),
        y=rates,
        name=label_text(name),
        mode="lines" if name == CEILING else "lines+markers",
        line={"color": color, "dash": dash, "width": 3.5 if name == own else 2},
        marker={"symbol": symbol, "size": 10 if name == own else 8, "color": color},
        error_y=None if bare else {"array": halves, "color": color, "thickness": 1.2, "width": 3},
        hovertext=hover,
        hoverinfo="text",
    )


def _doubling(capacities: pl.Series) -> dict[str, Any]:
    """Ticks at powers of two around the capacities."""
    powers = np.log2(capacities.to_numpy())
    ticks = [2.0**power for power in np.arange(np.floor(powers.min()), np.ceil(powers.max()) + 1)]
    return {"tickvals": ticks, "ticktext": [f"{tick:.3g}" for tick in ticks]}
