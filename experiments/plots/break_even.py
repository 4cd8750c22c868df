"""Time to first token against prompt length, measured and modelled, with the length from which reuse pays.

break_even_data(requests)         a run's requests, and the cost model fitted to them
break_even_curve(costs, ...)      the cost model alone, for hardware that is not here
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from experiments.cost import CostModel
from experiments.cost_calibration import calibrate, cost_cells
from experiments.plots._style import (
    REFERENCE_COLOR,
    arm_styles,
    label_text,
    new_figure,
    no_data_figure,
    seconds_axis,
)
from experiments.summary import NO_REUSE, PREFIX_CACHE
from experiments.units import seconds_text
from workbench.errors import InvalidInputError

__all__ = ["break_even_curve", "break_even_data", "plot_break_even"]

_TITLE = "Time to first token against prompt length"
_POINTS = 60
_SCHEMA = {"series": pl.String, "label": pl.String, "kind": pl.String, "prompt_tokens": pl.Float64,
           "cached_tokens": pl.Float64, "ttft_s": pl.Float64, "n": pl.Int64, "break_even_tokens": pl.Int64}  # fmt: skip


def break_even_data(requests: pl.DataFrame, *, model: Any = "smollm2-135m") -> pl.DataFrame:
    """Medians of a run's cells, and lines of the cost model fitted to all of them.

    Lines are there from four cells on. They hardly depend on `model` as long as every layer attends to the whole
    prompt: prefill is then linear plus quadratic in the tokens, and the fit scales both.

    Args:
        requests: As `experiments.runs` writes them, or no more than `calibrate` needs.
        model: What was served, as `resolve_shape` takes it.

    Returns:
        series (arm), label, kind ("measured" or "modelled"), prompt_tokens, cached_tokens, ttft_s, n (0 for lines),
        break_even_tokens (where the modelled line begins to pay; null where it never does, or always).
    """
    cells = cost_cells(requests)
    labels = _labels(requests, cells)
    rows = [
        (cell["arm"], labels[cell["arm"]], "measured", float(cell["prompt_tokens"]), float(cell["cached_tokens"]),
         cell["ttft_s"], cell["n"], None)
        for cell in cells.iter_rows(named=True)
    ]  # fmt: skip
    try:
        costs = calibrate(requests, model=model, split=False).model
    except InvalidInputError:  # too few cells for a fit: the points stand alone
        return pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    longest = float(cells["prompt_tokens"].max())
    for arm, label in labels.items():
        hits = cells.filter(pl.col("arm") == arm, pl.col("cached_tokens") > 0)
        if arm == NO_REUSE:
            lengths = np.geomspace(cells["prompt_tokens"].min(), longest, _POINTS)
            rows += _rows(arm, label, lengths, 0 * lengths, costs.ttft_seconds(lengths), None)
        elif hits.height:
            new = float(np.median(hits["prompt_tokens"].to_numpy() - hits["cached_tokens"].to_numpy()))
            least = float(hits["cached_tokens"].to_numpy().min())
            tier = None if arm == PREFIX_CACHE or arm not in costs.tiers else arm
            rows += _warm_line(costs, arm, label, tier, np.geomspace(least + new, max(longest, least + new), _POINTS),
                               new_tokens=new)  # fmt: skip
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def break_even_curve(costs: CostModel, *, tiers: Sequence[str] = ("memory", "disk"), hit_share: float = 0.9,
                     longest: int = 32_768) -> pl.DataFrame:  # fmt: skip
    """Modelled lines alone: no reuse, and the same share of every prompt found in each tier.

    Returns:
        As `break_even_data`.
    """
    lengths = np.geomspace(64, longest, _POINTS)
    rows = _rows(NO_REUSE, "no reuse", lengths, 0 * lengths, costs.ttft_seconds(lengths), None)
    for tier in tiers:
        hits = np.floor(hit_share * lengths)
        seconds = costs.ttft_seconds(lengths, hits, tier=tier)
        label = f"{100 * hit_share:.0f} % from {costs.tier(tier).name}"
        rows += _rows(tier, label, lengths, hits, seconds, costs.break_even_prompt_tokens(hit_share, tier))
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def plot_break_even(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """Points measured, lines modelled; a vertical line where reuse begins to pay."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no request was answered", template=template, badge=badge)
    measured, lines = data.filter(pl.col("kind") == "measured"), data.filter(pl.col("kind") == "modelled")
    about = f" · lines modelled · n = {measured['n'].sum()} requests" if measured.height else ""
    figure = new_figure(_TITLE, f"{label_text(badge)}{about}", template=template, height=480)
    styles = arm_styles(data["series"].unique(maintain_order=True).to_list())
    for (series,), group in lines.group_by("series", maintain_order=True):
        style = styles[str(series)]
        figure.add_scatter(x=group["prompt_tokens"].to_list(), y=group["ttft_s"].to_list(), mode="lines",
                           name=f"{label_text(group['label'][0])}, modelled", hovertext=_hover(group), hoverinfo="text",
                           line={"color": style.color, "dash": style.dash, "width": 2})  # fmt: skip
    for (series,), group in measured.group_by("series", maintain_order=True):
        style = styles[str(series)]
        figure.add_scatter(x=group["prompt_tokens"].to_list(), y=group["ttft_s"].to_list(), mode="markers",
                           name=f"{label_text(group['label'][0])}, measured (n = {group['n'].sum()})",
                           hovertext=_hover(group), hoverinfo="text",
                           marker={"symbol": style.symbol, "color": style.color, "size": 9})  # fmt: skip
    for number, row in enumerate(_break_evens(lines)):
        figure.add_vline(x=row["break_even_tokens"], line={"color": REFERENCE_COLOR, "dash": "dot"})
        figure.add_annotation(x=np.log10(row["break_even_tokens"]), y=0.6 - 0.07 * number, yref="paper", xanchor="left",
                              showarrow=False, text=f" {label_text(row['label'])}: pays from "
                              f"{row['break_even_tokens']:,} tokens")  # fmt: skip
    figure.update_xaxes(title="prompt length (tokens), log scale", type="log", **_length_ticks(data))
    figure.update_yaxes(seconds_axis(data["ttft_s"].to_list(), title="time to first token (log scale)"))
    return figure


def _labels(requests: pl.DataFrame, cells: pl.DataFrame) -> dict[str, str]:
    """Label of each arm that answered, no reuse first; its name where it has none."""
    arms = cells["arm"].unique(maintain_order=True).to_list()
    known = dict(requests.select("arm", "arm_label").iter_rows()) if "arm_label" in requests.columns else {}
    first = [arm for arm in (NO_REUSE, PREFIX_CACHE) if arm in arms]
    return {arm: known.get(arm) or arm for arm in dict.fromkeys([*first, *arms])}


def _warm_line(costs: CostModel, arm: str, label: str, tier: str | None, lengths: np.ndarray, *, new_tokens: float
               ) -> list[tuple]:  # fmt: skip
    """A model line of an arm that always computes so many tokens and finds the rest, from its least hit on."""
    hits = lengths - new_tokens
    seconds = costs.ttft_seconds(lengths, hits, tier=tier)
    saves = np.flatnonzero(np.asarray(costs.ttft_seconds(lengths)) > seconds)
    first = round(float(lengths[saves[0]])) if len(saves) and saves[0] else None  # at the first, it lies further left
    return _rows(arm, label, lengths, hits, seconds, first)


def _rows(series: str, label: str, lengths: np.ndarray, hits: np.ndarray, seconds: Any, first: int | None
          ) -> list[tuple]:  # fmt: skip
    return [(series, label, "modelled", float(n), float(hit), float(s), 0, first)
            for n, hit, s in zip(lengths, hits, seconds, strict=True)]  # fmt: skip


def _break_evens(lines: pl.DataFrame) -> list[dict[str, Any]]:
    """Break-even lengths inside the plot, one a series."""
    if lines.is_empty():
        return []
    lengths = lines["prompt_tokens"].to_numpy()
    shown = pl.col("break_even_tokens").is_between(0.99 * lengths.min(), 1.01 * lengths.max())
    return lines.filter(shown).unique("series", maintain_order=True).to_dicts()


def _hover(group: pl.DataFrame) -> list[str]:
    return [
        f"<b>{label_text(row['label'])}</b>, {row['kind']}<br>{row['prompt_tokens']:,.0f} prompt tokens, "
        f"{row['cached_tokens']:,.0f} found<br>TTFT {seconds_text(row['ttft_s'])}"
        + (f"<br>n = {row['n']}" if row["n"] else "")
        for row in group.iter_rows(named=True)
    ]


def _length_ticks(data: pl.DataFrame) -> dict[str, Any]:
    """Powers of two around the lengths."""
    low, high = float(data["prompt_tokens"].min()), float(data["prompt_tokens"].max())
    ticks = [2**power for power in range(4, 22) if low / 2 <= 2**power <= 2 * high]
    return {"tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks],
            "range": [np.log10(low) - 0.08, np.log10(high) + 0.08]}  # fmt: skip
