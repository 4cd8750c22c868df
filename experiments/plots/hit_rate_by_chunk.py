"""Hit rate against the size of a chunk, with confidence bands: small chunks find more, large ones cost less."""

import plotly.graph_objects as go
import polars as pl

from experiments.plots._study import line_data, plot_lines

__all__ = ["hit_rate_by_chunk_data", "plot_hit_rate_by_chunk"]


def hit_rate_by_chunk_data(study: pl.DataFrame, *, measure: str = "hit_rate") -> pl.DataFrame:
    """Mean and 95 % interval for each chunk size, a series for each combination of the other settings that vary.

    Args:
        study: Cells.
        measure: Column to show.

    Returns:
        series, x (tokens of a chunk), mean, low, high, n, bound, measure.
    """
    return line_data(study, "chunk_tokens", measure, "hit_rate_bound").with_columns(measure=pl.lit(measure))


def plot_hit_rate_by_chunk(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A line a series over chunk sizes."""
    measure = data["measure"][0] if data.height else "hit_rate"
    return plot_lines(data, title="Hit rate against chunk size", x_title="chunk size (tokens, log scale)",
                      measure=measure, template=template, badge=badge)  # fmt: skip
