"""Conversations that grow round by round: each prompt holds everything that was said before.

    prompt = system prompt | question 1 | answer 1 | ... | question n         (in the model's chat template)

All users' first rounds come first, then all second rounds, and so on, as on a server that many people use at once. The
answers in the history are text of the library, not what the model generated: prompts, and so the upper bound, are the
same for every engine and model.
"""

import random
from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads import Request, Workload, require_positive
from experiments.workloads._prompts import Message, PromptWriter
from experiments.workloads._texts import Library, draw_questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["chat"]

_SYSTEM_PROMPT = """Line {seed} of a reading service.
You talk with readers about texts that they quote to you. Keep to what was quoted so far in the conversation. Answer \
in plain sentences, without headings or lists. If a reader asks for something that none of the quoted parts says, say \
so. Keep names, version numbers and dates exactly as they were quoted, and refer to earlier answers where they help."""


def chat(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    users: int = 4,
    rounds: int = 10,
    question_tokens: int = 128,
    answer_tokens: int = 384,
    seed: int = 0,
) -> Workload:
    """Make the workload: users x rounds requests; each round adds about question_tokens + answer_tokens to the prompt.

    Args:
        tokenizer: The served model's tokenizer.
        users: Conversations that are held at the same time; they share the system prompt.
        rounds: Questions of each user.
        question_tokens: Quoted text in each question; the question itself is another ten tokens or so.
        answer_tokens: Length of each answer in the history.
        seed: Chooses texts and questions.

    Raises:
        InvalidInputError: A count below 1, or more text asked for than this machine holds.
    """
    require_positive(users=users, rounds=rounds, question_tokens=question_tokens, answer_tokens=answer_tokens)
    library, writer = Library(tokenizer, random.Random(f"chat texts {seed}")), PromptWriter(tokenizer)
    rng = random.Random(f"chat questions {seed}")
    questions = [draw_questions(rng, rounds) for _ in range(users)]
    dialogues: list[list[Message]] = [[("system", [_SYSTEM_PROMPT.format(seed=seed)])] for _ in range(users)]
    requests = []
    for round_number in range(rounds):
        for user, dialogue in enumerate(dialogues):
            question = questions[user][round_number]
            dialogue.append(("user", [library.go_on(question_tokens), f"\n\n{question}"]))
            requests.append(_request(user, round_number, question, writer.prompt(dialogue)))
            dialogue.append(("assistant", [library.go_on(answer_tokens)]))
    size = f"{users} users x {rounds} rounds of {question_tokens} + {answer_tokens} tokens"
    return Workload("chat", tuple(requests), seed, size, library.sources())


def _request(user: int, round_number: int, question: str, token_ids: list[int]) -> Request:
    return Request(
        request_id=f"u{user}-r{round_number}",
        token_ids=np.array(token_ids, np.int32),
        group=0,
        document=user,
        question=round_number,
        kind="warm" if round_number else "shared" if user else "cold",
        text=question,
    )
