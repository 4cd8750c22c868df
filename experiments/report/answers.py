"""Answers side by side: the different answers to each prompt, who gave them, and in which words they differ."""

import re
from difflib import SequenceMatcher
from typing import Any

import polars as pl

from experiments.summary import NO_REUSE, PREFIX_CACHE, answered, arm_labels

__all__ = ["compared_answers"]

_Tokens = tuple[int, ...]


def compared_answers(requests: pl.DataFrame) -> list[dict[str, Any]]:
    """One entry a prompt, those with more than one answer first, else in order.

    Returns:
        name and text of the prompt, differs, verdict, and its answers, the reference's first: `who` gave it, and its
        `parts`, each with text and whether it is marked as not in the reference.
    """
    labels = arm_labels(requests)
    prompts = answered(requests).sort("order").partition_by("request_id", maintain_order=True)
    return sorted((_compared(prompt, labels) for prompt in prompts), key=lambda entry: not entry["differs"])


def _compared(prompt: pl.DataFrame, labels: dict[str, str]) -> dict[str, Any]:
    texts: dict[_Tokens, str] = {}
    arms: dict[_Tokens, list[str]] = {}
    for row in prompt.iter_rows(named=True):
        tokens = tuple(row["token_ids"] or ())
        texts.setdefault(tokens, row["text"] or "")
        arms.setdefault(tokens, []).append(row["arm"])
    reference = _reference(arms)
    ordered = [reference, *(tokens for tokens in texts if tokens != reference)]
    return {
        "name": prompt["request_id"][0],
        "text": prompt["question"][0],
        "differs": len(ordered) > 1,
        "verdict": _verdict(ordered, prompt.height),
        "answers": [
            {"who": _who(arms[tokens], labels), "parts": _marked_words(texts[reference], texts[tokens])}
            for tokens in ordered
        ],
    }


def _reference(arms: dict[_Tokens, list[str]]) -> _Tokens:
    """The prefix cache's answer; without that arm no reuse's, or else the first."""
    for wanted in (PREFIX_CACHE, NO_REUSE):
        for tokens, names in arms.items():
            if wanted in names:
                return tokens
    return next(iter(arms))


def _who(arms: list[str], labels: dict[str, str]) -> str:
    counts = {arm: arms.count(arm) for arm in labels if arm in arms}
    return "; ".join(labels[arm] + (f" ({n} times)" if n > 1 else "") for arm, n in counts.items())


def _verdict(answers: list[_Tokens], given: int) -> str:
    if len(answers) == 1:
        return f"{given} answers, all equal ({len(answers[0])} tokens)"
    first = min(_first_difference(answers[0], other) for other in answers[1:])
    return f"{len(answers)} different answers, from token {first}"


def _first_difference(a: _Tokens, b: _Tokens) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


def _marked_words(reference: str, text: str) -> list[dict[str, Any]]:
    """The text in parts, word by word; marked is what the reference does not have there."""
    ours, theirs = re.findall(r"\s*\S+|\s+$", text), re.findall(r"\s*\S+|\s+$", reference)
    matcher = SequenceMatcher(None, theirs, ours, autojunk=False)
    parts = [
        {"text": "".join(ours[start:stop]), "marked": tag != "equal"}
        for tag, _, _, start, stop in matcher.get_opcodes()
        if stop > start
    ]
    return parts or [{"text": "(nothing)", "marked": bool(reference)}]
