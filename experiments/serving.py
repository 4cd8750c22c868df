"""Real vLLM, with and without reuse: engines as processes, arms, and one workload through several of them.

arms -> one engine process each -> first questions, rotating through the arms -> restart where an arm asks for it
     -> repeated questions, rotating -> requests and events as frames -> a run
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.engine_process import ENVIRONMENT
from workbench.config import CacheConfig
from workbench.errors import CacheError, InvalidInputError, UnknownNameError

__all__ = ["ARMS", "Arm", "Comparison", "EngineError", "EngineProcess", "Progress", "arm_by_name"]


class EngineError(CacheError):
    """An engine process failed; the message holds what it said last."""


@dataclass(frozen=True)
class Arm:
    """One way of serving the same requests.

    Args:
        name: Short, for tables.
        label: For people.
        prefix_caching: vLLM's own prefix cache on.
        cache: Settings of the engine (`CacheConfig`), or None without it.
        disk: The engine has a disk tier in a folder of this run.
        restart: vLLM is stopped and started between the first questions and the repeated ones.
        kv_transfer: Another connector's `KVTransferConfig` fields, for comparisons.
    """

    name: str
    label: str
    prefix_caching: bool = False
    cache: Mapping[str, Any] | None = None
    disk: bool = False
    restart: bool = False
    kv_transfer: Mapping[str, Any] | None = None


ARMS = (
    Arm("none", "no reuse"),
    Arm("prefix_cache", "vLLM's prefix cache", prefix_caching=True),
    Arm("memory", "KV Workbench (memory)", cache={"memory_bytes": "1GiB"}),
    Arm("disk", "KV Workbench (disk, after a restart)", cache={"memory_bytes": 0}, disk=True, restart=True),
)


def arm_by_name(name: str | Arm) -> Arm:
    """The arm of that name. Raises UnknownNameError, with the names there are."""
    if isinstance(name, Arm):
        return name
    for arm in ARMS:
        if arm.name == name:
            return arm
    raise UnknownNameError("arm", name, [arm.name for arm in ARMS])


@dataclass
class EngineProcess:
    """A vLLM engine in its own process. Use as a context manager, or call `start` and `close`.

    Args:
        model: Folder or Hugging Face name.
        cache: Settings of the KV-cache engine, or None without it.
        prefix_caching: vLLM's own prefix cache on.
        threads: Compute threads.
        vllm: Further arguments of `vllm.LLM`.
        kv_transfer: Another connector's `KVTransferConfig` fields.
        load_failure_policy: What vLLM does when a load fails: "recompute" or "fail".
        log: File for what the process prints; a temporary one by default.

    Raises:
        InvalidInputError: Settings that cannot work; found before anything starts.
    """

    model: str
    cache: Mapping[str, Any] | None = None
    prefix_caching: bool = False
    threads: int = 0
    vllm: Mapping[str, Any] = field(default_factory=dict)
    kv_transfer: Mapping[str, Any] | None = None
    load_failure_policy: str = "recompute"
    log: Path | None = None

    def __post_init__(self):
        self.settings: dict[str, Any] = {}
        self.start_seconds = 0.0
        self._process: subprocess.Popen | None = None
        if self.cache is not None:
            CacheConfig(**self.cache)
        if self.log is None:
            handle, name = tempfile.mkstemp(prefix="kvworkbench-engine-", suffix=".log")
            os.close(handle)
            self.log = Path(name)

    def start(self) -> "EngineProcess":
        """Start the process and wait until the engine is ready."""
        began = time.perf_counter()
        to_child, to_parent = os.pipe(), os.pipe()
        with open(self.log, "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiments.engine_process", str(to_child[0]), str(to_parent[1])],
                pass_fds=(to_child[0], to_parent[1]), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self._environment(), cwd=Path(__file__).parent.parent, start_new_session=True,
            )  # fmt: skip
        os.close(to_child[0])
        os.close(to_parent[1])
        self._requests, self._answers = os.fdopen(to_child[1], "w"), os.fdopen(to_parent[0], "r")
        self.settings = self._ask(self._spec())["settings"]
        self.start_seconds = time.perf_counter() - began
        return self

    def generate(
        self, token_ids: Sequence[int] | np.ndarray, *, max_tokens: int = 16, **options: Any
    ) -> dict[str, Any]:
        """Answer one prompt greedily, alone in the engine. See `experiments.engine_process` for what comes back.

        Args:
            token_ids: The prompt.
            max_tokens: The most to generate.
            options: cache_salt, ignore_eos, logprobs.
        """
        ids = np.asarray(token_ids).tolist()
        return self._ask({"op": "generate", "token_ids": ids, "max_tokens": max_tokens, **options})

    def close(self) -> None:
        """Stop the engine; queued writes are finished. Twice is fine."""
        if self._process is None:
            return
        with suppress(EngineError):  # it is gone already: that is what was asked for
            self._ask({"op": "close"})
        for stream in (self._requests, self._answers):
            with suppress(BrokenPipeError):  # closing flushes into a pipe whose other end may be gone
                stream.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> "EngineProcess":
        return self.start()

    def __exit__(self, *exc) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._requests.write(json.dumps(message) + "\n")
            self._requests.flush()
            line = self._answers.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            raise EngineError(f"the engine process ended; the end of {self.log}:\n{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']} (full log: {self.log})")
        return answer

    def _last_words(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _spec(self) -> dict[str, Any]:
        options = {"enforce_eager": True, "enable_prefix_caching": self.prefix_caching, "seed": 0, **self.vllm}
        cache = None if self.cache is None else {k: str(v) if isinstance(v, Path) else v for k, v in self.cache.items()}
        return {"model": self.model, "vllm": options, "cache": cache, "kv_transfer": self.kv_transfer,
                "load_failure_policy": self.load_failure_policy}  # fmt: skip

    def _environment(self) -> dict[str, str]:
        threads = str(self.threads or os.cpu_count() or 1)
        root = str(Path(__file__).parent.parent)
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        return {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads,
                "NUMBA_THREADING_LAYER": "omp", "PYTHONPATH": path}  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """Where a comparison stands."""

    done: int
    total: int
    what: str
    seconds_left: float | None


class Comparison:
    """One workload through several arms, in rotating order, one request at a time.

    Args:
        model: Folder or Hugging Face name.
        workload: Requests; see `experiments.workloads`.
        arms: Names or `Arm`s.
        folder: Where disk tiers, event files and logs go.
        threads: Compute threads of every engine; all cores by default.
        vllm: Further arguments of `vllm.LLM`, the same for every arm.
        watch: Called with `Progress` before each step.
    """

    def __init__(self, model: str, workload: Any, *, arms: Sequence[str | Arm], folder: Path, threads: int = 0,
                 vllm: Mapping[str, Any] | None = None,
                 watch: Callable[[Progress], None] = lambda _: None):  # fmt: skip
        self.model, self.workload, self.folder = model, workload, Path(folder)
        self.arms = [arm_by_name(arm) for arm in arms]
        if len({arm.name for arm in self.arms}) < len(self.arms):
            raise InvalidInputError(f"arms {[arm.name for arm in self.arms]} are not all different")
        self.threads, self.vllm, self.watch = threads or os.cpu_count() or 1, dict(vllm or {}), watch
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, dict[str, Any]] = {}
        self._engines: dict[str, EngineProcess] = {}
        self._starts = dict.fromkeys((arm.name for arm in self.arms), 0)
        self._started = time.perf_counter()
        self._done = 0
        self._bound = None

    def run(self) -> list[dict[str, Any]]:
        """Run everything; returns one row a request and arm. Engines are closed whatever happens."""
        first = [r for r in self.workload.requests if r.question == 0]
        again = [r for r in self.workload.requests if r.question > 0]
        try:
            for arm in self.arms:
                self._start(arm)
            self._ask_all(first, "first")
            for arm in self.arms:
                if arm.restart:
                    self._step(f"restarting vLLM: {arm.label}")
                    self._engines.pop(arm.name).close()
                    self._start(arm, announce=False)
            self._ask_all(again, "again")
        finally:
            for engine in self._engines.values():
                engine.close()
            for arm in self.arms:
                shutil.rmtree(self._tier_path(arm), ignore_errors=True)  # large, and of no use after the run
        return self.rows

    def events(self) -> Any:
        """Events of every arm as one polars frame, with a column `arm`; requests are numbered `start:number`.

        What the warm-up request of each start did is left out.
        """
        import polars

        from workbench.events import Event, events_frame

        frames = []
        for arm, start in ((a, start) for a in self.arms for start in range(self._starts[a.name])):
            path = self._events_path(arm, start)
            lines = path.read_text().splitlines() if path.exists() else []
            frame = events_frame(Event(*json.loads(line)) for line in lines)
            frames.append(frame.with_columns(
                polars.lit(arm.name).alias("arm"),
                # vLLM counts requests anew at each start, and appends a suffix of its own to each number
                polars.col("request").str.replace(r"^(\d+)-[0-9a-f]{8}$", f"{start}:${{1}}"),
            ).filter(~polars.col("request").str.contains("^[0-9]+:0$")))  # fmt: skip
        return polars.concat(frames)

    def _start(self, arm: Arm, announce: bool = True) -> None:
        if announce:
            self._step(f"starting vLLM: {arm.label}")
        cache, start = None, self._starts[arm.name]
        self._starts[arm.name] += 1
        if arm.cache is not None:
            cache = {**arm.cache, "events_path": str(self._events_path(arm, start))}
            if arm.disk:
                cache["disk_path"] = str(self._tier_path(arm))
        engine = EngineProcess(self.model, cache=cache, prefix_caching=arm.prefix_caching, threads=self.threads,
                               vllm=self.vllm, kv_transfer=arm.kv_transfer,
                               log=self.folder / f"engine-{arm.name}.log")  # fmt: skip
        self._engines[arm.name] = engine.start()
        self._check_settings(arm, engine.settings)
        self.settings[arm.name] = {**engine.settings, "cache": dict(arm.cache or {})}
        engine.generate(np.arange(1, 40), max_tokens=2)  # loads code paths; request 0 of each start, in no statistics

    def _check_settings(self, arm: Arm, settings: dict[str, Any]) -> None:
        """What runs must be what was asked for, or the comparison is of something else."""
        if settings["prefix_caching"] != arm.prefix_caching or settings["threads"] != self.threads:
            raise EngineError(f"arm {arm.name} runs with {settings}, asked were prefix_caching={arm.prefix_caching}, "
                              f"threads={self.threads}")  # fmt: skip

    def _ask_all(self, requests: Sequence[Any], phase: str) -> None:
        rotation = itertools.count()
        for request in requests:
            turn = next(rotation) % len(self.arms)
            for arm in self.arms[turn:] + self.arms[:turn]:
                self._step(f"{request.request_id}, {arm.label}", len(request.token_ids))
                self.rows.append(self._ask(arm, request, phase))

    def _ask(self, arm: Arm, request: Any, phase: str) -> dict[str, Any]:
        answer = self._engines[arm.name].generate(request.token_ids, max_tokens=request.max_tokens)
        counters = answer.pop("counters")
        answer["engine_request"] = f"{self._starts[arm.name] - 1}:{answer['engine_request']}"
        bound = self._upper_bound()
        return {
            "arm": arm.name, "arm_label": arm.label, "order": len(self.rows), "repeat": 0,
            "request_id": request.request_id, "group": request.group, "document": str(request.document),
            "question": request.text or str(request.question), "phase": phase, "prompt_tokens": len(request.token_ids),
            "expected_hit_tokens": bound[request.request_id], "output_tokens": len(answer["token_ids"]),
            "local_hit_tokens": int(counters["vllm:prefix_cache_hits"]),
            "external_hit_tokens": int(counters["vllm:external_prefix_cache_hits"]),
            "error": "" if answer["finish_reason"] != "error" else "finish_reason error", **answer,
        }  # fmt: skip

    def _upper_bound(self) -> dict[str, int]:
        if self._bound is None:
            tokens = int(CacheConfig().chunk_tokens)
            bound = self.workload.upper_bound_hit_tokens(tokens).tolist()
            self._bound = {r.request_id: b for r, b in zip(self.workload.requests, bound, strict=True)}
        return self._bound

    def _events_path(self, arm: Arm, start: int) -> Path:
        return self.folder / f"events-{arm.name}-{start}.jsonl"

    def _tier_path(self, arm: Arm) -> Path:
        return self.folder / f"tier-{arm.name}"

    def _step(self, what: str, tokens: int = 0) -> None:
        total = len(self.arms) * (1 + len(self.workload.requests)) + sum(arm.restart for arm in self.arms)
        elapsed = time.perf_counter() - self._started
        left = elapsed / self._done * (total - self._done) if self._done > len(self.arms) else None
        self.watch(Progress(self._done, total, what, left))
        self._done += 1
