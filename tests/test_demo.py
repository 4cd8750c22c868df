"""The main job, end to end, on the small random model: arms, restart, run store, report."""

import numpy as np
import polars as pl
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

from experiments.demo import compare
from experiments.models import resolve_model
from experiments.report import write_report
from experiments.runs import Run
from experiments.serving import Arm, EngineError, EngineProcess, arm_by_name
from experiments.workloads import Request, Workload
from workbench.errors import InvalidInputError, UnknownNameError

MODEL = "random:llama-2layer-h64"


def workload():
    """Two documents behind one system prompt, two questions each."""
    rng = np.random.default_rng(0)
    system = rng.integers(3, 250, 300)
    documents = [np.concatenate([system, rng.integers(3, 250, 400)]) for _ in range(2)]
    requests = [
        Request(f"d{d}-q{q}", np.concatenate([documents[d], rng.integers(3, 250, 30)]), group=0, document=d, question=q,
                kind="warm", max_tokens=4)
        for q in range(2) for d in range(2)
    ]  # fmt: skip
    return Workload("test", tuple(requests), 0, "two documents")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    seen = []
    folder = tmp_path_factory.mktemp("runs")
    run = compare(MODEL, workload(), arms=["none", "memory", "disk"], runs=folder, threads=1, watch=seen.append)
    assert [p.done for p in seen] == list(range(seen[0].total)), "the progress bar ends where it said it would"
    assert seen[-1].seconds_left is not None
    return run


def test_what_is_reused_is_what_the_counters_say(run):
    rows = {(r["arm"], r["request_id"]): r for r in run.requests.to_dicts()}
    assert all(rows["none", name]["cached_tokens"] == 0 for _, name in rows)
    for arm in ("memory", "disk"):
        assert [rows[arm, f"d{d}-q{q}"]["kind"] for q in (0, 1) for d in (0, 1)] == [
            "cold",
            "system",
            "document",
            "document",
        ]
        for name in ("d0-q1", "d1-q1"):
            row = rows[arm, name]
            assert row["external_hit_tokens"] == row["cached_tokens"] == row["expected_hit_tokens"] == 700
            assert row["load_s"] > 0 and row["prefill_s"] > 0
            assert row["ttft_s"] == pytest.approx(row["queue_s"] + row["load_s"] + row["prefill_s"], abs=0.02)
        assert rows[arm, "d0-q0"]["load_s"] == 0


def test_events_belong_to_arms_and_requests(run):
    loads = run.events.filter(pl.col("kind") == "load")
    assert set(loads["arm"].unique()) == {"memory", "disk"}
    warm = run.requests.filter((pl.col("arm") == "disk") & (pl.col("phase") == "again"))
    assert all(name.startswith("1:") for name in warm["engine_request"]), "asked after the restart"
    of_warm = loads.filter((pl.col("arm") == "disk") & pl.col("request").is_in(warm["engine_request"].to_list()))
    assert 0 <= of_warm["tokens"].sum() - warm["cached_tokens"].sum() < 256 * len(warm)
    assert set(of_warm["tier"]) == {"disk"}
    assert run.events.filter(pl.col("request").str.ends_with(":0")).is_empty(), "warm-up is in no statistic"


def test_the_run_can_be_read_again_and_reported(run):
    again = Run(run.folder)
    assert again.requests.equals(run.requests)
    arms = again.environment["arms"]
    assert arms["memory"]["kv_connector"] == "WorkbenchConnector" and arms["none"]["kv_connector"] is None
    assert {settings["threads"] for settings in arms.values()} == {1}
    assert not list(run.folder.glob("tier-*")), "the disk tier is gone"
    page = write_report(run.folder)
    assert page.stat().st_size < 8 << 20


def test_mistakes_are_found_before_anything_starts(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'memory'"):
        arm_by_name("memroy")
    with pytest.raises(InvalidInputError, match="did you mean 'memory_bytes'"):
        EngineProcess("model", cache={"memory_byte": 1})
    with pytest.raises(InvalidInputError, match="not all different"):
        compare(MODEL, workload(), arms=["none", Arm("none", "again")], runs=tmp_path)


def test_an_engine_that_cannot_start_says_why(tmp_path):
    model = str(resolve_model(MODEL, progress=False).path)
    with pytest.raises(EngineError, match="not a multiple of the block size"):
        EngineProcess(
            model,
            cache={"chunk_tokens": 100},
            vllm={"max_model_len": 256, "kv_cache_memory_bytes": 16 << 20},
            log=tmp_path / "log",
        ).start()


def test_the_quickstart_notebook_runs_from_top_to_bottom(monkeypatch):
    from experiments.notebook_files import FIGURE, notebook_sources, run_notebook

    monkeypatch.setenv("KVWORKBENCH_MODEL", MODEL)
    source = next(path for path in notebook_sources() if path.stem == "00_quickstart")
    notebook = run_notebook(source, seconds=600)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(FIGURE in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    cold, warm = (line for line in text.splitlines() if line.startswith(("cold:", "warm:")))
    assert " 0 tokens reused" in cold and " 0 tokens reused" not in warm
