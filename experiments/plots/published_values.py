"""How far recomputed values lie from published ones, a mark a value, a row a table."""

from collections.abc import Mapping

import plotly.graph_objects as go
import polars as pl

from experiments.plots._style import LINE_STYLES, label_text, new_figure, no_data_figure

__all__ = ["plot_published_values", "published_values_data"]

_TITLE = "Recomputed values against published ones"
_SMALLEST = 1e-7  # of a value: nothing is published to more digits
_GROUPS = (("every digit agrees", True), ("digits differ", False))


def published_values_data(tables: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """One row a published value.

    Args:
        tables: Frames of `experiments.tables.reproduce`, by name.

    Returns:
        table, trace, what, capacity, published, recomputed, deviation (|recomputed - published| over the published
        value, at least 1e-7), equal (every published digit agrees).
    """
    frames = [
        table.select(
            pl.lit(name).alias("table"), "trace", "what", "capacity", "published", "recomputed",
            deviation=(pl.col("gap") / pl.col("published").cast(pl.Float64)).abs().clip(_SMALLEST),
            equal=pl.col("agreeing_digits") == pl.col("digits"),
        )
        for name, table in tables.items()
    ]  # fmt: skip
    return pl.concat(frames) if frames else pl.DataFrame(schema={"table": pl.String})


def plot_published_values(data: pl.DataFrame, *, template: str = "light", badge: str = "simulated") -> go.Figure:
    """A row a table; open marks where a digit differs."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no table was recomputed", template=template, badge=badge)
    figure = new_figure(_TITLE, f"{label_text(badge)} · n = {data.height} values", template=template, height=420)
    for number, (label, equal) in enumerate(_GROUPS):
        group = data.filter(pl.col("equal") == equal)
        color, symbol, _ = LINE_STYLES[number]
        hover = [
            f"<b>{label_text(row['what'])}</b>, {label_text(row['trace'])}, {label_text(row['capacity'])}<br>"
            f"published {label_text(row['published'])}, recomputed {row['recomputed']:.6g}"
            for row in group.iter_rows(named=True)
        ]
        figure.add_scatter(x=group["deviation"].to_list(), y=group["table"].to_list(), mode="markers",
                           name=f"{label} (n = {group.height})", hovertext=hover, hoverinfo="text",
                           marker={"color": color, "symbol": symbol if equal else f"{symbol}-open", "size": 9,
                                   "opacity": 0.7, "line": {"width": 1.5, "color": color}})  # fmt: skip
    ticks = [10.0**power for power in range(-7, 1)]
    figure.update_xaxes(title="deviation, as a share of the published value (log scale)", type="log", tickvals=ticks,
                        ticktext=[f"≤ {ticks[0]:g}", *(f"{tick:g}" for tick in ticks[1:])])  # fmt: skip
    tables = data["table"].unique(maintain_order=True).to_list()
    return figure.update_yaxes(type="category", categoryorder="array", categoryarray=tables[::-1])
