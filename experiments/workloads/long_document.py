"""Questions about long documents: the workload in which a KV cache pays most.

    prompt = system prompt of the group | document | question      (in the model's chat template if it has one)

Each document's first question is asked in order, then its further ones in rounds. In a group the first document comes
cold, the others find the group's system prompt, and every later question finds the whole document. The documents are
real text that lies on any machine with Python: licences, Python's manual, the read-me texts of installed packages.
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads import Request, Workload, require_positive
from experiments.workloads._prompts import PromptWriter
from experiments.workloads._texts import Library, draw_questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["long_document"]

_SYSTEM_PROMPT = """Desk {seed}-{group} of a reading room.
You are the assistant at this desk. Visitors hand you one document at a time and ask short questions about it. Follow \
these instructions for every question.
1. Read the whole document before you answer. It may be a licence, a manual page, a description of a programming \
language, or the introduction to a software package. It may begin or end in the middle of a sentence, because long \
documents are handed over in parts.
2. Answer from the document alone. Do not add what you know from elsewhere, even if you are sure of it. If the \
document does not say what the visitor wants to know, answer that the document does not say.
3. Answer in one or two plain sentences. Do not repeat the question, do not greet the visitor, and do not describe \
what you are about to do.
4. Keep the names of people, organisations, functions and licences exactly as the document writes them. Keep version \
numbers, dates and figures exactly as they stand there.
5. If the document gives a rule and an exception to it, name both. If it gives a list, name the items in the order of \
the document, at most five of them.
6. Quote only where the visitor asks for a quotation, and then quote no more than one sentence.
7. You give no legal advice. If a visitor asks whether something is allowed, say what the document says about it and \
nothing more.
8. If two parts of the document contradict each other, say so and name both parts.
9. Write in English, without headings, lists, tables or any other markup."""


def long_document(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    groups: int = 5,
    documents_per_group: int = 2,
    document_tokens: int = 2000,
    questions: int = 2,
    seed: int = 0,
    max_tokens: int = 64,
) -> Workload:
    """Make the workload: groups x documents_per_group x questions requests.

    Prompts of one document are identical, token by token, up to the document's end. The same arguments on the same
    machine give the same prompts; the texts, and so the prompts, may differ where other packages are installed.

    Args:
        tokenizer: The served model's tokenizer; its chat template is used if it has one.
        groups: Independent repetitions: the first line of the system prompt names seed and group, so each starts cold.
        documents_per_group: Documents that share a group's system prompt of some 300 words.
        document_tokens: Exact length of each document in tokens.
        questions: Questions about each document; the first is its cold one.
        seed: Chooses texts and questions.
        max_tokens: Tokens to generate for each answer at most.

    Raises:
        InvalidInputError: A count below 1, or more text asked for than this machine holds.
    """
    require_positive(groups=groups, documents_per_group=documents_per_group, document_tokens=document_tokens)
    require_positive(questions=questions, max_tokens=max_tokens)
    library = Library(tokenizer, random.Random(f"texts {seed}"))
    rng = random.Random(f"questions {seed}")
    documents = [
        _Document(group, document, library.take(document_tokens), draw_questions(rng, questions))
        for group in range(groups)
        for document in range(documents_per_group)
    ]
    writer = PromptWriter(tokenizer)
    requests = tuple(
        _request(document, question, writer, seed, max_tokens)
        for question in range(questions)
        for document in documents
    )
    size = f"{groups} groups x {documents_per_group} documents of {document_tokens} tokens x {questions} questions"
    return Workload("long_document", requests, seed, size, library.sources())


@dataclass(frozen=True)
class _Document:
    group: int
    number: int
    token_ids: list[int]
    questions: list[str]


def _request(document: _Document, question: int, writer: PromptWriter, seed: int, max_tokens: int) -> Request:
    kind = "warm" if question else "shared" if document.number else "cold"
    text = document.questions[question]
    system = _SYSTEM_PROMPT.format(seed=seed, group=document.group)
    user = ["Document:\n\n", document.token_ids, f"\n\nEnd of the document. {text}"]
    return Request(
        request_id=f"g{document.group}-d{document.number}-q{question}",
        token_ids=np.array(writer.prompt([("system", [system]), ("user", user)]), np.int32),
        group=document.group,
        document=document.number,
        question=question,
        kind=kind,
        max_tokens=max_tokens,
        text=text,
    )
