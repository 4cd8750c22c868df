"""A run's summary for people: tables of texts, the same on a terminal, and one paragraph that sums it up.

summary_table -> summary_sheets (any table) -> render_summary (terminal); summary_table -> headline
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from experiments.summary import MEDIAN_SAMPLES, NO_REUSE, PREFIX_CACHE
from experiments.units import bytes_text, seconds_text, share_text, times_text

__all__ = ["Sheet", "headline", "render_summary", "sooner_text", "summary_sheets"]

_TOO_SMALL = "n too small"


class Sheet(NamedTuple):
    """A table of texts."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def summary_sheets(table: pl.DataFrame) -> list[Sheet]:
    """The summary as three tables of texts: times, reuse, answers."""
    rows = table.to_dicts()
    return [
        Sheet(
            "Time to first token",
            ("arm", "phase", "n", "median", "least to greatest", "against no reuse", "queue", "load", "prefill"),
            [_time_cells(row) for row in rows],
        ),
        Sheet(
            "Reuse",
            ("arm", "phase", "hit tokens", "of at most", "hit rate by tokens", "by chunks", "by requests",
             "loaded"),
            [_reuse_cells(row) for row in rows],
        ),
        Sheet(
            "Answers, token by token",
            ("arm", "phase", "same as no reuse", "first difference", "same as prefix cache", "first difference"),
            [_answer_cells(row) for row in rows],
        ),
    ]  # fmt: skip


def _time_cells(row: dict) -> tuple[str, ...]:
    n = f"{row['n']}" + (f" ({row['failed']} failed)" if row["failed"] else "")
    spread = (
        "–" if row["ttft_min_s"] is None else f"{seconds_text(row['ttft_min_s'])} to {seconds_text(row['ttft_max_s'])}"
    )
    parts = [_median_text(row[c], row["n"]) for c in ("queue_s", "load_s", "prefill_s")]
    return (*_name_cells(row), n, _median_text(row["ttft_median_s"], row["n"]), spread, _speedup_text(row), *parts)


def _name_cells(row: dict) -> tuple[str, str]:
    return row["arm_label"] or row["arm"], row["phase"]


def _median_text(seconds: float | None, n: int) -> str:
    return _TOO_SMALL if seconds is None and 0 < n < MEDIAN_SAMPLES else seconds_text(seconds)


def _speedup_text(row: dict) -> str:
    if row["arm"] == NO_REUSE or not row["pairs"]:
        return "–"
    if row["speedup_median"] is None:
        return f"{times_text(row['speedup_min'])}× to {times_text(row['speedup_max'])}×"
    return f"{times_text(row['speedup_median'])}×"


def _reuse_cells(row: dict) -> tuple[str, ...]:
    hits = ["–" if row[c] is None else f"{row[c]:,}" for c in ("hit_tokens", "expected_hit_tokens")]
    rates = [share_text(row[c]) for c in ("hit_rate", "hit_rate_by_chunks", "hit_rate_by_requests")]
    return (*_name_cells(row), *hits, *rates, bytes_text(row["bytes_loaded"]))


def _answer_cells(row: dict) -> tuple[str, ...]:
    cells = list(_name_cells(row))
    for reference in (NO_REUSE, PREFIX_CACHE):
        compared, first = row[f"compared_{reference}"], row[f"first_difference_{reference}"]
        cells.append(f"{row[f'equal_{reference}']} of {compared}" if compared else "–")
        cells.append("–" if first is None else f"token {first}")
    return tuple(cells)


def render_summary(table: pl.DataFrame) -> Group:
    """The summary for a terminal of 100 columns or more, to be printed by a rich console."""
    return Group(*(_rich_table(sheet) for sheet in summary_sheets(table)))


def _rich_table(sheet: Sheet) -> Table:
    drawn = Table(
        title=sheet.title,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        pad_edge=False,
    )
    for number, name in enumerate(sheet.header):
        drawn.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
    for row, following in zip_longest(sheet.rows, sheet.rows[1:]):
        drawn.add_row(*map(escape, row), end_section=following is not None and following[1] != row[1])
    return drawn


def headline(table: pl.DataFrame) -> str:
    """What the run shows, in two or three sentences with numbers; says so where it shows nothing."""
    again = table.filter(pl.col("phase") == "again")
    arms = again.filter(pl.col("arm") != NO_REUSE, pl.col("pairs") > 0).to_dicts()
    if not arms:
        return "No request was answered both with and without reuse, so there is nothing to compare."
    base = again.filter(pl.col("arm") == NO_REUSE).to_dicts()
    enough = [row for row in arms if row["speedup_median"] is not None]
    if not enough:
        ratios = "; ".join(f"{row['arm_label']} {_speedup_text(row)}" for row in arms)
        return f"Too few pairs for a median, which takes {MEDIAN_SAMPLES}. Against no reuse: {ratios}."
    return " ".join([_opening(base), _arms_sentence(enough), *_answers_sentence(arms)])


def _opening(base: Sequence[dict]) -> str:
    if not base or base[0]["ttft_median_s"] is None:
        return "vLLM was asked again about documents that it had just read."
    after = seconds_text(base[0]["ttft_median_s"])
    return f"Asked again about a document that it had just read, vLLM without reuse gave its first token after {after}."


def _arms_sentence(arms: Sequence[dict]) -> str:
    verdicts = [
        f"{sooner_text(row['speedup_median'])} ({seconds_text(row['ttft_median_s'])}, {row['arm_label']})"
        for row in arms
    ]
    listed = " and ".join([", ".join(verdicts[:-1]), verdicts[-1]] if len(verdicts) > 1 else verdicts)
    fewest = min(row["pairs"] for row in arms)
    more = " or more" if len({row["pairs"] for row in arms}) > 1 else ""
    return f"With reuse the first token came {listed}; medians of {fewest} pairs{more}."


def sooner_text(speedup: float) -> str:
    """A speed-up in words; below 1 it is a delay and says so."""
    return f"{times_text(speedup)} times sooner" if speedup >= 1 else f"{times_text(1 / speedup)} times later"


def _answers_sentence(arms: Sequence[dict]) -> list[str]:
    compared = sum(row["compared_prefix_cache"] for row in arms)
    equal = sum(row["equal_prefix_cache"] for row in arms)
    if not compared:
        return []
    return [
        f"{equal} of {compared} answers of the other arms with reuse equal those of the prefix cache, token by token."
    ]
