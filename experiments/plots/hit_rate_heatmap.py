"""Hit rate of every pair of chunk size and capacity, a panel for each combination of the other settings."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from experiments.plots._study import CAPACITIES, measure_of, series_label, varied_settings
from experiments.plots._style import label_text, new_figure, no_data_figure

__all__ = ["hit_rate_heatmap_data", "plot_hit_rate_heatmap"]

_TITLE = "Hit rate by chunk size and capacity"
_COLUMNS = 2
_PANEL_HEIGHT = 260
_SCHEMA = {"series": pl.String, "chunk_tokens": pl.Int64, "capacity": pl.Int64, "mean": pl.Float64, "n": pl.Int64,
           "measure": pl.String, "capacity_name": pl.String}  # fmt: skip


def hit_rate_heatmap_data(
    study: pl.DataFrame, *, measure: str = "hit_rate", capacity: str | None = None
) -> pl.DataFrame:
    """Mean over the repeats of each chunk size and capacity.

    Args:
        study: Cells.
        measure: Column to show.
        capacity: A key of `CAPACITIES`; the one that varies by default.

    Returns:
        series, chunk_tokens, capacity, mean, n, measure, capacity_name; empty if either setting is missing.
    """
    varied = varied_settings(study)
    chosen = capacity or next((name for name in CAPACITIES if name in varied), None)
    if chosen is None or chosen not in study.columns or not {"chunk_tokens", measure} <= set(study.columns):
        return pl.DataFrame(schema=_SCHEMA)
    others = [name for name in varied if name not in ("chunk_tokens", chosen)]
    rows = []
    for key, group in study.drop_nulls(measure).group_by([*others, "chunk_tokens", chosen], maintain_order=True):
        label = series_label(dict(zip(others, key[:-2], strict=True)))
        rows.append((label, int(key[-2]), int(key[-1]), group[measure].mean(), group.height, measure, chosen))
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def plot_hit_rate_heatmap(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A panel a series; every field carries its number, so that no colour has to be read."""
    if data.is_empty():
        return no_data_figure(_TITLE, "chunk_tokens and a capacity have to be set", template=template, badge=badge)
    panels = data.partition_by("series", maintain_order=True)
    rows, columns = -(-len(panels) // _COLUMNS), min(len(panels), _COLUMNS)
    height = 190 + rows * _PANEL_HEIGHT
    figure = make_subplots(rows=rows, cols=columns, shared_yaxes=True, shared_xaxes=True, horizontal_spacing=0.04,
                           vertical_spacing=min(0.5, 50 / (rows * _PANEL_HEIGHT)),
                           subplot_titles=[label_text(p["series"][0]) for p in panels])  # fmt: skip
    n = data["n"].min()
    new_figure(_TITLE, f"{label_text(badge)} · means of n = {n} or more repeats a field", template=template,
               height=height, figure=figure)  # fmt: skip
    shown = measure_of(data["measure"][0])
    for number, panel in enumerate(panels):
        figure.add_trace(_panel(panel, shown.scale), row=number // columns + 1, col=number % columns + 1)
    least, most = (shown.scale * min(data["mean"]), shown.scale * max(data["mean"]))
    low, high = (0, 100) if shown.scale == 100 else (least, most)
    figure.update_layout(margin_t=124, margin_b=60, coloraxis={
        "colorscale": "Cividis", "cmin": low, "cmax": high,
        "colorbar": {"title": {"text": shown.title, "side": "right"}, "thickness": 14},
    })  # fmt: skip
    figure.update_annotations(font_size=14)
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="chunk size (tokens)", row=rows)
    figure.update_yaxes(type="category")
    figure.update_yaxes(title=CAPACITIES[data["capacity_name"][0]].replace(", log scale", ""), col=1)
    return figure


def _panel(panel: pl.DataFrame, factor: float) -> go.Heatmap:
    chunks, capacities = (panel[name].unique().sort().to_list() for name in ("chunk_tokens", "capacity"))
    known = {(row["chunk_tokens"], row["capacity"]): row for row in panel.iter_rows(named=True)}
    fields = [[known.get((chunk, capacity)) for chunk in chunks] for capacity in capacities]
    values = [[None if field is None else factor * field["mean"] for field in row] for row in fields]
    name = label_text(panel["series"][0] or "all cells")
    hover = [
        ["no cell" if f is None else f"<b>{name}</b><br>{f['chunk_tokens']:,} tokens a chunk, {f['capacity']:,} kept"
         f"<br>{factor * f['mean']:.4g}<br>n = {f['n']}" for f in row]
        for row in fields
    ]  # fmt: skip
    return go.Heatmap(
        x=[f"{chunk:,}" for chunk in chunks], y=[f"{capacity:,}" for capacity in capacities], z=values,
        text=[["–" if value is None else f"{value:.3g}" for value in row] for row in values],
        texttemplate="%{text}", hovertext=hover, hoverinfo="text", coloraxis="coloraxis", xgap=2, ygap=2,
    )  # fmt: skip
