"""Studies of real vLLM: engines are shared, cells are cold, rows say what ran; and the parts that need no engine."""

import pytest

from experiments.intervals import percentile
from experiments.study import ENGINES_AT_ONCE, Study
from experiments.study_cells import mismatches
from experiments.study_points import make_cell
from experiments.study_serving import cache_settings, engine_name
from workbench.errors import InvalidInputError

MODEL = "random:llama-2layer-h64"


def cell(**settings):
    return make_cell({"model": MODEL, **settings}, 0, 0)


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
    assert engine_name(cell(arm="disk")) != engine_name(cell(arm="disk", workload="chat")), "not ours to empty"


def test_24_cells_of_the_example_start_13_engines_each_once_and_at_most_four_live_together():
    from experiments.study_texts import EXAMPLE

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
    from experiments.study_tables import _prompts_of

    row = {"settings": {"model": "m", "workload": "chat", "arm": "none", "chunk_tokens": 128}, "repeat": 0}
    same = {"settings": {**row["settings"], "arm": "cache", "chunk_tokens": 256, "codec": "int8"}, "repeat": 0}
    other = {"settings": {**row["settings"], "workload": "rag"}, "repeat": 0}
    assert _prompts_of(row) == _prompts_of(same) != _prompts_of(other) != _prompts_of({**row, "repeat": 1})


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
        assert row["hit_rate"] == (row["hit_rate_bound"] if arm == "cache" else 0.0)
        assert row["equal_answers"] is not None and row["evictions"] == (0 if arm == "cache" else None)
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
