"""Cells of real vLLM: settings -> engine -> a cold start -> every request of the workload -> figures.

Requests go one by one into an engine, or, with the settings `request_rate` and `concurrency`, to a server under load.
Before each cell the engine's caches are emptied and the cell's prompts get a salt of their own, so that nothing of
another cell can be found; the server's counters prove it, or the cell is contaminated.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.arms import hit_step_tokens
from experiments.client import send_requests
from experiments.models import ModelSource, resolve_model
from experiments.serving import EngineError
from experiments.study.cells import CellResult, settings_below
from experiments.study.engines import (
    BLOCK_TOKENS,
    HEADROOM_TOKENS,
    Engine,
    Engines,
    engine_name,
    flat,
    is_under_load,
)
from experiments.study.measures import EventSums, cell_figures, contamination, load_figures, loaded_answer, request_row
from experiments.study.points import Cell
from experiments.workloads import Workload, make_workload
from workbench.errors import InvalidInputError
from workbench.events import Event

__all__ = ["ServingCells"]

Answers = list[dict[str, Any]]


class ServingCells:
    """Runs cells on engines that stay up while cells to come need them.

    Args:
        description: Of the study.
        folder: Of the study.
        worker: Name of this worker; its files carry it.
    """

    def __init__(self, description: dict[str, Any], folder: Path, *, worker: str):
        self.description = description
        own = Path(folder) / "engines" / worker
        own.mkdir(parents=True, exist_ok=True)
        self._engines = Engines(own)

    def run(self, cell: Cell, keep: Sequence[str] = ()) -> CellResult:
        """Run one cell.

        Args:
            cell: What to run.
            keep: Engines that cells to come need; all others are closed before another one starts.

        Raises:
            CacheError: Settings that cannot work, or an engine that failed.
        """
        source, workload = _model_of(cell.settings), _workload_of(cell.settings, cell.seed)
        engine = self._engines.engine(cell, source, self._room(source), keep)
        fresh, engine.used = not engine.used, True
        under_load = is_under_load(cell.settings)
        try:
            engine.empty()
            answers, events = (_ask_under_load if under_load else _ask_in_turn)(engine, cell, workload)
        except EngineError:
            self._engines.end(engine_name(cell))
            raise
        ours = {answer["engine_request"] for answer in answers}
        sums = EventSums([event for event in events if event.request in ours or event.request.endswith(":")])
        step = hit_step_tokens(engine.arm.cache, int(engine.settings["block_size"]))
        bounds = workload.upper_bound_hit_tokens(step).tolist()
        asked = zip(workload.requests, bounds, answers, strict=True)
        rows = [request_row(engine.arm, request, bound, answer, sums) for request, bound, answer in asked]
        results = {**cell_figures(rows), **(load_figures(rows) if under_load else {}), **sums.figures(),
                   "engine_start_s": engine.process.start_seconds if fresh else None}  # fmt: skip
        return CellResult(results, flat(engine.settings), engine.asked, rows, contamination(rows, workload))

    def close(self) -> None:
        self._engines.close()

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
                    requests = _workload_of(settings, self.description["seed"] + repeat).requests
                except InvalidInputError:
                    continue  # its own cell fails with it
                longest = max(longest, *(len(r.token_ids) + r.max_tokens for r in requests))
                whole = max(whole, sum(_blocks(len(r.token_ids) + r.max_tokens) for r in requests))
        length = _blocks(longest + HEADROOM_TOKENS)
        nbytes = (whole + 2 * length) * (source.bytes_per_token or 1 << 16)
        return {"max_model_len": length, "kv_cache_memory_bytes": nbytes}


# ---------------------------------------------------------------- asking


def _ask_in_turn(engine: Engine, cell: Cell, workload: Workload) -> tuple[Answers, list[Event]]:
    """Answers to every request, one after the other, and what the engine's events say about them."""
    answers, events, start = [], [], 0
    for request in workload.requests:
        if engine.arm.restart and request.question > 0 and not start:
            engine.process.close()
            events, start = engine.new_events(), 1
            engine.process.start()
            engine.warm_up()
            engine.new_events()
        answer = engine.process.generate(request.token_ids, max_tokens=request.max_tokens, cache_salt=cell.key)
        answers.append({**answer, "engine_request": f"{start}:{answer['engine_request']}"})
        if engine.arm.deferred_stores:
            engine.settle()
    if engine.arm.cache is not None:
        engine.settle()
    return answers, [*events, *engine.new_events(start)]


def _ask_under_load(engine: Engine, cell: Cell, workload: Workload) -> tuple[Answers, list[Event]]:
    """The same from a server: each request when it is due, or as soon as one of so many places is free."""
    settings = cell.settings
    rows = send_requests(workload.requests, engine.process.url, open_loop=settings.get("request_rate") is not None,
                         concurrency=settings.get("concurrency"), cache_salt=cell.key)  # fmt: skip
    errors = [row["error"] for row in rows if row["error"]]
    if not engine.process.healthy() or len(errors) == len(rows):
        said = errors[0] if errors else "every request was answered"
        raise EngineError(f"the server did not bear the load (log: {engine.process.log}): {said}")
    engine.settle()
    return [loaded_answer(row) for row in rows], engine.new_events()


# ---------------------------------------------------------------- model and workloads


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _model_of(settings: Mapping[str, Any]) -> ModelSource:
    return _model(settings.get("model", "smollm2"))


def _workload_of(settings: Mapping[str, Any], seed: int) -> Workload:
    """The cell's requests; at a rate, with the times at which they are due: its own if it has any, else Poisson's."""
    chosen = json.dumps([settings.get("workload", "long_document"), settings_below(settings, "workload.")])
    workload = _workload(settings.get("model", "smollm2"), chosen, seed)
    rate = settings.get("request_rate")
    return workload if rate is None else workload.with_arrivals(rate)


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
