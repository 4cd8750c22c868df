"""Hit rate against capacity, with confidence bands: what more room would buy."""

import plotly.graph_objects as go
import polars as pl

from experiments.plots._study import CAPACITIES, line_data, plot_lines, varied_settings

__all__ = ["hit_rate_by_capacity_data", "plot_hit_rate_by_capacity"]


def hit_rate_by_capacity_data(
    study: pl.DataFrame, *, measure: str = "hit_rate", capacity: str | None = None
) -> pl.DataFrame:
    """Mean and 95 % interval for each capacity, a series for each combination of the other settings that vary.

    Args:
        study: Cells.
        measure: Column to show.
        capacity: A key of `CAPACITIES`; the one that varies by default.

    Returns:
        series, x (capacity), mean, low, high, n, bound, measure, capacity.
    """
    varied = varied_settings(study)
    chosen = capacity or next((name for name in CAPACITIES if name in varied), "capacity_tokens")
    data = line_data(study, chosen, measure, "hit_rate_bound")
    return data.with_columns(measure=pl.lit(measure), capacity=pl.lit(chosen))


def plot_hit_rate_by_capacity(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A line a series over capacities."""
    measure, capacity = (data["measure"][0], data["capacity"][0]) if data.height else ("hit_rate", "capacity_tokens")
    return plot_lines(data, title="Hit rate against capacity", x_title=CAPACITIES[capacity], measure=measure,
                      template=template, badge=badge)  # fmt: skip
