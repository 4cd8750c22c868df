"""vLLM's server with the engine in it: starts, serves, counts, and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from experiments.client import load_summary, send_requests
from experiments.server import ServerProcess, parse_metrics
from experiments.serving import EngineError, EngineProcess
from workbench.errors import InvalidInputError

MODEL = "random:llama-2layer-h64"
CHUNK_BYTES = 256 * 2 * 2 * 64 * 2  # tokens, layers, K and V, one head, bfloat16
VLLM = {"max_model_len": 2048, "kv_cache_memory_bytes": 64 << 20}


def prompts(**options):
    from transformers import AutoTokenizer

    from experiments.models import resolve_model
    from experiments.workloads import make_workload

    tokenizer = AutoTokenizer.from_pretrained(str(resolve_model(MODEL, progress=False).path))
    options = {"prefix_tokens": 700, "questions": 6, "max_tokens": 8, **options}
    return make_workload("shared_prefix", tokenizer, **options).requests


def server(**options) -> ServerProcess:
    from experiments.models import resolve_model

    return ServerProcess(str(resolve_model(MODEL, progress=False).path), threads=1, vllm=VLLM, **options)


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


# --- without a server

PAGE = """# HELP vllm:prefix_cache_hits_total hits
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0"} 128.0
vllm:prefix_cache_hits_total{engine="1"} 2.0
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="+Inf"} 4.0
vllm:ttft_seconds_count 4.0
vllm:ttft_seconds_sum 2.0
"""


def test_metrics_are_summed_over_labels():
    metrics = parse_metrics(PAGE)
    assert metrics.value("vllm:prefix_cache_hits_total") == 130
    assert metrics.value("vllm:prefix_cache_hits_total", engine="1") == 2
    assert metrics.value("vllm:nothing") == 0 and metrics.labels("vllm:nothing") == {}
    assert metrics.mean("vllm:ttft_seconds") == 0.5 and metrics.mean("vllm:ttft_seconds", metrics) is None


def test_mistakes_are_found_before_anything_starts():
    with pytest.raises(InvalidInputError, match="did you mean 'memory_bytes'"):
        ServerProcess("model", cache={"memory_byte": 1})
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidInputError, match="cannot be had"):
        ServerProcess("model", port=taken.getsockname()[1]).start()


def test_an_engine_and_a_server_are_started_with_the_same_settings(tmp_path):
    options = {"cache": {"memory_bytes": 1, "disk_path": tmp_path}, "prefix_caching": True, "threads": 1,
               "vllm": {"block_size": 32}, "load_failure_policy": "fail"}  # fmt: skip
    engine, one = EngineProcess("model", **options), ServerProcess("model", **options)
    asked = engine.arguments()
    assert asked == one.arguments() and asked["enable_prefix_caching"] is True and asked["block_size"] == 32
    assert asked["kv_transfer_config"]["kv_load_failure_policy"] == "fail"
    assert asked["kv_transfer_config"]["kv_connector_extra_config"]["disk_path"] == str(tmp_path)
    assert engine.environment() == one.environment() and "VLLM_SERVER_DEV_MODE" not in one.environment()
    assert ServerProcess("model", resettable=True).environment()["VLLM_SERVER_DEV_MODE"] == "1"
    other = ServerProcess("model", kv_transfer={"kv_connector": "ExampleConnector"}).arguments()
    assert other["kv_transfer_config"] == {"kv_connector": "ExampleConnector"}
    assert "kv_transfer_config" not in ServerProcess("model").arguments()
    for process in (engine, one):
        assert process.log.exists() and not process.log.read_text()


def test_a_password_is_not_shown():
    from experiments.cli.serve import _without_password

    assert _without_password("redis://me:s3cret@host:6379/0") == "redis://me:***@host:6379/0"
    assert [_without_password(v) for v in ("redis://host:6379/0", "4GiB", 5)] == ["redis://host:6379/0", "4GiB", 5]


# --- with one


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_repeated_prompt_is_found_counted_and_nothing_is_left(tmp_path):
    pytest.importorskip("vllm")
    cache = {"memory_bytes": "64MiB", "disk_path": tmp_path / "disk"}
    with server(cache=cache, log=tmp_path / "log") as running:
        processes = family(running._process.pid)
        assert running.settings()["block_size"] == 128 and running.settings()["prefix_caching"] is False
        assert {c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"} == {"127.0.0.1"}
        again = prompts(questions=1) * 2
        chunks = -(-len(again[0].token_ids) // 256)  # the last one a tail
        before = running.metrics()
        rows = send_requests(again[:1], running.url) + send_requests(again[1:], running.url)
        assert [row["error"] for row in rows] == ["", ""]
        assert rows[0]["cached_tokens"] == 0 and rows[1]["cached_tokens"] == len(again[0].token_ids) - 1
        assert rows[0]["token_ids"] == rows[1]["token_ids"] and rows[0]["output_tokens"] == 8
        assert all(0 < row["ttft_s"] < row["e2e_s"] for row in rows)
        assert all(0 < row["server_ttft_s"] < row["ttft_s"] for row in rows), "the client's figure holds the server's"
        server_ttft = running.metrics().mean("vllm:time_to_first_token_seconds", before)
        assert 0 < server_ttft < sum(row["ttft_s"] for row in rows) / 2
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and running.status()["loads"] < chunks:
            time.sleep(0.1)  # counters follow the answer
        status = running.status()
        assert status["healthy"] and status["loads"] == status["stores"] == chunks > 1 and status["load_failures"] == 0
        assert status["cache_hit_tokens"] == len(again[0].token_ids) - 1
        assert (chunks - 1) * CHUNK_BYTES < status["load_bytes"] <= chunks * CHUNK_BYTES
        spent = cpu_seconds(processes)
        time.sleep(2)
        assert (cpu_seconds(processes) - spent) / 2 < 0.2, "an idle server does not spin"
    assert not [process for process in processes if lives(process)]
    assert not running.healthy()
    files = [path for path in (tmp_path / "disk").rglob("*") if path.stat().st_size >= CHUNK_BYTES // 4]
    assert len(files) == chunks, "writes are finished"
    running.close()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_the_command_serves_until_it_is_interrupted(tmp_path):
    pytest.importorskip("vllm")
    config = tmp_path / "cache.yaml"
    config.write_text("chunk_tokens: 128\nmemory_bytes: 16MiB\n")
    options = {"--port": 0, "--config": config, "--memory": "32MiB", "--threads": 1, "--max-model-len": 1024,
               "--kv-memory": "64MiB"}  # fmt: skip
    command = [sys.executable, "-m", "experiments.cli", "serve", MODEL, "--json"]
    command += [str(part) for option in options.items() for part in option]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = iter(process.stdout.readline, "")
    settings = json.loads(next(line for line in lines if line.startswith("{")))
    processes = family(process.pid)
    assert settings["cache"] == {"chunk_tokens": 128, "memory_bytes": 32 << 20} and settings["max_model_len"] == 1024
    assert settings["model"] == MODEL and settings["prefix_caching"] is True
    rows = send_requests(prompts(questions=5), settings["url"], concurrency=2)
    assert load_summary(rows)["failed"] == 0 and rows[-1]["cached_tokens"] >= 640
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert not [process for process in processes if lives(process)]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_server_ends_with_its_killed_parent_and_a_bad_one_says_why(tmp_path):
    pytest.importorskip("vllm")
    with pytest.raises(EngineError, match="not a multiple of the block size"):
        server(cache={"chunk_tokens": 100}, log=tmp_path / "bad").start()
    code = (
        "import sys, time; sys.path.insert(0, 'tests'); from test_server import server\n"
        "running = server().start(); print(running._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                              cwd=Path(__file__).parents[1])  # fmt: skip
    processes = family(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while any(lives(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
