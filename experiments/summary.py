"""A run in numbers: requests and events in, one row for each arm and phase out, and one sentence that sums it up.

    requests, events -> summary_table -> render_summary (terminal), summary_sheets (any table), headline (a sentence)

Nothing here is an average over unlike things: arms are compared request by request, and a median of fewer than
`MEDIAN_SAMPLES` values is not given.
"""

from collections.abc import Sequence
from typing import NamedTuple

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from experiments.units import bytes_text, seconds_text, share_text, times_text
from workbench.errors import InvalidInputError
from workbench.events import Event, Totals, events_frame

__all__ = [
    "MEDIAN_SAMPLES",
    "NO_REUSE",
    "PHASE_TEXT",
    "PREFIX_CACHE",
    "Sheet",
    "answered",
    "arm_labels",
    "arm_rank",
    "headline",
    "hit_rates",
    "median_if_enough",
    "paired_requests",
    "phase_rank",
    "render_summary",
    "sooner_text",
    "summary_sheets",
    "summary_table",
]

# The fewest values whose greatest lies above the true median with a probability of 95 %: 1 - 0.5^5 = 0.97.
MEDIAN_SAMPLES = 5

NO_REUSE, PREFIX_CACHE = "none", "prefix_cache"
_FIRST_ARMS = (NO_REUSE, PREFIX_CACHE)
PHASE_TEXT = {"first": "first question", "again": "asked again", "all": "whole run"}
_PAIR = ["request_id", "repeat"]
_TOO_SMALL = "n too small"


# ---------------------------------------------------------------- requests


def answered(requests: pl.DataFrame) -> pl.DataFrame:
    """The requests that were answered, with a known time to first token.

    Raises:
        InvalidInputError: Columns are missing, or an arm has a request twice.
    """
    needed = {"arm", "arm_label", "order", "phase", "kind", "error", "ttft_s", *_PAIR}
    if missing := sorted(needed - set(requests.columns)):
        raise InvalidInputError(f"requests lack the columns {', '.join(missing)}")
    good = requests.filter(pl.col("error").fill_null("") == "", pl.col("ttft_s").is_not_null())
    twice = good.filter(good.select("arm", *_PAIR).is_duplicated())
    if twice.height:
        arm, name, repeat = twice.select("arm", *_PAIR).row(0)
        raise InvalidInputError(f"arm {arm} has request {name}, repeat {repeat}, more than once; each is measured once")
    return good


def arm_labels(requests: pl.DataFrame) -> dict[str, str]:
    """Label of each arm: no reuse first, then vLLM's prefix cache, then in order of appearance."""
    seen = requests.sort("order").unique("arm", keep="first", maintain_order=True).select("arm", "arm_label")
    labels = {arm: label or arm for arm, label in seen.iter_rows()}
    return {arm: labels[arm] for arm in (*_FIRST_ARMS, *labels) if arm in labels}


def arm_rank(requests: pl.DataFrame) -> pl.Expr:
    """Sort key that puts a frame's column `arm` into the order of `arm_labels`; arms without a request come last."""
    arms = list(arm_labels(requests))
    return pl.col("arm").replace_strict(arms, range(len(arms)), default=len(arms), return_dtype=pl.Int64)


def phase_rank() -> pl.Expr:
    """Sort key for a column `phase`: first questions, then repeated ones, then any other."""
    return pl.col("phase").replace_strict(list(PHASE_TEXT), range(len(PHASE_TEXT)), default=len(PHASE_TEXT),
                                          return_dtype=pl.Int64)  # fmt: skip


def median_if_enough(column: str) -> pl.Expr:
    """Median of a column's values; null if there are fewer than `MEDIAN_SAMPLES`."""
    return pl.when(pl.col(column).count() >= MEDIAN_SAMPLES).then(pl.col(column).median())


def paired_requests(requests: pl.DataFrame, *, baseline: str = NO_REUSE) -> pl.DataFrame:
    """Each request of each other arm beside the same request of the baseline.

    A pair is the same prompt, `request_id` and `repeat`. Phase and kind are those of the arm, not of the baseline, for
    which a prompt that is asked again is as cold as the first. A baseline "none" that did find something is not cold:
    those pairs are left out.

    Returns:
        arm, arm_label, phase, kind, request_id, repeat, prompt_tokens, ttft_s, baseline_ttft_s and `speedup`, the
        baseline's TTFT divided by the arm's: 2 is half the time.
    """
    good = answered(requests)
    base = good.filter(pl.col("arm") == baseline)
    if baseline == NO_REUSE:
        base = base.filter(pl.col("kind") == "cold")
    return (
        good.filter(pl.col("arm") != baseline)
        .join(base.select(*_PAIR, baseline_ttft_s="ttft_s"), on=_PAIR, how="inner", maintain_order="left")
        .with_columns(speedup=pl.col("baseline_ttft_s") / pl.col("ttft_s"))
        .select("arm", "arm_label", "phase", "kind", *_PAIR, "prompt_tokens", "ttft_s", "baseline_ttft_s", "speedup")
    )


# ---------------------------------------------------------------- events


_RATE_SCHEMA = {
    "arm": pl.String, "phase": pl.String, "measure": pl.String, "part": pl.Int64, "whole": pl.Int64,
    "hit_rate": pl.Float64, "source": pl.String,
}  # fmt: skip


def hit_rates(requests: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """The three hit rates of each arm and phase: by tokens, by chunks, by requests.

    Where an arm has events they are the events' own: what vLLM's prefix cache had is not in the denominator. Elsewhere
    they are the server's counters, which know no chunks: there the rate by chunks is null.

    Args:
        requests: Answered requests.
        events: With a column `arm`, and a column `phase` if they are to be told apart by it; events without a phase
            (null or "", as of a warm-up request) are not counted. Without the column, the phase is "all".

    Returns:
        arm, phase, measure, part, whole, hit_rate, source ("events" or "server counters").
    """
    rates = _event_rates(events)
    rows = [*rates, *_counter_rates(requests, {(arm, phase) for arm, phase, *_ in rates})]
    return pl.DataFrame(rows, schema=_RATE_SCHEMA, orient="row")


def _event_totals(events: pl.DataFrame) -> dict[tuple[str, str], Totals]:
    """Totals of each (arm, phase)."""
    if "phase" not in events.columns:
        events = events.with_columns(phase=pl.lit("all"))
    totals: dict[tuple[str, str], Totals] = {}
    for arm, phase, *fields in events.select("arm", "phase", *Event._fields).iter_rows():
        if phase:
            totals.setdefault((arm, phase), Totals()).add(Event(*fields))
    return totals


def _event_rates(events: pl.DataFrame) -> list[tuple]:
    rows = []
    for (arm, phase), totals in _event_totals(events).items():
        rates, looked_up = totals.hit_rates(), totals.count("lookup")
        chunks = totals.count("hit") + totals.count("miss")
        rows += [
            (arm, phase, "tokens", totals.tokens["reuse"], totals.tokens["lookup"], rates["hit_rate"], "events"),
            (arm, phase, "chunks", totals.count("hit"), chunks, rates["hit_rate_by_chunks"], "events"),
            (arm, phase, "requests", totals.requests_with_hit, looked_up, rates["hit_rate_by_requests"], "events"),
        ]
    return rows


def _counter_rates(requests: pl.DataFrame, known: set[tuple[str, str]]) -> list[tuple]:
    """Rates of each arm and phase that is not known from events."""
    rows = []
    for (arm, phase), group in requests.group_by("arm", "phase", maintain_order=True):
        if (arm, phase) in known:
            continue
        cached = group["cached_tokens"].fill_null(0)
        tokens = (int(cached.sum()), int(group["prompt_tokens"].sum()))
        asked = (int((cached > 0).sum()), group.height)
        source = "server counters"
        rows += [
            (arm, phase, "tokens", *tokens, tokens[0] / tokens[1] if tokens[1] else None, source),
            (arm, phase, "chunks", None, None, None, source),
            (arm, phase, "requests", *asked, asked[0] / asked[1], source),
        ]
    return rows


# ---------------------------------------------------------------- the table


def summary_table(requests: pl.DataFrame, events: pl.DataFrame | None = None) -> pl.DataFrame:
    """One row for each arm and phase.

    Args:
        requests: As `experiments.runs` writes them.
        events: As `hit_rates` takes them; without any, hit rates come from the server's counters.

    Returns:
        n and failed requests; `kinds`, what the server's counters say was reused; medians in seconds, null where n is
        below `MEDIAN_SAMPLES`; TTFT's least and greatest; hit tokens beside the workload's upper bound; three hit rates;
        bytes loaded; answers that could be compared, that are equal, and the earliest token that differs; the median,
        least and greatest speed-up over the same requests without reuse.
    """
    good = answered(requests)
    if events is None:
        events = pl.DataFrame(schema={**_event_schema(), "arm": pl.String})
    keys = ["arm", "phase"]
    table = requests.group_by(keys).agg(arm_label=pl.col("arm_label").first(), requests=pl.len())
    parts = (
        _times(good),
        _kinds(good),
        _answers(good),
        _speedups(good),
        _rate_columns(hit_rates(good, events)),
        _loaded(events),
    )
    for part in parts:
        table = table.join(part, on=keys, how="left")
    counts = ["n", "compared_none", "compared_prefix_cache", "equal_none", "equal_prefix_cache", "pairs"]
    return (
        table.with_columns(pl.col(counts).fill_null(0), failed=pl.col("requests") - pl.col("n").fill_null(0))
        .sort(phase_rank(), "phase", arm_rank(requests))
        .select("arm", "arm_label", "phase", pl.exclude("arm", "arm_label", "phase"))
    )


def _event_schema() -> dict[str, pl.DataType | type[pl.DataType]]:
    return dict(events_frame([]).schema)


def _times(good: pl.DataFrame) -> pl.DataFrame:
    return good.group_by("arm", "phase").agg(
        n=pl.len(),
        ttft_median_s=median_if_enough("ttft_s"),
        ttft_min_s=pl.col("ttft_s").min(),
        ttft_max_s=pl.col("ttft_s").max(),
        **{column: median_if_enough(column) for column in ("queue_s", "load_s", "prefill_s", "prompt_tokens")},
        hit_tokens=pl.col("cached_tokens").sum(),
        expected_hit_tokens=pl.col("expected_hit_tokens").sum(),
    )


def _kinds(good: pl.DataFrame) -> pl.DataFrame:
    """What was reused, counted: "8 document, 2 cold"."""
    counted = good.group_by("arm", "phase", "kind").len("requests").sort("requests", "kind", descending=[True, False])
    text = pl.format("{} {}", "requests", "kind")
    return counted.group_by("arm", "phase", maintain_order=True).agg(kinds=text.str.join(", "))


def _answers(good: pl.DataFrame) -> pl.DataFrame:
    """How many answers have one of the reference arm to compare with, how many are equal, where the earliest differs."""
    columns = []
    for reference in (NO_REUSE, PREFIX_CACHE):
        asked = good.filter(pl.col("arm") == reference).select(*_PAIR, pl.lit(True).alias(f"has_{reference}"))
        good = good.join(asked, on=_PAIR, how="left")
        compared = pl.col(f"has_{reference}").fill_null(False) & (pl.col("arm") != reference)
        difference = pl.col(f"first_difference_{reference}")
        columns += [
            compared.sum().alias(f"compared_{reference}"),
            (compared & difference.is_null()).sum().alias(f"equal_{reference}"),
            difference.filter(compared).min().alias(f"first_difference_{reference}"),
        ]
    return good.group_by("arm", "phase").agg(columns)


def _speedups(good: pl.DataFrame) -> pl.DataFrame:
    return paired_requests(good).group_by("arm", "phase").agg(
        pairs=pl.len(),
        speedup_median=median_if_enough("speedup"),
        speedup_min=pl.col("speedup").min(),
        speedup_max=pl.col("speedup").max(),
    )  # fmt: skip


def _rate_columns(rates: pl.DataFrame) -> pl.DataFrame:
    def rate(measure: str) -> pl.Expr:
        return pl.col("hit_rate").filter(pl.col("measure") == measure).first()

    return rates.group_by("arm", "phase").agg(
        hit_rate=rate("tokens"),
        hit_rate_by_chunks=rate("chunks"),
        hit_rate_by_requests=rate("requests"),
        hit_rate_source=pl.col("source").first(),
    )


def _loaded(events: pl.DataFrame) -> pl.DataFrame:
    rows = [
        (arm, phase, sum(nbytes for (kind, _), nbytes in totals.nbytes.items() if kind == "load"))
        for (arm, phase), totals in _event_totals(events).items()
    ]
    return pl.DataFrame(rows, schema={"arm": pl.String, "phase": pl.String, "bytes_loaded": pl.Int64}, orient="row")


# ---------------------------------------------------------------- for people


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
    for row, following in zip(sheet.rows, [*sheet.rows[1:], None], strict=True):
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
    return f"With reuse it came {listed}; medians of {fewest} pairs{more}."


def sooner_text(speedup: float) -> str:
    """A speed-up in words; below 1 it is a delay and says so."""
    return f"{times_text(speedup)} times sooner" if speedup >= 1 else f"{times_text(1 / speedup)} times later"


def _answers_sentence(arms: Sequence[dict]) -> list[str]:
    compared = sum(row["compared_prefix_cache"] for row in arms)
    equal = sum(row["equal_prefix_cache"] for row in arms)
    if not compared:
        return []
    return [
        f"{equal} of {compared} answers with KV from the engine equal those with vLLM's own prefix cache, token by token."
    ]
