"""Real vLLM, with and without reuse: engines as processes, arms, and one workload through several of them.

arms -> one engine process each -> first questions, rotating through the arms -> restart where an arm asks for it
     -> the other requests, rotating -> requests and events as frames -> a run

What would distort the comparison is the same in every arm or kept out of the figures: threads and their binding, the
hash seed, inherited variables that overrule settings (`engine_process.engine_environment`); cores that idle engines
spin on (single-process engines do not); stores that a connector puts off to its next step (an untimed short request
makes it do them); warm file caches (`Arm.cold_files`).
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.arms import ARMS, Arm, ArmUnavailableError, arm_by_name, hit_step_tokens, ready
from experiments.vllm_process import VllmProcess
from workbench.errors import CacheError, InvalidInputError

__all__ = ["ARMS", "SHORT_PROMPT", "Arm", "Comparison", "EngineError", "EngineProcess", "Progress", "arm_by_name",
           "drop_file_cache"]  # fmt: skip

SHORT_PROMPT = np.arange(1, 40)  # for steps that are not measured; shares nothing with what is

# What a request has to show for itself when its engine failed.
_NO_ANSWER = {
    "engine_request": "", "ttft_s": None, "queue_s": None, "load_and_prefill_s": None, "itl_s": None, "e2e_s": None,
    "cached_tokens": 0, "token_ids": [], "text": "", "finish_reason": "error", "counters": Counter(),
}  # fmt: skip


class EngineError(CacheError):
    """An engine process failed; the message holds what it said last."""


class EngineProcess(VllmProcess):
    """A vLLM engine in its own process. Use as a context manager, or call `start` and `close`."""

    def __post_init__(self):
        super().__post_init__()
        self.settings: dict[str, Any] = {}

    def start(self) -> "EngineProcess":
        """Start the process and wait until the engine is ready."""
        began = time.perf_counter()
        to_child, to_parent = os.pipe(), os.pipe()
        with open(self.log, "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiments.engine_process", str(to_child[0]), str(to_parent[1])],
                pass_fds=(to_child[0], to_parent[1]), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment(), cwd=Path(__file__).parent.parent, start_new_session=True,
            )  # fmt: skip
        os.close(to_child[0])
        os.close(to_parent[1])
        self._requests, self._answers = os.fdopen(to_child[1], "w"), os.fdopen(to_parent[0], "r")
        self.settings = self._ask({"arguments": self.arguments(), "append_path": self.append_path})["settings"]
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

    def reset(self) -> bool:
        """Forget what the engine's caches hold, so that the next prompt is cold; False if something is still in use."""
        return bool(self._ask({"op": "reset"})["reset"])

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


def drop_file_cache(folder: Path) -> int:
    """Drop what a folder's files have in the operating system's cache, so that they are read from the disk next.

    Returns:
        How many files; where the system has no such call, 0.
    """
    if not hasattr(os, "posix_fadvise"):
        return 0
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())  # only what is on the disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return len(files)


@dataclass(frozen=True)
class Progress:
    """Where a comparison stands."""

    done: int
    total: int
    what: str
    seconds_left: float | None


class Comparison:
    """One workload through several arms, in rotating order, one request at a time.

    An arm whose software is not installed is left out, with the reason in `skipped`. An engine that fails gives rows
    with an error, and the others go on.

    Args:
        model: Folder or Hugging Face name.
        workload: Requests; see `experiments.workloads`.
        arms: Names or `Arm`s.
        folder: Where disk tiers, event files and logs go.
        threads: Compute threads of every engine; all cores by default.
        vllm: Further arguments of `vllm.LLM`, the same for every arm.
        watch: Called with `Progress` before each step.

    Raises:
        ArmUnavailableError: None of the arms can run here.
    """

    def __init__(self, model: str, workload: Any, *, arms: Sequence[str | Arm], folder: Path, threads: int = 0,
                 vllm: Mapping[str, Any] | None = None,
                 watch: Callable[[Progress], None] = lambda _: None):  # fmt: skip
        self.model, self.workload, self.folder = model, workload, Path(folder).absolute()  # engines run elsewhere
        asked = [arm_by_name(arm) for arm in arms]
        if len({arm.name for arm in asked}) < len(asked):
            raise InvalidInputError(f"arms {[arm.name for arm in asked]} are not all different")
        self.skipped = {arm.name: arm.missing for arm in asked if arm.missing}
        self.arms = [arm for arm in asked if arm.name not in self.skipped]
        if not self.arms:
            raise ArmUnavailableError(f"no arm can run here: {self.skipped}")
        self.threads, self.vllm, self.watch = threads or os.cpu_count() or 1, dict(vllm or {}), watch
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, dict[str, Any]] = {}
        self._engines: dict[str, EngineProcess] = {}
        self._starts = dict.fromkeys((arm.name for arm in self.arms), 0)
        self._started = time.perf_counter()
        self._done = 0
        self._bounds: dict[int, dict[str, int]] = {}
        self._turns = itertools.count()

    def run(self) -> list[dict[str, Any]]:
        """Run everything; returns one row a request and arm. Engines are closed whatever happens."""
        requests = list(self.workload.requests)
        split = next((i for i, request in enumerate(requests) if request.question > 0), len(requests))
        with ExitStack() as companions:
            try:
                self.arms = [companions.enter_context(ready(arm, self.folder)) for arm in self.arms]
                for arm in self.arms:
                    self._start(arm)
                self._ask_all(requests[:split])
                for arm in self.arms:
                    self._between(arm)
                self._ask_all(requests[split:])
            finally:
                for engine in self._engines.values():
                    engine.close()
                for arm in self.arms:
                    shutil.rmtree(arm.tier_path(self.folder), ignore_errors=True)  # large, and of no use after the run
        return self.rows

    def _between(self, arm: Arm) -> None:
        """What an arm asks for between the first questions and the others."""
        if arm.restart:
            self._step(f"restarting vLLM: {arm.label}")
            self._engines.pop(arm.name).close()
        if arm.cold_files:
            drop_file_cache(arm.tier_path(self.folder))
        if arm.restart:
            self._start(arm, announce=False)

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
        options, start = arm.engine_options(self.folder), self._starts[arm.name]
        self._starts[arm.name] += 1
        if options["cache"] is not None:
            options["cache"]["events_path"] = str(self._events_path(arm, start))
        engine = EngineProcess(self.model, threads=self.threads, vllm={**self.vllm, **arm.vllm}, **options,
                               log=self.folder / f"engine-{arm.name}.log")  # fmt: skip
        self._engines[arm.name] = engine.start()
        self._check_settings(arm, engine.settings)
        self.settings[arm.name] = {**engine.settings, "cache": dict(arm.cache or {})}
        engine.generate(SHORT_PROMPT, max_tokens=2)  # loads code paths; request 0 of each start, in no statistics

    def _check_settings(self, arm: Arm, settings: dict[str, Any]) -> None:
        """What runs must be what was asked for, or the comparison is of something else."""
        if settings["prefix_caching"] != arm.prefix_caching or settings["threads"] != self.threads:
            raise EngineError(f"arm {arm.name} runs with {settings}, asked were prefix_caching={arm.prefix_caching}, "
                              f"threads={self.threads}")  # fmt: skip

    def _ask_all(self, requests: Sequence[Any]) -> None:
        for request in requests:
            turn = next(self._turns) % len(self.arms)
            for arm in self.arms[turn:] + self.arms[:turn]:
                self._step(f"{request.request_id}, {arm.label}")
                self.rows.append(self._ask(arm, request))

    def _ask(self, arm: Arm, request: Any) -> dict[str, Any]:
        engine = self._engines[arm.name]
        try:
            answer = engine.generate(request.token_ids, max_tokens=request.max_tokens)
            if arm.deferred_stores:
                engine.generate(SHORT_PROMPT, max_tokens=1)  # makes the connector do its stores; not timed
        except EngineError as error:
            answer = {**_NO_ANSWER, "error": str(error)}
        return self._row(arm, request, answer)

    def _row(self, arm: Arm, request: Any, answer: dict[str, Any]) -> dict[str, Any]:
        counters = answer.pop("counters")
        answer["engine_request"] = f"{self._starts[arm.name] - 1}:{answer['engine_request']}"
        step = hit_step_tokens(arm.cache, int(self.settings[arm.name]["block_size"]))
        bound, most = self._upper_bounds(step)[request.request_id], self._upper_bounds(1)[request.request_id]
        if answer["cached_tokens"] > most:
            answer["error"] = f"contaminated: {answer['cached_tokens']} tokens found where {most} were sent before"
        return {
            "arm": arm.name, "arm_label": arm.label, "order": len(self.rows), "repeat": 0,
            "request_id": request.request_id, "group": request.group, "document": str(request.document),
            "question": request.text or str(request.question), "phase": "again" if request.question else "first",
            "prompt_tokens": len(request.token_ids),
            "expected_hit_tokens": bound, "output_tokens": len(answer["token_ids"]),
            "local_hit_tokens": int(counters["vllm:prefix_cache_hits"]),
            "external_hit_tokens": int(counters["vllm:external_prefix_cache_hits"]),
            "error": "" if answer["finish_reason"] != "error" else "finish_reason error", **answer,
        }  # fmt: skip

    def _upper_bounds(self, step: int) -> dict[str, int]:
        """Tokens that each request can hit at most, in steps of so many."""
        if step not in self._bounds:
            names = [request.request_id for request in self.workload.requests]
            found = self.workload.upper_bound_hit_tokens(step).tolist()
            self._bounds[step] = dict(zip(names, found, strict=True))
        return self._bounds[step]

    def _events_path(self, arm: Arm, start: int) -> Path:
        return self.folder / f"events-{arm.name}-{start}.jsonl"

    def _step(self, what: str) -> None:
        total = len(self.arms) * (1 + len(self.workload.requests)) + sum(arm.restart for arm in self.arms)
        elapsed = time.perf_counter() - self._started
        left = elapsed / self._done * (total - self._done) if self._done > len(self.arms) else None
        self.watch(Progress(self._done, total, what, left))
        self._done += 1
