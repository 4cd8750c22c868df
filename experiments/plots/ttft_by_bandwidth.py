"""Time to first token against the bandwidth of the link behind which the KV lies, a line a codec: where coding pays."""

import numpy as np
import plotly.graph_objects as go
import polars as pl

from experiments.codec_links import NO_CACHE
from experiments.plots._style import (
    LINE_STYLES,
    REFERENCE_COLOR,
    label_text,
    new_figure,
    no_data_figure,
    seconds_axis,
)
from experiments.units import seconds_text

__all__ = ["plot_ttft_by_bandwidth", "ttft_by_bandwidth_data"]

_TITLE = "Time to first token against link bandwidth"


def ttft_by_bandwidth_data(links: pl.DataFrame, *, raw: str = "raw") -> pl.DataFrame:
    """Medians, and where each codec's line crosses that of the raw form.

    Args:
        links: As `experiments.codec_links.codec_links` returns it.
        raw: Name of the form without a codec.

    Returns:
        codec, gbit_per_s, ttft_s (median), low_s and high_s (least and most), n, crossing_gbit_per_s: the bandwidth
        from which on the raw form is faster, between measured points by interpolation in logarithms; null where the
        lines do not cross.
    """
    medians = (
        links.filter(pl.col("ttft_s").is_not_null())
        .group_by("codec", "gbit_per_s", maintain_order=True)
        .agg(pl.col("ttft_s").median(), low_s=pl.col("ttft_s").min(), high_s=pl.col("ttft_s").max(), n=pl.len())
        .sort(pl.col("codec").rank("dense"), "gbit_per_s", maintain_order=True)
    )
    of_raw = medians.filter(pl.col("codec") == raw)
    crossings = {
        codec: _crossing(of_raw, group) for (codec,), group in medians.group_by("codec") if codec not in (raw, NO_CACHE)
    }
    places = pl.col("codec").replace_strict(crossings, default=None, return_dtype=pl.Float64)
    return medians.with_columns(crossing_gbit_per_s=places)


def _crossing(raw: pl.DataFrame, coded: pl.DataFrame) -> float | None:
    both = raw.join(coded, on="gbit_per_s", suffix="_coded").filter(pl.col("gbit_per_s").is_finite()).sort("gbit_per_s")
    x = np.log(both["gbit_per_s"].to_numpy())
    gain = np.log(both["ttft_s"].to_numpy() / both["ttft_s_coded"].to_numpy())  # over 0 where the codec is faster
    for left in range(len(x) - 1):
        if gain[left] > 0 >= gain[left + 1]:
            share = gain[left] / (gain[left] - gain[left + 1])
            return float(np.exp(x[left] + share * (x[left + 1] - x[left])))
    return None


def plot_ttft_by_bandwidth(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A line a codec, bars from the least to the most; a dotted vertical where it crosses the raw form."""
    data = data.filter(pl.col("gbit_per_s").is_finite())
    if data.is_empty():
        return no_data_figure(_TITLE, "no request passed a link", template=template, badge=badge)
    figure = new_figure(_TITLE, f"{label_text(badge)} · n = {data['n'].sum()} requests", template=template, height=500)
    for number, ((codec,), group) in enumerate(data.group_by("codec", maintain_order=True)):
        color, symbol, dash = LINE_STYLES[number % len(LINE_STYLES)]
        hover = [
            f"<b>{label_text(codec)}</b><br>{row['gbit_per_s']:g} Gbit/s: TTFT {seconds_text(row['ttft_s'])}"
            f" ({seconds_text(row['low_s'])} to {seconds_text(row['high_s'])})<br>n = {row['n']}"
            for row in group.iter_rows(named=True)
        ]
        middle = group["ttft_s"].to_list()
        bars = {"type": "data", "symmetric": False, "thickness": 1.2,
                "array": (group["high_s"] - group["ttft_s"]).to_list(),
                "arrayminus": (group["ttft_s"] - group["low_s"]).to_list()}  # fmt: skip
        crossing = group["crossing_gbit_per_s"][0]
        pays = "" if crossing is None else f", pays below {crossing:.2g} Gbit/s"
        figure.add_scatter(x=group["gbit_per_s"].to_list(), y=middle, mode="lines+markers", error_y=bars,
                           name=f"{label_text(codec)}{pays} (n = {group['n'].sum()})", hovertext=hover,
                           hoverinfo="text", line={"color": color, "dash": dash, "width": 2},
                           marker={"symbol": symbol, "size": 9, "color": color})  # fmt: skip
        if crossing is not None:
            figure.add_vline(x=crossing, line={"color": REFERENCE_COLOR, "dash": "dot", "width": 1})
    speeds = sorted(data["gbit_per_s"].unique().to_list())
    figure.update_xaxes(title="bandwidth of the link (Gbit/s, log scale)", type="log", tickvals=speeds,
                        ticktext=[f"{speed:g}" for speed in speeds])  # fmt: skip
    figure.update_yaxes(seconds_axis(data["ttft_s"].to_list(), title="time to first token (log scale)"))
    return figure
