"""Engines of a study's cells: settings -> arm -> one running vLLM, in process or as a server.

An engine is started once for all the cells that it can serve: what differs between them may be the workload, its rate
and the repeat, nothing that the engine is made of. It stays up while cells to come need it.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.arms import Arm, arm_by_name, hit_step_tokens, ready
from experiments.client import ENGINE_NAME, send_requests
from experiments.models import ModelSource
from experiments.server import ServerProcess
from experiments.serving import SHORT_PROMPT, EngineError, EngineProcess
from experiments.study.cells import settings_below
from experiments.study.points import Cell
from experiments.workloads import Request
from workbench.codecs import resolve_codec
from workbench.config import CacheConfig
from workbench.errors import InvalidInputError
from workbench.events import Event
from workbench.policies import resolve_policy

__all__ = ["BLOCK_TOKENS", "HEADROOM_TOKENS", "Engine", "Engines", "cache_settings", "engine_name",
           "flat", "is_under_load"]  # fmt: skip

_CACHE = "cache"  # the arm whose tiers the setting `tier` names
_TIERS = ("memory", "disk", "redis", "object_store")  # tiers, and the arms of the same names
_PLAIN = ("none", "prefix_cache")
# Where tiers lie that the settings do not place: in the study's folder, or in a server that is started for the engine.
_PLACES = {"redis": "redis://127.0.0.1:$redis_port/0", "object_store": "file://$folder"}

# More engines than this are not kept, whatever cells to come need: each takes memory for a model and its caches.
_MOST_ALIVE = 6

BLOCK_TOKENS = 128  # of vLLM's CPU backend; a whole number of every other block size
HEADROOM_TOKENS = 512
_WARM_UP, _WARM_UP_SECONDS = "warm-up", 60.0


# ---------------------------------------------------------------- settings -> engine


def is_under_load(settings: Mapping[str, Any]) -> bool:
    """Whether a cell's requests go to a server, several at a time, instead of one by one into an engine."""
    return any(settings.get(name) is not None for name in ("request_rate", "concurrency"))


def engine_name(cell: Cell) -> str:
    """Names the engine that a cell needs; cells with the same name can share one."""
    settings = cell.settings
    arm = settings.get("arm", _CACHE)
    engine = {name: settings[name] for name in settings if name in ("model", "threads") or name.startswith("vllm.")}
    if is_under_load(settings):
        engine["server"] = True
    if _is_ours(arm):
        engine["cache"] = cache_settings(settings)
    elif arm not in _PLAIN:
        engine["cell"] = cell.key  # another connector is not ours to empty: it gets a fresh engine for each cell
    text = json.dumps([arm, engine], sort_keys=True)
    return f"{arm}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def cache_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `CacheConfig` for an arm with this engine, without the places that the run supplies.

    The arms memory, disk, redis and object_store have the tier of that name. For the arm "cache", `tier` is one of
    these, or several joined by "+". `codec` is that of the tier, and of every tier below memory where there are
    several; `policy` is that of each.
    """
    tiers = _tiers_of(settings)
    found: dict[str, Any] = {"memory_bytes": settings.get("memory_bytes", "1GiB") if "memory" in tiers else 0}
    found |= {name: settings[name] for name in ("chunk_tokens", "disk_bytes") if name in settings}
    if "codec" in settings:
        found["memory_codec" if tiers == ["memory"] else "codec"] = settings["codec"]
    if "policy" in settings:
        found |= {"policy" if tier == "memory" else f"{tier}_policy": settings["policy"] for tier in tiers}
    found |= {f"{tier}_url": settings.get(f"{tier}_url", _PLACES[tier]) for tier in tiers if tier in _PLACES}
    return {**found, **settings_below(settings, "cache.")}


def _is_ours(arm: str) -> bool:
    return arm == _CACHE or arm in _TIERS


def _tiers_of(settings: Mapping[str, Any]) -> list[str]:
    arm = settings.get("arm", _CACHE)
    if arm in _TIERS:
        if "tier" in settings:
            raise InvalidInputError(f"arm {arm!r} has a tier of its own; with the setting tier, the arm is {_CACHE!r}")
        return [arm]
    tiers = str(settings.get("tier", "memory")).split("+")
    if unknown := [tier for tier in tiers if tier not in _TIERS]:
        raise InvalidInputError(f"tier {unknown[0]!r} is not one of {', '.join(_TIERS)}, nor several joined by '+'")
    return tiers


def _arm_of(settings: Mapping[str, Any]) -> Arm:
    name = settings.get("arm", _CACHE)
    arm = Arm(_CACHE, "KV Workbench") if name == _CACHE else arm_by_name(name)
    if arm.restart and is_under_load(settings):
        raise InvalidInputError(f"arm {name!r} restarts vLLM between first and repeated questions, which load has no "
                                f"place for; the arm {_CACHE!r} with tier: {name} does not")  # fmt: skip
    if not _is_ours(name):
        return arm
    cache = cache_settings(settings)
    own_server = arm_by_name("redis").companion if cache.get("redis_url") == _PLACES["redis"] else None
    return replace(arm, cache=cache, disk="disk" in _tiers_of(settings), companion=own_server)


# ---------------------------------------------------------------- one engine


@dataclass
class Engine:
    """A running engine and what belongs to it."""

    process: EngineProcess | ServerProcess
    arm: Arm
    settings: dict[str, Any]  # what it says that it runs with
    asked: dict[str, Any]  # what it must say
    events: Path
    servers: ExitStack  # what runs beside it, and its files
    used: bool = False
    read: int = 0  # bytes of the events that earlier cells have read

    def empty(self) -> None:
        """Forget what the caches hold, and the events so far."""
        self.process.reset()
        self.new_events()

    def settle(self) -> None:
        """Take a step more, in which the last request's stores are done and told; it is not timed."""
        self._ask(SHORT_PROMPT, tokens=1)

    def warm_up(self) -> None:
        """Load code paths with a prompt that shares nothing with any other, until it is found again: what compiles when
        it is first used, a codec behind a queue of writes too, has compiled then."""
        length = min(BLOCK_TOKENS * 5, int(self.settings["max_model_len"]) - HEADROOM_TOKENS // 2)
        prompt = np.resize(np.arange(1, 200), max(length, 2))
        stores = self.arm.cache is not None or self.arm.kv_transfer is not None
        findable = stores and hit_step_tokens(self.arm.cache, int(self.settings["block_size"])) < length
        deadline = time.monotonic() + _WARM_UP_SECONDS
        self._ask(prompt, tokens=2)
        while not self._ask(prompt, tokens=2) and findable and time.monotonic() < deadline:
            time.sleep(0.2)

    def _ask(self, prompt: np.ndarray, *, tokens: int) -> int:
        """Ask something that is not measured; returns how many tokens were found."""
        if isinstance(self.process, EngineProcess):
            return self.process.generate(prompt, max_tokens=tokens, cache_salt=_WARM_UP)["cached_tokens"]
        request = Request(_WARM_UP, prompt, 0, 0, 0, "cold", max_tokens=tokens)
        return send_requests([request], self.process.url, cache_salt=_WARM_UP)[0]["cached_tokens"] or 0

    def new_events(self, start: int = 0) -> list[Event]:
        """Events since the last call; requests are named "start:request", for vLLM counts anew at each start."""
        if not self.events.exists():
            return []
        with open(self.events, "rb") as file:
            file.seek(self.read)
            whole = file.read().rpartition(b"\n")[0]
        self.read += len(whole) + 1 if whole else 0
        events = [Event(*json.loads(line)) for line in whole.splitlines()]
        names = [re.sub(ENGINE_NAME, r"\1", event.request) for event in events]
        return [event._replace(request=f"{start}:{name}") for event, name in zip(events, names, strict=True)]


class Engines:
    """The engines of one worker.

    Args:
        folder: Of this worker, for tiers in files, events and logs.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._alive: dict[str, Engine] = {}  # that was used longest ago first
        self._broken: dict[str, str] = {}  # engines that could not start, and why

    def engine(self, cell: Cell, source: ModelSource, room: Mapping[str, int], keep: Sequence[str]) -> Engine:
        """The running engine that a cell needs; `used` is false the first time.

        Args:
            cell: What it has to serve.
            source: The model.
            room: Arguments of vLLM that nobody set.
            keep: Engines that cells to come need; others are closed before another one starts.

        Raises:
            CacheError: Settings that cannot work, or an engine that does not start.
        """
        name = engine_name(cell)
        if name in self._broken:
            raise EngineError(f"this engine did not start for an earlier cell: {self._broken[name]}")
        if name in self._alive:
            self._alive[name] = self._alive.pop(name)
            return self._alive[name]
        for other in [other for other in self._alive if other not in keep]:
            self.end(other)
        while len(self._alive) >= _MOST_ALIVE:
            self.end(next(iter(self._alive)))
        try:
            engine = self._alive[name] = self._started(name, cell.settings, source, room)
            engine.warm_up()
        except EngineError as error:
            self._broken[name] = str(error)
            self.end(name)
            raise
        return engine

    def end(self, name: str) -> None:
        """Stop an engine and what runs beside it, and remove its tiers' files."""
        engine = self._alive.pop(name, None)
        if engine is not None:
            engine.servers.close()

    def close(self) -> None:
        for name in list(self._alive):
            self.end(name)

    def _started(self, name: str, settings: Mapping[str, Any], source: ModelSource, room: Mapping[str, int]) -> Engine:
        folder, arm = self._folder / name, _arm_of(settings)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        folder.mkdir(parents=True)
        threads = settings.get("threads") or os.cpu_count() or 1
        with ExitStack() as servers:
            servers.callback(shutil.rmtree, arm.tier_path(folder), ignore_errors=True)  # large, of no use afterwards
            arm = servers.enter_context(ready(arm, folder))
            options, events = arm.engine_options(folder), folder / "events.jsonl"
            if options["cache"] is not None:
                options["cache"]["events_path"] = str(events)
            options |= {"threads": threads, "log": folder / "log.txt",
                        "vllm": {**room, **arm.vllm, **settings_below(settings, "vllm.")}}  # fmt: skip
            asked = _asked(arm, options["cache"], threads, options["vllm"])
            if is_under_load(settings):
                process = ServerProcess(str(source.path), resettable=True, **options)
            else:
                process = EngineProcess(str(source.path), **options)
            servers.callback(process.close)
            process.start()
            said = process.settings() if isinstance(process, ServerProcess) else process.settings
            if isinstance(process, ServerProcess):  # it tells less: what it does not tell cannot be held against it
                asked = {key: value for key, value in asked.items() if key in flat(said)}
            return Engine(process, arm, said, asked, events, servers.pop_all())


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


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dots in their names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
