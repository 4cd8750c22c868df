"""Published figures and ours side by side: shares left, factors right."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from experiments.claims import Claim, Measured, Published
from experiments.plots._style import PALETTE, REFERENCE_COLOR, label_text, new_figure, no_data_figure

__all__ = ["claims_data", "plot_claims"]

_TITLE = "Published results and what runs here gave"
_UNITS = {"share": ("share (%)", 100.0), "times": ("times (log scale)", 1.0)}
_SCHEMA = {"claim": pl.String, "unit": pl.String, "low": pl.Float64, "high": pl.Float64, "measured": pl.Float64,
           "modelled": pl.Float64}  # fmt: skip


def claims_data(claims: tuple[Claim, ...], found: dict[str, Measured]) -> pl.DataFrame:
    """One row a claim with a figure: claim, unit, low, high (published), measured, modelled (null without)."""
    rows = []
    for claim in claims:
        result = found.get(claim.measure.__name__) if claim.measure else None
        value = result.figures.get(claim.figure) if result else None
        if value is not None and claim.published.unit in _UNITS:
            low, high = _ends(claim.published)
            rows.append((claim.name, claim.published.unit, low, high, value,
                         claim.modelled() if claim.modelled else None))  # fmt: skip
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def plot_claims(data: pl.DataFrame, *, template: str = "light", badge: str = "measured and simulated") -> go.Figure:
    """A bar from the lower to the upper published end, a point measured here, a diamond of the cost model."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no claim was measured yet", template=template, badge=badge)
    units = [unit for unit in _UNITS if unit in data["unit"]]
    sheet = make_subplots(rows=1, cols=len(units), horizontal_spacing=0.24)
    tallest = max(data.filter(pl.col("unit") == unit).height for unit in units)
    figure = new_figure(_TITLE, f"{label_text(badge)} · bars published · diamonds modelled", template=template,
                        height=190 + 26 * tallest, figure=sheet)  # fmt: skip
    for column, unit in enumerate(units, 1):
        title, scale = _UNITS[unit]
        part = data.filter(pl.col("unit") == unit)
        names = [label_text(name) for name in part["claim"]]
        for style in _styles(part, scale):
            figure.add_scatter(y=names, showlegend=column == 1, row=1, col=column, **style)
        figure.update_xaxes(title=title, type="log" if unit == "times" else "linear", row=1, col=column)
        figure.update_yaxes(autorange="reversed", row=1, col=column)
    return figure


def _styles(part: pl.DataFrame, scale: float) -> list[dict]:
    """The three series of a panel: a bar is an error bar from its middle to both ends."""
    low, high = scale * part["low"], scale * part["high"]
    middle = (low + high) / 2
    bar = {"type": "data", "array": (high - middle).to_list(), "arrayminus": (middle - low).to_list(),
           "thickness": 8, "width": 0, "color": REFERENCE_COLOR}  # fmt: skip
    return [
        {"x": middle.to_list(), "mode": "markers", "name": "published", "error_x": bar,
         "marker": {"symbol": "line-ns-open", "size": 12, "color": REFERENCE_COLOR}},
        {"x": (scale * part["modelled"]).to_list(), "mode": "markers", "name": "modelled, their hardware",
         "marker": {"symbol": "diamond-open", "size": 11, "color": PALETTE[6], "line": {"width": 2}}},
        {"x": (scale * part["measured"]).to_list(), "mode": "markers", "name": "here",
         "marker": {"symbol": "circle", "size": 10, "color": PALETTE[5]}},
    ]  # fmt: skip


def _ends(published: Published) -> tuple[float, float]:
    """A bound of one side is drawn as the bound alone."""
    if published.bound == "least":
        return published.low, published.low
    return (published.high, published.high) if published.bound == "most" else (published.low, published.high)
