"""What a codec does to a real model: the prefix goes through the codec, and the model goes on from it.

    text -> prefill of a prefix -> its KV in pages, chunk by chunk -> encode -> decode -> the next tokens scored on it
                                └> `PrefixMethod.send`: another library's way to make it smaller ┘

    kvworkbench codecs measure int8 "ecsq(step=0.3)" --out codecs.json

Compared with the same tokens scored on the uncompressed bfloat16 prefix: KL divergence of the next-token
distributions (the figure to trust), change in negative log-likelihood with a 95 % interval, agreement of the top
token, where greedy continuations part, and recall (`experiments.recall`). Sizes are the bytes really stored, headers
included; seconds are CPU time of one thread. The model computes in float32, so that nothing but the codec rounds.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from experiments.models import resolve_model
from experiments.recall import RecallTask, Tasks
from kernels.floats import decode16, encode16
from kernels.threads import thread_limit
from workbench.codecs import Codec, resolve_codec
from workbench.layout import KVLayout

__all__ = [
    "CodecQuality",
    "Passage",
    "Prefix",
    "PrefixMethod",
    "StudyModel",
    "chunk_of_prefix",
    "layout_of_prefix",
    "measure_quality",
    "pass_through",
    "sample_texts",
    "spread",
]


@dataclass(frozen=True, slots=True)
class CodecQuality:
    """One codec on one model, over all texts.

    Attributes:
        bits_per_value: Stored bits of a key or value element.
        size_fraction: Stored bytes over bfloat16 bytes; its inverse is the compression.
        key_error, value_error: Relative L2 error; None where tokens were left out.
        kl: Mean KL divergence from the uncompressed prefix's next-token distribution, nats.
        kl_interval: Half its 95 % interval, from means of 32 tokens in a row.
        kl_by_position: KL in quarters of the scored tokens.
        kl_by_text: KL of each text.
        nll_change, nll_interval: Change in negative log-likelihood, nats a token, and half its 95 % interval.
        top1_agreement: Share of scored tokens at which both have the same most likely next token.
        greedy_tokens: Mean tokens until greedy continuations part; the length asked for if they never do.
        needle_recall, key_value_recall: Share of questions answered from the compressed prefix, of the `needles` and
            `key_values` that are answered from the uncompressed one.
        encode_seconds, decode_seconds: Thread CPU seconds of all chunks; None where they are part of the prefill.
        source_nbytes: bfloat16 bytes that went through the codec.
        key_error_by_layer, value_error_by_layer: Relative L2 error of each layer.
    """

    codec: str
    bits_per_value: float
    size_fraction: float
    key_error: float | None
    value_error: float | None
    kl: float
    kl_interval: float
    kl_by_position: list[float]
    kl_by_text: dict[str, float]
    nll_change: float
    nll_interval: float
    top1_agreement: float
    greedy_tokens: float | None
    needle_recall: float | None
    encode_seconds: float | None
    decode_seconds: float | None
    source_nbytes: int
    key_error_by_layer: list[float] = field(repr=False)
    value_error_by_layer: list[float] = field(repr=False)
    needles: int = 0
    key_value_recall: float | None = None
    key_values: int = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens, and the KV of the first of them, float32 (layers, heads, tokens, head size), on the bfloat16 grid."""

    tokens: list[int]
    keys: np.ndarray
    values: np.ndarray

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]


class StudyModel:
    """A causal language model that takes KV as arrays.

    Args:
        spec: See `experiments.models.resolve_model`.
    """

    def __init__(self, spec: str = "smollm2"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.source = resolve_model(spec)
        self.tokenizer = AutoTokenizer.from_pretrained(self.source.path)
        self.model = AutoModelForCausalLM.from_pretrained(self.source.path, dtype=torch.float32).eval()

    @property
    def rope_theta(self) -> float:
        """Base of the model's rotary embedding."""
        config = self.model.config
        settings = getattr(config, "rope_parameters", None) or {}
        return float(settings.get("rope_theta") or getattr(config, "rope_theta", 0.0))

    def prefix(self, tokens: Sequence[int], num_tokens: int) -> Prefix:
        """Prefill the first `num_tokens`; its KV is rounded to bfloat16, as a serving engine would hold it."""
        import torch

        with torch.no_grad():
            cache = self.model(torch.tensor([list(tokens[:num_tokens])]), use_cache=True).past_key_values
        parts = [np.stack([getattr(layer, name)[0].numpy() for layer in cache.layers]) for name in ("keys", "values")]
        return Prefix(list(tokens), *(decode16(encode16(part, "bfloat16"), "bfloat16") for part in parts))

    def continuation(self, prefix: Prefix, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Log-probabilities (tokens, vocabulary), float32, of what follows each token after the prefix."""
        import torch

        logits = self._logits(prefix.num_tokens, keys, values, [prefix.tokens[prefix.num_tokens : -1]])
        return torch.log_softmax(logits[0], -1).numpy()

    def greedy(self, prefix: Prefix, keys: np.ndarray, values: np.ndarray, count: int) -> list[int]:
        """The `count` most likely tokens in turn, after the token that follows the prefix."""
        import torch

        cache, token, found = self._cache(keys, values), prefix.tokens[prefix.num_tokens], []
        for _ in range(count):
            with torch.no_grad():
                logits = self.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            found.append(token)
        return found

    def agreed(self, prefix: Prefix, keys: np.ndarray, values: np.ndarray, greedy: Sequence[int]) -> int:
        """How many of the tokens of `greedy` a greedy continuation from this KV begins with, in one pass."""
        given = [prefix.tokens[prefix.num_tokens], *greedy[:-1]]
        likely = self._logits(prefix.num_tokens, keys, values, [given])[0].argmax(-1).tolist()
        return next((place for place, (a, b) in enumerate(zip(likely, greedy, strict=True)) if a != b), len(greedy))

    def answers(
        self, num_tokens: int, keys: np.ndarray, values: np.ndarray, questions: Sequence[tuple[list[int], list[int]]]
    ) -> list[bool]:
        """Whether the answer to each (question, answer) is what the model says after a prefix of `num_tokens`."""
        whole = [[*question, *answer] for question, answer in questions]
        longest = max(map(len, whole))
        padded = [tokens + [tokens[-1]] * (longest - len(tokens)) for tokens in whole]  # later tokens change nothing
        likely = self._logits(num_tokens, keys, values, padded).argmax(-1).tolist()
        return [
            said[len(question) - 1 : len(question) + len(answer) - 1] == answer
            for said, (question, answer) in zip(likely, questions, strict=True)
        ]

    def _logits(self, num_tokens: int, keys: np.ndarray, values: np.ndarray, inputs: list[list[int]]) -> Any:
        """Logits (rows, tokens, vocabulary) of rows that each follow a prefix of `num_tokens`, some left out."""
        import torch

        places = torch.arange(num_tokens, num_tokens + len(inputs[0]))[None]
        cache = self._cache(keys, values, len(inputs))
        with torch.no_grad():
            return self.model(torch.tensor(inputs), position_ids=places, past_key_values=cache, use_cache=True).logits

    def _cache(self, keys: np.ndarray, values: np.ndarray, rows: int = 1) -> Any:
        import torch
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            cache.update(*(torch.from_numpy(part)[None].expand(rows, -1, -1, -1) for part in (k, v)), layer)
        return cache


@dataclass(slots=True)
class Passage:
    """KV after its way through a codec, and what the way cost; fewer tokens than the prefix if some were left out."""

    keys: np.ndarray
    values: np.ndarray
    stored_nbytes: int = 0
    encode_seconds: float | None = 0.0
    decode_seconds: float | None = 0.0


class PrefixMethod(Protocol):
    """Another way than a codec to make a prefix's KV smaller; its repr names it in tables."""

    def send(self, prefix: Prefix) -> Passage:
        """What is left of the prefix's KV, and its stored bytes."""
        ...


def pass_through(codec: Codec, prefix: Prefix, layout: KVLayout) -> Passage:
    """Send a prefix's KV through a codec, chunk by chunk, on one thread."""
    passage, encode, decode = Passage(np.empty_like(prefix.keys), np.empty_like(prefix.values)), 0.0, 0.0
    with thread_limit(1):
        _compile(codec, layout)
        for start in range(0, prefix.num_tokens, layout.chunk_tokens):
            tokens = slice(start, start + layout.chunk_tokens)
            chunk = chunk_of_prefix(prefix, layout, start)
            begin = time.thread_time()
            data = codec.encode(chunk, layout)
            middle = time.thread_time()
            codec.decode(data, layout, chunk)
            decode += time.thread_time() - middle
            encode += middle - begin
            passage.stored_nbytes += len(data)
            for view, part in zip(layout.keys_and_values(chunk), (passage.keys, passage.values), strict=True):
                flat = np.ascontiguousarray(view.transpose(0, 2, 1, 3, 4))
                part[:, :, tokens] = decode16(flat, layout.dtype).reshape(part[:, :, tokens].shape)
    passage.encode_seconds, passage.decode_seconds = encode, decode
    return passage


def chunk_of_prefix(prefix: Prefix, layout: KVLayout, start: int) -> np.ndarray:
    """The chunk of a prefix that begins at token `start`, in pages."""
    chunk = np.empty(layout.chunk_shape, np.uint8)
    tokens = slice(start, start + layout.chunk_tokens)
    for view, part in zip(layout.keys_and_values(chunk), (prefix.keys, prefix.values), strict=True):
        view[...] = _in_blocks(encode16(part[:, :, tokens], layout.dtype), layout)
    return chunk


@functools.cache
def _compile(codec: Codec, layout: KVLayout) -> None:
    """Send one chunk through, so that no measured one waits for a compiler."""
    chunk = np.zeros(layout.chunk_shape, np.uint8)
    codec.decode(codec.encode(chunk, layout), layout, chunk)


def _in_blocks(part: np.ndarray, layout: KVLayout) -> np.ndarray:
    """(layers, heads, tokens, size) -> (layers, blocks, heads, tokens of a block, size)."""
    layers, heads, tokens, size = part.shape
    return part.reshape(layers, heads, tokens // layout.block_size, layout.block_size, size).swapaxes(1, 2)


def measure_quality(
    model: StudyModel,
    codecs: Iterable[Codec | PrefixMethod | str],
    *,
    texts: dict[str, str] | None = None,
    prefix_tokens: int = 1024,
    scored_tokens: int = 256,
    tasks: Tasks | None = None,
    watch: Callable[[str, int, int], None] | None = None,
) -> list[CodecQuality]:
    """Measure codecs, and other methods beside them, on a model.

    Args:
        texts: Name to text, each at least `prefix_tokens + scored_tokens` long; None for `sample_texts()`.
        prefix_tokens: Stored through the codec; whole chunks of 256.
        tasks: What is measured besides; None for nothing.
        watch: Called with (what, done, total) before each step.
    """
    texts, tasks = sample_texts() if texts is None else texts, tasks or Tasks()
    methods = [resolve_codec(codec) if isinstance(codec, str | Codec) else codec for codec in codecs]
    tallies = [_Tally(method) for method in dict.fromkeys(methods)]
    steps = _Steps(watch, (len(texts) + len(tasks.recall)) * (len(tallies) + 1))
    for name, text in texts.items():
        steps.next(f"{name}: the uncompressed prefix")
        prefix = model.prefix(model.tokenizer(text)["input_ids"][: prefix_tokens + scored_tokens], prefix_tokens)
        want = model.continuation(prefix, prefix.keys, prefix.values)
        greedy = model.greedy(prefix, prefix.keys, prefix.values, tasks.greedy_tokens)
        for tally in tallies:
            steps.next(f"{name}: {tally.method!r}")
            passage = _send(tally.method, prefix)
            tally.add(name, prefix, passage, (want, model.continuation(prefix, passage.keys, passage.values)))
            if greedy:
                tally.greedy.append(model.agreed(prefix, passage.keys, passage.values, greedy))
    for task in tasks.recall:
        _ask(model, tallies, task, steps)
    return [tally.result() for tally in tallies]


class _Steps:
    """Tells who watches where the study is."""

    def __init__(self, watch: Callable[[str, int, int], None] | None, total: int):
        self.watch, self.total, self.done = watch, total, 0

    def next(self, what: str) -> None:
        if self.watch:
            self.watch(what, self.done, self.total)
        self.done += 1


def _send(method: Codec | PrefixMethod, prefix: Prefix) -> Passage:
    if isinstance(method, Codec):
        return pass_through(method, prefix, layout_of_prefix(prefix))
    return method.send(prefix)


def _ask(model: StudyModel, tallies: list["_Tally"], task: RecallTask, steps: _Steps) -> None:
    """Ask the questions that the model answers from the uncompressed prefix again after each codec."""
    steps.next(f"{task.kind}: the uncompressed prefix")
    prefix = model.prefix(task.tokens, len(task.tokens))
    known = model.answers(prefix.num_tokens, prefix.keys, prefix.values, task.questions)
    questions = [question for question, right in zip(task.questions, known, strict=True) if right]
    for tally in tallies:
        steps.next(f"{task.kind}: {tally.method!r}")
        if questions:
            passage = _send(tally.method, prefix)
            tally.recall[task.kind] += model.answers(prefix.num_tokens, passage.keys, passage.values, questions)


def layout_of_prefix(prefix: Prefix) -> KVLayout:
    """Pages as vLLM's CPU backend has them, chunks of 256 tokens."""
    layers, heads, _, size = prefix.keys.shape
    return KVLayout(
        num_layers=layers,
        num_kv_heads=heads,
        head_size=size,
        block_size=128,
        chunk_tokens=256,
        page_format="vllm-cpu-vec",
    )


class _Tally:
    """Gathers one codec's figures over texts."""

    def __init__(self, method: Codec | PrefixMethod):
        self.method = method
        self.kl: dict[str, np.ndarray] = {}
        self.nll: list[np.ndarray] = []
        self.agreement: list[np.ndarray] = []
        self.errors: list[np.ndarray] = []  # (key or value, error or whole, layer), sums of squares
        self.greedy: list[int] = []
        self.recall: dict[str, list[bool]] = {"needle": [], "key_value": []}
        self.stored = self.source = 0
        self.seconds: list[tuple[float | None, float | None]] = []  # of encoding and decoding

    def add(self, text: str, prefix: Prefix, passage: Passage, outputs: tuple[np.ndarray, np.ndarray]) -> None:
        """Outputs are the log-probabilities after the uncompressed prefix and after the passage."""
        want, got = outputs
        target = np.array(prefix.tokens[prefix.num_tokens + 1 :])[:, None]
        self.kl[text] = _divergence(want, got)
        gained = np.take_along_axis(want, target, 1) - np.take_along_axis(got, target, 1)
        self.nll.append(gained[:, 0])
        self.agreement.append(want.argmax(-1) == got.argmax(-1))
        pairs = ((passage.keys, prefix.keys), (passage.values, prefix.values))
        if passage.keys.shape == prefix.keys.shape:
            sums = [[np.square(a - b).sum((1, 2, 3)), np.square(b).sum((1, 2, 3))] for a, b in pairs]
            self.errors.append(np.array(sums, np.float64))
        self.stored += passage.stored_nbytes
        self.source += 2 * (prefix.keys.size + prefix.values.size)
        self.seconds.append((passage.encode_seconds, passage.decode_seconds))

    def result(self) -> CodecQuality:
        nll, kl = np.concatenate(self.nll), np.stack(list(self.kl.values()))
        errors, errors_by_layer = self._errors()
        encode, decode = (None if None in spent else math.fsum(spent) for spent in zip(*self.seconds, strict=True))
        recall = {kind: float(np.mean(right)) if right else None for kind, right in self.recall.items()}
        return CodecQuality(
            codec=repr(self.method),
            bits_per_value=self.stored * 16 / self.source,
            size_fraction=self.stored / self.source,
            key_error=errors[0],
            value_error=errors[1],
            kl=float(kl.mean()),
            kl_interval=_interval(kl),
            kl_by_position=[float(part.mean()) for part in np.array_split(kl, 4, axis=1)],
            kl_by_text={text: float(part.mean()) for text, part in self.kl.items()},
            nll_change=float(nll.mean()),
            nll_interval=float(1.96 * nll.std(ddof=1) / math.sqrt(len(nll))),
            top1_agreement=float(np.concatenate(self.agreement).mean()),
            greedy_tokens=float(np.mean(self.greedy)) if self.greedy else None,
            needle_recall=recall["needle"],
            encode_seconds=encode,
            decode_seconds=decode,
            source_nbytes=self.source,
            key_error_by_layer=errors_by_layer[0],
            value_error_by_layer=errors_by_layer[1],
            needles=len(self.recall["needle"]),
            key_value_recall=recall["key_value"],
            key_values=len(self.recall["key_value"]),
        )

    def _errors(self) -> tuple[list[float | None], list[list[float]]]:
        """Relative L2 errors of keys and values, in all and by layer; none where tokens were left out."""
        if not self.errors:
            return [None, None], [[], []]
        sums = sum(self.errors)
        whole = sums.sum(-1)
        return np.sqrt(whole[:, 0] / whole[:, 1]).tolist(), np.sqrt(sums[:, 0] / sums[:, 1]).tolist()


def _divergence(want: np.ndarray, got: np.ndarray, rows: int = 32) -> np.ndarray:
    """KL divergence of each row of log-probabilities; some rows at a time, since vocabularies are large."""
    found = []
    for start in range(0, len(want), rows):
        exact = want[start : start + rows].astype(np.float64)
        found.append((np.exp(exact) * (exact - got[start : start + rows])).sum(-1))
    return np.concatenate(found)


def _interval(kl: np.ndarray, span: int = 32) -> float:
    """Half a 95 % interval of the mean of (texts, tokens): neighbouring tokens are not independent, spans nearly."""
    spans = np.concatenate([[part.mean() for part in np.split(row, range(span, len(row), span))] for row in kl])
    return float(1.96 * spans.std(ddof=1) / math.sqrt(len(spans))) if len(spans) > 1 else math.nan


def spread(prefix: Prefix) -> dict[str, float]:
    """Outlier statistics that decide which codec fits.

    Returns:
        For keys and values: the loudest over the median channel's RMS (mean over layers and heads), the share of the
        energy in channel means, and the first token's norm over the median's.
    """
    found = {}
    for name, part in (("key", prefix.keys), ("value", prefix.values)):
        rms = np.sqrt(np.square(part).mean(2))
        found[f"{name}_loudest_channel"] = float((rms.max(-1) / np.median(rms, -1)).mean())
        found[f"{name}_energy_in_means"] = float(np.square(part.mean(2)).sum() / np.square(part).mean(2).sum())
        norm = np.linalg.norm(part, axis=-1)
        found[f"{name}_first_token_norm"] = float((norm[..., 0] / np.median(norm, -1)).mean())
    return found


def sample_texts() -> dict[str, str]:
    """Five texts that come with Python: reference prose and code, each at least 20,000 characters."""
    import argparse as arguments
    import inspect
    import typing
    from pydoc_data.topics import topics

    prose = "\n\n".join(topics[name] for name in sorted(topics))
    third, length = len(prose) // 3, 20000
    sources = {f"reference {part + 1}": prose[part * third :] for part in range(3)}
    sources["argparse.py"] = inspect.getsource(arguments)[4000:]
    sources["typing.py"] = inspect.getsource(typing)[4000:]
    order = ("reference 1", "argparse.py", "reference 2", "typing.py", "reference 3")  # any first few are of both kinds
    return {name: sources[name][:length] for name in order}
