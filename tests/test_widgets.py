"""The panels without a browser, and what they are views of: comparisons, explanations, pairs, cache state, exports."""

import json
import os
import re
import time

import nbformat
import numpy as np
import polars as pl
import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from oracle import IDENTITY, SMALL, Pages, chain_of
from synthetic_run import synthetic_run

from experiments.cache_state import CacheState, plot_prefix_tree, plot_prompt
from experiments.capacity import capacity_table, plot_capacity
from experiments.curves import lru_curve
from experiments.explain_run import explain_run
from experiments.export import export, export_notebook
from experiments.intervals import mean_interval
from experiments.live_policy import beside_replay, live_study, workload_trace
from experiments.paired import paired_difference, plot_paired_difference, settings_difference
from experiments.policy_comparison import PolicyComparison, available_traces
from experiments.policy_curves import CEILING, OPTIMUM
from experiments.replay import replay
from experiments.runs import Run
from experiments.sharing import share
from experiments.study import Study
from experiments.study.curves import plot_sweep, sweep_axes, sweep_data, sweep_measures
from experiments.traces import chat, rag
from experiments.widgets import CacheExplorer, ExplainCard, LiveChart, PolicyLab, RunBrowser, SweepPanel
from experiments.widgets.copy_text import CopyText
from experiments.widgets.live_chart import plotly_library
from experiments.widgets.row_table import RowTable
from experiments.widgets.sweep_form import SweepForm
from experiments.workloads import Request, Workload
from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError, UnknownNameError
from workbench.policies import policy, resolve_policy

SMALL_CHAT = chat(sessions=40)


@policy
class Recency:
    """Prefix LRU in the score form; with `worth` it is not."""

    fields = {"uses": "i4", "used": "f8"}
    scalars = {"worth": 0.0}

    def touch(self, c):
        self.uses[c] += 1
        self.used[c] = self.request

    def score(self, c):
        return self.used[c] + self.worth * min(self.uses[c] - 1, 3)


@policy
class NamesSeven:
    def on_insert(self, c):
        pass

    def on_hit(self, c):
        pass

    def evict(self):
        return 7


@policy
class Raises:
    compile = False

    def touch(self, c):
        raise RuntimeError("of my own <b>")

    def score(self, c):
        return 0.0


# ---------------------------------------------------------------- intervals


def test_interval_is_students():
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high - found.mean == pytest.approx(4.303 / np.sqrt(3), abs=1e-3)
    assert mean_interval([5.0]).high == np.inf and np.isnan(mean_interval([]).mean)
    assert mean_interval([1.0, 1.1, 0.9]).excludes_zero and not mean_interval([-1.0, 1.0]).excludes_zero


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = [found.low <= 0 <= found.high for found in (mean_interval(rng.normal(size=6)) for _ in range(2000))]
    assert 0.935 < np.mean(inside) < 0.965


# ---------------------------------------------------------------- comparison of policies


def test_a_policy_that_is_lru_differs_from_it_by_nothing():
    found = PolicyComparison(Recency, rivals=["lru", "mru"], seeds=2, capacities=3).run()
    assert found.broken is None and found.done == found.total == 3 * 5
    assert found.frame().filter(pl.col("policy") == "Recency").height == 3 * 2
    ahead = found.difference("lru")
    assert (ahead.mean, ahead.low, ahead.high, ahead.n) == (0.0, 0.0, 0.0, 2)
    assert found.difference("mru").mean > 1
    assert "no difference is shown" in found.verdict() and "n = 2 seeds" in found.verdict()
    rates = {
        name: found.frame().filter(pl.col("policy") == name)["hit_rate"] for name in (CEILING, OPTIMUM, "lru", "mru")
    }
    assert (rates[CEILING] >= rates[OPTIMUM]).all() and (rates[OPTIMUM] >= rates["lru"]).all()


def test_one_recorded_trace_is_judged_by_its_parts():
    found = PolicyComparison("fifo", rivals=["lru"], trace=SMALL_CHAT, capacities=2).run()
    assert found.samples_are == "parts of one trace" and found.difference().n == 20
    whole = replay(SMALL_CHAT, "fifo", capacity_chunks=found.capacities_chunks[0]).hit_rate
    shown = float(found.table().filter(pl.col("policy") == "Fifo").row(0)[1])
    assert shown == pytest.approx(100 * whole, abs=0.06)
    assert found.orphaned_share() > 0.01 and "of no use" in found.orphaned_text()


@pytest.mark.parametrize("broken, what", [(NamesSeven, "returned 7"), (Raises, "of my own")])
def test_a_broken_policy_is_named_with_its_victim_and_the_contract(broken, what):
    found = PolicyComparison(broken, seeds=1).run()
    assert what in found.broken.what and "capacity 24" in found.broken.where
    assert found.frame().is_empty() and "inserted and has not left" in found.verdict()


def test_comparisons_refuse_what_cannot_be():
    with pytest.raises(UnknownNameError, match="there are"):
        _ = PolicyComparison("fifo", trace="chatt").traces
    with pytest.raises(InvalidInputError, match="itself"):
        PolicyComparison(Recency, rivals=["lru", Recency])
    with pytest.raises(InvalidInputError, match="at least 1"):
        PolicyComparison("fifo", seeds=0)
    assert available_traces()[:3] == ["chat", "rag", "agent"]


# ---------------------------------------------------------------- LiveChart and PolicyLab


def test_charts_share_one_library_and_carry_figures_without_template():
    first, second = LiveChart(), LiveChart()
    assert first.library is second.library is plotly_library()
    found = PolicyComparison("fifo", rivals=["lru"], trace=SMALL_CHAT, capacities=2).run()
    first.show(found.figure(), alt="two lines")
    spec = json.loads(first.spec)
    assert {trace["name"] for trace in spec["data"]} == {"Fifo", "lru", CEILING, OPTIMUM}
    assert "template" not in spec["layout"] and len(first.spec) < 20_000 and first.alt == "two lines"
    assert len(LiveChart._esm) < 10_000 < 1_000_000 < len(plotly_library()._esm)


def test_panels_shadow_nothing_that_widgets_are_made_of(tmp_path):
    """A name such as `_compare` belongs to ipywidgets, which calls it when the front end sends something."""
    run = synthetic_run().save(tmp_path / "run")
    panels = [
        PolicyLab(Recency, rivals=["lru"]),
        RunBrowser(tmp_path),
        CacheExplorer(run, arm="memory"),
        ExplainCard(run),
        SweepPanel(small_study(tmp_path)),
        SweepForm("serving", {}),
    ]
    for panel in (*panels, LiveChart(), RowTable(caption="rows"), CopyText({})):
        base = next(cls for cls in type(panel).__mro__ if cls.__module__.startswith(("ipywidgets", "anywidget")))
        theirs = set(dir(base)) | set(vars(base()))
        ours = [cls for cls in type(panel).__mro__ if cls.__module__.startswith("experiments")]
        own = (set().union(*map(vars, ours)) | set(vars(panel)) - set(vars(base()))) - {"close"}
        assert {name for name in own & theirs if not name.startswith("__")} <= MADE_BY_METACLASSES


MADE_BY_METACLASSES = {
    "_esm",
    "_anywidget_commands",
    "_all_trait_default_generators",
    "_descriptors",
    "_instance_inits",
    "_static_immutable_initial_values",
    "_trait_default_generators",
    "_traits",
}


def test_lab_runs_without_a_front_end():
    lab = PolicyLab(Recency(worth=50.0), rivals=["lru"], trace=SMALL_CHAT, capacities=3).run()
    assert not lab.running and lab.frame().height > 0
    assert "done" in lab._status.value and lab.verdict().split(":")[0] in lab._verdict.value
    drawn = {trace["name"]: trace["x"] for trace in json.loads(lab.chart.spec)["data"]}
    assert len(drawn["Recency"]) == 3
    assert lab.figure().layout.yaxis.title.text == "hit rate by tokens (%)"


def test_lab_stops_within_a_second_and_runs_again():
    lab = PolicyLab(Recency, rivals=["lru", "arc", "s3fifo"], trace="rag", seeds=20, capacities=20)
    lab.comparison.check()  # compiled before the clock starts
    lab.start()
    assert soon(lambda: lab.comparison.done)
    began = time.monotonic()
    lab.stop()
    assert lab.wait(5) and time.monotonic() - began < 1
    assert 0 < lab.comparison.done < lab.comparison.total and "stopped" in lab._status.value
    lab._trace.value, lab._seeds.value, lab._rivals.value = "chat", 1, ("lru",)
    lab._settings["capacities"] = 2
    lab._run.click()
    assert lab.wait(60) and lab.comparison.done == lab.comparison.total == 2 * 4


def test_lab_shows_a_box_and_escapes_what_the_policy_said():
    lab = PolicyLab(Raises, rivals=["lru"], seeds=1).run()
    assert 'role="alert"' in lab._verdict.value and "of my own &lt;b&gt;" in lab._verdict.value
    assert "<b>\n" not in lab._verdict.value and "traceback" in lab._verdict.value
    assert not lab._run.disabled and lab._stop.disabled


def test_lab_exports_a_class_that_names_the_same_victims(tmp_path):
    path = PolicyLab(Recency, rivals=["lru"], seeds=1).export(tmp_path)
    again = resolve_policy(f"{path}:Recency")
    trace, options = rag(requests=300), {"capacity_chunks": 300, "record_victims": True}
    assert np.array_equal(replay(trace, again, **options).victims, replay(trace, Recency, **options).victims)
    with pytest.raises(InvalidInputError, match="source"):
        PolicyLab(policy(type("Nameless", (Recency,), {})), rivals=["lru"]).export(tmp_path)


def test_lab_exports_a_class_from_a_cell(tmp_path):
    shell = InteractiveShell()
    cell = """
from workbench.policies import policy
@policy
class FromCell:
    fields = {"used": "f8"}
    def touch(self, c):
        self.used[c] = math.sqrt(self.request)
    def score(self, c):
        return self.used[c]
"""
    assert shell.run_cell(f"import math{cell}").success
    path = PolicyLab(shell.user_ns["FromCell"], rivals=["lru"]).export(tmp_path)
    assert path.read_text().count("@policy") == 1 and "import math" in path.read_text()
    assert replay(SMALL_CHAT, f"{path}:FromCell", capacity_chunks=200).hit_rate > 0.1


@pytest.mark.vllm
@pytest.mark.slow
def test_vllms_own_manager_agrees_with_the_replay():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    found = PolicyLab(Recency(worth=100.0), rivals=["lru"], seeds=1).check_in_vllm()
    assert 0.05 < found.in_vllm < 0.9 and abs(found.in_vllm - found.in_replay) < 0.02


@pytest.mark.vllm
@pytest.mark.slow
def test_lab_serves_a_policy_under_real_vllm_beside_its_replay(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    lab = PolicyLab(Recency, rivals=["sieve"], seeds=1, runs=tmp_path)
    found = {(row["policy"], row["how"]): row for row in lab.run_live().iter_rows(named=True)}
    assert set(found) == {(name, how) for name in ("Recency", "sieve") for how in ("measured", "simulated")}
    for name in ("Recency", "sieve"):
        measured, simulated = found[name, "measured"], found[name, "simulated"]
        assert measured["prompt_tokens"] == simulated["prompt_tokens"] and measured["ttft_warm_mean_s"] > 0
        assert measured["evictions"] > 0 and abs(measured["hit_rate"] - simulated["hit_rate"]) < 0.03
    assert found["sieve", "measured"]["hit_tokens"] > found["Recency", "measured"]["hit_tokens"]
    assert "measured" in lab._live_rows.value


def test_capacity_table_is_the_curve_and_the_figure_names_the_knee():
    curve = lru_curve(SMALL_CHAT)
    table = capacity_table(curve, bytes_per_token=1 << 17)
    for row in table.iter_rows(named=True):
        assert curve.hit_rate(row["capacity_chunks"]) >= row["hit_rate_by_chunks"] - 1e-12
        assert curve.hit_rate(row["capacity_chunks"] - 1) < row["hit_rate_by_chunks"]
    assert any("knee" in trace.name for trace in plot_capacity(curve, bytes_per_token=1 << 17).data)


# ---------------------------------------------------------------- a policy live, beside its replay


def test_a_workload_as_a_trace_has_the_engines_chunks():
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 100, 40)
    prompts = [np.concatenate([shared, rng.integers(0, 100, n)]) for n in (10, 30, 3)]
    requests = [Request(f"r{n}", tokens, 0, n, 0, "cold") for n, tokens in enumerate([*prompts, prompts[1]])]
    workload = Workload("made", tuple(requests), 0, "three prompts that share 40 tokens, one of them twice")
    trace = workload_trace(workload, 16)
    assert trace.lengths.tolist() == [3, 4, 2, 4] and trace.distinct == 2 + 1 + 2 and trace.conflicts == 0
    found = replay(trace, "lru", capacity_chunks=100).hit_tokens
    assert found.tolist() == [0, 32, 32, 64] == workload.upper_bound_hit_tokens(16).tolist()


def test_live_studies_name_what_an_engine_can_import(tmp_path):
    study = PolicyLab(Recency, rivals=["sieve"], seeds=1, runs=tmp_path).live_study()
    own, rival = study.space["policy"]
    assert rival == "sieve" and own.endswith(":Recency") and type(resolve_policy(own)).__name__ == "Recency"
    assert PolicyLab("fifo", rivals=["lru"], seeds=1, runs=tmp_path).live_study().space["policy"] == ["fifo", "lru"]
    with pytest.raises(InvalidInputError, match="settings of its own"):
        PolicyLab(Recency(worth=3.0), rivals=["lru"], seeds=1, runs=tmp_path).live_study()
    assert beside_replay(live_study("lru", rival="fifo", runs=tmp_path)).is_empty(), "nothing has run"


def test_sharing_needs_three_questions_on_a_document(tmp_path):
    once = Workload("made", (Request("r0", np.arange(300), 0, 0, 0, "cold"),), 0, "one question")
    with pytest.raises(InvalidInputError, match="three questions"):
        share("random:tiny", once, runs=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing was begun"


# ---------------------------------------------------------------- sweeps


def small_study(runs, **changes) -> Study:
    made = {"space": {"chunk_tokens": [64, 96, 128], "policy": ["lru", "<b>"]}, "repeats": 2,
            "fixed": {"trace": "chat", "trace.sessions": 30, "capacity_tokens": 6400}}  # fmt: skip
    return Study("small", kind="replay", runs=runs, **(made | changes))


def study_frame(**columns) -> pl.DataFrame:
    return pl.DataFrame({"cell": [str(n) for n in range(len(columns["error"]))], **columns})


def test_sweeps_put_a_number_across_and_keep_each_lines_place():
    assert sweep_axes({"policy": ["a", "b"], "capacity_chunks": [1, 2], "chunk_tokens": [16, 32]}) == (
        "chunk_tokens", ["policy", "capacity_chunks"])  # fmt: skip
    assert sweep_axes({"trace": ["chat"], "policy": ["a", "b"]}) == ("policy", [])
    space = {"policy": ["a", "b"], "chunk_tokens": [16, 32]}
    frame = study_frame(policy=["b", "b", "b", "a"], chunk_tokens=[16, 16, 32, 16], hit_rate=[0.2, 0.4, 0.9, None],
                        error=["", "", "broken", ""])  # fmt: skip
    rate = sweep_measures("replay")[0]
    data = sweep_data(frame, space, rate)
    assert data.select("series", "place", "x", "n").rows() == [("b", 1, 16.0, 2)], "no failed cell, no missing value"
    assert data["mean"][0] == pytest.approx(0.3)
    assert data["high"][0] - data["mean"][0] == pytest.approx(12.706 * 0.1, rel=1e-3)
    figure = plot_sweep(data, kind="replay", measure=rate, across="chunk_tokens")
    assert figure.layout.title.subtitle.text.startswith("simulated") and figure.data[0].name == "b"
    assert figure.data[0].y == pytest.approx([30]) and figure.data[0].error_y.array[0] > 100, "in per cent"
    both = sweep_data(frame.with_columns(hit_rate=pl.lit(0.5), error=pl.lit("")), space, rate)
    colors = {trace.name: trace.line.color
              for trace in plot_sweep(both, kind="serving", measure=rate, across="chunk_tokens").data}  # fmt: skip
    assert colors["b"] == figure.data[0].line.color != colors["a"], "a line that comes later changes no colour"
    empty = plot_sweep(data.clear(), kind="serving", measure=rate, across="chunk_tokens")
    assert "no cell" in empty.layout.annotations[0].text and "measured" in empty.layout.title.subtitle.text


def test_a_sweep_runs_shows_its_failures_and_is_found_again(tmp_path):
    panel = SweepPanel(small_study(tmp_path))
    assert "press Run" in panel._status.value and panel._stop.disabled and panel._resume.disabled
    panel.run()
    assert panel.study.status().state == "finished" and panel.frame().height == 12
    table = json.loads(panel.table.content)
    assert len(table["rows"]) == 12 and sum(bool(row["error"]) for row in table["rows"]) == 8
    assert any("whole number" in row["error"] and "chunk_tokens 96" in row["label"] for row in table["rows"])
    assert "8 failed, done" in panel._status.value and not panel._resume.disabled, "failed cells can be tried again"
    assert {trace["name"] for trace in json.loads(panel.chart.spec)["data"]} == {"lru"}
    assert [trace.mode for trace in panel.figure().data] == ["lines", "lines+markers"], "a line and its band"
    line = re.search(r"SweepPanel\.attach\(&#x27;(.*?)&#x27;\)", panel._again.value)[1]
    again = SweepPanel.attach(line)
    assert again.frame().equals(panel.frame()) and again.table.content == panel.table.content
    with pytest.raises(InvalidInputError, match="not a study"):
        SweepPanel.attach(tmp_path)


def test_a_sweep_stops_within_a_second_from_anywhere_and_goes_on(tmp_path):
    fixed = {"trace": "chat", "trace.sessions": 4000, "capacity_tokens": 64000}
    panel = SweepPanel(small_study(tmp_path, fixed=fixed, repeats=20,
                                   space={"chunk_tokens": [64, 128], "policy": ["lru", "sieve"]}))  # fmt: skip
    panel._run.click()
    assert not panel._stop.disabled and soon(lambda: panel.study.status().done > 0, 60)
    asked = time.monotonic()
    Study.open(panel.study.folder).stop()  # as a terminal or another notebook would
    busy = os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)
    assert panel.wait(10) and time.monotonic() - asked < (5 if busy else 1.5)
    kept = panel.study.status().done
    assert 0 < kept < 80 and soon(lambda: not panel._resume.disabled) and "stopped" in panel._status.value
    panel._resume.click()
    assert soon(lambda: panel.study.status().done > kept, 60)
    psutil.Process(panel.study.status().pid).kill()  # nobody asked for this
    assert panel.wait(10) and soon(lambda: "ended before the study did" in panel._message.value)
    assert panel.frame()["cell"].is_unique().all() and not panel._resume.disabled


def test_choices_of_a_panel_become_a_study_and_its_texts(tmp_path):
    panel = SweepPanel(small_study(tmp_path, space={"chunk_tokens": [64, 128]}))
    assert panel._chosen() is panel.study
    form = panel._forms["replay"]
    form._controls["policy"].value = ("lru", "fifo")
    form._controls["chunk_tokens"].value = "64"
    panel._repeats.value = 3
    chosen = panel._chosen()
    assert chosen.space == {"policy": ["lru", "fifo"], "chunk_tokens": [64]} and chosen.repeats == 3
    assert chosen.fixed == {"trace": "chat", "capacity_tokens": 6400, "trace.sessions": 30}
    for text in (panel.copy_text.texts["YAML"], panel.copy_text.texts["CLI"].split("\n", 1)[1].rpartition("STUDY")[0]):
        assert Study.from_yaml(text) == chosen
    assert "Study(" in panel.copy_text.texts["Python"] and "fifo" in panel.copy_text.texts["Python"]
    form._controls["chunk_tokens"].value = "64, many"
    assert "whole numbers" in panel._message.value and "many" in panel._message.value
    form._controls["chunk_tokens"].value = "64"
    form._rest.value = "trace.sessions"
    assert "write name=value" in panel._message.value
    form._rest.value = "trace.sessions=20, 30; no_such=1"
    assert "no setting" in panel._message.value
    odd = {"trace": "chat", "capacity_tokens": 6400, "trace.path": "a, b", "trace.name": "[1", "trace.level": "800"}
    again = SweepPanel(small_study(tmp_path, space={"policy": ["lru"]}, fixed=odd))
    assert again._message.value == "" and again._chosen() is again.study, "every value is read as it was written"
    panel._kind.value = "serving"
    assert "measured" in panel._head.value and panel._chosen().kind == "serving"


def test_what_a_cell_said_cannot_become_markup(tmp_path):
    assert "innerHTML" not in RowTable._esm + CopyText._esm, "texts enter the page as texts"
    table = RowTable(caption="rows")
    table.show(pl.DataFrame({"a": [float("nan"), 1.5], "b": ["<i>", None], "error": ["", "<script>"]}), error="error")
    rows = json.loads(table.content)["rows"]
    assert [cell["text"] for cell in rows[0]["cells"]] == ["nan", "<i>"] and rows[1]["error"] == "<script>"
    assert rows[0]["cells"][0]["value"] is None
    panel = SweepPanel(small_study(tmp_path, space={"policy": ["<script>", "lru"]}))
    assert "<script>" not in panel._head.value + panel._status.value + panel._again.value


# ---------------------------------------------------------------- why did TTFT not fall


def changed(tmp_path, *, arm="disk", requests=None, events=None, **made):
    """A synthetic run whose frames were changed for one arm."""
    run = synthetic_run(**made)
    mine = pl.col("arm") == arm
    if requests:
        run.requests = run.requests.with_columns(
            pl.when(mine).then(e).otherwise(pl.col(c)).alias(c) for c, e in requests.items()
        )
    if events is not None:
        run.events = run.events.with_columns(
            pl.when(mine).then(e).otherwise(pl.col(c)).alias(c) for c, e in events.items()
        )
    return run.save(tmp_path / "run")


def causes(run, arm="disk"):
    return [finding.name for finding in explain_run(run, arm=arm).arms[0].causes]


def test_a_run_in_which_reuse_works_has_no_cause(tmp_path):
    explanation = explain_run(synthetic_run().save(tmp_path / "run"))
    assert [arm.arm for arm in explanation.arms] == ["memory", "disk"] and not explanation.arms[0].causes
    assert "repeated prompts: sooner" in str(explanation) and "24,320 from memory" in str(explanation)
    assert explanation.frame().height == 2 * 9


def test_eviction_before_reuse(tmp_path):
    run = synthetic_run(memory_chunks=20).save(tmp_path / "run")
    finding = explain_run(run, arm="memory").arms[0].causes[0]
    assert finding.name == "eviction before reuse" and "memory_bytes" in finding.mend
    lost = int(re.match(r"([\d,]+) tokens", finding.number)[1].replace(",", ""))
    again = run.requests.filter(pl.col("arm") == "memory", pl.col("expected_hit_tokens") > 0)
    assert lost == int((again["expected_hit_tokens"] - again["cached_tokens"]).sum())


NOTHING = pl.lit(0, pl.Int64)
CASES = {
    "only cold requests measured": {"requests": {"expected_hit_tokens": NOTHING, "cached_tokens": NOTHING}},
    "prompt too short": {"requests": {"prompt_tokens": pl.lit(200, pl.Int64), "cached_tokens": NOTHING}},
    "chunk larger than the shared prefix": {"requests": {"expected_hit_tokens": NOTHING, "cached_tokens": NOTHING}},
    "vLLM's own cache already hits": {"requests": {"local_hit_tokens": pl.col("cached_tokens")}},
    "load slower than prefill": {"requests": {"load_s": pl.col("external_hit_tokens") * 2e-3}},
    "waiting for a turn": {"requests": {"queue_s": pl.col("ttft_s") * 0.8}},
    "stores or loads failed": {
        "events": {"reason": pl.when(pl.col("kind") == "load").then(pl.lit("corrupt")).otherwise("reason")}
    },
    "keys do not match": {
        "requests": {"cached_tokens": NOTHING, "external_hit_tokens": NOTHING},
        "events": {"kind": pl.when(pl.col("kind") == "hit").then(pl.lit("miss")).otherwise("kind")},
    },
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_found_with_its_number_and_its_setting(cause, tmp_path):
    run = changed(tmp_path, **CASES[cause])
    found = {finding.name: finding for finding in explain_run(run, arm="disk").arms[0].causes}
    assert cause in found and found[cause].mend and re.search(r"\d", found[cause].number)
    assert not causes(run, arm="memory"), "the other arm is as it was"


def test_explanations_say_what_they_cannot_tell(tmp_path):
    run = changed(tmp_path, arms=("none", "memory"), arm="memory")
    findings = {f.name: f for f in explain_run(run).arms[0].findings}
    assert findings["chunk larger than the shared prefix"].state == "unknown"
    with pytest.raises(UnknownNameError, match="there are"):
        explain_run(run, arm="dsk")
    assert "Run synthetic" not in ExplainCard(run).value and run.run_id in ExplainCard(run).value


# ---------------------------------------------------------------- two runs


def test_pairs_find_what_was_done_and_nothing_else(tmp_path):
    first = synthetic_run().save(tmp_path / "a")
    faster = synthetic_run()
    faster.requests = faster.requests.with_columns(
        pl.when(pl.col("arm") == "disk").then(pl.col("ttft_s") / 2).otherwise("ttft_s").alias("ttft_s")
    )
    faster.environment["model"]["name"] = "Another"
    second = faster.save(tmp_path / "b")
    rows = {(row["arm"], row["phase"]): row for row in paired_difference(first, second).iter_rows(named=True)}
    assert (
        rows["disk", "again"]["ratio"] == pytest.approx(0.5) and rows["disk", "again"]["verdict"] == "second is sooner"
    )
    assert rows["none", "again"]["verdict"] == "no difference shown" and rows["none", "again"]["n"] == 10
    assert settings_difference(first, second).rows() == [("model.name", "Synthetic-135M-Instruct", "Another")]
    noisy = paired_difference(first, synthetic_run(seed=1).save(tmp_path / "c"))
    assert (noisy["low"] < noisy["ratio"]).all() and (noisy["ratio"] < noisy["high"]).all()


def test_runs_without_a_common_request_give_no_data(tmp_path):
    first, second = (synthetic_run(arms=(arm,)).save(tmp_path / arm) for arm in ("none", "disk"))
    difference = paired_difference(first, second)
    assert difference.is_empty() and "no data" in plot_paired_difference(difference).layout.annotations[0].text


def test_browser_filters_compares_and_exports(tmp_path):
    for number, seed in enumerate((0, 1, 2)):
        run = synthetic_run(seed=seed)
        run.environment["model"]["name"] = f"model-{seed}<x>"
        run.save(tmp_path / f"2026010{number}-run")
    browser = RunBrowser(tmp_path)
    assert (browser._first.value, browser._second.value) == ("20260101-run", "20260102-run")
    settings, measures = browser.choose("20260100-run", "20260102-run").differences()
    assert "model.name" in settings["setting"] and measures.height == 8
    assert "model-0&lt;x&gt;" in browser._table.value and "<x>" not in browser._table.value
    browser._filter.value = "MODEL-1"
    assert browser._first.options == browser._second.options == ("20260101-run",)
    browser._filter.value = "no such"
    assert "no run with these words" in browser._table.value
    browser._filter.value = ""
    browser._format.value = ".csv"
    browser._export.click()
    assert browser._work.wait(30) and (tmp_path / f"{browser._first.value}.csv").stat().st_size > 1000
    assert "kvworkbench demo" in RunBrowser(tmp_path / "nothing")._table.value


# ---------------------------------------------------------------- the state of a cache


def test_state_from_events_is_the_engines_own(tmp_path):
    rng, pages = np.random.default_rng(0), Pages(64)
    shared = rng.integers(0, 1000, 30)
    with CacheEngine(IDENTITY, memory_bytes=12 * SMALL.chunk_nbytes, disk_path=tmp_path, disk_bytes="400KiB") as engine:
        for _ in range(60):
            tokens = np.concatenate([shared[: rng.integers(0, 30)], rng.integers(0, 3, rng.integers(0, 30))])
            pages.compute(chain_of(tokens), range(64))
            engine.retrieve(tokens, pages.table, blocks=range(64))
            engine.store(tokens, pages.table, blocks=range(64))
        engine.flush()
        state = CacheState(engine.record.frame())
        own = {use.name: use.chunks for use in engine.tiers()}
        assert dict(state.tiers().select("tier", "chunks").iter_rows()) == own
        assert engine.record.totals.count("evict") > 5 and 0 < own["memory"] <= 12
        engine.retrieve(shared, pages.table, blocks=range(64))
        explorer = CacheExplorer(engine)
        looked_up = engine.record.frame().filter(pl.col("kind") == "lookup")["request"]
        prompt = explorer.state.prompt(looked_up[-1])
        assert prompt["key"].to_list()[:3] == [chunk.key.hex() for chunk in chain_of(shared)]
        assert prompt.height == 4, "and a tail, or what another chunk begins with"
        seen = explorer._events_seen
        engine.retrieve(shared, pages.table, blocks=range(64))
        assert explorer.refresh()._events_seen > seen
    for figure in (explorer.figure(), explorer.tree_figure()):
        assert "data" in figure.to_plotly_json()


def test_explorer_follows_a_live_engine_until_it_is_closed():
    pages = Pages(64)
    with CacheEngine(IDENTITY, memory_bytes=12 * SMALL.chunk_nbytes) as engine:
        explorer = CacheExplorer(engine)
        explorer._follow.value = True
        engine.store(range(30), pages.table, blocks=range(64))
        assert soon(lambda: "4 chunks" in explorer._summary.value)
    assert soon(lambda: not explorer._follow.value)


def test_explorer_reads_the_file_of_an_engine_in_another_process(tmp_path):
    pages, path = Pages(64), tmp_path / "events.jsonl"
    explorer = CacheExplorer(path)
    assert explorer.state.requests == [] and not explorer._follow.disabled, "it may come to be"
    with CacheEngine(IDENTITY, memory_bytes=12 * SMALL.chunk_nbytes, events_path=path) as engine:
        engine.store(range(30), pages.table, blocks=range(64))
        engine.retrieve(range(30), pages.table, blocks=range(64))
    path.write_bytes(path.read_bytes() + b'["half a')  # what a writer has just begun
    assert explorer.refresh().state.tiers().row(0)[:2] == ("memory", 4)
    assert set(explorer.state.prompt(explorer.state.requests[-1])["outcome"]) == {"hit"}


def soon(ready, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not ready():
        time.sleep(0.02)
    return ready()


def test_tree_has_every_chunk_below_its_parent(tmp_path):
    run = synthetic_run(memory_chunks=20).save(tmp_path / "run")
    explorer = CacheExplorer(run, arm="memory")
    tree = explorer.state.tree()
    assert tree.height == tree["key"].n_unique() and set(tree["parent"]) - {""} <= set(tree["key"])
    assert (tree["tier"] == "memory").sum() == 20, "as many as the memory tier held"
    assert "no chunk" in plot_prefix_tree(tree.clear()).layout.annotations[0].text
    assert "no request" in plot_prompt(explorer.state.prompt("none"), "none").layout.annotations[0].text
    with pytest.raises(UnknownNameError, match="there are"):
        CacheExplorer(run, arm="dsk")
    with pytest.raises(InvalidInputError, match="takes an engine"):
        CacheExplorer(3)


# ---------------------------------------------------------------- export


def notebook_with(figure, path):
    outputs = [
        nbformat.v4.new_output("display_data", {"application/vnd.plotly.v1+json": json.loads(figure.to_json())}),
        nbformat.v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}}),
    ]
    cells = [nbformat.v4.new_markdown_cell("# </script> $x$"), nbformat.v4.new_code_cell("1", outputs=outputs)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {"state": 1}}), path)
    return path


def test_an_exported_notebook_is_one_page_with_one_plotly(tmp_path):
    figure = plot_paired_difference(paired_difference(*(synthetic_run(seed=s).save(tmp_path / str(s)) for s in (0, 1))))
    figure.layout.title.text = "</script><script>alert(1)</script>"
    page = export(notebook_with(figure, tmp_path / "n.ipynb")).read_text()
    assert page.count("plotly.js v") == 1 and page.count('class="kv-figure"') == 1 and len(page) < 8e6
    assert "<script>alert(1)" not in page and "open the notebook to use it" in page
    assert not re.search(r"<(?:script|link|img|iframe)[^>]{0,200}(?:src|href)=.?(?:https?:)?//", page)
    assert "default-src 'none'" in page


def test_exports_refuse_what_they_cannot_write(tmp_path):
    run = synthetic_run().save(tmp_path / "run")
    with pytest.raises(InvalidInputError, match=r"use \.html"):
        export(run.folder, tmp_path / "x.xlsx")
    with pytest.raises(InvalidInputError, match="not a run"):
        export(tmp_path)
    empty = tmp_path / "empty.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), empty)
    with pytest.raises(InvalidInputError, match="no outputs"):
        export(empty)
    with pytest.raises(InvalidInputError, match=r"must end in \.html"):
        export_notebook(empty, tmp_path / "x.pdf")


def test_an_exported_run_holds_every_request(tmp_path):
    run = synthetic_run().save(tmp_path / "run")
    assert pl.read_parquet(export(run.folder, tmp_path / "x.parquet")).equals(run.requests)
    assert pl.read_csv(export(run.folder, tmp_path / "x.csv")).height == run.requests.height
    assert isinstance(Run(run.folder), Run)
