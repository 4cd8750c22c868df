"""Which settings nobody beats: time to first token against bytes kept, with the quality of the answers as colour."""

import plotly.graph_objects as go
import polars as pl

from experiments.plots._study import measure_of, series_label, varied_settings
from experiments.plots._style import COLOR_SCALE, PALETTE, REFERENCE_COLOR, label_text, new_figure, no_data_figure

__all__ = ["pareto_data", "plot_pareto"]

_TITLE = "TTFT against stored bytes and quality"


def pareto_data(
    study: pl.DataFrame, *, time: str = "ttft_warm_s", nbytes: str = "bytes_per_token", quality: str = "equal_answers"
) -> pl.DataFrame:
    """One row for each combination of settings, means over the repeats.

    Args:
        study: Cells.
        time: Column of seconds, less is better.
        nbytes: Column of bytes, less is better. Cells without it, which keep nothing, are left out.
        quality: Column of shares, more is better; unknown where the study has no arm "none".

    Returns:
        label, time_s, nbytes, quality, n, on_front (no other point is as good in everything and better in something),
        time_name.
    """
    schema = {"label": pl.String, "time_s": pl.Float64, "nbytes": pl.Float64, "quality": pl.Float64, "n": pl.Int64}
    rows = []
    if {time, nbytes} <= set(study.columns):
        names = varied_settings(study)
        groups = study.drop_nulls([time, nbytes]).group_by(names or ["kind"], maintain_order=True)
        for key, group in groups:
            kept = group[quality].mean() if quality in group.columns else None
            label = series_label(dict(zip(names, key, strict=False)))
            rows.append((label, group[time].mean(), group[nbytes].mean(), kept, group.height))
    data = pl.DataFrame(rows, schema=schema, orient="row")
    return data.with_columns(on_front=pl.Series(_front(data), dtype=pl.Boolean), time_name=pl.lit(time))


def _front(data: pl.DataFrame) -> list[bool]:
    """An unknown quality counts as the best, for all points alike."""
    points = [(time, nbytes, -(1.0 if quality is None else quality))
              for time, nbytes, quality in data.select("time_s", "nbytes", "quality").iter_rows()]  # fmt: skip
    return [
        not any(other != point and all(o <= p for o, p in zip(other, point, strict=True)) for other in points)
        for point in points
    ]


def plot_pareto(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A mark a combination; those on the front are diamonds with names, and a line joins them from left to right."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no cell has a time and stored bytes", template=template, badge=badge)
    shown = measure_of(data["time_name"][0])
    known = data["quality"].null_count() < data.height
    said = f"{label_text(badge)} · n = {data['n'].min()} or more repeats a mark · diamonds: nothing beats them"
    figure = new_figure(_TITLE, said, template=template, height=500)
    front = data.filter("on_front").sort("nbytes")
    figure.add_scatter(x=(front["nbytes"] / 1024).to_list(), y=(shown.scale * front["time_s"]).to_list(), mode="lines",
                       line={"color": REFERENCE_COLOR, "dash": "dash", "shape": "hv", "width": 1.5}, hoverinfo="skip",
                       name="front")  # fmt: skip
    for on_front in (False, True):
        _add_marks(figure, data.filter(pl.col("on_front") == on_front).sort("nbytes"), on_front, shown.scale, known)
    if known:
        figure.update_layout(coloraxis={"colorscale": COLOR_SCALE, "colorbar": {
            "title": {"text": "answers equal to no reuse (%)", "side": "right"}, "thickness": 14}})  # fmt: skip
    figure.update_xaxes(title="stored bytes (KiB a token)", rangemode="tozero")
    figure.update_yaxes(title=shown.title, rangemode="tozero")
    return figure.update_layout(margin_b=100)


def _add_marks(figure: go.Figure, marks: pl.DataFrame, on_front: bool, factor: float, known: bool) -> None:
    hover = [
        f"<b>{label_text(row['label'])}</b><br>{factor * row['time_s']:.4g} ms, {row['nbytes'] / 1024:.3g} KiB a token"
        f"<br>{_quality_text(row['quality'])}<br>n = {row['n']}"
        for row in marks.iter_rows(named=True)
    ]
    plain = {"color": PALETTE[6] if on_front else PALETTE[8]}
    color = {"coloraxis": "coloraxis", "color": (100 * marks["quality"]).to_list()} if known else plain
    right = 0.6 * max(marks["nbytes"], default=0.0)  # labels there grow to the left, where there is room
    sides = [f"{('top', 'bottom')[place % 2]} {'left' if nbytes > right else 'right'}"
             for place, nbytes in enumerate(marks["nbytes"])]  # fmt: skip
    figure.add_scatter(
        x=(marks["nbytes"] / 1024).to_list(), y=(factor * marks["time_s"]).to_list(),
        mode="markers+text" if on_front else "markers", hovertext=hover, hoverinfo="text",
        text=[label_text(label) for label in marks["label"]], textposition=sides, textfont={"size": 11},
        showlegend=False,
        marker={"symbol": "diamond" if on_front else "circle", "size": 14 if on_front else 9,
                "line": {"width": 1.5 if on_front else 0, "color": REFERENCE_COLOR}, **color},
    )  # fmt: skip


def _quality_text(quality: float | None) -> str:
    return "quality not known" if quality is None else f"{100 * quality:.1f} % of answers equal to no reuse"
