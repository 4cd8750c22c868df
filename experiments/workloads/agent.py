"""Tool loops: an agent calls a tool, reads its result, calls the next; every call sends the whole history again.

    prompt = system prompt with tools | task | call 1 | result 1 | ... | call n-1 | result n-1

Sessions run side by side, step by step. Calls and results are fixed texts, not what the model generated, so every
engine gets the same prompts. Results come as user messages, which every chat template can write.
"""

import json
import random
from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads import Request, Workload, require_positive
from experiments.workloads._prompts import Message, PromptWriter, encode
from experiments.workloads._texts import Library, draw_questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["agent"]

_TOOLS = (
    (
        "read_file",
        "Return a part of a text file.",
        {"path": "name of the file", "first": "first line", "count": "lines"},
    ),
    ("search", "Return the lines of all files that hold a word.", {"word": "what to look for", "limit": "most lines"}),
    ("list_folder", "Return the names of the files in a folder.", {"path": "name of the folder"}),
    ("compare", "Return the lines in which two files differ.", {"old": "first file", "new": "second file"}),
    ("count_words", "Return how often each word of a list occurs.", {"path": "name of the file", "words": "the list"}),
    ("note", "Keep a sentence for later steps.", {"text": "the sentence"}),
    ("finish", "End the task with an answer.", {"answer": "what the user gets to read"}),
)

_SYSTEM_PROMPT = """Agent {seed} of a documentation team.
You answer questions about a folder of documents by calling tools, one at a time. Before each call, consider what you \
already know from earlier results. A call is one line of JSON with the fields "tool" and "arguments", and nothing \
else. After each call you are given its result. Results may be cut; ask for the next part if you need it. Never guess \
what a file says. When you know the answer, call "finish". The tools are:
{tools}"""


def agent(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    sessions: int = 3,
    steps: int = 8,
    result_tokens: int = 256,
    seed: int = 0,
) -> Workload:
    """Make the workload: sessions x steps requests; each step adds a call and a result to the prompt.

    Args:
        tokenizer: The served model's tokenizer.
        sessions: Agents at work at the same time; they share the system prompt and its tools.
        steps: Calls of each agent.
        result_tokens: Exact length of each tool's result.
        seed: Chooses tasks, calls and texts.

    Raises:
        InvalidInputError: A count below 1, or more text asked for than this machine holds.
    """
    require_positive(sessions=sessions, steps=steps, result_tokens=result_tokens)
    library, writer = Library(tokenizer, random.Random(f"agent texts {seed}")), PromptWriter(tokenizer)
    rng = random.Random(f"agent tasks {seed}")
    tools = "\n".join(json.dumps({"name": n, "does": does, "arguments": given}) for n, does, given in _TOOLS)
    tasks = draw_questions(rng, sessions)
    histories: list[list[Message]] = [
        [("system", [_SYSTEM_PROMPT.format(seed=seed, tools=tools)]), ("user", [f"Task {number}: {task}"])]
        for number, task in enumerate(tasks)
    ]
    requests = []
    for step in range(steps):
        for session, history in enumerate(histories):
            requests.append(_request(session, step, tasks[session], writer.prompt(history)))
            history.append(("assistant", [encode(tokenizer, _call(rng, step))]))
            history.append(("user", ["Result:\n\n", library.go_on(result_tokens)]))
    size = f"{sessions} sessions x {steps} steps, results of {result_tokens} tokens"
    return Workload("agent", tuple(requests), seed, size, library.sources())


def _call(rng: random.Random, step: int) -> str:
    name, _, arguments = rng.choice(_TOOLS[:-1])
    given = {argument: f"{argument}-{rng.randrange(1000)}" for argument in arguments}
    return json.dumps({"tool": name, "arguments": given, "step": step})


def _request(session: int, step: int, task: str, token_ids: list[int]) -> Request:
    return Request(
        request_id=f"s{session}-t{step}",
        token_ids=np.array(token_ids, np.int32),
        group=0,
        document=session,
        question=step,
        kind="warm" if step else "shared" if session else "cold",
        text=task,
    )
