"""Messages -> prompt tokens in the model's own chat template, so that a longer dialogue begins with the shorter one.

Content that was given as token ids keeps them; the text between two such stretches is tokenised as one. A prompt's
beginning therefore never depends on what follows it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Message", "PromptWriter", "encode"]

Message = tuple[str, Sequence[str | list[int]]]  # (role, content in parts); roles: system (first only), user, assistant


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text, without the tokens that a tokenizer puts around one."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


class PromptWriter:
    """Writes dialogues as prompts that end where the assistant's next message begins.

    Args:
        tokenizer: The served model's; without a chat template, messages are set one below the other.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        self._start = [] if tokenizer.chat_template else _start_ids(tokenizer)  # a template writes its own start
        self._frames: dict[tuple[str, ...], list[str]] = {}
        self._encoded: dict[str, list[int]] = {}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a dialogue.

        Raises:
            InvalidInputError: The chat template leaves a message out or changes their order.
        """
        roles = tuple(role for role, _ in messages)
        if roles not in self._frames:
            self._frames[roles] = _frame(self._tokenizer, roles)
        frame = self._frames[roles]
        parts: list[str | list[int]] = [frame[0]]
        for (_, content), after in zip(messages, frame[1:], strict=True):
            parts += [*content, after]
        ids = list(self._start)
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                ids += self._text_ids(text) + part
                text = ""
        return ids + self._text_ids(text)

    def _text_ids(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = encode(self._tokenizer, text)
        return self._encoded[text]


def _mark(number: int) -> str:
    return f"MESSAGE{number}GOESHERE"  # stands for a message while the template is applied; none changes such words


def _frame(tokenizer: "PreTrainedTokenizerBase", roles: tuple[str, ...]) -> list[str]:
    """Return the text before, between and after the messages: one piece more than there are messages."""
    marks = [_mark(number) for number in range(len(roles))]
    rest, frame = _rendered(tokenizer, roles, marks), []
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found:
            raise InvalidInputError(
                f"the tokenizer's chat template cannot write the messages {', '.join(roles)} in order"
            )
        frame.append(before)
    return [*frame, rest]


def _rendered(tokenizer: "PreTrainedTokenizerBase", roles: tuple[str, ...], marks: list[str]) -> str:
    if not tokenizer.chat_template:
        lead = {"assistant": "Answer:"}
        return "\n\n".join(lead.get(role, "") + mark for role, mark in zip(roles, marks, strict=True)) + "\n\nAnswer:"
    from jinja2 import TemplateError

    apart = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        rendered = str(tokenizer.apply_chat_template(apart, tokenize=False, add_generation_prompt=True))
    except TemplateError:  # how templates of models without a system role refuse one
        rendered = ""
    if roles[0] != "system" or marks[0] in rendered:
        return rendered
    together = [{"role": "user", "content": f"{marks[0]}\n\n{marks[1]}"}, *apart[2:]]
    return str(tokenizer.apply_chat_template(together, tokenize=False, add_generation_prompt=True))


def _start_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the token that this tokenizer puts before any text, if it does."""
    ids = tokenizer("")["input_ids"]
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
