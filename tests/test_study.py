"""Studies of small simulations: descriptions, order, resume after a kill, stop, searches, failed cells."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import psutil
import pytest
import yaml

from experiments.study import Study, list_studies
from experiments.study.cells import CellRunner, mismatches
from experiments.study.points import BayesianSearch, in_blocks, make_cell, space_points
from experiments.study.store import StudyStatus, StudyStore
from experiments.study.texts import EXAMPLE
from workbench.errors import InvalidInputError, UnknownNameError

TRACE = {"trace": "chat", "trace.sessions": 8}
SPACE = {"chunk_tokens": [64, 128], "policy": ["lru", "s3fifo"], "capacity_tokens": [4_000, 16_000]}

# A policy that numba does not take, so that a cell lasts as long as the test needs it to.
SLOW_POLICY = '''
import time

from workbench.policies import policy


@policy
class Slow:
    """Evicts the newest after a nap."""

    compile = False
    fields = dict(older="i4")
    scalars = dict(top=-1)

    def on_insert(self, c):
        self.older[c] = self.top
        self.top = c

    def on_hit(self, c):
        pass

    def evict(self):
        time.sleep({seconds})
        c = self.top
        self.top = self.older[c]
        return c
'''


def make_study(runs: Path, *, name="tiny", space=SPACE, **settings) -> Study:
    settings.setdefault("fixed", TRACE)
    return Study(name, kind="replay", space=space, runs=runs, **settings)


def slow_policy(folder: Path, seconds: float) -> str:
    path = folder / "slow.py"
    path.write_text(SLOW_POLICY.replace("{seconds}", str(seconds)))
    return f"{path}:Slow"


def wait_for(condition, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Study:
    return make_study(tmp_path_factory.mktemp("runs"), repeats=2).run()


# --- what a study is


def test_every_combination_is_a_cell_and_every_repeat_has_its_own_seed(tmp_path):
    study = make_study(tmp_path, repeats=3, seed=7)
    cells = study.cells()
    assert len(cells) == study.total == 24 and len({cell.key for cell in cells}) == 24
    assert {cell.seed for cell in cells} == {7, 8, 9}
    assert {tuple(cell.settings[name] for name in SPACE) for cell in cells} == {
        (chunk, policy, capacity)
        for chunk in SPACE["chunk_tokens"]
        for policy in SPACE["policy"]
        for capacity in SPACE["capacity_tokens"]
    }
    assert all(cell.settings["trace"] == "chat" for cell in cells)


def test_keys_stay_the_same_from_process_to_process_and_follow_every_setting():
    cell = make_cell({"policy": "lru", "capacity_chunks": 5}, 0, 0)
    assert cell.key == "c741dded8968f65e"
    assert cell.key == make_cell({"capacity_chunks": 5, "policy": "lru"}, 0, 0).key
    others = [({"policy": "arc", "capacity_chunks": 5}, 0, 0), ({"policy": "lru", "capacity_chunks": 6}, 0, 0),
              ({"policy": "lru", "capacity_chunks": 5}, 1, 0), ({"policy": "lru", "capacity_chunks": 5}, 0, 1),
              ({"policy": "lru", "capacity_chunks": "5"}, 0, 0)]  # fmt: skip
    assert len({cell.key, *(make_cell(*other).key for other in others)}) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "replays"}, "did you mean 'replay'"),
        ({"search": "gird"}, "did you mean 'grid'"),
        ({"space": {"polcy": ["lru"]}}, "did you mean 'policy'"),
        ({"space": {"arm": ["none"]}}, "a replay study has no setting 'arm'"),
        ({"space": {"policy": "lru"}}, "takes a list of values"),
        ({"space": {"policy": []}}, "at least one"),
        ({"space": {"policy": ["lru", "lru"]}}, "each once"),
        ({"space": {"capacity_chunks": [float("inf")]}}, "finite"),
        ({"space": {"policy": [object()]}}, "a text, a finite number"),
        ({"fixed": {"policy": "lru"}}, "stand in space and in fixed"),
        ({"repeats": 0}, "at least 1"),
        ({"search": "random"}, "needs trials"),
        ({"search": "bayes", "trials": 3}, "give 'min <column>'"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(settings, message, tmp_path):
    given = {"kind": "replay", "space": SPACE, "fixed": TRACE, "runs": tmp_path, **settings}
    with pytest.raises(InvalidInputError, match=message):
        Study("wrong", **given)
    assert not list(tmp_path.iterdir())


def test_numpy_values_ranges_and_paths_become_plain(tmp_path):
    import numpy as np

    study = Study("plain", kind="replay", runs=tmp_path, fixed={"trace": tmp_path / "t.jsonl"},
                  space={"capacity_chunks": np.array([4, 8]), "trace.seed": range(2)})  # fmt: skip
    assert study.space == {"capacity_chunks": [4, 8], "trace.seed": [0, 1]}
    assert type(study.space["capacity_chunks"][0]) is int and study.fixed["trace"] == str(tmp_path / "t.jsonl")


# --- texts


def test_a_study_survives_yaml_with_every_kind_of_value(tmp_path):
    study = Study(
        "many: kinds", kind="serving", runs=tmp_path, repeats=2, search="bayes", trials=5, objective="min ttft_s",
        seed=3, space={"codec": ["raw", "int4(group=32)"], "memory_bytes": [0, "1GiB", 5_000_000],
                       "vllm.enforce_eager": [True]},
        fixed={"workload.permuted_share": 0.5, "redis_url": None, "policy": "my file.py:Über", "model": "007"},
    )  # fmt: skip
    again = Study.from_yaml(study.to_yaml(), runs=tmp_path)
    assert again == study and again.fixed["model"] == "007"
    assert [c.key for c in again.blocks(space_points(again.space))[0]] == [
        c.key for c in study.blocks(space_points(study.space))[0]
    ]
    (tmp_path / "study.yaml").write_text(study.to_yaml())
    assert Study.from_yaml(tmp_path / "study.yaml") == Study.from_yaml(str(tmp_path / "study.yaml")) == study


def test_the_python_text_makes_and_runs_the_same_study(tmp_path):
    study = make_study(tmp_path, space={"policy": ["lru", "fifo"]}, fixed={**TRACE, "capacity_chunks": 50}, seed=2)
    names: dict = {}
    exec(compile(study.to_python(), "copied", "exec"), names)
    assert names["study"] == study and names["study"].runs == tmp_path
    assert names["study"].status().state == "finished" and names["study"].frame().height == 2


def test_the_command_text_runs_in_a_shell(tmp_path):
    study = make_study(tmp_path, space={"policy": ["lru"]}, fixed={**TRACE, "capacity_chunks": 50})
    command = study.to_command().replace("kvworkbench sweep -", f"kvworkbench sweep - --json --runs {tmp_path}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PATH": path})  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["policy"] == "lru" and row["badge"] == "simulated" and row["error"] == ""
    assert [s.status().state for s in list_studies(tmp_path)] == ["finished"]


def test_the_example_of_the_command_line_is_a_study():
    study = Study.from_yaml(EXAMPLE)
    assert study.total == 24 and study.kind == "serving"
    assert yaml.safe_load(EXAMPLE)["fixed"]["model"] == "smollm2"


@pytest.mark.parametrize("text", ["[1, 2]\n", "name: x\n", "a: b: c\n", "name: x\nspace: {policy: [lru]}\ncell: 1\n"])
def test_a_text_that_is_no_study_is_refused(text):
    with pytest.raises(InvalidInputError):
        Study.from_yaml(text)


def test_a_folder_that_is_no_study_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="is not a study"):
        Study.open(tmp_path)


# --- order


def test_arms_stand_side_by_side_and_take_turns_at_being_first():
    points = space_points({"chunk_tokens": [128, 256, 512], "arm": ["none", "cache"]})
    cells = [make_cell(p, repeat, 0) for p in points for repeat in range(2)]

    def engine(cell):
        return cell.settings["arm"] if cell.settings["arm"] == "none" else cell.settings["chunk_tokens"]

    (first, second, third) = in_blocks(cells, engine_of=engine, engines_at_once=2)
    for block, chunk in zip((first, second, third), (128, 256, 512), strict=True):
        assert [(c.settings["arm"], c.repeat) for c in block] == [("none", 0), ("cache", 0), ("cache", 1), ("none", 1)]
        assert {c.settings["chunk_tokens"] for c in block} == {chunk}
    (together,) = in_blocks(cells, engine_of=engine, engines_at_once=4)
    assert [(c.settings["chunk_tokens"], c.settings["arm"]) for c in together if c.repeat == 1] == [
        (256, "cache"), (256, "none"), (512, "none"), (512, "cache"), (128, "cache"), (128, "none")
    ]  # fmt: skip


def test_no_engine_is_needed_again_after_others_took_its_place():
    points = space_points({"workload.document_tokens": [500, 1000], "chunk_tokens": [128, 256, 512], "arm": ["cache"]})
    cells = [make_cell(p, 0, 0) for p in points]
    found = in_blocks(cells, engine_of=lambda c: c.settings["chunk_tokens"], engines_at_once=1)
    order = [[c.settings["chunk_tokens"] for c in block] for block in found]
    assert order == [[128, 128], [256, 256], [512, 512]]


# --- running


def test_a_study_ends_with_one_row_a_cell(finished):
    frame = finished.frame()
    assert finished.status() == StudyStatus("finished", 16, 0, 16, None, "", os.getpid(), finished.status().updated)
    assert frame.height == 16 and frame["cell"].n_unique() == 16 and set(frame["error"]) == {""}
    assert frame.select("chunk_tokens", "policy", "capacity_tokens").n_unique() == 8
    assert set(frame["badge"]) == {"simulated"} and frame["commit"].null_count() in (0, 16)
    assert (frame["effective.chunk_tokens"] == frame["chunk_tokens"]).all()
    read = pl.read_parquet(finished.folder / "cells.parquet")
    assert read.equals(frame)
    assert sorted(path.name for path in finished.folder.iterdir() if path.suffix != ".txt") == [
        "cells", "cells.parquet", "runner.lock", "status.json", "study.yaml"
    ]  # fmt: skip


def test_the_rows_say_what_replay_says(finished):
    from experiments.replay import replay
    from experiments.traces import chat

    for row in finished.frame().filter(pl.col("chunk_tokens") == 128).iter_rows(named=True):
        trace = chat(sessions=8, seed=row["repeat"]).coarsen(2)
        own = replay(trace, row["policy"], capacity_chunks=row["capacity_tokens"] // 128)
        assert (row["hit_rate"], row["evictions"]) == (own.hit_rate, own.evictions)


def test_a_finished_study_is_not_run_again(finished):
    before = {path: path.stat().st_mtime_ns for path in (finished.folder / "cells").iterdir()}
    again = Study.open(finished.folder).run()
    assert {path: path.stat().st_mtime_ns for path in (finished.folder / "cells").iterdir()} == before
    assert again == finished and again.status().state == "finished"


def test_failed_cells_are_rows_and_are_tried_again(tmp_path):
    policy = slow_policy(tmp_path, 0)
    late = tmp_path / "late.py"
    study = make_study(tmp_path, space={"policy": ["lru", "lri", f"{late}:Slow", policy], "chunk_tokens": [64, 100]},
                       fixed={**TRACE, "capacity_chunks": 40})  # fmt: skip
    study.run()
    errors = {(r["policy"], r["chunk_tokens"]): r["error"] for r in study.frame().to_dicts()}
    assert errors["lru", 64] == errors[policy, 64] == ""
    assert "did you mean 'lru'" in errors["lri", 64] and "late.py" in errors[f"{late}:Slow", 64]
    assert "100" in errors["lru", 100] and "64" in errors["lru", 100]
    assert (study.status().state, study.status().failed) == ("finished", 6)
    failed = [row for row in study.rows() if row["error"]]
    assert all("Traceback" in row["traceback"] for row in failed) and study.frame()["hit_rate"].null_count() == 6
    late.write_text((tmp_path / "slow.py").read_text())
    study.run()
    rows = {(r["policy"], r["chunk_tokens"]): r for r in study.frame().to_dicts()}
    assert study.status().failed == 5 and study.frame().height == 8
    mended = rows[f"{late}:Slow", 64]
    assert mended["attempts"] == 2 and mended["hit_rate"] == rows[policy, 64]["hit_rate"]
    assert rows["lru", 64]["attempts"] == 1


def test_what_runs_must_be_what_was_asked_for(tmp_path, monkeypatch):
    assert mismatches({"threads": 2, "block_size": 16}, {"threads": 2, "block_size": 16, "dtype": "bfloat16"}) == ""
    wrong = mismatches({"threads": 2, "block_size": 16}, {"threads": 1})
    assert "threads is 1, asked was 2" in wrong and "block_size is None, asked was 16" in wrong
    import experiments.replay

    honest = experiments.replay.replay
    monkeypatch.setattr(experiments.replay, "replay", lambda *given, capacity_chunks, **more: honest(
        *given, capacity_chunks=7, **more))  # fmt: skip
    study = make_study(tmp_path, space={"policy": ["lru"]}, fixed={**TRACE, "capacity_chunks": 40})
    row = CellRunner(study.description, tmp_path, worker="here").run(study.cells()[0])
    assert "capacity_chunks is 7, asked was 40" in row["error"] and row["results"]["hit_rate"] > 0


def test_a_model_study_predicts_and_says_that_it_is_simulated(tmp_path):
    space = {"prompt_tokens": [1000, 8000], "hardware": ["h100", "nothing"]}
    study = Study("cost", kind="model", runs=tmp_path, space=space)
    frame = study.run().frame()
    good = frame.filter(pl.col("error") == "")
    assert good.height == 2 and set(good["badge"]) == {"simulated"} and good["ttft_s"].is_sorted()
    assert frame.filter(pl.col("hardware") == "nothing")["error"].str.contains("nothing").all()


# --- the store


def test_a_reader_never_meets_half_a_row_and_parts_of_a_killed_writer_go(tmp_path):
    store = StudyStore(tmp_path)
    store.write_row({"key": "a", "finished": 1.0, "value": 1})
    (tmp_path / "cells" / "b.json.123.partial").write_text('{"key": "b", "fini')
    assert [row["key"] for row in store.rows()] == ["a"]
    store.remove_parts()
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["a.json"]
    store.write_row({"key": "a", "finished": 1.0, "value": 2})
    assert store.rows()[0]["value"] == 2
    store.rows()[0]["value"] = 3
    assert store.rows()[0]["value"] == 2


def test_one_process_runs_a_study_at_a_time(tmp_path):
    study = make_study(tmp_path)
    with study.store.running():
        assert study.store.is_running()
        with pytest.raises(InvalidInputError, match="is being run by process"):
            Study.open(study.folder).run()
    assert not study.store.is_running()


# --- kills


def run_until(study: Study, cells: int) -> subprocess.Popen:
    """`python -m experiments.study`, until so many cells are there."""
    process = subprocess.Popen([sys.executable, "-m", "experiments.study", str(study.folder)], start_new_session=True,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    wait_for(lambda: len(list((study.folder / "cells").glob("*.json"))) >= cells or process.poll() is not None, 60)
    return process


def kill_at(study: Study, cells: int) -> None:
    """SIGKILL the process that runs the study, and see that nothing of it lives on."""
    process = run_until(study, cells)
    if process.poll() is None:
        family = descendants(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 10)


def resume_and_check(study: Study, before: dict[Path, int]) -> None:
    study = Study.open(study.folder)
    study.run()
    rows = study.rows()
    assert sorted(row["key"] for row in rows) == sorted(cell.key for cell in study.cells())
    assert {row["attempts"] for row in rows} == {1} and not any(row["error"] for row in rows)
    assert not list(study.folder.rglob("*.partial"))
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what was finished was run again"


def finished_files(study: Study) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (study.folder / "cells").glob("*.json")}


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_cells_and_resumed_every_cell_is_there_once(seed, tmp_path):
    study = make_study(tmp_path, repeats=3, fixed={**TRACE, "trace.sessions": 40})
    for cells in sorted(random.Random(seed).sample(range(24), 2)):
        kill_at(study, cells)
        assert Study.open(study.folder).status().state in ("stopped", "finished")
    resume_and_check(study, finished_files(study))


@pytest.mark.slow
def test_killed_at_each_of_24_cells_and_resumed_every_cell_is_there_once(tmp_path):
    for cells in range(24):
        study = make_study(tmp_path, name=f"at-{cells}", repeats=3, fixed={**TRACE, "trace.sessions": 100})
        kill_at(study, cells)
        resume_and_check(study, finished_files(study))


def test_a_worker_that_dies_in_a_cell_is_replaced_and_the_row_says_so(tmp_path):
    study = make_study(tmp_path, space={"policy": [slow_policy(tmp_path, 0.004)]},
                       fixed={**TRACE, "capacity_chunks": 40})  # fmt: skip
    process = run_until(study, 0)
    worker = wait_for(lambda: [p for p in descendants(process.pid) if "experiments.study.cells" in p.cmdline()])[0]
    wait_for(lambda: study.status().current and "slow" in study.status().current)
    worker.send_signal(signal.SIGKILL)
    assert process.wait(60) == 0
    (row,) = study.rows()
    assert row["attempts"] == 2 and row["error"] == "" and row["results"]["evictions"] > 0
    assert row["worker_deaths"] == [f"process {worker.pid} ended with code -9"]


def test_an_interrupt_ends_the_workers_and_the_study_goes_on_from_there(tmp_path):
    study = make_study(tmp_path, space={"policy": ["lru", slow_policy(tmp_path, 0.05)]},
                       fixed={**TRACE, "trace.sessions": 60, "capacity_chunks": 40})  # fmt: skip
    process = run_until(study, 1)
    family = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) != 0
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 5)
    assert (study.status().state, study.status().done) == ("stopped", 1)
    (tmp_path / "slow.py").write_text(SLOW_POLICY.replace("{seconds}", "0"))
    assert study.run().status().state == "finished" and study.frame().height == 2


def test_a_worker_that_dies_idle_costs_no_cell_and_rows_stay_with_their_cells(tmp_path):
    from experiments.study.executors import LocalWorkers

    study = make_study(tmp_path, space={"policy": ["lru", "fifo"]}, fixed={**TRACE, "capacity_chunks": 50})
    first, second = study.cells()
    workers = LocalWorkers(study.description, study.folder, size=1)

    def answer():
        return wait_for(lambda: workers.wait(0.1))

    try:
        workers.give(0, first, [])
        ((place, row),) = answer()
        assert place == 0 and row["effective"]["policy"] == "Lru()"
        (process,) = [p for p in descendants(os.getpid()) if "experiments.study.cells" in p.cmdline()]
        process.kill()
        assert not workers.wait(1.0), "nobody waits for an idle worker"
        workers.give(0, second, [])
        ((place, row),) = answer()
        assert place == 0 and row["effective"]["policy"] == "Fifo()" and row["provenance"]["pid"] != process.pid
    finally:
        workers.kill()


# --- start, stop, status


def test_a_detached_study_is_watched_stopped_and_taken_up_again_from_elsewhere(tmp_path):
    study = make_study(tmp_path, space={"policy": ["lru", slow_policy(tmp_path, 0.05)], "chunk_tokens": [64, 128]},
                       fixed={**TRACE, "trace.sessions": 60, "capacity_chunks": 40})  # fmt: skip
    pid = study.start()
    assert study.status().state == "running"
    other = Study.open(study.folder)
    assert other.status().state == "running"
    status = wait_for(lambda: (s := other.status()).done == 2 and s)
    assert status.pid == pid and status.total == 4 and status.seconds_left > 0 and "slow" in status.current
    family = descendants(pid)
    began = time.monotonic()
    other.stop()
    status = other.wait(5)
    assert status.state == "stopped" and time.monotonic() - began < 1.0
    assert (status.done, status.failed, status.current) == (2, 0, "")
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 5)
    assert study.wait(5).state == "stopped"
    (tmp_path / "slow.py").write_text(SLOW_POLICY.replace("{seconds}", "0"))
    other.start()
    assert other.wait(60).state == "finished" and other.frame().height == 4


def test_a_stop_that_comes_before_the_process_is_up_is_obeyed(tmp_path):
    study = make_study(tmp_path)
    study.start()
    study.stop()
    status = study.wait(30)
    assert status.state == "stopped" and status.done < 8


def test_a_process_that_cannot_run_the_study_ends_as_stopped(tmp_path):
    study = make_study(tmp_path)
    study.start(executor="abacus")
    assert study.wait(30).state == "stopped"
    assert "no executor 'abacus'" in (study.folder / "log.txt").read_text()


def test_the_state_of_every_study_is_listed(tmp_path):
    first, second = make_study(tmp_path, name="a", space={"policy": ["lru"]}, fixed={**TRACE, "capacity_chunks": 9}), \
        make_study(tmp_path, name="b")  # fmt: skip
    assert second.status() == StudyStatus("new", total=8) and not list_studies(tmp_path)
    assert second.frame().is_empty() and second.rows() == [] and not list(tmp_path.iterdir()), "looking makes no folder"
    first.run()
    assert second.folder.exists()
    assert [(s.name, s.status().state) for s in list_studies(tmp_path)] == [("a", "finished"), ("b", "new")]


# --- the command line


def command(*arguments: str):
    from typer.testing import CliRunner

    from experiments.cli import app

    return CliRunner().invoke(app, list(arguments))


def test_the_command_line_runs_lists_shows_and_takes_up_studies(tmp_path):
    study = make_study(tmp_path, space={"policy": ["lru", "lri"]}, fixed={**TRACE, "capacity_chunks": 50})
    path, runs = tmp_path / "study.yaml", str(tmp_path / "runs")
    path.write_text(study.to_yaml())
    ran = command("sweep", str(path), "--runs", runs)
    assert ran.exit_code == 1, "a cell failed"
    assert "simulated; finished: 2 of 2 cells, 1 failed" in ran.output and "did you mean" in ran.output
    (folder,) = (tmp_path / "runs").iterdir()
    listed = json.loads(command("studies", "--json", "--runs", runs).output)
    assert [(s["study"], s["state"], s["done"], s["failed"]) for s in listed] == [(folder.name, "finished", 2, 1)]
    rows = json.loads(command("studies", "show", str(folder), "--json").output)
    assert [row["policy"] for row in rows] == ["lru", "lri"] and rows[0]["attempts"] == 1
    again = json.loads(command("sweep", "--resume", str(folder), "--json").output)
    assert [row["attempts"] for row in again] == [1, 2], "only what failed is tried again"
    stopped = command("studies", "stop", str(folder))
    assert stopped.exit_code == 0 and "2 of 2 cells done" in stopped.output


def test_the_command_line_prints_an_example_and_refuses_nothing_and_both():
    assert command("sweep", "--example").output == EXAMPLE
    for arguments in (("sweep",), ("sweep", "a.yaml", "--resume", "b"), ("sweep", "no-such-file.yaml")):
        found = command(*arguments)
        assert found.exit_code != 0 and isinstance(found.exception, InvalidInputError)


def test_a_detached_sweep_gives_the_terminal_back(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(make_study(tmp_path, space={"policy": ["lru"]}, fixed={**TRACE, "capacity_chunks": 9}).to_yaml())
    (row,) = json.loads(command("sweep", str(path), "--detach", "--json", "--runs", str(tmp_path)).output)
    assert Study.open(row["study"]).wait(60).state == "finished" and row["pid"] != os.getpid()


# --- searches


def test_a_random_search_takes_points_of_the_grid_each_once_and_the_seed_decides(tmp_path):
    space = {"capacity_chunks": list(range(1, 101)), "policy": ["lru", "fifo", "arc"]}
    chosen = [space_points(space, trials=20, seed=seed) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len({json.dumps(point) for point in chosen[0]}) == 20
    grid = space_points(space)
    assert all(point in grid for point in chosen[0]) and space_points(space, trials=900) == grid
    study = make_study(tmp_path, space=space, search="random", trials=6, seed=4)
    assert study.run().frame().height == study.total == 6


def test_a_bayesian_search_ends_nearer_the_best_than_its_start(tmp_path):
    pytest.importorskip("optuna")
    study = make_study(tmp_path, space={"capacity_chunks": list(range(10, 400, 10)), "policy": ["lru", "mru", "fifo"]},
                       search="bayes", trials=12, objective="max hit_rate", repeats=2)  # fmt: skip
    frame = study.run().frame()
    assert frame.height == 24 and frame["cell"].n_unique() == 24
    trials = StudyStore(study.folder).trials()
    assert len(trials) == 12 and [cell.settings["capacity_chunks"] for cell in study.cells()][::2] is not None
    means = frame.group_by("capacity_chunks", "policy").agg(pl.col("hit_rate").mean())
    by_point = {(r["capacity_chunks"], r["policy"]): r["hit_rate"] for r in means.to_dicts()}
    rates = [by_point[t["capacity_chunks"], t["policy"]] for t in trials]
    assert sum(rates[6:]) / 6 > sum(rates[:5]) / 5


def test_a_bayesian_search_that_was_stopped_goes_on_without_a_point_twice(tmp_path):
    pytest.importorskip("optuna")
    study = make_study(tmp_path, space={"capacity_chunks": list(range(10, 100, 10))}, search="bayes", trials=9,
                       objective="max hit_rate", repeats=2)  # fmt: skip
    study.run(watch=lambda status: study.stop() if status.done == 5 else None)
    assert study.status().state == "stopped" and 5 <= study.status().done < 18
    before = finished_files(study)
    again = Study.open(study.folder).run()
    assert again.status().state == "finished" and again.frame().height == 18
    assert again.frame()["capacity_chunks"].n_unique() == 9, "every point of the space, none twice"
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_search_never_proposes_what_is_known():
    pytest.importorskip("optuna")
    search = BayesianSearch({"a": [1, 2], "b": ["x", "y"]}, maximize=False, seed=0)
    seen = []
    while (point := search.ask()) is not None:
        assert point not in seen
        seen.append(point)
        search.tell(point, None if len(seen) == 2 else float(len(seen)))
    assert len(seen) == 4


def test_an_objective_that_no_cell_has_is_named(tmp_path):
    pytest.importorskip("optuna")
    study = make_study(tmp_path, space={"capacity_chunks": [10, 20]}, search="bayes", trials=2, objective="max hitrate")
    with pytest.raises(UnknownNameError, match="did you mean 'hit_rate'"):
        study.run()
