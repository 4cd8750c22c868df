"""Cells of real vLLM: settings -> arm and engine -> a cold start -> every request of the workload -> figures.

An engine is started once for all the cells that it can serve: what differs between them may be the workload and the
repeat, nothing that the engine is made of. Before each cell its caches are emptied and the cell's prompts get a salt of
their own, so that nothing of another cell can be found; the server's counters prove it, or the cell is contaminated.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments.arms import Arm, arm_by_name, ready
from experiments.models import ModelSource, resolve_model
from experiments.serving import EngineError, EngineProcess
from experiments.study_cells import CellResult, settings_below
from experiments.study_measures import EventSums, cell_figures, contamination, request_row
from experiments.study_points import Cell
from experiments.workloads import Workload, make_workload
from workbench.codecs import resolve_codec
from workbench.config import CacheConfig
from workbench.errors import InvalidInputError
from workbench.events import Event
from workbench.policies import resolve_policy

__all__ = ["ServingCells", "cache_settings", "engine_name"]

# The arms whose engines are emptied between cells; any other arm gets a fresh engine for each cell.
_CACHE = "cache"
_PLAIN = ("none", "prefix_cache")
_TIERS = ("memory", "disk", "redis", "object_store")
# Where tiers lie that the settings do not place: in the study's folder, or in a server that is started for the engine.
_PLACES = {"redis": "redis://127.0.0.1:$redis_port/0", "object_store": "file://$folder"}

_BLOCK_TOKENS = 128  # of vLLM's CPU backend; a whole number of every other block size
_HEADROOM_TOKENS = 512
_WARM_UP = "warm-up"
_SHORT_PROMPT = np.arange(1, 40)  # less than a block: no arm stores or finds it


# ---------------------------------------------------------------- settings -> engine


def engine_name(cell: Cell) -> str:
    """Names the engine that a cell needs; cells with the same name can share one."""
    settings = cell.settings
    arm = settings.get("arm", _CACHE)
    common = {name: settings[name] for name in settings if name in ("model", "threads") or name.startswith("vllm.")}
    if arm == _CACHE:
        engine = {**common, "cache": cache_settings(settings)}
    else:
        engine = common if arm in _PLAIN else {**common, "cell": cell.key}
    text = json.dumps([arm, engine], sort_keys=True)
    return f"{arm}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def cache_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `CacheConfig` for the arm "cache", without the places that the run supplies.

    `tier` is one of memory, disk, redis, object_store, or several joined by "+". `codec` is that of the tier, and of
    every tier below memory where there are several; `policy` is that of each.
    """
    tiers = str(settings.get("tier", "memory")).split("+")
    if unknown := [tier for tier in tiers if tier not in _TIERS]:
        raise InvalidInputError(f"tier {unknown[0]!r} is not one of {', '.join(_TIERS)}, nor several joined by '+'")
    found: dict[str, Any] = {"memory_bytes": settings.get("memory_bytes", "1GiB") if "memory" in tiers else 0}
    found |= {name: settings[name] for name in ("chunk_tokens", "disk_bytes") if name in settings}
    if "codec" in settings:
        found["memory_codec" if tiers == ["memory"] else "codec"] = settings["codec"]
    if "policy" in settings:
        found |= {"policy" if tier == "memory" else f"{tier}_policy": settings["policy"] for tier in tiers}
    found |= {f"{tier}_url": settings.get(f"{tier}_url", _PLACES[tier]) for tier in tiers if tier in _PLACES}
    return {**found, **settings_below(settings, "cache.")}


def _arm_of(settings: Mapping[str, Any]) -> Arm:
    name = settings.get("arm", _CACHE)
    if name != _CACHE:
        return arm_by_name(name)
    cache = cache_settings(settings)
    server = arm_by_name("redis").companion if cache.get("redis_url") == _PLACES["redis"] else None
    return Arm(_CACHE, "KV Workbench", cache=cache, disk="disk" in str(settings.get("tier")), companion=server)


@dataclass
class _Engine:
    """A running engine and what belongs to it."""

    process: EngineProcess
    arm: Arm
    servers: ExitStack  # what runs beside it, and its files
    asked: dict[str, Any]
    events: Path
    read: int = 0  # bytes of the events that earlier cells have read

    def new_events(self, start: int = 0) -> list[Event]:
        """Events since the last call; requests are named "start:number", for vLLM counts anew at each start."""
        if not self.events.exists():
            return []
        with open(self.events, "rb") as file:
            file.seek(self.read)
            whole = file.read().rpartition(b"\n")[0]
        self.read += len(whole) + 1 if whole else 0
        events = [Event(*json.loads(line)) for line in whole.splitlines()]
        return [event._replace(request=f"{start}:{event.request.partition('-')[0]}") for event in events]


# ---------------------------------------------------------------- cells


class ServingCells:
    """Runs cells on engines that stay up while cells to come need them.

    Args:
        description: Of the study.
        folder: Of the study.
        worker: Name of this worker; its files carry it.
    """

    def __init__(self, description: dict[str, Any], folder: Path, *, worker: str):
        self.description, self.folder = description, Path(folder) / "engines" / worker
        self.folder.mkdir(parents=True, exist_ok=True)
        self._engines: dict[str, _Engine] = {}
        self._broken: dict[str, str] = {}  # engines that could not start, and why

    def run(self, cell: Cell, keep: Sequence[str] = ()) -> CellResult:
        """Run one cell.

        Args:
            cell: What to run.
            keep: Engines that cells to come need; all others are closed before another one starts.

        Raises:
            CacheError: Settings that cannot work, or an engine that failed.
        """
        name, settings = engine_name(cell), cell.settings
        source, workload = self._source(settings), self._workload(settings, cell.seed)
        started = name not in self._engines
        try:
            engine = self._engine(name, settings, source, keep)
            answers, events = self._ask_all(engine, cell, workload)
        except EngineError:
            self._end(name)
            raise
        effective = engine.process.settings
        granularity = effective.get("chunk_tokens") or effective["block_size"]
        bounds = workload.upper_bound_hit_tokens(granularity).tolist()
        sums = EventSums(events)
        asked = zip(workload.requests, bounds, answers, strict=True)
        rows = [request_row(engine.arm, request, bound, answer, sums) for request, bound, answer in asked]
        results = {**cell_figures(rows), **sums.figures(),
                   "engine_start_s": engine.process.start_seconds if started else None}  # fmt: skip
        return CellResult(results, _flat(effective), engine.asked, rows, contamination(rows, workload))

    def close(self) -> None:
        for name in list(self._engines):
            self._end(name)

    def _ask_all(self, engine: _Engine, cell: Cell, workload: Workload) -> tuple[list[dict[str, Any]], list[Event]]:
        """Answers to every request, in order, and what the engine's events say about them."""
        engine.process.reset()
        engine.new_events()  # what earlier cells and the reset left
        answers, events, start = [], [], 0
        for request in workload.requests:
            if engine.arm.restart and request.question > 0 and not start:
                engine.process.close()
                events, start = engine.new_events(), 1
                engine.process.start()
                self._warm_up(engine)
                engine.new_events()
            answer = engine.process.generate(request.token_ids, max_tokens=request.max_tokens, cache_salt=cell.key)
            answers.append({**answer, "engine_request": f"{start}:{answer['engine_request']}"})
            if engine.arm.deferred_stores:
                engine.process.generate(_SHORT_PROMPT, max_tokens=1)  # an untimed step that does what was put off
        if engine.arm.cache is not None:
            engine.process.generate(_SHORT_PROMPT, max_tokens=1)  # the step in which the last request's stores are told
        return answers, [*events, *engine.new_events(start)]

    # ---------------------------------------------------------------- engines

    def _engine(self, name: str, settings: dict[str, Any], source: ModelSource, keep: Sequence[str]) -> _Engine:
        if name in self._broken:
            raise EngineError(f"this engine did not start for an earlier cell: {self._broken[name]}")
        if name not in self._engines:
            for other in [other for other in self._engines if other not in keep]:
                self._end(other)
            try:
                self._engines[name] = self._started(name, settings, source)
            except EngineError as error:
                self._broken[name] = str(error)
                raise
            self._warm_up(self._engines[name])
        return self._engines[name]

    def _started(self, name: str, settings: dict[str, Any], source: ModelSource) -> _Engine:
        folder, arm = self.folder / name, _arm_of(settings)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        folder.mkdir(parents=True)
        threads = settings.get("threads") or os.cpu_count() or 1
        with ExitStack() as servers:
            servers.callback(shutil.rmtree, arm.tier_path(folder), ignore_errors=True)  # large, of no use afterwards
            arm = servers.enter_context(ready(arm, folder))
            options, events = arm.engine_options(folder), folder / "events.jsonl"
            if options["cache"] is not None:
                options["cache"]["events_path"] = str(events)
            vllm = {**self._room(source), **arm.vllm, **settings_below(settings, "vllm.")}
            process = EngineProcess(str(source.path), threads=threads, vllm=vllm, log=folder / "log.txt", **options)
            servers.callback(process.close)
            process.start()
            return _Engine(process, arm, servers.pop_all(), _asked(arm, options["cache"], threads, vllm), events)

    def _warm_up(self, engine: _Engine) -> None:
        """Load code paths, those of a hit too, with a prompt that shares nothing with any other; then forget it."""
        length = min(_BLOCK_TOKENS * 5, int(engine.process.settings["max_model_len"]) - _HEADROOM_TOKENS // 2)
        prompt = np.resize(np.arange(1, 200), max(length, 2))
        for _ in range(2):
            engine.process.generate(prompt, max_tokens=2, cache_salt=_WARM_UP)

    def _end(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.servers.close()

    # ---------------------------------------------------------------- model and workloads

    def _source(self, settings: Mapping[str, Any]) -> ModelSource:
        return _model(settings.get("model", "smollm2"))

    def _workload(self, settings: Mapping[str, Any], seed: int) -> Workload:
        chosen = json.dumps([settings.get("workload", "long_document"), settings_below(settings, "workload.")])
        return _workload(settings.get("model", "smollm2"), chosen, seed)

    def _room(self, source: ModelSource) -> dict[str, int]:
        """Room for the longest prompt and for every prompt of the largest workload, the same for each engine of the
        study: vLLM's own prefix cache never evicts, and no engine differs from another in what nobody set."""
        space, fixed = self.description["space"], self.description["fixed"]
        varied = {name: values for name, values in space.items() if name == "workload" or name.startswith("workload.")}
        longest = whole = 0
        for values in itertools.product(*varied.values()):
            settings = {**fixed, "model": str(source.path), **dict(zip(varied, values, strict=True))}
            for repeat in range(self.description["repeats"]):
                try:
                    requests = self._workload(settings, self.description["seed"] + repeat).requests
                except InvalidInputError:
                    continue  # its own cell fails with it
                longest = max(longest, *(len(r.token_ids) + r.max_tokens for r in requests))
                whole = max(whole, sum(_blocks(len(r.token_ids) + r.max_tokens) for r in requests))
        length = _blocks(longest + _HEADROOM_TOKENS)
        nbytes = (whole + 2 * length) * (source.bytes_per_token or 1 << 16)
        return {"max_model_len": length, "kv_cache_memory_bytes": nbytes}


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK_TOKENS) * _BLOCK_TOKENS


@cache
def _model(spec: str) -> ModelSource:
    return resolve_model(spec, progress=False)


@cache
def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@cache
def _workload(model: str, chosen: str, seed: int) -> Workload:
    name, settings = json.loads(chosen)
    return make_workload(name, _tokenizer(str(_model(model).path)), **{"seed": seed, **settings})


# ---------------------------------------------------------------- asked and effective


def _asked(arm: Arm, cache: Mapping[str, Any] | None, threads: int, vllm: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine must report that it runs with."""
    asked = {"prefix_caching": arm.prefix_caching, "threads": threads}
    asked |= {name: vllm[name] for name in ("max_model_len", "block_size", "max_num_batched_tokens", "enforce_eager")
              if name in vllm}  # fmt: skip
    if cache is None:
        return asked
    config = CacheConfig(**cache)
    asked |= {"kv_connector": "WorkbenchConnector", "chunk_tokens": config.chunk_tokens}
    for tier in [tier for tier, used in (("memory", config.memory_bytes), ("disk", config.disk_path),
                                         ("redis", config.redis_url), ("object_store", config.object_store_url))
                 if used]:  # fmt: skip
        codec = config.memory_codec if tier == "memory" else config.codec
        policy = config.policy if tier == "memory" else getattr(config, f"{tier}_policy")
        asked |= {f"tiers.{tier}.capacity_bytes": int(getattr(config, f"{tier}_bytes")),
                  f"tiers.{tier}.policy": repr(resolve_policy(policy)),
                  f"tiers.{tier}.codec": repr(resolve_codec(codec))}  # fmt: skip
    return asked


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
