"""A run in numbers: requests and events in, one row for each arm and phase out.

    requests -> answered -> paired_requests -+
    events -> hit_rates ---------------------+-> summary_table

Nothing here is an average over unlike things: arms are compared request by request, and a median of fewer than
`MEDIAN_SAMPLES` values is not given.
"""

import polars as pl

from workbench.errors import InvalidInputError
from workbench.events import Event, Totals, events_frame

__all__ = [
    "MEDIAN_SAMPLES",
    "NO_REUSE",
    "PHASE_TEXT",
    "PREFIX_CACHE",
    "answered",
    "arm_labels",
    "arm_rank",
    "hit_rates",
    "median_if_enough",
    "paired_requests",
    "phase_rank",
    "summary_table",
]

# The fewest values whose greatest lies above the true median with a probability of 95 %: 1 - 0.5^5 = 0.97.
MEDIAN_SAMPLES = 5

NO_REUSE, PREFIX_CACHE = "none", "prefix_cache"
_FIRST_ARMS = (NO_REUSE, PREFIX_CACHE)
PHASE_TEXT = {"first": "first question", "again": "asked again", "all": "whole run"}
_PAIR = ["request_id", "repeat"]


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
        requests: Answered requests. Their column `engine_request` tells the phase of an event; events of other
            requests, such as a warm-up, are then not counted. Without the column, the phase of an event is "all".
        events: With a column `arm`.

    Returns:
        arm, phase, measure, part, whole, hit_rate, source ("events" or "server counters").
    """
    rates = _event_rates(requests, events)
    rows = [*rates, *_counter_rates(requests, {(arm, phase) for arm, phase, *_ in rates})]
    return pl.DataFrame(rows, schema=_RATE_SCHEMA, orient="row")


def _event_totals(requests: pl.DataFrame, events: pl.DataFrame) -> dict[tuple[str, str], Totals]:
    """Totals of each (arm, phase)."""
    if "engine_request" in requests.columns:
        phases = requests.select("arm", "phase", request="engine_request")
        events = events.join(phases, on=["arm", "request"], how="inner", maintain_order="left")
    else:
        events = events.with_columns(phase=pl.lit("all"))
    totals: dict[tuple[str, str], Totals] = {}
    for arm, phase, *fields in events.select("arm", "phase", *Event._fields).iter_rows():
        totals.setdefault((arm, phase), Totals()).add(Event(*fields))
    return totals


def _event_rates(requests: pl.DataFrame, events: pl.DataFrame) -> list[tuple]:
    rows = []
    for (arm, phase), totals in _event_totals(requests, events).items():
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
        below `MEDIAN_SAMPLES`; TTFT's least and greatest; hit tokens beside the workload's upper bound; hit rates;
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
        _loaded(good, events),
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
    """Answers with a counterpart in the reference arm, how many are equal to it, and where the earliest differs."""
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


def _loaded(requests: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    rows = [
        (arm, phase, sum(nbytes for (kind, _), nbytes in totals.nbytes.items() if kind == "load"))
        for (arm, phase), totals in _event_totals(requests, events).items()
    ]
    return pl.DataFrame(rows, schema={"arm": pl.String, "phase": pl.String, "bytes_loaded": pl.Int64}, orient="row")
