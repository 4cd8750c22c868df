"""Studies of real vLLM: engines are shared, cells are cold, rows say what ran; and the parts that need no engine."""

import json

import polars as pl
import pytest

from experiments.arms import Arm
from experiments.intervals import percentile
from experiments.serving import EngineProcess
from experiments.study import ENGINES_AT_ONCE, Study
from experiments.study.cells import mismatches
from experiments.study.engines import Engine, cache_settings, engine_name
from experiments.study.measures import EventSums, load_figures, loaded_answer, request_row
from experiments.study.points import make_cell
from experiments.workloads import Request
from workbench.errors import InvalidInputError
from workbench.events import Event

MODEL = "random:llama-2layer-h64"


def cell(**settings):
    return make_cell({"model": MODEL, **settings}, 0, 0)


def event(kind: str, request: str, *, seconds: float = 0.0) -> Event:
    return Event(0.0, kind, "memory", request, "", 0, 0, 0, seconds, "")


# --- settings


def test_settings_become_those_of_the_engine():
    assert cache_settings({}) == {"memory_bytes": "1GiB"}
    assert cache_settings({"tier": "memory", "codec": "int8", "policy": "arc", "chunk_tokens": 128}) == {
        "memory_bytes": "1GiB", "memory_codec": "int8", "policy": "arc", "chunk_tokens": 128,
    }  # fmt: skip
    disk = {"tier": "disk", "codec": "int8", "policy": "arc", "disk_bytes": "2GiB", "cache.verify": True}
    assert cache_settings(disk) == {
        "memory_bytes": 0, "codec": "int8", "disk_policy": "arc", "disk_bytes": "2GiB", "verify": True,
    }  # fmt: skip
    assert cache_settings({"tier": "memory+disk", "codec": "int8", "policy": "arc"}) == {
        "memory_bytes": "1GiB", "codec": "int8", "policy": "arc", "disk_policy": "arc",
    }  # fmt: skip
    with pytest.raises(InvalidInputError, match="'dsik' is not one of memory, disk"):
        cache_settings({"tier": "dsik"})
    assert cache_settings({"tier": "redis"})["redis_url"] == "redis://127.0.0.1:$redis_port/0", "a server of its own"
    assert cache_settings({"tier": "redis", "redis_url": "redis://host:1/0"})["redis_url"] == "redis://host:1/0"


def test_cells_share_an_engine_where_nothing_of_it_differs():
    assert engine_name(cell(arm="none", chunk_tokens=128, tier="disk")) == engine_name(cell(arm="none", codec="int8"))
    assert engine_name(cell(chunk_tokens=128)) == engine_name(cell(chunk_tokens=128, workload="chat"))
    different = [cell(), cell(arm="none"), cell(arm="prefix_cache"), cell(chunk_tokens=128), cell(codec="int8"),
                 cell(tier="disk"), cell(threads=1), cell(**{"vllm.block_size": 32}), cell(memory_bytes=5)]  # fmt: skip
    assert len({engine_name(c) for c in different}) == len(different)
    assert engine_name(cell(arm="lmcache")) != engine_name(cell(arm="lmcache", workload="chat")), "not ours to empty"
    rates = {engine_name(cell(request_rate=rate)) for rate in (1.0, 2.0, None)} | {engine_name(cell(concurrency=4))}
    assert len(rates) == 2, "one server for every load, and an engine in process"


def test_the_arms_of_this_engine_take_its_settings_and_name_their_tier():
    for tier in ("memory", "disk", "redis", "object_store"):
        more = {"chunk_tokens": 128, "codec": "int8"}
        assert cache_settings({"arm": tier, **more}) == cache_settings({"arm": "cache", "tier": tier, **more})
        assert engine_name(cell(arm=tier, **more)) != engine_name(cell(arm=tier))
        assert engine_name(cell(arm=tier)) == engine_name(cell(arm=tier, workload="chat"))
    with pytest.raises(InvalidInputError, match="'memory' has a tier of its own"):
        cache_settings({"arm": "memory", "tier": "disk"})


def test_what_a_request_under_load_shows():
    from types import SimpleNamespace

    sent = {"sent_as": "ab.r0", "scheduled_s": 3.0, "queue_s": 0.01, "ttft_s": 0.5, "e2e_s": 0.7, "itl_s": 0.1,
            "server_queue_s": 0.2, "server_ttft_s": 0.25, "cached_tokens": None, "token_ids": [1, 2], "error": "",
            "finish_reason": "length"}  # fmt: skip
    request = Request("r0", list(range(100)), 0, 0, 0, "cold")
    events = [event("load", "0:ab.r0", seconds=0.05), event("load", "0:ab.r1", seconds=9.0)]
    arm = SimpleNamespace(name="memory", label="m")
    row = request_row(arm, request, 0, loaded_answer(sent), EventSums(events))
    assert (row["ttft_s"], row["queue_s"], row["load_s"], row["cached_tokens"]) == (0.5, 0.2, 0.05, 0)
    assert row["prefill_s"] == pytest.approx(0.2) and (row["scheduled_s"], row["sent_late_s"]) == (3.0, 0.01)
    lost = loaded_answer({**sent, "ttft_s": None, "server_ttft_s": None, "error": "HTTP 500", "finish_reason": None})
    failed = request_row(arm, request, 0, lost, EventSums([]))
    assert failed["error"] == "HTTP 500" and failed["prefill_s"] is None

    rows = [{**row, "scheduled_s": float(n), "sent_late_s": n / 100} for n in range(5)] + [failed]
    figures = load_figures(rows)
    assert figures["requests_per_s"] == pytest.approx(5 / 4.7) and figures["sent_late_most_s"] == 0.04
    assert load_figures([failed])["requests_per_s"] is None


def test_requests_are_named_alike_in_process_and_behind_a_server(tmp_path):
    path = tmp_path / "events.jsonl"
    names = ("12-0a1b2c3d", "cmpl-ab.g0-d1-q0-0-0a1b2c3d", "ab.x")
    path.write_text("".join(json.dumps(event("lookup", name)) + "\n" for name in names) + "[1, ")
    engine = Engine(None, None, {}, {}, path, None)
    assert [event.request for event in engine.new_events(1)] == ["1:12", "1:ab.g0-d1-q0", "1:ab.x"]
    assert engine.new_events() == [], "half a line is left for the next time"


def test_24_cells_of_the_example_start_13_engines_each_once_and_at_most_four_live_together():
    from experiments.study.texts import EXAMPLE

    study = Study.from_yaml(EXAMPLE)
    cells = study.cells()
    assert len(cells) == 24
    alive, started, most = set(), [], 0
    for number, one in enumerate(cells):
        name = engine_name(one)
        if name not in alive:
            alive &= {engine_name(later) for later in cells[number:]}
            alive.add(name)
            started.append(name)
        most = max(most, len(alive))
    assert len(started) == len(set(started)) == 13 and most <= ENGINES_AT_ONCE + 1
    pairs = [{cells[i].settings["arm"], cells[i + 1].settings["arm"]} for i in range(0, 24, 2)]
    assert pairs == [{"none", "cache"}] * 12, "arms side by side"


@pytest.mark.parametrize(("percent", "n"), [(50, 5), (90, 29), (95, 59), (99, 299)])
def test_no_percentile_without_enough_values(percent, n):
    assert percentile([1.0] * (n - 1) + [None], percent) is None
    assert percentile(list(map(float, range(n))), percent) == pytest.approx((n - 1) * percent / 100)


def test_a_baseline_is_found_by_its_prompts_whatever_the_cache_was():
    from experiments.study.tables import _prompts_of

    row = {"settings": {"model": "m", "workload": "chat", "arm": "none", "chunk_tokens": 128}, "repeat": 0}
    same = {"settings": {**row["settings"], "arm": "cache", "chunk_tokens": 256, "codec": "int8"}, "repeat": 0}
    other = {"settings": {**row["settings"], "workload": "rag"}, "repeat": 0}
    assert _prompts_of(row) == _prompts_of(same) != _prompts_of(other) != _prompts_of({**row, "repeat": 1})


def test_a_warm_up_lasts_until_its_prompt_is_found_where_it_can_be(tmp_path):
    """A codec that compiles behind a queue of writes would otherwise make the first cells miss."""

    class Answering(EngineProcess):
        def generate(self, token_ids, **options):
            asked.append(len(token_ids))
            return {"cached_tokens": 256 if len(asked) >= 5 else 0}

    for cache, times in (({"memory_bytes": 1}, 5), (None, 2), ({"chunk_tokens": 4096, "partial_hits": False}, 2)):
        asked: list[int] = []
        arm = Arm("made", "made", cache=cache)
        said = {"max_model_len": 4096, "block_size": 128}
        Engine(Answering("model", log=tmp_path / "log"), arm, said, {}, tmp_path / "events", None).warm_up()
        assert asked == [640] * times, cache


def test_an_arm_that_cannot_run_is_a_row_with_the_reason_and_the_study_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("KVWORKBENCH_LMCACHE_PYTHON", raising=False)
    study = Study("missing", kind="serving", runs=tmp_path, space={"arm": ["lmcache", "disk"]},
                  fixed={"model": MODEL, "workload": "shared_prefix", "workload.prefix_tokens": 200,
                         "workload.questions": 2, "request_rate": 1.0}).run()  # fmt: skip
    errors = {row["settings"]["arm"]: row["error"] for row in study.rows()}
    assert "set KVWORKBENCH_LMCACHE_PYTHON" in errors["lmcache"] and "restarts vLLM" in errors["disk"]
    assert study.status().state == "finished" and study.status().failed == 2 and study.requests().is_empty()
    assert "no data" in study.plot("ttft_by_rate").layout.annotations[0].text


# --- real vLLM


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    runs = tmp_path_factory.mktemp("runs")
    return Study(
        "real", kind="serving", runs=runs, repeats=2,
        space={"arm": ["none", "cache"], "workload.document_tokens": [500, 700]},
        fixed={"model": MODEL, "workload": "long_document", "workload.groups": 5, "workload.documents_per_group": 1,
               "workload.max_tokens": 4, "chunk_tokens": 128, "tier": "disk", "codec": "lossless", "threads": 1},
    ).run()  # fmt: skip


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_real_study_measures_cold_cells_on_two_engines(study):
    frame = study.frame()
    assert study.status().state == "finished" and frame.height == 8
    assert set(frame["error"]) == set(frame["contaminated"]) == {""} and set(frame["badge"]) == {"measured"}
    assert frame["engine_start_s"].drop_nulls().len() == 2, "eight cells, two engines"
    rows = {(r["arm"], r["workload.document_tokens"], r["repeat"]): r for r in frame.to_dicts()}
    for (arm, _, _), row in rows.items():
        assert row["n"] == 10 and row["ttft_cold_s"] > 0 and row["ttft_warm_s"] > 0 and row["ttft_p90_s"] is None
        assert (row["hit_rate"] > 0.4) if arm == "cache" else row["hit_rate"] == 0.0
        assert row["equal_answers"] is not None and row["evictions"] == (0 if arm == "cache" else None)
    short = study.requests().filter(arm="cache").select(pl.col("expected_hit_tokens") - pl.col("cached_tokens"))
    assert short.min().item() >= 0 and short.max().item() < 128, "within a chunk of the most that could hit"
    one = rows["cache", 500, 0]
    assert one["bytes_per_token"] > 0 and one["bytes_loaded"] > 0 and one["load_s"] is not None
    assert one["effective.tiers.disk.codec"].startswith("lossless") and one["effective.chunk_tokens"] == 128


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_its_requests_pair_with_no_reuse_and_its_plots_draw(study):
    from experiments.summary import paired_requests

    pairs = paired_requests(study.requests())
    assert pairs.height == 40 and set(pairs["arm"]) == {"cache"}, "two lengths, two repeats, ten prompts"
    for name in ("ttft_ecdf", "ttft_by_length", "pareto", "parallel_coordinates"):
        figure = study.plot(name)
        assert figure.data and figure.layout.title.subtitle.text.startswith("measured"), name


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_row_says_when_something_else_runs(study):
    row = next(row for row in study.rows() if row["settings"]["arm"] == "cache")
    effective = row["effective"]
    assert "tiers.disk.codec" in mismatches({"tiers.disk.codec": "raw"}, effective)
    assert mismatches({"kv_connector": "WorkbenchConnector", "threads": 1}, effective) == ""
    assert "threads is 1, asked was 2" in mismatches({"threads": 2}, effective)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_study_under_load_sends_when_due_and_finds_what_it_stored(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    study = Study(
        "load", kind="serving", runs=tmp_path, space={"request_rate": [5.0, 20.0]},
        fixed={"model": MODEL, "workload": "shared_prefix", "workload.prefix_tokens": 600, "workload.questions": 12,
               "workload.max_tokens": 4, "chunk_tokens": 128, "threads": 1, "arm": "memory"},
    ).run()  # fmt: skip
    frame, requests = study.frame(), study.requests()
    assert frame.height == 2 and set(frame["error"]) == set(frame["contaminated"]) == {""}, frame["error"].to_list()
    assert frame["engine_start_s"].drop_nulls().len() == 1, "one server for both rates"
    assert set(frame["effective.max_model_len"].drop_nulls()) and frame["requests_per_s"].min() > 0
    for row in study.rows():
        due = [request["scheduled_s"] for request in row["requests"]]
        assert due[0] == 0 and due == sorted(due) and due[-1] > 5 / row["settings"]["request_rate"]
        assert all(r["ttft_s"] >= r["sent_late_s"] >= 0 for r in row["requests"])
        assert row["requests"][0]["cached_tokens"] == 0 and row["results"]["hit_tokens"] >= 5 * 512, "emptied between"
        assert row["results"]["load_s"] > 0 and row["results"]["queue_s"] >= 0 and row["results"]["prefill_s"] > 0
    (events,) = study.folder.rglob("events.jsonl")
    assert '"cleared"' in events.read_text(), "a server is emptied between two cells"
    slow, fast = (requests.filter(request_rate=rate)["scheduled_s"].to_list() for rate in (5.0, 20.0))
    assert slow == pytest.approx([4 * at for at in fast]), "the same arrivals, stretched"
    assert study.plot("ttft_by_rate").data[0].name.endswith("median")
