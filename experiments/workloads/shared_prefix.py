"""A batch of different questions behind one long system prompt.

prompt = system prompt with a handbook | question                          (in the model's chat template)
"""

import random
from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads import Request, Workload, require_positive
from experiments.workloads._prompts import PromptWriter
from experiments.workloads._texts import Library, draw_questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["shared_prefix"]

_SYSTEM_PROMPT = """{seed}-{prefix}, a handbook.
You answer questions of people who work with this handbook. It may begin or end in the middle of a sentence. Answer \
from it alone, in one or two sentences.

"""


def shared_prefix(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prefixes: int = 1,
    prefix_tokens: int = 2048,
    questions: int = 16,
    seed: int = 0,
) -> Workload:
    """Make the workload: prefixes x questions requests, the prefixes in turn.

    Args:
        tokenizer: The served model's tokenizer.
        prefixes: Different system prompts; they share nothing.
        prefix_tokens: Exact length of the handbook in each.
        questions: Different questions to each.
        seed: Chooses texts and questions.

    Raises:
        InvalidInputError: A count below 1, or more text asked for than this machine holds.
    """
    require_positive(prefixes=prefixes, prefix_tokens=prefix_tokens, questions=questions)
    library, writer = Library(tokenizer, random.Random(f"handbooks {seed}")), PromptWriter(tokenizer)
    rng = random.Random(f"shared questions {seed}")
    asked = [draw_questions(rng, questions) for _ in range(prefixes)]
    systems: list[list[str | list[int]]] = [
        [_SYSTEM_PROMPT.format(seed=seed, prefix=prefix), library.take(prefix_tokens)] for prefix in range(prefixes)
    ]
    requests = tuple(
        Request(
            request_id=f"p{prefix}-q{question}",
            token_ids=np.array(
                writer.prompt([("system", systems[prefix]), ("user", [asked[prefix][question]])]), np.int32
            ),
            group=prefix,
            document=0,
            question=question,
            kind="warm" if question else "cold",
            text=asked[prefix][question],
        )
        for question in range(questions)
        for prefix in range(prefixes)
    )
    size = f"{prefixes} system prompts of {prefix_tokens} tokens x {questions} questions"
    return Workload("shared_prefix", requests, seed, size, library.sources())
