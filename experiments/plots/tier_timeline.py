"""How full each tier was over the run, and when something was evicted from it."""

from collections import Counter

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from experiments.plots._style import PALETTE, label_text, new_figure, no_data_figure
from experiments.summary import arm_labels
from experiments.units import bytes_text

__all__ = ["plot_tier_timeline", "tier_timeline_data"]

_TITLE = "Bytes in each tier over time, and evictions"
_TIMES = 1000  # rows kept for each arm, tier and kind at most: one a pixel
_TIER_LOOKS = ((PALETTE[5], "solid"), (PALETTE[3], "dash"), (PALETTE[7], "dot"), (PALETTE[2], "dashdot"))

_SCHEMA = {
    "arm": pl.String, "arm_label": pl.String, "tier": pl.String, "time_s": pl.Float64, "kind": pl.String,
    "used_bytes": pl.Int64, "changed_bytes": pl.Int64, "chunks": pl.Int64,
}  # fmt: skip


def tier_timeline_data(requests: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """What came into and left each tier, in order.

    A chunk that is loaded from a tier where no event has put it lay there from an earlier start and counts from then
    on. A restart writes no event, so that a tier which does not survive one is shown as if it did.

    Returns:
        arm, arm_label, tier, time_s since the run's first event, kind ("in" or "evict" or "remove"), used_bytes after
        it, changed_bytes and chunks. Where there are more than a thousand, neighbours of one kind are summed.
    """
    if events.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    labels, begin = arm_labels(requests), min(events["time"].to_list())
    rows: list[tuple] = []
    for group in events.partition_by("arm", maintain_order=True):
        arm = group["arm"][0]
        rows += [(arm, labels.get(arm, arm), *row) for row in _changes(group, begin)]
    return _thinned(pl.DataFrame(rows, schema=_SCHEMA, orient="row"))


def _changes(events: pl.DataFrame, begin: float) -> list[tuple]:
    """(tier, time_s, kind, used_bytes, changed_bytes, 1) for each event that moves a tier's filling."""
    held: dict[tuple[str, str], int] = {}
    used: Counter[str] = Counter()
    rows = []
    for time, kind, tier, key, nbytes, reason in events.select(
        "time", "kind", "tier", "key", "nbytes", "reason"
    ).iter_rows():
        chunk = (tier, key)
        if kind in ("store", "promote", "load") and not reason and chunk not in held:
            held[chunk] = nbytes
            used[tier] += nbytes
            rows.append((tier, time - begin, "in", used[tier], nbytes, 1))
        elif kind in ("evict", "remove") and chunk in held:
            nbytes = held.pop(chunk)
            used[tier] -= nbytes
            rows.append((tier, time - begin, kind, used[tier], -nbytes, 1))
    return rows


def _thinned(changes: pl.DataFrame) -> pl.DataFrame:
    if changes.is_empty():
        return changes
    step = max(max(changes["time_s"].to_list()) / _TIMES, 1e-9)
    keys = ["arm", "arm_label", "tier", "kind"]
    return (
        changes.with_row_index("row")
        .group_by(*keys, pl.col("time_s").floordiv(step).alias("bin"), maintain_order=True)
        .agg(pl.col("row", "time_s", "used_bytes").last(), pl.col("changed_bytes", "chunks").sum())
        .sort("row")
        .select(*_SCHEMA)
    )


def plot_tier_timeline(data: pl.DataFrame, *, template: str = "light", badge: str = "measured") -> go.Figure:
    """A panel an arm, a stepped line a tier, a cross where chunks were evicted."""
    if data.is_empty():
        return no_data_figure(_TITLE, "no chunk was stored", template=template, badge=badge)
    arms = data.partition_by("arm", maintain_order=True)
    figure = make_subplots(rows=len(arms), cols=1, shared_xaxes=True, vertical_spacing=0.12 / len(arms) + 0.03,
                           subplot_titles=[label_text(group["arm_label"][0]) for group in arms])  # fmt: skip
    evicted = data.filter(pl.col("kind") == "evict")["chunks"].sum()
    subtitle = f"{label_text(badge)} · {data['chunks'].sum():,} changes, {evicted:,} evictions"
    new_figure(_TITLE, subtitle, template=template, height=180 + 190 * len(arms), figure=figure)
    unit_bytes, unit = _unit(max(data["used_bytes"].to_list()))
    tiers = data["tier"].unique(maintain_order=True).to_list()
    end, shown = max(data["time_s"].to_list()), set()
    for row, group in enumerate(arms, 1):
        for part in group.partition_by("tier", maintain_order=True):
            look = _TIER_LOOKS[tiers.index(part["tier"][0]) % len(_TIER_LOOKS)]
            for trace in (_filling(part, look, unit_bytes, end), *_evictions(part, unit_bytes)):
                figure.add_trace(trace.update(showlegend=trace["name"] not in shown), row=row, col=1)
                shown.add(trace["name"])
    figure.update_layout(margin_t=124)
    figure.update_annotations(font_size=14)
    figure.update_yaxes(title=f"held ({unit})", rangemode="tozero")
    figure.update_xaxes(title="time since the run's first event (s)", row=len(arms))
    return figure


def _unit(most_bytes: int) -> tuple[int, str]:
    return (2**30, "GiB") if most_bytes >= 2**30 else (2**20, "MiB") if most_bytes >= 2**20 else (2**10, "KiB")


def _filling(part: pl.DataFrame, look: tuple[str, str], unit_bytes: int, end: float) -> go.Scatter:
    """From empty, by steps, to the end of the run."""
    name = f"{label_text(part['tier'][0])} tier"
    times = [part["time_s"][0], *part["time_s"], end]
    used = [0, *part["used_bytes"], part["used_bytes"][-1]]
    hover = [f"<b>{name}</b><br>{bytes_text(u)} at {t:.1f} s" for t, u in zip(times, used, strict=True)]
    return go.Scatter(x=times, y=[u / unit_bytes for u in used], mode="lines", name=name, legendgroup=name,
                      hovertext=hover, hoverinfo="text", line={"shape": "hv", "color": look[0], "dash": look[1],
                                                               "width": 2.2})  # fmt: skip


def _evictions(part: pl.DataFrame, unit_bytes: int) -> list[go.Scatter]:
    gone = part.filter(pl.col("kind") == "evict")
    if gone.is_empty():
        return []
    hover = [
        f"<b>{row['chunks']} evicted</b> from {label_text(row['tier'])}<br>"
        f"{bytes_text(-row['changed_bytes'])} at {row['time_s']:.1f} s"
        for row in gone.iter_rows(named=True)
    ]
    return [go.Scatter(x=gone["time_s"].to_list(), y=[u / unit_bytes for u in gone["used_bytes"]], mode="markers",
                       name="evicted", legendgroup="evicted", hovertext=hover, hoverinfo="text",
                       marker={"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": PALETTE[6]}})]  # fmt: skip
