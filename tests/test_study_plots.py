"""The plots of a study: their data against figures worked out by hand; what they draw has units, n and a badge."""

import math
import statistics

import numpy as np
import polars as pl
import pytest
from synthetic_run import synthetic_run

from experiments.intervals import PERCENTILE_SAMPLES, mean_interval
from experiments.plots import plot_names, plot_run, plot_study, study_plot_names
from experiments.plots._study import varied_settings
from experiments.plots._style import TEMPLATES, line_style
from experiments.plots.hit_rate_by_capacity import hit_rate_by_capacity_data
from experiments.plots.hit_rate_by_chunk import hit_rate_by_chunk_data
from experiments.plots.hit_rate_heatmap import hit_rate_heatmap_data
from experiments.plots.parallel_coordinates import parallel_coordinates_data
from experiments.plots.pareto import pareto_data
from experiments.plots.ttft_by_rate import ttft_by_rate_data
from experiments.plots.ttft_ecdf import ttft_ecdf_data
from experiments.plots.ttft_waterfall import ttft_waterfall_data
from experiments.study import Study
from workbench.errors import UnknownNameError

CHUNKS, CAPACITIES, CODECS, REPEATS = (64, 128, 256), (1_000, 4_000), ("raw", "int8"), 3
OWN = ("hit_rate_by_capacity", "hit_rate_by_chunk", "hit_rate_heatmap", "parallel_coordinates", "pareto")


def rate(chunk: int, capacity: int, codec: str, repeat: int) -> float:
    return 0.9 - chunk / 1000 - 100 / capacity + (0.05 if codec == "int8" else 0) + 0.01 * repeat


@pytest.fixture(scope="module")
def cells() -> pl.DataFrame:
    """A made-up study in the form of a real one. No figure in it was measured."""
    rows = [
        {"cell": f"{chunk}-{capacity}-{codec}-{repeat}", "chunk_tokens": chunk, "capacity_tokens": capacity,
         "codec": codec, "model": "made-up", "repeat": repeat, "hit_rate": rate(chunk, capacity, codec, repeat),
         "hit_rate_bound": 0.97, "ttft_warm_s": 0.05 + (0.02 if codec == "int8" else 0) + chunk * 1e-5,
         "bytes_per_token": 46_080.0 if codec == "raw" else 24_000.0, "equal_answers": 1.0 if codec == "raw" else 0.9,
         "kind": "serving", "error": "", "contaminated": "", "badge": "made up"}
        for chunk in CHUNKS for capacity in CAPACITIES for codec in CODECS for repeat in range(REPEATS)
    ]  # fmt: skip
    return pl.DataFrame(rows)


@pytest.fixture(scope="module")
def requests() -> pl.DataFrame:
    return synthetic_run(memory_chunks=80).requests


def titles(figure) -> list[str]:
    axes = [axis for name, axis in figure.to_dict()["layout"].items() if "axis" in name]
    found = [axis["title"]["text"] for axis in axes if "text" in axis.get("title", {})]
    return found + [d["label"] for trace in figure.data for d in (getattr(trace, "dimensions", None) or ())]


# --- names


def test_plots_of_runs_and_of_studies_are_told_apart_by_the_frames_they_take():
    assert set(OWN) <= set(study_plot_names()) and not set(OWN) & set(plot_names())
    assert "ttft_waterfall" in plot_names() and "ttft_waterfall" not in study_plot_names(), "it needs events"
    assert {"ttft", "ttft_by_length", "speedup"} <= set(plot_names()) & set(study_plot_names())
    assert "_study" not in study_plot_names()
    with pytest.raises(UnknownNameError, match="did you mean 'hit_rate_heatmap'"):
        plot_study("hit_rate_heat_map", pl.DataFrame(), pl.DataFrame())
    with pytest.raises(UnknownNameError):
        plot_run("pareto", pl.DataFrame(), pl.DataFrame())


# --- every plot


@pytest.mark.parametrize("name", [*OWN, "ttft_ecdf"])
@pytest.mark.parametrize("template", ["light", "dark"])
def test_a_plot_draws_its_data_with_units_a_badge_and_n(name, template, cells, requests):
    figure = plot_study(name, cells, requests, template=template)
    said = figure.layout.title.subtitle.text
    assert said.startswith("made up") and "n = " in said and figure.layout.width is None
    units = ("(tokens", "(%)", "(ms)", "(KiB", "(log scale)", "codec", "chunk_tokens", "capacity_tokens")
    assert titles(figure) and all(any(unit in title for unit in units) for title in titles(figure)), titles(figure)
    assert figure.layout.template.layout.paper_bgcolor == TEMPLATES[template].layout.paper_bgcolor
    hover = [text for trace in figure.data for text in (getattr(trace, "hovertext", None) or ()) if text]
    assert hover or name == "parallel_coordinates"


@pytest.mark.parametrize("name", study_plot_names())
def test_without_data_a_plot_says_so(name, cells, requests):
    for study in (pl.DataFrame(), cells.clear(), cells.with_columns(error=pl.lit("gone"))):
        figure = plot_study(name, study, requests.clear())
        assert "no data" in figure.layout.annotations[0].text, name


@pytest.mark.parametrize("name", [*OWN, "ttft_ecdf"])
def test_one_cell_is_enough_to_draw_and_strings_are_escaped(name, cells, requests):
    evil = "<img src=x onerror=alert(1)>"
    study = pl.concat([cells.head(1), cells.tail(1).with_columns(codec=pl.lit(evil))])
    named = requests.with_columns(arm_label=pl.lit(evil))
    assert "<img" not in plot_study(name, study, named, badge=evil).to_json()
    plot_study(name, cells.head(1), requests.head(1)).to_json()


def test_failed_and_contaminated_cells_are_in_no_plot(cells, requests):
    spoilt = cells.with_columns(
        hit_rate=pl.when(pl.col("repeat") > 0).then(-1.0).otherwise("hit_rate"),
        error=pl.when(pl.col("repeat") == 1).then(pl.lit("gone")).otherwise("error"),
        contaminated=pl.when(pl.col("repeat") == 2).then(pl.lit("warm")).otherwise("contaminated"),
    )
    figure = plot_study("hit_rate_by_chunk", spoilt, requests)
    assert min(y for trace in figure.data for y in trace.y) > 0
    assert "one value a point" in figure.layout.title.subtitle.text


def test_a_real_study_draws_its_own_plots(tmp_path):
    study = Study("drawn", kind="replay", runs=tmp_path, fixed={"trace": "chat", "trace.sessions": 6}, repeats=2,
                  space={"chunk_tokens": [64, 128], "capacity_tokens": [2_000, 8_000]}).run()  # fmt: skip
    for name in ("hit_rate_by_chunk", "hit_rate_by_capacity", "hit_rate_heatmap", "parallel_coordinates"):
        figure = study.plot(name)
        assert figure.layout.title.subtitle.text.startswith("simulated") and figure.data
    assert "no data" in study.plot("pareto").layout.annotations[0].text, "a simulation has no times"


# --- lines


def test_lines_have_means_and_intervals_over_the_repeats(cells):
    assert varied_settings(cells) == ["chunk_tokens", "capacity_tokens", "codec"]
    data = hit_rate_by_chunk_data(cells)
    assert data.height == 12 and set(data["n"]) == {REPEATS}
    assert set(data["series"]) == {f"capacity_tokens {c:,}, {codec}" for c in CAPACITIES for codec in CODECS}
    row = data.filter(pl.col("series") == "capacity_tokens 1,000, int8", pl.col("x") == 128).to_dicts()[0]
    values = [rate(128, 1_000, "int8", repeat) for repeat in range(REPEATS)]
    own = mean_interval(values)
    assert row["mean"] == pytest.approx(statistics.mean(values)) and row["bound"] == pytest.approx(0.97)
    assert (row["low"], row["high"]) == pytest.approx((own.low, own.high))
    single = hit_rate_by_chunk_data(cells.filter(pl.col("repeat") == 0))
    assert single["low"].null_count() == single.height and set(single["n"]) == {1}


def test_the_band_is_drawn_around_the_line_and_the_bound_above_it(cells, requests):
    figure = plot_study("hit_rate_by_chunk", cells, requests)
    bands = [trace for trace in figure.data if trace.fill == "toself"]
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert len(bands) == len(lines) == 4 and figure.data[-1].name == "most that the workload allows"
    for band, line in zip(bands, lines, strict=True):
        assert max(band.y) > max(line.y) and min(band.y) < min(line.y)
    assert len({(line.line.color, line.line.dash, line.marker.symbol) for line in lines}) == 4


def test_capacity_is_the_setting_that_varies(cells):
    data = hit_rate_by_capacity_data(cells)
    assert set(data["x"]) == set(CAPACITIES) and set(data["capacity"]) == {"capacity_tokens"}
    assert set(data["series"]) == {f"chunk_tokens {chunk}, {codec}" for chunk in CHUNKS for codec in CODECS}
    chunks = hit_rate_by_capacity_data(cells.rename({"capacity_tokens": "memory_bytes"}))
    assert set(chunks["capacity"]) == {"memory_bytes"}
    other = hit_rate_by_capacity_data(cells, measure="ttft_warm_s")
    assert other["mean"].max() < 0.1


def test_the_first_49_lines_differ_in_more_than_colour():
    styles = [line_style(number) for number in range(49)]
    assert len(set(styles)) == 49 and len({style[1:] for style in styles[:7]}) == 7


# --- heat map


def test_the_heat_map_has_a_field_for_every_pair(cells, requests):
    data = hit_rate_heatmap_data(cells)
    assert data.height == 12 and set(data["series"]) == set(CODECS) and set(data["n"]) == {REPEATS}
    for row in data.iter_rows(named=True):
        values = [rate(row["chunk_tokens"], row["capacity"], row["series"], repeat) for repeat in range(REPEATS)]
        assert row["mean"] == pytest.approx(statistics.mean(values))
    holed = cells.filter(~((pl.col("chunk_tokens") == 128) & (pl.col("capacity_tokens") == 4_000)))
    panel = plot_study("hit_rate_heatmap", holed, requests).data[0]
    assert panel.text[1][1] == "–" and panel.z[1][1] is None and panel.hovertext[1][1] == "no cell"


# --- Pareto


def test_the_front_is_what_nobody_beats_in_all_three(cells):
    data = {row["label"]: row for row in pareto_data(cells).to_dicts()}
    assert len(data) == 12
    on_front = {label for label, row in data.items() if row["on_front"]}
    assert on_front == {f"chunk_tokens 64, capacity_tokens {c:,}, {codec}" for c in CAPACITIES for codec in CODECS}
    row = data["chunk_tokens 256, capacity_tokens 1,000, int8"]
    assert (row["time_s"], row["nbytes"], row["quality"], row["n"]) == pytest.approx((0.07256, 24_000, 0.9, REPEATS))


def test_the_front_against_brute_force():
    rng = np.random.default_rng(0)
    rows = [{"cell": str(i), "policy": f"p{i}", "repeat": 0, "kind": "serving", "ttft_warm_s": float(t),
             "bytes_per_token": float(b), "equal_answers": float(q)}
            for i, (t, b, q) in enumerate(rng.integers(1, 6, (60, 3)))]  # fmt: skip
    data = pareto_data(pl.DataFrame(rows))
    points = [(r["time_s"], r["nbytes"], -r["quality"]) for r in data.iter_rows(named=True)]
    for point, on_front in zip(points, data["on_front"], strict=True):
        better = [o for o in points if o != point and o[0] <= point[0] and o[1] <= point[1] and o[2] <= point[2]]
        assert on_front == (not better)
    assert 0 < data["on_front"].sum() < data.height


def test_without_known_quality_time_and_bytes_decide(cells):
    data = pareto_data(cells.drop("equal_answers"))
    assert data["quality"].null_count() == data.height and data["on_front"].sum() == 4
    nothing_kept = cells.with_columns(bytes_per_token=pl.lit(None, pl.Float64))
    assert pareto_data(nothing_kept).is_empty()


# --- parallel coordinates


def test_parallel_coordinates_have_what_varies_and_what_came_out(cells, requests):
    data = parallel_coordinates_data(cells)
    assert data.columns == ["chunk_tokens", "capacity_tokens", "codec", "ttft_warm_s", "bytes_per_token",
                            "equal_answers", "hit_rate"]  # fmt: skip
    assert data.height == cells.height
    figure = plot_study("parallel_coordinates", cells, requests, color="ttft_warm_s")
    axes = {axis.label: axis for axis in figure.data[0].dimensions}
    assert list(axes)[-1] == "TTFT of repeated prompts, median (ms)"
    assert list(axes["codec"].ticktext) == ["int8", "raw"] and set(axes["codec"].values) == {0, 1}
    assert max(axes["hit rate by tokens (%)"].values) == pytest.approx(100 * cells["hit_rate"].max())


# --- times


def test_the_ecdf_gives_the_share_served_within_each_time(requests):
    data = ttft_ecdf_data(requests)
    for row in data.iter_rows(named=True):
        same = data.filter(pl.col("arm") == row["arm"])["ttft_s"]
        assert row["n"] == len(same) == 10
        assert row["served_share"] == pytest.approx((same <= row["ttft_s"]).sum() / len(same))
    assert ttft_ecdf_data(requests, phase="").height == requests.height


def test_only_percentiles_that_n_bears_are_marked(cells, requests):
    def marks(frame):
        figure = plot_study("ttft_ecdf", cells, frame, phase="")
        return {percent for trace in figure.data if trace.mode == "markers" for percent in trace.y}

    none = requests.filter(pl.col("arm") == "none")
    assert marks(none) == {50} and marks(none.head(4)) == set()
    many = pl.concat([none.with_columns(repeat=pl.lit(r, pl.Int64)) for r in range(15)])
    assert marks(many) == {50, 90, 95, 99}
    for percent, n in PERCENTILE_SAMPLES.items():
        assert 1 - (percent / 100) ** n >= 0.95 > 1 - (percent / 100) ** (n - 1), percent


def test_the_marks_stand_on_the_steps(cells, requests):
    figure = plot_study("ttft_ecdf", cells, requests, phase="")
    curves = {trace.legendgroup: trace for trace in figure.data if trace.mode == "lines" and trace.legendgroup}
    for trace in figure.data:
        if trace.mode == "markers":
            for time, percent in zip(trace.x, trace.y, strict=True):
                curve = curves[trace.legendgroup]
                at = [share for t, share in zip(curve.x, curve.y, strict=True) if t <= time]
                assert max(at) >= percent and time in curve.x


# --- load


@pytest.fixture(scope="module")
def loaded() -> pl.DataFrame:
    """Requests of a made-up study under load: with reuse a request takes 0.1 s, without it 0.5 s, one at a time."""
    rows = []
    for arm, takes in (("none", 0.5), ("memory", 0.1)):
        for rate in (1.0, 4.0):
            for repeat in range(2):
                free = 0.0
                for number in range(30):
                    due = number / rate
                    start, free = max(due, free), max(due, free) + takes
                    rows.append({"cell": f"{arm}-{rate}-{repeat}", "request_rate": rate, "arm": arm, "model": "made-up",
                                 "repeat": repeat, "arm_label": f"{arm}!", "scheduled_s": due, "ttft_s": free - due,
                                 "queue_s": start - due, "e2e_s": free - due, "error": ""})  # fmt: skip
    return pl.DataFrame(rows)


def test_ttft_by_rate_has_percentiles_and_says_who_kept_up(loaded):
    data = {(row["arm"], row["request_rate"]): row for row in ttft_by_rate_data(loaded).to_dicts()}
    assert set(data) == {(arm, rate) for arm in ("none", "memory") for rate in (1.0, 4.0)}
    assert {key for key, row in data.items() if not row["kept_up"]} == {("none", 4.0)}, "two a second are its most"
    for row in data.values():
        assert row["n"] == 60 and row["failed"] == 0 and row["p95"] is not None and row["p99"] is None
    assert data["memory", 4.0]["p50"] == pytest.approx(0.1) and data["memory", 4.0]["queue_p50"] == 0
    assert data["none", 4.0]["answered_per_s"] == pytest.approx(2.0)
    waits = [0.5 * (n + 1) - n / 4 for n in range(30)]
    assert data["none", 4.0]["p50"] == pytest.approx(statistics.median(waits)), "waiting counts"
    broken = loaded.with_columns(error=pl.when(pl.col("scheduled_s") == 1.0).then(pl.lit("gone")).otherwise("error"))
    assert set(ttft_by_rate_data(broken)["failed"]) == {2} and set(ttft_by_rate_data(broken)["n"]) == {58}
    assert ttft_by_rate_data(loaded.drop("request_rate")).is_empty()


@pytest.mark.parametrize("template", ["light", "dark"])
def test_ttft_by_rate_draws_a_median_and_a_high_percentile_with_open_marks(loaded, cells, template):
    figure = plot_study("ttft_by_rate", cells, loaded, template=template)
    lines = {trace.name: trace for trace in figure.data}
    assert set(lines) == {f"{arm}!, {what}" for arm in ("none", "memory") for what in ("median", "p95")}
    assert [symbol.endswith("-open") for symbol in lines["none!, median"].marker.symbol] == [False, True]
    assert not any(symbol.endswith("-open") for symbol in lines["memory!, median"].marker.symbol)
    assert "n = 60 requests a point" in figure.layout.title.subtitle.text and figure.layout.width is None
    assert titles(figure) == ["requests that come (1/s, log scale)", "time to first token (log scale)"]
    assert "2 are answered" in lines["none!, median"].hovertext[1] and "0 failed" in lines["none!, median"].hovertext[1]
    more = loaded.with_columns(threads=pl.when(pl.col("repeat") == 0).then(1).otherwise(2))
    more = more.select("cell", "threads", pl.all().exclude("cell", "threads"))
    names = [trace.name for trace in plot_study("ttft_by_rate", cells, more, template=template).data]
    assert "none!, threads 2, median" in names and len(set(names)) == len(names) == 8
    few = loaded.group_by("cell", maintain_order=True).head(3)
    assert [trace.name for trace in plot_study("ttft_by_rate", cells, few).data] == ["none!, median", "memory!, median"]


# --- waterfall


def test_the_waterfall_adds_up_and_a_lookup_is_taken_from_the_queue():
    run = synthetic_run(memory_chunks=80)
    unrecorded = run.events.with_columns(seconds=pl.when(pl.col("kind") == "lookup").then(0.0).otherwise("seconds"))
    data = ttft_waterfall_data(run.requests, unrecorded)
    assert data.height == 4 * run.requests.height and set(data["part"]) == {"queue", "lookup", "load", "prefill"}
    own = {(r["arm"], r["request_id"]): r for r in run.requests.to_dicts()}
    for (arm, name), bar in data.group_by("arm", "request_id", maintain_order=True):
        row, parts = own[arm, name], {r["part"]: r for r in bar.to_dicts()}
        assert parts["prefill"]["start_s"] == pytest.approx(row["queue_s"] + row["load_s"])
        assert math.fsum(r["seconds"] for r in parts.values()) == pytest.approx(
            row["queue_s"] + row["load_s"] + row["prefill_s"]
        )
        assert parts["lookup"]["seconds"] == 0.0
    one = run.requests.filter(pl.col("arm") == "disk").row(0, named=True)
    looked = unrecorded.with_columns(
        seconds=pl.when((pl.col("kind") == "lookup") & (pl.col("request") == one["engine_request"])
                        & (pl.col("arm") == "disk")).then(one["queue_s"] / 4).otherwise("seconds")
    )  # fmt: skip
    bar = ttft_waterfall_data(run.requests, looked).filter(
        pl.col("arm") == "disk", pl.col("request_id") == one["request_id"]
    )
    assert bar["seconds"].to_list()[:2] == pytest.approx([0.75 * one["queue_s"], 0.25 * one["queue_s"]])
    slow = run.events.with_columns(seconds=pl.when(pl.col("kind") == "lookup").then(9.0).otherwise("seconds"))
    assert ttft_waterfall_data(run.requests, slow)["start_s"].max() < 1, "a lookup is never longer than the queue"


def test_a_long_waterfall_shows_some_of_the_requests_and_says_how_many():
    run = synthetic_run(memory_chunks=80)
    figure = plot_run("ttft_waterfall", run.requests, run.events)
    assert "64 of 80 requests" in figure.layout.title.subtitle.text
    assert all(len(trace.y) == 16 for trace in figure.data)
