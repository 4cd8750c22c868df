"""vLLM's OpenAI-compatible server in a process of its own, with the engine in it.

    with ServerProcess("model-folder", cache={"memory_bytes": "4GiB"}) as server:
        server.url, server.status(), server.metrics().value("vllm:prefix_cache_hits_total")

    parent -> python -m experiments.server -> vLLM's front end -> its engine process, with both halves of the connector
           <- /health until it answers

The server is started as a module: the `vllm` command of the CPU wheel does not start. It listens on 127.0.0.1 alone and
ends when this process ends, even if that is killed. vLLM's executor runs inside the engine process, as it does in
`experiments.engine_process`: an executor of its own would spin on a core while the server is idle.
"""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from experiments.ports import reserved_port
from experiments.serving import EngineError
from experiments.vllm_process import VllmProcess
from workbench.errors import InvalidInputError

__all__ = ["Metrics", "Sample", "ServerProcess", "parse_metrics"]

_START_SECONDS = 600.0
_STOP_SECONDS = 30.0
_HTTP_SECONDS = 10.0


# ---------------------------------------------------------------- metrics


@dataclass(frozen=True)
class Sample:
    """One line of a Prometheus page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """A Prometheus page, read once."""

    samples: tuple[Sample, ...]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name that have these labels; 0 if there are none."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())

    def labels(self, name: str) -> Mapping[str, str]:
        """Labels of the first sample of that name: where vLLM shows settings. Empty if there is none."""
        return next((s.labels for s in self.samples if s.name == name), {})

    def mean(self, name: str, since: "Metrics | None" = None) -> float | None:
        """Mean of a histogram's observations, all or those since an earlier page; None without any."""
        count, total = self.value(f"{name}_count"), self.value(f"{name}_sum")
        if since is not None:
            count, total = count - since.value(f"{name}_count"), total - since.value(f"{name}_sum")
        return total / count if count else None


def parse_metrics(text: str) -> Metrics:
    """Read the text of a `/metrics` page."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(text)
    return Metrics(tuple(Sample(s.name, s.labels, s.value) for family in families for s in family.samples))


# ---------------------------------------------------------------- the server


@dataclass
class ServerProcess(VllmProcess):
    """A vLLM server. Use as a context manager, or call `start` and `close`.

    Args:
        ...: Those of `VllmProcess`.
        port: Port on 127.0.0.1; 0 for a free one.
        resettable: `reset` works. vLLM then answers on its development routes, too.
    """

    port: int = 0
    resettable: bool = False

    def __post_init__(self):
        super().__post_init__()
        self._lifeline: int | None = None  # its closing tells the server that this process is gone

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "ServerProcess":
        """Start the server and wait until it is healthy.

        Raises:
            InvalidInputError: The port is taken.
            EngineError: The server ended, or is not healthy within ten minutes.
        """
        began = time.perf_counter()
        try:
            reserved = reserved_port(self.port)
        except OSError as error:
            raise InvalidInputError(f"port {self.port} of 127.0.0.1 cannot be had: {error}") from None
        self.port = reserved.number
        try:
            with reserved:
                self._spawn()
                self._wait_until_healthy()
        except BaseException:  # an interrupt, too, must not leave the server running
            self.close()
            raise
        self.start_seconds = time.perf_counter() - began
        return self

    def healthy(self) -> bool:
        """Whether the server says that its engine works."""
        try:
            with urlopen(f"{self.url}/health", timeout=_HTTP_SECONDS) as answer:
                return answer.status == 200
        except OSError:
            return False

    def metrics(self) -> Metrics:
        """The server's counters now."""
        return parse_metrics(self._get("/metrics"))

    def settings(self) -> dict[str, Any]:
        """What the server says that it runs with, not what it was asked for."""
        served = json.loads(self._get("/v1/models"))["data"][0]
        config = self.metrics().labels("vllm:cache_config_info")
        return {
            "model": served["id"],
            "max_model_len": served.get("max_model_len"),
            "block_size": int(config["block_size"]),
            "kv_cache_dtype": config.get("cache_dtype"),
            "num_blocks": int(config["num_gpu_blocks"]),
            "prefix_caching": config["enable_prefix_caching"] == "True",
            "threads": int(self.environment()["OMP_NUM_THREADS"]),
            "thread_binding": self.environment()["VLLM_CPU_OMP_THREADS_BIND"],
        }

    def status(self) -> dict[str, Any]:
        """Health, requests, and what the caches did since the start, from the server's own counters."""
        metrics = self.metrics()
        found = {
            "healthy": self.healthy(),
            "running": int(metrics.value("vllm:num_requests_running")),
            "waiting": int(metrics.value("vllm:num_requests_waiting")),
            "kv_usage": metrics.value("vllm:kv_cache_usage_perc"),
            "prompt_tokens": int(metrics.value("vllm:prompt_tokens_total")),
        }
        for label, name in (("prefix_cache", "vllm:prefix_cache"), ("cache", "vllm:external_prefix_cache")):
            looked_up = int(metrics.value(f"{name}_queries_total"))
            hit = int(metrics.value(f"{name}_hits_total"))
            found |= {f"{label}_hit_tokens": hit, f"{label}_looked_up_tokens": looked_up,
                      f"{label}_hit_rate": hit / looked_up if looked_up else None}  # fmt: skip
        counters = {"s": "seconds_count", "_bytes": "bytes_total", "_failures": "failures_total"}
        for transfer in ("load", "store", "write"):
            for ending, name in counters.items():
                value = metrics.value(f"vllm:kvworkbench_transfer_{name}", transfer=transfer)
                found[transfer + ending] = int(value)
        used = (s for s in metrics.samples if s.name == "vllm:kvworkbench_tier_used_bytes")
        return {**found, "tier_used_bytes": {sample.labels["tier"]: int(sample.value) for sample in used}}

    def reset(self) -> bool:
        """Forget what the server's caches hold, so that the next prompt is cold; False if something is still in use.

        Raises:
            EngineError: The server is not `resettable`, or does not answer.
        """
        request = Request(f"{self.url}/reset_prefix_cache?reset_external=true", method="POST")
        return bool(json.loads(self._answer(request))["success"])

    def wait(self) -> int:
        """Wait until the server ends by itself; returns its exit status."""
        return self._process.wait()

    def close(self) -> None:
        """Stop the server; queued writes are finished. Twice is fine."""
        if self._process is None:
            return
        family = _family(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        if not self._ended(family, _STOP_SECONDS):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._ended(family, _STOP_SECONDS)
        self._process.wait()
        os.close(self._lifeline)
        self._process = self._lifeline = None

    def __enter__(self) -> "ServerProcess":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ended(self, family: list[psutil.Process], seconds: float) -> bool:
        """Whether every process ends within that time; the engine's may end after the front end's."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None or any(_lives(process) for process in family):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _spawn(self) -> None:
        to_server, self._lifeline = os.pipe()
        command = [
            sys.executable,
            "-m",
            "experiments.server",
            str(to_server),
            self.append_path or "",
            *self._command_line(),
        ]
        with open(self.log, "a") as log:
            self._process = subprocess.Popen(command, pass_fds=(to_server,), stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=log, env=self.environment(), cwd=Path(__file__).parent.parent,
                                             start_new_session=True)  # fmt: skip
        os.close(to_server)

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self.healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"the server did not start (log: {self.log}):\n{self._errors()}")
            time.sleep(0.1)

    def _errors(self, most: int = 5) -> str:
        """The log's first lines that name an exception: the cause comes first. Without any, its last lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        named = dict.fromkeys(line for line in lines if re.search(r"\b\w+(Error|Exception): ", line))
        return "\n".join(list(named)[:most] or lines[-most:])

    def _get(self, path: str) -> str:
        return self._answer(Request(self.url + path))

    def _answer(self, request: Request) -> str:
        try:
            with urlopen(request, timeout=_HTTP_SECONDS) as answer:
                return answer.read().decode()
        except OSError as error:
            raise EngineError(f"{request.full_url} does not answer: {error} (log: {self.log})") from None

    def _command_line(self) -> list[str]:
        options = {**self.arguments(), "enable_prompt_tokens_details": True, "host": "127.0.0.1", "port": self.port}
        return [part for name, value in options.items() for part in _argument(name, value)]

    def environment(self) -> dict[str, str]:
        """Environment of the process."""
        return {**super().environment(), **({"VLLM_SERVER_DEV_MODE": "1"} if self.resettable else {})}


def _family(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _argument(name: str, value: Any) -> list[str]:
    """One setting as vLLM's command line takes it."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, json.dumps(value) if isinstance(value, Mapping | list) else str(value)]


def main() -> None:
    """Run vLLM's server until it is told to stop or the process at the other end of the lifeline is gone."""
    lifeline, append_path = int(sys.argv[1]), sys.argv[2]
    if append_path:
        sys.path.append(append_path)

    def end_with_parent() -> None:
        os.read(lifeline, 1)  # returns when every copy of the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv[1:] = [*sys.argv[3:], *_request_metrics_flag()]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _request_metrics_flag() -> list[str]:
    """Makes the server tell each request's own TTFT and queue time, where it can (vLLM 0.32)."""
    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:  # releases before have this module elsewhere, and no such flag
        return []
    return ["--enable-per-request-metrics"] if hasattr(FrontendArgs, "enable_per_request_metrics") else []


if __name__ == "__main__":
    main()
