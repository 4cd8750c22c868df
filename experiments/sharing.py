"""Two real vLLM engines over one shared tier: what one computes, the other finds.

engine A: every document, computed and stored -> engine B: a question on each, from the shared tier
-> engine B: another question on each, from its own memory

run = share("smollm2")
run.plot("ttft"); CacheExplorer(run.folder / "events-b.jsonl")
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl

from experiments.arms import arm_by_name, hit_step_tokens, ready
from experiments.cache_state import read_events
from experiments.demo import engine_room, shared_tokens
from experiments.environment import describe_environment
from experiments.models import ModelSource, resolve_model
from experiments.runs import RUNS_FOLDER, Run, new_run_folder, requests_frame
from experiments.serving import SHORT_PROMPT, EngineProcess, Progress
from experiments.workloads import Request, Workload, make_workload
from workbench.errors import InvalidInputError

__all__ = ["share"]

_MEMORY = "256MiB"  # of each engine's own
_WRITTEN_SECONDS = 10.0  # that the shared tier may lag behind engine A's last answer


def share(model: str | ModelSource = "smollm2", workload: Workload | None = None, *, tier: str = "redis",
          runs: Path = RUNS_FOLDER, threads: int = 0,
          watch: Callable[[Progress], None] = lambda _: None) -> Run:  # fmt: skip
    """Ask engine A the first question on each document, engine B the second and the third.

    Args:
        model: What `resolve_model` takes.
        workload: Documents with three questions each; five short ones by default.
        tier: "redis" (a server is started for this run) or "object_store" (local files).
        runs: Folder of the run store.
        threads: Compute threads of each engine; all cores by default.
        watch: Called with `Progress` before each step.

    Returns:
        The run, with the arms "computed", `tier` and "memory"; `events-a.jsonl` and `events-b.jsonl` lie in its folder.

    Raises:
        InvalidInputError: A workload without three questions on its documents.
        ArmUnavailableError: The shared tier's server is not installed.
    """
    source = model if isinstance(model, ModelSource) else resolve_model(model)
    workload = workload if workload is not None else _documents(source)
    rounds = [[r for r in workload.requests if r.question == number] for number in range(3)]
    if not all(rounds):
        raise InvalidInputError("sharing needs a workload with three questions on each document: questions=3")
    folder = new_run_folder("sharing", runs)
    run = _Sharing(source, workload, folder, threads or os.cpu_count() or 1, watch)
    with ExitStack() as stack:
        arm = stack.enter_context(ready(arm_by_name(tier), folder))
        first, second = (stack.enter_context(run.engine(name, arm.cache or {})) for name in ("a", "b"))
        run.ask(first, "a", rounds[0], "computed", "engine A, computes and stores")
        run.wait_until_written(first, tier)
        run.ask(second, "b", rounds[1], tier, f"engine B, from {arm.label.partition('(')[2].rstrip(')') or tier}")
        run.ask(second, "b", rounds[2], "memory", "engine B, from its own memory")
    return run.save({"a": first.settings, "b": second.settings}, tier)


def _documents(source: ModelSource) -> Workload:
    from transformers import AutoTokenizer

    return make_workload("long_document", AutoTokenizer.from_pretrained(str(source.path)), groups=5, questions=3,
                         documents_per_group=1, document_tokens=800, max_tokens=4)  # fmt: skip


class _Sharing:
    """What is collected while the engines answer."""

    def __init__(self, source: ModelSource, workload: Workload, folder: Path, threads: int,
                 watch: Callable[[Progress], None]):  # fmt: skip
        self.source, self.workload, self.folder, self.threads, self.watch = source, workload, folder, threads, watch
        self.rows: list[dict[str, Any]] = []
        self.events: list[pl.DataFrame] = []
        self._read = {"a": 0, "b": 0}
        self._bounds: dict[str, int] = {}

    def engine(self, name: str, cache: dict[str, Any]) -> EngineProcess:
        """An engine with memory of its own over the shared tier, not started."""
        settings = {**cache, "memory_bytes": _MEMORY, "events_path": str(self._events_path(name))}
        return EngineProcess(str(self.source.path), cache=settings, threads=self.threads,
                             vllm=engine_room(self.workload, self.source),
                             log=self.folder / f"engine-{name}.log")  # fmt: skip

    def ask(self, engine: EngineProcess, name: str, requests: list[Request], arm: str, label: str) -> None:
        """Ask every request, one after another, as one arm."""
        if not self._read[name]:
            engine.generate(SHORT_PROMPT, max_tokens=2)  # loads code paths; in no statistics
            self._new_events(name)
        for request in requests:
            total = sum(r.question < 3 for r in self.workload.requests)
            self.watch(Progress(len(self.rows), total, f"{request.request_id}, {label}", None))
            self.rows.append(self._row(engine, name, request, arm, label))
        self.events.append(_numbered(self._new_events(name), name).with_columns(pl.lit(arm).alias("arm")))

    def wait_until_written(self, engine: EngineProcess, tier: str) -> None:
        """Until the shared tier holds every chunk of engine A; a step of the engine brings the news of it."""
        deadline = time.monotonic() + _WRITTEN_SECONDS
        stored = pl.col("kind").is_in(["store", "dedup"])
        wanted = self.events[-1].filter(stored, pl.col("tier") == "memory").height
        while time.monotonic() < deadline:
            engine.generate(SHORT_PROMPT, max_tokens=1)
            self.events.append(_numbered(self._new_events("a"), "a").with_columns(pl.lit("computed").alias("arm")))
            if pl.concat(self.events).filter(stored, pl.col("tier") == tier).height >= wanted:
                return
            time.sleep(0.05)

    def save(self, settings: dict[str, Any], tier: str) -> Run:
        """The run with all that was collected."""
        events = pl.concat(self.events)
        requests = requests_frame(self.folder.name, self.rows, events, shared_tokens(self.workload))
        source, workload = self.source, self.workload
        return Run.save(self.folder, requests, events, {
            **describe_environment(),
            "model": {"name": source.name, "licence": source.licence, "sha256": source.sha256, "dtype": source.dtype,
                      "bytes_per_token": source.bytes_per_token},
            "workload": {"name": workload.name, "seed": workload.seed, "description": workload.description,
                         "requests": len(workload.requests), "sources": [vars(s) for s in workload.sources]},
            "arms": {"computed": settings["a"], tier: settings["b"], "memory": settings["b"]},
            "method": "two engine processes over one shared tier, one request at a time; eager mode; greedy",
        })  # fmt: skip

    def _row(self, engine: EngineProcess, name: str, request: Request, arm: str, label: str) -> dict[str, Any]:
        answer = engine.generate(request.token_ids, max_tokens=request.max_tokens)
        counters = answer.pop("counters")
        answer["engine_request"] = f"{name}:{answer['engine_request']}"
        step = hit_step_tokens(engine.cache, int(engine.settings["block_size"]))
        return {
            "arm": arm, "arm_label": label, "order": len(self.rows), "repeat": 0, "request_id": request.request_id,
            "group": request.group, "document": str(request.document), "question": request.text or "",
            "phase": "again" if request.question else "first", "prompt_tokens": len(request.token_ids),
            "expected_hit_tokens": self._bound(request, step),
            "output_tokens": len(answer["token_ids"]), "local_hit_tokens": int(counters["vllm:prefix_cache_hits"]),
            "external_hit_tokens": int(counters["vllm:external_prefix_cache_hits"]), "error": "", **answer,
        }  # fmt: skip

    def _bound(self, request: Request, step_tokens: int) -> int:
        if not self._bounds:
            found = self.workload.upper_bound_hit_tokens(step_tokens).tolist()
            self._bounds = {r.request_id: bound for r, bound in zip(self.workload.requests, found, strict=True)}
        return self._bounds[request.request_id]

    def _events_path(self, name: str) -> Path:
        return self.folder / f"events-{name}.jsonl"

    def _new_events(self, name: str) -> pl.DataFrame:
        """Events that an engine has written since the last call."""
        events = read_events(self._events_path(name))
        new, self._read[name] = events[self._read[name] :], events.height
        return new


def _numbered(events: pl.DataFrame, name: str) -> pl.DataFrame:
    """Requests as the rows name them; vLLM appends a suffix of its own to each number."""
    return events.with_columns(pl.col("request").str.replace(r"^(\d+)-[0-9a-f]{8}$", f"{name}:${{1}}"))
