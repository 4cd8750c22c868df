"""Retrieval: a system prompt, a few passages out of a pool, a question.

    prompt = system prompt | passage | passage | passage | question           (in the model's chat template)

Popular passages are drawn more often (Zipf). A share of the requests gets its passages in an order of its own, the
others in the pool's order: a prefix cache finds a passage again only behind the very same passages.
"""

import random
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads import Request, Workload, require_positive
from experiments.workloads._prompts import PromptWriter
from experiments.workloads._texts import Library, draw_questions
from workbench.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["rag"]

_SYSTEM_PROMPT = """Index {seed} of a library.
Below stand passages that a search found for the question at the end. Answer the question from these passages alone, \
in one or two sentences. Name the number of the passage that you took the answer from. A passage may begin or end in \
the middle of a sentence. If no passage answers the question, say that the passages do not answer it. If two passages \
contradict each other, name both. Do not add what you know from elsewhere."""


def rag(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    requests: int = 24,
    passages: int = 12,
    passages_per_request: int = 3,
    passage_tokens: int = 256,
    permuted_share: float = 0.5,
    seed: int = 0,
) -> Workload:
    """Make the workload.

    Args:
        tokenizer: The served model's tokenizer.
        requests: How many.
        passages: Size of the pool; passage k is drawn with a weight of 1 / (k + 1).
        passages_per_request: Different passages in each prompt.
        passage_tokens: Exact length of each passage in tokens.
        permuted_share: Chance that a request has its passages in an order of its own, 0 to 1.
        seed: Chooses texts, passages and questions.

    Raises:
        InvalidInputError: A count below 1, a share outside 0 to 1, or more passages in a prompt than in the pool.
    """
    require_positive(requests=requests, passages_per_request=passages_per_request, passage_tokens=passage_tokens)
    if passages_per_request > passages or not 0 <= permuted_share <= 1:
        raise InvalidInputError(
            f"{passages_per_request} of {passages} passages a request, permuted_share {permuted_share}; allowed are at "
            "most as many as the pool has, and a share from 0 to 1"
        )
    library, writer = Library(tokenizer, random.Random(f"rag texts {seed}")), PromptWriter(tokenizer)
    pool = [library.take(passage_tokens) for _ in range(passages)]
    rng = np.random.default_rng(seed)
    questions = draw_questions(random.Random(f"rag questions {seed}"), requests)
    system = [_SYSTEM_PROMPT.format(seed=seed)]
    made, begun = [], Counter()
    for question in questions:
        drawn = _draw(rng, passages, passages_per_request, permuted_share)
        user: list[str | list[int]] = []
        for passage in drawn:
            user += [f"Passage {passage}:\n\n", pool[passage], "\n\n"]
        token_ids = writer.prompt([("system", system), ("user", [*user, f"Question: {question}"])])
        made.append(_request(len(made), drawn[0], begun[drawn[0]], question, token_ids))
        begun[drawn[0]] += 1
    size = (f"{requests} requests with {passages_per_request} of {passages} passages of {passage_tokens} tokens, "
            f"{permuted_share:.0%} in an order of their own")  # fmt: skip
    return Workload("rag", tuple(made), seed, size, library.sources())


def _draw(rng: np.random.Generator, passages: int, count: int, permuted_share: float) -> list[int]:
    weights = 1 / np.arange(1, passages + 1)
    drawn = rng.choice(passages, count, replace=False, p=weights / weights.sum())
    permuted = rng.random() < permuted_share  # drawn in every case: another share leaves the passages as they are
    return (drawn if permuted else np.sort(drawn)).tolist()


def _request(number: int, first_passage: int, times_before: int, question: str, token_ids: list[int]) -> Request:
    return Request(
        request_id=f"r{number}",
        token_ids=np.array(token_ids, np.int32),
        group=0,
        document=first_passage,
        question=times_before,
        kind="warm" if times_before else "shared" if number else "cold",
        text=question,
    )
