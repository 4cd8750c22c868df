"""Every plot's data is checked against figures worked out by hand or by another road; every plot draws what it gets."""

import statistics

import plotly.graph_objects as go
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from synthetic_run import ARMS, CHUNK_BYTES, CHUNK_TOKENS, SyntheticRun, synthetic_run

from experiments import summary
from experiments.plots import plot_names, plot_run, resolve_plot
from experiments.plots._style import PALETTE, TEMPLATES, arm_styles, seconds_axis
from experiments.plots.hit_tokens import hit_tokens_data
from experiments.plots.speedup import speedup_data
from experiments.plots.tier_timeline import tier_timeline_data
from experiments.plots.ttft import ttft_data
from experiments.plots.ttft_by_length import ttft_by_length_data
from experiments.plots.ttft_parts import ttft_parts_data
from experiments.summary import arm_labels, hit_rates, paired_requests, summary_table
from experiments.summary_text import headline, render_summary, summary_sheets
from experiments.units import bytes_text, seconds_text, times_text
from workbench.errors import InvalidInputError, UnknownNameError
from workbench.events import Event, events_frame


@pytest.fixture(scope="module")
def run() -> SyntheticRun:
    return synthetic_run(memory_chunks=80)


def rows_of(frame: pl.DataFrame, **wanted) -> list[dict]:
    return frame.filter(*(pl.col(column) == value for column, value in wanted.items())).to_dicts()


def texts_of(figure: go.Figure) -> str:
    return figure.to_json()


def axis_titles(figure: go.Figure) -> set[str]:
    layout = figure.to_dict()["layout"]
    return {
        axis["title"]["text"] for name, axis in layout.items() if "axis" in name and "text" in axis.get("title", {})
    }


def few(run: SyntheticRun, n: int) -> pl.DataFrame:
    return run.requests.filter(pl.col("request_id").is_in([f"g{g}-d0-q{q}" for g in range(n) for q in (0, 1)]))


# --- every plot


def test_the_plots_are_the_files_and_a_wrong_name_lists_them():
    assert plot_names() == [
        "break_even",
        "hit_rates",
        "hit_tokens",
        "speedup",
        "tier_timeline",
        "ttft",
        "ttft_by_length",
        "ttft_parts",
        "ttft_waterfall",
    ]
    with pytest.raises(UnknownNameError, match="did you mean 'ttft'"):
        resolve_plot("tfft")


@pytest.mark.parametrize("name", plot_names())
def test_a_plot_draws_its_data_with_units_a_badge_and_n(name, run):
    figure = plot_run(name, run.requests, run.events, badge="measured on a toaster")
    drawn = [x for trace in figure.data for x in (trace.x if trace.x is not None else ()) if x is not None]
    assert len(drawn) > 8
    assert figure.layout.title.subtitle.text.startswith("measured on a toaster")
    assert any(word in figure.layout.title.subtitle.text for word in ("n = ", "requests", "pairs", "changes"))
    units = ("(log scale)", "(tokens)", "(%)", "(s)", "seconds", "(MiB)")
    assert all(any(unit in title for unit in units) for title in axis_titles(figure)) and axis_titles(figure)
    hover = [text for trace in figure.data for text in (trace.hovertext if trace.hovertext is not None else ())]
    assert hover and figure.layout.width is None


@pytest.mark.parametrize("name", plot_names())
@pytest.mark.parametrize("template", ["light", "dark", "plotly_white"])
def test_a_plot_takes_a_template(name, template, run):
    figure = plot_run(name, run.requests, run.events, template=template)
    if template in TEMPLATES:
        assert figure.layout.template.layout.paper_bgcolor == TEMPLATES[template].layout.paper_bgcolor


@pytest.mark.parametrize("name", plot_names())
def test_without_data_a_plot_says_so(name, run):
    figure = plot_run(name, run.requests.clear(), run.events.clear())
    assert not figure.data
    assert "no data" in figure.layout.annotations[0].text


@pytest.mark.parametrize("name", plot_names())
def test_when_every_request_failed_a_plot_says_so_or_shows_the_events(name, run):
    failed = run.requests.with_columns(error=pl.lit("engine gone"), ttft_s=pl.lit(None, pl.Float64))
    figure = plot_run(name, failed, run.events)
    assert name in ("tier_timeline", "hit_rates") or "no data" in figure.layout.annotations[0].text
    assert "NaN" not in texts_of(figure)


@pytest.mark.parametrize("name", plot_names())
def test_one_request_is_enough_to_draw(name, run):
    plot_run(name, run.requests.head(1), run.events.head(12)).to_json()


@pytest.mark.parametrize("name", plot_names())
def test_strings_from_outside_are_escaped(name, run):
    evil = "<img src=x onerror=alert(1)>"
    requests = run.requests.with_columns(arm_label=pl.lit(evil), request_id=pl.lit(evil) + pl.col("request_id"))
    assert "<img" not in texts_of(plot_run(name, requests, run.events, badge=evil))


def test_no_median_is_drawn_below_five_requests(run):
    for name, said in (
        ("ttft", "n too small"),
        ("speedup", "n too small"),
        ("ttft_parts", "n too small for a median (4)"),
    ):
        figure = plot_run(name, few(run, 4), run.events)
        assert said in texts_of(figure) and not any(shape.line.width == 4 for shape in figure.layout.shapes)
    figure = plot_run("ttft", few(run, 5), run.events)
    assert "n too small" not in texts_of(figure) and any(shape.line.width == 4 for shape in figure.layout.shapes)
    points = [trace for trace in plot_run("ttft", few(run, 4), run.events).data if trace.mode == "markers"]
    assert sum(len(trace.x) for trace in points) == few(run, 4).height


def test_arms_differ_in_colour_and_in_mark_and_in_dash():
    styles = list(arm_styles([*ARMS, "offloading", "lmcache", "example"]).values())
    for field in ("color", "symbol"):
        assert len({getattr(style, field) for style in styles}) == len(styles)
    assert {style.color for style in styles} <= set(PALETTE)
    assert len({(style.dash, style.pattern) for style in styles}) == len(styles)


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_time_axis_has_readable_ticks_around_its_values(values):
    axis = seconds_axis(values)
    low, high = (10.0**end for end in axis["range"])
    assert low <= min(values) and max(values) <= high
    assert any(low <= tick <= high for tick in axis["tickvals"])
    assert all(text.split()[1] in ("s", "ms", "µs") for text in axis["ticktext"] if "e" not in text)


# --- pairs and times


def test_a_pair_is_the_same_request_with_and_without_reuse(run):
    none = {r["request_id"]: r["ttft_s"] for r in rows_of(run.requests, arm="none")}
    pairs = paired_requests(run.requests)
    assert pairs.height == 3 * 20 and "none" not in set(pairs["arm"])
    for row in pairs.iter_rows(named=True):
        own = rows_of(run.requests, arm=row["arm"], request_id=row["request_id"])[0]
        assert row["speedup"] == pytest.approx(none[row["request_id"]] / own["ttft_s"])
        assert (row["phase"], row["kind"]) == (own["phase"], own["kind"])
    again = rows_of(pairs, arm="disk", phase="again")
    assert statistics.median(row["speedup"] for row in again) > 5


def test_a_baseline_that_found_something_makes_no_pair(run):
    warm = (pl.col("arm") == "none") & (pl.col("request_id") == "g0-d0-q1")
    contaminated = run.requests.with_columns(kind=pl.when(warm).then(pl.lit("system")).otherwise("kind"))
    assert rows_of(paired_requests(contaminated), request_id="g0-d0-q1") == []
    assert paired_requests(contaminated).height == paired_requests(run.requests).height - 3


def test_repeats_pair_with_their_own_repeat(run):
    slower = run.requests.with_columns(repeat=pl.lit(1, pl.Int64), ttft_s=pl.col("ttft_s") * 3)
    both = pl.concat([run.requests, slower])
    first, second = paired_requests(run.requests), paired_requests(both)
    assert second.height == 2 * first.height
    assert sorted(second["speedup"]) == pytest.approx(sorted([*first["speedup"], *first["speedup"]]))


def test_a_request_measured_twice_is_refused(run):
    with pytest.raises(InvalidInputError, match="more than once"):
        ttft_data(pl.concat([run.requests, run.requests.head(1)]))
    with pytest.raises(InvalidInputError, match="lack the columns kind"):
        paired_requests(run.requests.drop("kind"))


def test_speedup_data_has_the_medians_of_its_pairs(run):
    data = speedup_data(run.requests)
    for group in data.partition_by("arm", "phase"):
        assert group["median_speedup"][0] == pytest.approx(statistics.median(group["speedup"]))
        assert group["n"].to_list() == [group.height] * group.height
    assert speedup_data(few(run, 4))["median_speedup"].null_count() == speedup_data(few(run, 4)).height
    assert list(dict.fromkeys(data["arm"])) == ["prefix_cache", "memory", "disk"]


def test_ttft_data_gives_the_share_served_within_each_time(run):
    data = ttft_data(run.requests)
    for row in data.iter_rows(named=True):
        same = [r["ttft_s"] for r in rows_of(data, arm=row["arm"], phase=row["phase"])]
        assert row["n"] == len(same)
        assert row["served_share"] == pytest.approx(sum(t <= row["ttft_s"] for t in same) / len(same))
        assert row["median_s"] == pytest.approx(statistics.median(same))


def test_a_failed_request_is_counted_and_not_timed(run):
    failed = (pl.col("arm") == "disk") & (pl.col("request_id") == "g0-d0-q1")
    requests = run.requests.with_columns(error=pl.when(failed).then(pl.lit("gone")).otherwise("error"))
    assert ttft_data(requests).height == run.requests.height - 1
    row = rows_of(summary_table(requests, run.events), arm="disk", phase="again")[0]
    assert (row["n"], row["failed"], row["pairs"]) == (9, 1, 9)
    assert summary_sheets(summary_table(requests, run.events))[0].rows[-1][2] == "9 (1 failed)"


def test_parts_are_medians_and_rest_is_what_remains_of_each_request(run):
    data = ttft_parts_data(run.requests)
    for row in data.iter_rows(named=True):
        own = rows_of(run.requests, arm=row["arm"], phase=row["phase"])
        rest = [r["ttft_s"] - r["queue_s"] - r["load_s"] - r["prefill_s"] for r in own]
        assert row["rest_s"] == pytest.approx(statistics.median(rest)) and row["rest_s"] > 0
        assert row["load_s"] == pytest.approx(statistics.median(r["load_s"] for r in own))
        assert row["ttft_s"] == pytest.approx(statistics.median(r["ttft_s"] for r in own))
    assert ttft_parts_data(few(run, 4))["ttft_s"].null_count() == 8


def test_arms_that_reuse_are_enlarged_only_where_they_are_small(run):
    def titles(requests):
        figure = plot_run("ttft_parts", requests, run.events)
        return {note.text for note in figure.layout.annotations}

    quick = run.requests.filter(pl.col("arm") != "memory")  # its small tier keeps it as slow as no reuse
    enlarged = "asked again, arms with reuse, enlarged"
    assert enlarged in titles(quick) and enlarged not in titles(run.requests)


def test_length_and_computed_tokens(run):
    data = ttft_by_length_data(run.requests)
    assert (data["computed_tokens"] == data["prompt_tokens"] - data["cached_tokens"]).all()
    assert data.height == run.requests.height


def test_hit_tokens_stand_beside_their_bound(run):
    data = hit_tokens_data(run.requests)
    assert (data["unused_tokens"] == data["expected_hit_tokens"] - data["cached_tokens"]).all()
    assert set(data.filter(pl.col("arm") == "disk")["unused_tokens"]) == {0}
    assert data.filter(pl.col("arm") == "memory")["unused_tokens"].max() > 0  # it evicts
    unknown = run.requests.with_columns(expected_hit_tokens=pl.lit(None, pl.Int64))
    assert hit_tokens_data(unknown).is_empty()


# --- events


def event(kind: str, time: float = 0.0, **fields) -> Event:
    rest = {
        "tier": "",
        "request": "0:g0-d0-q1",
        "key": "",
        "start": 0,
        "tokens": 0,
        "nbytes": 0,
        "seconds": 0.0,
        "reason": "",
    }
    return Event(**{"time": time, "kind": kind, **rest, **fields})


def frame(events: list[Event], arm: str = "memory") -> pl.DataFrame:
    return events_frame(events).with_columns(arm=pl.lit(arm))


def test_the_three_hit_rates_by_hand(run):
    events = frame(
        [event("lookup", tokens=600), event("reuse", tokens=256), event("hit", tier="memory"), event("miss"),
         event("lookup", tokens=400), event("reuse", tokens=0), event("miss"), event("miss")],
    )  # fmt: skip
    rates = {row["measure"]: row for row in rows_of(hit_rates(run.requests, events), arm="memory", phase="again")}
    assert {name: (row["part"], row["whole"]) for name, row in rates.items()} == {
        "tokens": (256, 1000), "chunks": (1, 4), "requests": (1, 2),
    }  # fmt: skip
    assert rates["tokens"]["hit_rate"] == pytest.approx(0.256)
    assert {row["source"] for row in rates.values()} == {"events"}


def test_without_events_the_server_counts_tokens_and_requests_and_no_chunks(run):
    own = rows_of(run.requests, arm="prefix_cache", phase="again")
    rates = {r["measure"]: r for r in rows_of(hit_rates(run.requests, run.events), arm="prefix_cache", phase="again")}
    assert rates["tokens"]["hit_rate"] == pytest.approx(
        sum(r["cached_tokens"] for r in own) / sum(r["prompt_tokens"] for r in own)
    )
    assert rates["requests"]["hit_rate"] == 1.0 and rates["chunks"]["hit_rate"] is None
    assert {row["source"] for row in rates.values()} == {"server counters"}


def test_events_of_a_warm_up_do_not_count_and_without_names_the_phase_is_the_whole_run(run):
    lookups = [event("lookup", tokens=100), event("reuse", tokens=50)]
    warm_up = frame([e._replace(request="0:0") for e in lookups])
    assert rows_of(hit_rates(run.requests, warm_up), source="events") == []
    other_arm = frame(lookups, arm="another")
    assert rows_of(hit_rates(run.requests, other_arm), source="events") == []
    nameless = run.requests.drop("engine_request")
    whole = rows_of(hit_rates(nameless, frame(lookups)), source="events", measure="tokens")
    assert [(row["phase"], row["hit_rate"]) for row in whole] == [("all", 0.5)]


def test_events_and_server_counters_agree_on_the_synthetic_run(run):
    by_events = hit_rates(run.requests, run.events)
    by_counters = hit_rates(run.requests, run.events.clear())
    keys = ["arm", "phase", "measure"]
    both = by_events.join(by_counters, on=keys, suffix="_counted").filter(pl.col("measure") != "chunks")
    assert both.height == 16
    assert (both["part"] == both["part_counted"]).all() and (both["whole"] == both["whole_counted"]).all()


def test_occupancy_by_hand(run):
    events = frame([
        event("store", 10.0, tier="memory", key="a", nbytes=100),
        event("store", 11.0, tier="memory", key="a", nbytes=100),  # stored already
        event("store", 12.0, tier="memory", key="b", nbytes=50),
        event("store", 12.5, tier="memory", key="x", nbytes=70, reason="ENOSPC"),  # did not happen
        event("evict", 13.0, tier="memory", key="a", nbytes=100, reason="capacity"),
        event("evict", 13.5, tier="memory", key="never seen", nbytes=9),
        event("load", 14.0, tier="disk", key="c", nbytes=30),  # lay there from an earlier start
        event("promote", 15.0, tier="memory", key="c", nbytes=30),
        event("remove", 16.0, tier="disk", key="c", reason="corrupt"),
    ])  # fmt: skip
    data = tier_timeline_data(run.requests, events)
    assert data.select("tier", "time_s", "kind", "used_bytes", "changed_bytes").rows() == [
        ("memory", 0.0, "in", 100, 100),
        ("memory", 2.0, "in", 150, 50),
        ("memory", 3.0, "evict", 50, -100),
        ("disk", 4.0, "in", 30, 30),
        ("memory", 5.0, "in", 80, 30),
        ("disk", 6.0, "remove", 0, -30),
    ]
    assert set(data["arm_label"]) == {"engine, memory tier"}


def test_a_long_timeline_is_thinned_without_losing_bytes_or_evictions(run):
    stores = [event("store", i / 1e3, tier="memory", key=str(i), nbytes=10) for i in range(20_000)]
    evicts = [event("evict", 20 + i / 1e3, tier="memory", key=str(i)) for i in range(5_000)]
    data = tier_timeline_data(run.requests, frame(stores + evicts))
    assert 500 < data.height <= 2100
    assert data["used_bytes"][-1] == 150_000 and data["changed_bytes"].sum() == 150_000
    assert data.filter(pl.col("kind") == "evict")["chunks"].sum() == 5_000


def test_the_synthetic_tier_stays_within_its_capacity_and_evicts(run):
    data = tier_timeline_data(run.requests, run.events).filter(pl.col("tier") == "memory")
    assert data["used_bytes"].max() == 80 * CHUNK_BYTES
    assert (
        data.filter(pl.col("kind") == "evict")["chunks"].sum()
        == run.events.filter(pl.col("kind") == "evict").height
        > 0
    )


# --- the summary


def test_the_summary_has_a_row_for_each_arm_and_phase_in_order(run):
    table = summary_table(run.requests, run.events)
    assert table.select("phase", "arm").rows() == [(phase, arm) for phase in ("first", "again") for arm in ARMS]
    assert table["n"].to_list() == [10] * 8 and table["failed"].sum() == 0
    assert list(arm_labels(run.requests).items()) == list(ARMS.items())


def test_the_summary_against_a_second_computation(run):
    own = rows_of(run.requests, arm="disk", phase="again")
    row = rows_of(summary_table(run.requests, run.events), arm="disk", phase="again")[0]
    assert row["ttft_median_s"] == pytest.approx(statistics.median(r["ttft_s"] for r in own))
    assert (row["ttft_min_s"], row["ttft_max_s"]) == (min(r["ttft_s"] for r in own), max(r["ttft_s"] for r in own))
    assert row["hit_tokens"] == row["expected_hit_tokens"] == 10 * 9 * CHUNK_TOKENS
    assert row["bytes_loaded"] == 10 * 9 * CHUNK_BYTES
    assert row["kinds"] == "10 document"
    assert rows_of(summary_table(run.requests, run.events), arm="disk", phase="first")[0]["kinds"] == "5 cold, 5 system"


def test_the_summary_counts_equal_answers_and_the_first_difference(run):
    rows = {row["arm"]: row for row in rows_of(summary_table(run.requests, run.events), phase="again")}
    assert (rows["disk"]["compared_none"], rows["disk"]["equal_none"]) == (10, 8)
    assert (rows["disk"]["first_difference_none"], rows["disk"]["first_difference_prefix_cache"]) == (7, None)
    assert (rows["disk"]["compared_prefix_cache"], rows["disk"]["equal_prefix_cache"]) == (10, 10)
    assert rows["none"]["compared_none"] == 0 and rows["none"]["equal_prefix_cache"] == 8
    alone = run.requests.filter(pl.col("arm") != "none")
    assert summary_table(alone, run.events)["compared_none"].sum() == 0  # equal to nothing is not equal


def test_the_summary_has_no_median_below_five(run):
    table = summary_table(few(run, 4), run.events)
    assert table["ttft_median_s"].null_count() == table["speedup_median"].null_count() == table.height
    assert table["ttft_min_s"].null_count() == 0
    assert "n too small" in summary_sheets(table)[0].rows[0]
    assert headline(table).startswith("Too few pairs for a median, which takes 5.")


def test_an_empty_run_has_an_empty_summary_and_says_so(run):
    table = summary_table(run.requests.clear(), run.events.clear())
    assert table.is_empty()
    assert "nothing to compare" in headline(table)
    render_summary(table)


def test_the_headline_gives_the_medians_of_the_pairs(run):
    table = summary_table(run.requests, run.events)
    row = rows_of(table, arm="disk", phase="again")[0]
    told = f"{row['speedup_median']:.1f} times sooner ({seconds_text(row['ttft_median_s'])}, engine, disk tier"
    assert told in headline(table)
    slow = run.requests.with_columns(ttft_s=pl.when(pl.col("arm") == "disk").then(99.0).otherwise("ttft_s"))
    assert "times later (99.0 s, engine, disk tier" in headline(summary_table(slow, run.events))


def test_the_terminal_shows_every_row_within_100_columns(run):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_summary(summary_table(run.requests, run.events)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(" again " in line for line in lines) == 12 and "…" not in "".join(lines)


def test_brackets_in_a_label_are_not_markup(run):
    requests = run.requests.with_columns(arm_label=pl.lit("[red]arm[/red]"))
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_summary(summary_table(requests, run.events)))
    assert "[red]arm" in console.export_text()


@given(ttfts=st.lists(st.floats(1e-4, 1e2), min_size=5, max_size=12))
@settings(max_examples=25, deadline=None)
def test_an_arm_equal_to_the_baseline_is_once_as_fast(ttfts):
    base = synthetic_run(groups=1, documents=1, questions=1, arms=("none",)).requests
    rows = [base.with_columns(request_id=pl.lit(f"r{i}"), ttft_s=pl.lit(t)) for i, t in enumerate(ttfts)]
    none = pl.concat(rows)
    both = pl.concat([none, none.with_columns(arm=pl.lit("other"))])
    row = rows_of(summary_table(both), arm="other")[0]
    assert row["speedup_median"] == row["speedup_min"] == row["speedup_max"] == 1.0
    assert row["ttft_median_s"] == pytest.approx(statistics.median(ttfts))


def test_the_median_needs_what_it_says():
    assert 1 - 0.5**summary.MEDIAN_SAMPLES >= 0.95 > 1 - 0.5 ** (summary.MEDIAN_SAMPLES - 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.4712, "2.47 s"), (0.9999, "1.00 s"), (0.0461, "46.1 ms"), (0.00035, "350 µs"), (0.0, "0 ms"), (123.4, "123 s"),
     (None, "–")],
)  # fmt: skip
def test_seconds_have_three_digits_and_a_unit(value, text):
    assert seconds_text(value) == text


def test_bytes_and_times():
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 * 2**20, 2**40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "5.00 MiB",
        "1.00 TiB",
    ]
    assert (times_text(1.049), times_text(20.83)) == ("1.05", "20.8")
