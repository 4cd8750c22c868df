"""Real text that lies on any machine with Python: licences, Python's manual, read-me texts of installed packages.

library = Library(tokenizer, random.Random("texts 0"))
library.take(2000)      # the next 2,000 tokens, each handed out once
"""

import hashlib
import itertools
import random
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.workloads import TextSource
from experiments.workloads._prompts import encode
from workbench.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Library", "draw_questions"]

_COMMON_LICENCES = Path("/usr/share/common-licenses")

# Shorter texts are mostly a title and a copyright line.
_MIN_CHARACTERS = 2000

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


def draw_questions(rng: random.Random, count: int) -> list[str]:
    """Return distinct questions; past the list's end they are asked again for another reader."""
    order = rng.sample(_QUESTIONS, len(_QUESTIONS))
    rounds = (f"{question} Answer for reader {n}." if n else question for n in itertools.count() for question in order)
    return list(itertools.islice(rounds, count))


@dataclass
class _Text:
    """A text of the library and how far it was read."""

    origin: str
    licence: str
    text: str
    ids: list[int] = field(default_factory=list)
    taken: int = 0


class Library:
    """Hands out text in tokens, each token once."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", rng: random.Random):
        self._tokenizer = tokenizer
        self._unread = _texts(rng)
        self._opened: list[_Text] = []
        self._begun: deque[_Text] = deque()

    def take(self, count: int) -> list[int]:
        """Return `count` tokens from a text's beginning; from parts that were left once every text was begun.

        They are one text's if it is long enough, else several texts' in a row.
        """
        return self._take(count, self._new_text)

    def go_on(self, count: int) -> list[int]:
        """Return `count` tokens that follow those handed out last."""
        return self._take(count, lambda: self._begun.pop() if self._begun else self._new_text())

    def _take(self, count: int, next_text: Callable[[], _Text | None]) -> list[int]:
        ids: list[int] = []
        while len(ids) < count:
            text = next_text()
            if text is None:
                raise InvalidInputError(self._used_up(count))
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

    def _new_text(self) -> _Text | None:
        text = next(self._unread, None)
        if text is not None:
            text.ids = encode(self._tokenizer, text.text)
            self._opened.append(text)
            return text
        return self._begun.popleft() if self._begun else None

    def _used_up(self, wanted: int) -> str:
        total = sum(len(text.ids) for text in self._opened)
        return (
            f"this machine's texts hold {total} tokens, all used before the last piece of {wanted} tokens was full; "
            "ask for fewer or shorter texts"
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
