"""What a model is asked about a prefix: facts hidden in text, and pairs of a long list.

    needles      real text with a few sentences "The access code of Lisbon is 4821." far apart; asked for each code
    key values   "The code of item 314 is 4821." line by line; asked for some of the codes

A question is right if every token of its answer is the most likely one after those before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["RecallTask", "Tasks", "recall_tasks"]

_PLACES = ("Lisbon", "Nairobi", "Oslo", "Lima", "Kyoto", "Dublin", "Quito", "Perth")
_NEEDLES = 4  # of a text
_PAIRS = 10  # asked of a list


@dataclass(frozen=True)
class RecallTask:
    """Attributes:
    kind: "needle" or "key_value".
    tokens: The prefix.
    questions: (what follows the prefix, the answer that belongs after it), both tokens.
    """

    kind: str
    tokens: list[int]
    questions: list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Tasks:
    """What is measured beside the scored tokens.

    Args:
        greedy_tokens: Length of the greedy continuations that are compared; 0 leaves them out.
        recall: Questions about prefixes of their own.
    """

    greedy_tokens: int = 0
    recall: tuple[RecallTask, ...] = ()


def recall_tasks(tokenizer: Any, texts: Iterable[str], *, tokens: int, seed: int = 0) -> tuple[RecallTask, ...]:
    """A needle task for each text and, for every two texts, a list of key-value pairs, each `tokens` long."""
    rng, texts = np.random.default_rng(seed), list(texts)
    needles = [_needle_task(tokenizer, text, tokens, rng) for text in texts]
    return (*needles, *(_key_value_task(tokenizer, tokens, rng) for _ in range(-(-len(texts) // 2))))


def _needle_task(tokenizer: Any, text: str, count: int, rng: np.random.Generator) -> RecallTask:
    """Needles in the middle of as many equal parts of the text."""
    places = rng.permutation(_PLACES)[:_NEEDLES]
    codes = [str(rng.integers(1000, 10000)) for _ in places]
    hidden = [_tokens(tokenizer, f"\n\nThe access code of {place} is {code}.\n\n")
              for place, code in zip(places, codes, strict=True)]  # fmt: skip
    filler = _tokens(tokenizer, text)[: count - sum(map(len, hidden))]
    parts = np.array_split(np.array(filler), 2 * _NEEDLES)
    tokens: list[int] = []
    for number, needle in enumerate(hidden):
        tokens += [*parts[2 * number].tolist(), *needle, *parts[2 * number + 1].tolist()]
    questions = [_question(tokenizer, f"\n\nThe access code of {place} is", code)
                 for place, code in zip(places, codes, strict=True)]  # fmt: skip
    return RecallTask("needle", tokens, questions)


def _key_value_task(tokenizer: Any, count: int, rng: np.random.Generator) -> RecallTask:
    names = rng.permutation(900)[: count // 8] + 100  # a line has more than eight tokens
    codes = {int(name): str(rng.integers(1000, 10000)) for name in names}
    tokens = _tokens(tokenizer, "".join(f"The code of item {name} is {code}.\n" for name, code in codes.items()))[
        :count
    ]
    whole = tokenizer.decode(tokens).count("\n") - 1  # lines that the prefix holds to their end
    asked = names[np.unique(np.linspace(0, whole - 1, _PAIRS).astype(int))].tolist()
    return RecallTask("key_value", tokens, [_question(tokenizer, f"\nThe code of item {name} is", codes[name])
                                            for name in asked])  # fmt: skip


def _question(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    return _tokens(tokenizer, question), _tokens(tokenizer, f" {answer}")


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
