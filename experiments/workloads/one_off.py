"""Prompts that never repeat: what a cache costs where it cannot help.

prompt = system prompt that names the request first | text | question      (in the model's chat template)
"""

import random
from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads import Request, Workload, require_positive
from experiments.workloads._prompts import PromptWriter
from experiments.workloads._texts import Library, draw_questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["one_off"]

# The number comes before anything that two prompts could share.
_SYSTEM_PROMPT = """{name}: read the text and answer the question in one sentence."""


def one_off(
    tokenizer: "PreTrainedTokenizerBase", *, requests: int = 16, text_tokens: int = 1024, seed: int = 0
) -> Workload:
    """Make the workload: no two prompts share more than the chat template's first words.

    Args:
        tokenizer: The served model's tokenizer.
        requests: How many.
        text_tokens: Exact length of the text in each prompt.
        seed: Chooses texts and questions.

    Raises:
        InvalidInputError: A count below 1, or more text asked for than this machine holds.
    """
    require_positive(requests=requests, text_tokens=text_tokens)
    library, writer = Library(tokenizer, random.Random(f"one-off texts {seed}")), PromptWriter(tokenizer)
    rng = random.Random(f"one-off questions {seed}")
    made = []
    for number, question in enumerate(draw_questions(rng, requests)):
        system = _SYSTEM_PROMPT.format(name=f"{rng.getrandbits(64):016x}")
        user = [library.go_on(text_tokens), f"\n\n{question}"]
        token_ids = np.array(writer.prompt([("system", [system]), ("user", user)]), np.int32)
        made.append(Request(f"o{number}", token_ids, group=number, document=0, question=0, kind="cold", text=question))
    return Workload("one_off", tuple(made), seed, f"{requests} requests of {text_tokens} tokens", library.sources())
