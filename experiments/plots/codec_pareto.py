"""Which codec nobody beats: stored bits against what they do to the model's answers, decoding speed as colour."""

import math
import re
from typing import Any

import plotly.graph_objects as go
import polars as pl

from experiments.plots._style import REFERENCE_COLOR, label_text, new_figure, no_data_figure

__all__ = ["codec_pareto_data", "plot_codec_pareto"]

_TITLE = "Codecs: size against quality"
_SYMBOLS = {True: ("diamond", "circle-open"), False: ("x", "x-thin-open")}  # own or not: on the front, beaten
_LONGEST_LABEL = 30  # characters; the whole name stands in the hover text
_LEAST_KL = 1e-6  # lossless codecs stand here on the logarithmic axis


def codec_pareto_data(codecs: pl.DataFrame) -> pl.DataFrame:
    """The marks of the plot, the smallest first.

    Args:
        codecs: `CodecTable.frame()` of one model.

    Returns:
        model, codec, own (false: another library's), family (the codec's name without parameters), bits_per_value,
        times_smaller, kl, kl_interval, lossless, top1_agreement, greedy_tokens, needle_recall, key_value_recall,
        decode_gb_per_s (None where decoding is no step of its own), on_front (no other codec is as small and as good,
        and better in one).
    """
    columns = ("model", "codec", "own", "bits_per_value", "times_smaller", "kl", "kl_interval", "top1_agreement",
               "greedy_tokens", "needle_recall", "key_value_recall", "decode_gb_per_s")  # fmt: skip
    points = list(codecs.select("bits_per_value", "kl").iter_rows())
    front = [
        not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
        for point in points
    ]
    return (
        codecs.select(columns)
        .with_columns(
            family=pl.col("codec").str.replace(r"\(.*", ""),
            lossless=pl.col("kl") == 0,
            on_front=pl.Series(front, dtype=pl.Boolean),
        )
        .sort("bits_per_value", "codec")
    )


def plot_codec_pareto(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A mark a codec, filled and named on the front, with a line along it; a cross is another library's method."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no codec was measured", template=template, badge=badge)
    said = f"{label_text(badge)}<br>filled: none is smaller and better · crosses: other libraries · bars: 95 % interval"
    title = f"{_TITLE}, on {label_text(data['model'][0])}"
    figure = new_figure(title, said, template=template, height=560)
    front = data.filter("on_front")
    figure.add_scatter(x=front["bits_per_value"].to_list(), y=_heights(front), mode="lines", hoverinfo="skip",
                       line={"color": REFERENCE_COLOR, "dash": "dash", "width": 1.5, "shape": "hv"},
                       name="front")  # fmt: skip
    for on_front in (True, False):
        for own in (True, False):
            marks = data.filter(on_front=on_front, own=own)
            if not marks.is_empty():
                _add_marks(figure, marks, on_front, own)
    speeds = (0.1, 0.3, 1, 3, 10)
    figure.update_layout(
        coloraxis={
            "colorscale": "Cividis", "cmin": math.log10(speeds[0]), "cmax": math.log10(speeds[-1]),
            "colorbar": {"title": {"text": "decoding, GB/s a core", "side": "right"}, "thickness": 14,
                         "tickvals": [math.log10(s) for s in speeds], "ticktext": [f"{s:g}" for s in speeds]},
        },
        margin={"t": 116, "b": 100},
    )  # fmt: skip
    low, high = math.log10(data["bits_per_value"].min()), math.log10(data["bits_per_value"].max())
    figure.update_xaxes(title="stored bits per value, headers included (bfloat16: 16; log scale)", type="log",
                        range=[low - 0.16, high + 0.05], tickvals=[1, 2, 3, 4, 5, 6, 8, 11, 16])  # fmt: skip
    powers = range(-6, 2)
    figure.update_yaxes(title="KL divergence (nats a token, log scale)", type="log", tickvals=[10.0**p for p in powers],
                        ticktext=["none", *(f"10<sup>{p}</sup>" for p in powers[1:])])  # fmt: skip
    return figure


def _heights(data: pl.DataFrame) -> list[float]:
    return [max(kl, _LEAST_KL) for kl in data["kl"]]


def _add_marks(figure: go.Figure, marks: pl.DataFrame, on_front: bool, own: bool) -> None:
    names = [label_text(_short(codec, family)) for codec, family in marks.select("codec", "family").iter_rows()]
    speeds = marks["decode_gb_per_s"].to_list()
    coloured = {"coloraxis": "coloraxis", "color": [math.log10(speed) for speed in speeds if speed]}
    figure.add_scatter(
        x=marks["bits_per_value"].to_list(), y=_heights(marks),
        error_y={"array": marks["kl_interval"].to_list(), "thickness": 1, "width": 0, "color": REFERENCE_COLOR},
        mode="markers+text" if on_front else "markers", hoverinfo="text",
        hovertext=[_hover(row) for row in marks.iter_rows(named=True)],
        text=names, textposition="bottom left", textfont={"size": 11},
        name=f"{'on the front' if on_front else 'beaten'}{'' if own else ', another library'}",
        marker={"symbol": _SYMBOLS[own][not on_front], "size": 12 if on_front else 10, "line": {"width": 2},
                **(coloured if own else {"color": REFERENCE_COLOR})},
    )  # fmt: skip


def _short(codec: str, family: str) -> str:
    """The codec's name; without digests, and without its parameters' names or values, where it is long for a label."""
    named = re.sub(r"digest='\w+', ", "", codec)
    values_only = re.sub(r"\w+=|'", "", named)
    return next((name for name in (named, values_only) if len(name) <= _LONGEST_LABEL), f"{family}(…)")


def _hover(row: dict[str, Any]) -> str:
    lines = [
        f"<b>{label_text(row['codec'])}</b>",
        f"{row['bits_per_value']:.2f} bits, {row['times_smaller']:.2f} times smaller",
        f"KL {row['kl']:.2g} ± {row['kl_interval']:.1g} nats",
        f"top token the same: {100 * row['top1_agreement']:.1f} %",
    ]
    for name, form in (
        ("greedy_tokens", "{:.1f} greedy tokens the same"),
        ("needle_recall", "needles found: {:.0%}"),
        ("key_value_recall", "pairs recalled: {:.0%}"),
        ("decode_gb_per_s", "decoding: {:.2g} GB/s a core"),
    ):
        if row[name] is not None:
            lines.append(form.format(row[name]))
    return "<br>".join(lines)
