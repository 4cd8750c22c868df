"""Questions about long documents: the workload in which a KV cache pays most.

    prompt = system prompt of the group | document | question      (in the model's chat template if it has one)

Each document's first question is asked in order, then its further ones in rounds. In a group the first document comes
cold, the others find the group's system prompt, and every later question finds the whole document. The documents are
real text that lies on any machine with Python: licences, Python's manual, the read-me texts of installed packages.
"""

import hashlib
import itertools
import random
import sysconfig
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.workloads import Request, TextSource, Workload
from workbench.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["long_document"]

_COMMON_LICENCES = Path("/usr/share/common-licenses")

# Shorter texts are mostly a title and a copyright line.
_MIN_CHARACTERS = 2000

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

_QUESTIONS = (
    "What is this document about?",
    "Which subject does the document treat first?",
    "What does the document allow the reader to do?",
    "What does the document ask the reader not to do?",
    "Which names of people or organisations does the document mention?",
    "Which term does the document define, and how?",
    "For whom was this document written?",
    "Which condition does the document set, and what happens if it is not met?",
    "Which exception does the document name?",
    "What does the last part of the document say?",
    "Quote the sentence that says best what the document is for.",
    "Which single point should a reader in a hurry take from the document?",
)

# Stand where the document and the question go while the chat template is applied; no template changes such words.
_DOCUMENT_MARK, _QUESTION_MARK = "DOCUMENTGOESHERE", "QUESTIONGOESHERE"
_USER_PROMPT = f"Document:\n\n{_DOCUMENT_MARK}\n\nEnd of the document. {_QUESTION_MARK}"


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
    _require_positive(groups=groups, documents_per_group=documents_per_group, document_tokens=document_tokens)
    _require_positive(questions=questions, max_tokens=max_tokens)
    library = _Library(tokenizer, random.Random(f"texts {seed}"))
    rng = random.Random(f"questions {seed}")
    documents = [
        _Document(group, document, library.take(document_tokens), _questions(rng, questions))
        for group in range(groups)
        for document in range(documents_per_group)
    ]
    frames = [_Frame(tokenizer, _SYSTEM_PROMPT.format(seed=seed, group=group)) for group in range(groups)]
    requests = tuple(
        _request(document, question, frames[document.group], max_tokens)
        for question in range(questions)
        for document in documents
    )
    size = f"{groups} groups x {documents_per_group} documents of {document_tokens} tokens x {questions} questions"
    return Workload("long_document", requests, seed, size, library.sources())


def _require_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InvalidInputError(f"{name} is {count}; at least 1 is needed")


@dataclass(frozen=True)
class _Document:
    group: int
    number: int
    token_ids: list[int]
    questions: list[str]


def _questions(rng: random.Random, count: int) -> list[str]:
    """Return distinct questions; past the list's end they are asked again for another reader."""
    order = rng.sample(_QUESTIONS, len(_QUESTIONS))
    rounds = (f"{question} Answer for reader {n}." if n else question for n in itertools.count() for question in order)
    return list(itertools.islice(rounds, count))


def _request(document: _Document, question: int, frame: "_Frame", max_tokens: int) -> Request:
    kind = "warm" if question else "shared" if document.number else "cold"
    text = document.questions[question]
    return Request(
        request_id=f"g{document.group}-d{document.number}-q{question}",
        token_ids=np.array(frame.prompt(document.token_ids, text), np.int32),
        group=document.group,
        document=document.number,
        question=question,
        kind=kind,
        max_tokens=max_tokens,
        text=text,
    )


class _Frame:
    """What surrounds document and question. Each part is tokenised alone, so that a prefix never depends on its end."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", system_prompt: str):
        self._tokenizer = tokenizer
        rendered = _rendered(tokenizer, system_prompt)
        before, _, rest = rendered.partition(_DOCUMENT_MARK)
        self._between, _, self._after = rest.partition(_QUESTION_MARK)
        start = [] if tokenizer.chat_template else _start_ids(tokenizer)  # a template writes its own start
        self._before_ids = start + _encode(tokenizer, before)

    def prompt(self, document_ids: list[int], question: str) -> list[int]:
        return self._before_ids + document_ids + _encode(self._tokenizer, self._between + question + self._after)


def _rendered(tokenizer: "PreTrainedTokenizerBase", system_prompt: str) -> str:
    """Return the prompt text with both marks in it, in the chat template if there is one."""
    joined = f"{system_prompt}\n\n{_USER_PROMPT}"
    if not tokenizer.chat_template:
        return f"{joined}\n\nAnswer:"
    from jinja2 import TemplateError

    apart = [{"role": "system", "content": system_prompt}, {"role": "user", "content": _USER_PROMPT}]
    together = [{"role": "user", "content": joined}]
    try:
        rendered = str(tokenizer.apply_chat_template(apart, tokenize=False, add_generation_prompt=True))
    except TemplateError:  # how templates of models without a system role refuse one
        rendered = ""
    if system_prompt in rendered:
        return rendered
    return str(tokenizer.apply_chat_template(together, tokenize=False, add_generation_prompt=True))


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _start_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the token that this tokenizer puts before any text, if it does."""
    ids = tokenizer("")["input_ids"]
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


# --- the texts


@dataclass
class _Text:
    """A text of the library and how far it was read."""

    origin: str
    licence: str
    text: str
    ids: list[int] = field(default_factory=list)
    taken: int = 0


class _Library:
    """Hands out text in tokens, each token once: first every text's beginning, then the parts that were left."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", rng: random.Random):
        self._tokenizer = tokenizer
        self._unread = _texts(rng)
        self._opened: list[_Text] = []
        self._begun: deque[_Text] = deque()

    def take(self, count: int) -> list[int]:
        """Return the next `count` tokens: one text's if it is long enough, else several texts' in a row."""
        ids: list[int] = []
        while len(ids) < count:
            text = self._next_text(count)
            part = text.ids[text.taken : text.taken + count - len(ids)]
            text.taken += len(part)
            ids += part
            if text.taken < len(text.ids):
                self._begun.append(text)
        return ids

    def sources(self) -> tuple[TextSource, ...]:
        return tuple(
            TextSource(text.origin, text.licence, hashlib.sha256(text.text.encode()).hexdigest(), text.taken)
            for text in self._opened
        )

    def _next_text(self, wanted: int) -> _Text:
        text = next(self._unread, None)
        if text is not None:
            text.ids = _encode(self._tokenizer, text.text)
            self._opened.append(text)
            return text
        if self._begun:
            return self._begun.popleft()
        total = sum(len(text.ids) for text in self._opened)
        raise InvalidInputError(
            f"this machine's texts hold {total} tokens, all used before the last document of {wanted} tokens was full; "
            "ask for fewer or shorter documents"
        )


def _texts(rng: random.Random) -> Iterator[_Text]:
    """Yield every text once, shelf by shelf, in an order inside a shelf that the seed decides."""
    seen: set[str] = set()
    for shelf in (_common_licences, _python_texts, _package_texts, _project_texts):
        texts = list(shelf())
        rng.shuffle(texts)
        for text in texts:
            if len(text.text) >= _MIN_CHARACTERS and text.text not in seen:
                seen.add(text.text)
                yield text


def _common_licences() -> Iterator[_Text]:
    """Debian's full texts of free licences; links to the newest version of one are skipped."""
    for path in sorted(_COMMON_LICENCES.glob("*")):
        if path.is_file() and not path.is_symlink():
            yield _Text(str(path), "licence text, verbatim copying permitted", _read(path))


def _python_texts() -> Iterator[_Text]:
    """Python's licence and the chapters of its language reference that `help()` shows."""
    path = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    if path.is_file():
        yield _Text(str(path), "PSF-2.0", _read(path))
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield _Text(f"pydoc_data.topics[{name!r}]", "PSF-2.0", topics[name])


def _package_texts() -> Iterator[_Text]:
    """The read-me text of every installed package, as its metadata holds it."""
    packages = {f"{package.name} {package.version}": package for package in metadata.distributions()}
    for name in sorted(packages):
        described: Any = packages[name].metadata  # an email message; its type does not say that it has a payload
        licence = (described.get("License-Expression") or described.get("License") or "").strip().partition("\n")[0]
        if licence in ("", "UNKNOWN"):
            licence = "see the package"
        yield _Text(f"read-me of {name}", licence[:80], str(described.get_payload()))


def _project_texts() -> Iterator[_Text]:
    root = Path(__file__).parents[2]
    for path in (root / "README.md", root / "ARCHITECTURE.md", root / "LICENSE"):
        if path.is_file():
            yield _Text(str(path), "Apache-2.0", _read(path))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
