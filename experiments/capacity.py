"""How much cache a trace pays for: the exact curve of LRU, its knee, and what each share of the ceiling takes.

lru_curve(trace) -> capacity_table, plot_capacity
"""

import plotly.graph_objects as go
import polars as pl

from experiments.curves import LruCurve
from experiments.plots._style import PALETTE, REFERENCE_COLOR, label_text, new_figure

__all__ = ["capacity_table", "plot_capacity"]


def capacity_table(
    curve: LruCurve, *, bytes_per_token: int, shares: tuple[float, ...] = (0.5, 0.8, 0.9, 0.99, 1.0)
) -> pl.DataFrame:
    """The least capacity that reaches each share of the ceiling.

    Returns:
        share_of_ceiling, hit_rate_by_chunks, capacity_chunks, capacity_gib.
    """
    ceiling = float(curve.hits[-1]) / max(1, curve.accesses)
    rows = []
    for share in shares:
        chunks = curve.capacity_for(share * ceiling)
        gib = None if chunks is None else _gib(chunks, curve, bytes_per_token)
        rows.append((share, share * ceiling, chunks, gib))
    schema = {
        "share_of_ceiling": pl.Float64,
        "hit_rate_by_chunks": pl.Float64,
        "capacity_chunks": pl.Int64,
        "capacity_gib": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def plot_capacity(curve: LruCurve, *, bytes_per_token: int, template: str = "light") -> go.Figure:
    """Hit rate of LRU at every capacity, with the ceiling and the knee.

    Args:
        curve: From `lru_curve`.
        bytes_per_token: Of KV, for the axis.
        template: "light" or "dark".
    """
    points, knee = curve.frame(), curve.knee()
    ceiling = 100 * float(curve.hits[-1]) / max(1, curve.accesses)
    figure = new_figure(
        f"Hit rate of LRU on {label_text(curve.trace)}",
        f"simulated · exact at every capacity · {curve.accesses:,} lookups · touched tail first",
        template=template,
        height=420,
    )
    gib = [_gib(chunks, curve, bytes_per_token) for chunks in points["capacity_chunks"]]
    rates = (100 * points["hit_rate_by_chunks"]).to_list()
    figure.add_scatter(x=gib, y=rates, mode="lines", line={"color": PALETTE[5], "width": 3}, name="LRU")
    figure.add_scatter(
        x=[gib[0], gib[-1]],
        y=[ceiling] * 2,
        mode="lines",
        name=f"unlimited cache, {ceiling:.1f} %",
        line={"color": REFERENCE_COLOR, "dash": "dash"},
    )
    figure.add_scatter(
        x=[_gib(knee, curve, bytes_per_token)],
        y=[100 * float(curve.hit_rate(knee))],
        mode="markers",
        marker={"color": PALETTE[6], "symbol": "diamond", "size": 12},
        name=f"knee, {_gib(knee, curve, bytes_per_token):.3g} GiB",
    )
    figure.update_xaxes(title=f"capacity (GiB, at {bytes_per_token / 1024:g} KiB a token)", type="log", dtick=1)
    figure.update_yaxes(title="hit rate by chunks (%)", range=[0, 100])
    return figure.update_layout(margin_b=70)


def _gib(chunks: int, curve: LruCurve, bytes_per_token: int) -> float:
    return chunks * curve.chunk_tokens * bytes_per_token / 2**30
