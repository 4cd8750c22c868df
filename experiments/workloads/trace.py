"""A trace as real requests: the same sharing and the same arrival times, with text in the place of block ids.

    make_workload("trace", tokenizer, trace="mooncake_conversation", requests=50, block_tokens=64, requests_per_s=1)

Every block id stands for one piece of text, the same wherever the id occurs; different ids stand for different pieces.
Prompts of a trace are often longer than a small model takes, so a block of 512 tokens may become one of 64: lengths of
prompts and answers shrink by that factor, shared fractions stay. A few requests from the beginning hardly repeat
anything; whole sessions drawn from all of the trace repeat as much as the trace does.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from experiments.traces import Trace, load_trace
from experiments.workloads import Request, Workload, require_positive
from experiments.workloads._prompts import encode
from experiments.workloads._texts import Library
from workbench.errors import InvalidInputError, UnknownNameError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["trace"]

_TEXT_TOKENS = 40_000  # of the stretch from which all pieces are cut

# Blocks in more prompts than this share are a system prompt, not a session's beginning.
_COMMON_SHARE = 0.05


def trace(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    trace: str | Path | Trace = "mooncake_conversation",
    requests: int = 50,
    sample: Literal["first", "sessions"] = "first",
    block_tokens: int | None = None,
    max_prompt_tokens: int = 4096,
    seed: int = 0,
) -> Workload:
    """Make the workload from a part of a trace.

    Args:
        tokenizer: The served model's tokenizer.
        trace: A known trace's name, a file, or a `Trace`.
        requests: How many at most.
        sample: "first": the trace's beginning. "sessions": whole sessions, each as likely as any other.
        block_tokens: Tokens of text for each of the trace's blocks, 16 at least; by default as many as the block has,
            at most 64.
        max_prompt_tokens: Longer prompts are cut at their end, which leaves their shared beginning.
        seed: Chooses texts and sessions.

    Raises:
        InvalidInputError: No such trace or sample, blocks of unequal size or with less than 16 tokens of text.
    """
    found = trace if isinstance(trace, Trace) else load_trace(trace)
    size = min(found.block_tokens, 64) if block_tokens is None else block_tokens
    require_positive(requests=requests, max_prompt_tokens=max_prompt_tokens)
    if size < 16 or found.block_sizes is not None:
        raise InvalidInputError(f"block_tokens is {size}; allowed are 16 and more, and traces with equal blocks")
    if sample not in _SAMPLES:
        raise UnknownNameError("sample", sample, _SAMPLES)
    pieces, begun = _Pieces(tokenizer, seed, size), Counter()
    made, cut = [], 0
    for number in _SAMPLES[sample](found, requests, seed):
        request = _request(found, number, begun, pieces)
        cut += len(request.token_ids) > max_prompt_tokens
        made.append(replace(request, token_ids=request.token_ids[:max_prompt_tokens]))
    start = made[0].arrival_s if made else 0.0
    described = (f"{len(made)} requests of {found.name} ({sample}), {found.block_tokens} tokens of it as {size}, "
                 f"{cut} prompts cut at {max_prompt_tokens} tokens")  # fmt: skip
    shifted = tuple(replace(request, arrival_s=request.arrival_s - start) for request in made)
    return Workload("trace", shifted, seed, described, pieces.sources)


def _first(trace: Trace, requests: int, seed: int) -> list[int]:
    return list(range(min(requests, trace.requests)))


def _sessions(trace: Trace, requests: int, seed: int) -> list[int]:
    """Numbers of the requests of whole sessions, by time; a session too long for what is left is passed over."""
    members: dict[int, list[int]] = {}
    for number, session in enumerate(_session_of(trace)):
        members.setdefault(session, []).append(number)
    chosen: list[int] = []
    for session in np.random.default_rng(seed).permutation(sorted(members)).tolist():
        if len(chosen) + len(members[session]) <= requests:
            chosen += members[session]
    return sorted(chosen)


def _session_of(trace: Trace) -> list[int]:
    """The trace's own sessions, or what a prompt begins with after the blocks that many prompts begin with."""
    if trace.tenants.any():
        return trace.tenants.tolist()
    uses = np.bincount(trace.ids, minlength=trace.distinct)
    common = uses > max(1.0, _COMMON_SHARE * trace.requests)
    sessions = []
    for number in range(trace.requests):
        blocks = trace.ids[trace.offsets[number] : trace.offsets[number + 1]]
        own = blocks[~common[blocks]]
        sessions.append(int(own[0]) if len(own) else -1 - number)
    return sessions


_SAMPLES: dict[str, Callable[[Trace, int, int], list[int]]] = {"first": _first, "sessions": _sessions}


def _request(trace: Trace, number: int, begun: Counter[int], pieces: "_Pieces") -> Request:
    """One request at its full length; `begun` counts how many began with each block."""
    scale = pieces.size / trace.block_tokens
    blocks = trace.ids[trace.offsets[number] : trace.offsets[number + 1]]
    first = int(blocks[0]) if len(blocks) else -1 - number  # without any block it has a document of its own
    begun[first] += 1
    return Request(
        request_id=f"t{number}",
        token_ids=pieces.prompt(number, blocks, max(1, round(int(trace.input_tokens[number]) * scale))),
        group=0,
        document=first,
        question=begun[first] - 1,
        kind="warm" if begun[first] > 1 else "cold",
        max_tokens=max(1, round(int(trace.output_tokens[number]) * scale)),
        arrival_s=float(trace.timestamps[number]),
    )


class _Pieces:
    """Text for block ids: a label that no other piece has, then a stretch of the library."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", seed: int, size: int):
        self._tokenizer, self._seed, self.size = tokenizer, seed, size
        library = Library(tokenizer, random.Random(f"trace texts {seed}"))
        self._text = library.take(_TEXT_TOKENS)
        self.sources = library.sources()
        self._made: dict[int, list[int]] = {}

    def prompt(self, number: int, blocks: np.ndarray, tokens: int) -> np.ndarray:
        """int32[tokens]: the blocks' pieces; where they end before the prompt does, then text of this request alone."""
        ids: list[int] = []
        for block in blocks.tolist():
            ids += self._piece(block)
        if len(ids) < tokens:
            ids += self._labelled(f"Request {self._seed}-{number}: ", tokens - len(ids), (self._seed, 1, number))
        return np.array(ids[:tokens], np.int32)

    def _piece(self, block: int) -> list[int]:
        if block not in self._made:
            self._made[block] = self._labelled(f"{block}-{self._seed}: ", self.size, (self._seed, 0, block))
        return self._made[block]

    def _labelled(self, label: str, tokens: int, place: tuple[int, ...]) -> list[int]:
        ids = encode(self._tokenizer, label)
        start = int(np.random.default_rng(place).integers(len(self._text)))
        rounds = -(-(start + tokens) // len(self._text))
        return (ids + (self._text * rounds)[start : start + tokens])[:tokens]
