"""Arms and what keeps a comparison of them fair, without an engine; with engines in the slow part."""

import ctypes
import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments.arms import ARMS, LMCACHE_VARIABLE, MORE_ARMS, Arm, ArmUnavailableError, Companion, arm_by_name, ready
from experiments.engine_process import engine_environment
from experiments.ports import reserved_port
from experiments.serving import Comparison, drop_file_cache
from experiments.workloads import Request, Workload
from workbench.config import CacheConfig
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


# --- what would distort a comparison


def test_engines_get_the_same_environment_whatever_is_inherited(monkeypatch):
    settings = {"kv_cache_memory_bytes": 1 << 26}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    found = engine_environment(2, settings)
    assert found["OMP_NUM_THREADS"] == found["NUMBA_NUM_THREADS"] == "2", "the same compute threads in every arm"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind", "a connector does not take a core away"
    assert found["PYTHONHASHSEED"] == "0", "hashes agree between processes"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "no idle executor spins"
    assert "VLLM_CPU_KVCACHE_SPACE" not in found, "it would overrule kv_cache_memory_bytes"
    assert engine_environment(2, {})["VLLM_CPU_KVCACHE_SPACE"] == "4", "without a setting it is the user's"
    assert engine_environment(0, {})["OMP_NUM_THREADS"] == str(os.cpu_count())


def test_the_environment_reaches_the_process():
    code = "import os, torch; print(torch.get_num_threads(), hash('a'))"
    runs = [
        subprocess.run([sys.executable, "-c", code], env=engine_environment(1, {}), capture_output=True, text=True)
        for _ in range(2)
    ]
    assert runs[0].stdout.split()[0] == "1" and runs[0].stdout == runs[1].stdout


def test_file_cache_is_dropped(tmp_path):
    path = tmp_path / "a" / "chunk"
    path.parent.mkdir()
    path.write_bytes(bytes(1 << 20))
    assert resident_pages(path) > 0
    assert drop_file_cache(tmp_path) == 1
    if resident_pages(path):
        pytest.skip("this file system keeps files in memory")
    assert drop_file_cache(tmp_path / "absent") == 0


def resident_pages(path) -> int:
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_void_p)) == 0
        return int((pages & 1).sum())


# --- arms


def test_every_arm_has_a_name_of_its_own_and_settings_that_can_work(tmp_path):
    arms = (*ARMS, *MORE_ARMS)
    assert len({arm.name for arm in arms}) == len({arm.label for arm in arms}) == len(arms)
    for arm in arms:
        assert arm_by_name(arm.name) is arm
        assert arm.cache is None or arm.kv_transfer is None, "one connector an engine"
        if arm.companion is None:
            with ready(arm, tmp_path) as filled:
                options = filled.engine_options(tmp_path)
                assert "$" not in str(options)
                if options["cache"] is not None:
                    CacheConfig(**options["cache"])
    with pytest.raises(UnknownNameError, match="did you mean 'offloading_file'"):
        arm_by_name("offloading_files")


def test_names_are_filled_in_wherever_they_stand(tmp_path):
    def start(folder):
        from contextlib import nullcontext

        return nullcontext({"some_port": "1234"})

    companion = Companion(lambda: "", start)
    arm = Arm("a", "an arm", kv_transfer={"x": [{"path": "$folder"}], "y": {"z": "to $some_port"}, "n": 5},
              companion=companion)  # fmt: skip
    with ready(arm, tmp_path) as filled:
        assert filled.kv_transfer == {"x": [{"path": str(tmp_path / "tier-a")}], "y": {"z": "to 1234"}, "n": 5}
    with (
        pytest.raises(InvalidInputError, match=r"may hold \$folder"),
        ready(Arm("b", "b", cache={"disk_path": "$folders"}), tmp_path),
    ):
        pass


def test_an_arm_that_cannot_run_here_is_left_out_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.delenv(LMCACHE_VARIABLE, raising=False)
    comparison = Comparison("model", workload(), arms=["none", "lmcache"], folder=tmp_path)
    assert [arm.name for arm in comparison.arms] == ["none"] and LMCACHE_VARIABLE in comparison.skipped["lmcache"]
    with pytest.raises(ArmUnavailableError, match="no arm can run here"):
        Comparison("model", workload(), arms=["lmcache"], folder=tmp_path)
    with pytest.raises(ArmUnavailableError, match=LMCACHE_VARIABLE), ready(arm_by_name("lmcache"), tmp_path):
        pass
    monkeypatch.setenv("PATH", "")
    assert "redis-server is not installed" in arm_by_name("redis").missing


@pytest.mark.redis
def test_redis_runs_as_long_as_its_arm(tmp_path):
    arm = arm_by_name("redis")
    if arm.missing:
        pytest.skip(arm.missing)
    import redis

    with ready(arm, tmp_path) as filled:
        client = redis.Redis.from_url(filled.cache["redis_url"])
        assert client.set("a", "b") and client.config_get("appendonly")["appendonly"] == "no"
        assert CacheConfig(**filled.cache).redis_url == filled.cache["redis_url"]
    with pytest.raises(redis.ConnectionError):
        client.get("a")


@pytest.mark.redis
def test_redis_ends_with_a_killed_parent(tmp_path):
    if arm_by_name("redis").missing:
        pytest.skip(arm_by_name("redis").missing)
    import redis

    code = (
        "import sys, time; from pathlib import Path; from experiments.arms import arm_by_name, ready\n"
        "with ready(arm_by_name('redis'), Path(sys.argv[1])) as arm:\n"
        "    print(arm.cache['redis_url'], flush=True)\n    time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                              cwd=Path(__file__).parents[1])  # fmt: skip
    client = redis.Redis.from_url(parent.stdout.readline().strip())
    assert client.ping()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    with pytest.raises(redis.ConnectionError):
        while time.monotonic() < deadline:
            client.ping()
            time.sleep(0.05)


def test_a_companion_that_cannot_start_says_why(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "redis-server").write_text("#!/bin/sh\necho no memory left\nexit 3\n")
    (folder / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    with pytest.raises(ArmUnavailableError, match="no memory left"), ready(arm_by_name("redis"), tmp_path):
        pass


# --- ports


def test_a_reserved_port_goes_to_nobody_else():
    with reserved_port() as one, reserved_port() as two:
        assert one.number != two.number
        taker = socket.create_server(("127.0.0.1", one.number))  # sets SO_REUSEADDR, as servers do
        with taker, pytest.raises(OSError):
            reserved_port(one.number)
    one.release()


# --- real engines


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_every_arm_finds_what_was_sent_before_and_answers_alike(tmp_path):
    pytest.importorskip("vllm")
    comparison = compared(tmp_path, [arm.name for arm in MORE_ARMS])
    rows = comparison.run()
    assert not [row["error"] for row in rows if row["error"]], "nothing is contaminated, nothing failed"
    for row in rows:
        found = row["cached_tokens"]
        least = 0 if row["arm"] in ("none", "example") and row["phase"] == "first" else row["expected_hit_tokens"]
        assert found == 0 if row["arm"] == "none" else found >= least, row
    answers = {row["request_id"]: row["token_ids"] for row in rows if row["arm"] == "none"}
    assert all(row["token_ids"] == answers[row["request_id"]] for row in rows)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_an_engine_that_dies_gives_rows_with_an_error(tmp_path):
    pytest.importorskip("vllm")

    def kill(progress):
        if progress.done == 5:
            comparison._engines["memory"]._process.kill()

    comparison = compared(tmp_path, ["memory"], watch=kill)
    rows = comparison.run()
    errors = {arm: [bool(row["error"]) for row in rows if row["arm"] == arm] for arm in ("none", "memory")}
    assert errors["none"] == [False] * 4 and errors["memory"][0] is False and errors["memory"][-2:] == [True, True]
    from experiments.runs import requests_frame

    frame = requests_frame(
        "run", rows, comparison.events(), dict.fromkeys(errors, 0) | {r["request_id"]: 0 for r in rows}
    )
    assert frame.height == 8 and frame["prefill_s"].null_count() == sum(errors["memory"])


def compared(folder, arms, **options) -> Comparison:
    from experiments.models import resolve_model

    vllm = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    path = str(resolve_model(MODEL, progress=False).path)
    return Comparison(path, workload(), arms=["none", *arms], folder=folder, threads=1, vllm=vllm, **options)
