"""Request logs -> a trace: which prompt blocks each request has in common with earlier ones.

    known or generated trace, trace file          -> traces.load_trace
    OpenAI-style JSON lines                       -> prompts -> tokens -> blocks named by their prefix -> Trace
    vLLM's own log with requests in it            -> prompt token ids -> the same

Lines of JSON hold `messages` or `prompt`, by themselves or inside `body` (batch files) or `request` (proxies); `usage`,
`timestamp` or `created`, and `user` are taken where they are. vLLM logs token ids with VLLM_LOGGING_LEVEL=DEBUG and
--enable-log-requests; a log without them is refused with that advice.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from experiments.traces import Trace, generators, known_traces, load_trace, trace_from_frame
from experiments.traces.jsonl import RowError
from workbench.errors import InvalidInputError

__all__ = ["ESTIMATED", "Tokenize", "estimated_tokens", "read_log"]

Tokenize = Callable[[str], list[int]]
ESTIMATED = "token counts are estimated at up to four characters a token; give a tokenizer for exact ones"
GENERATED = ("chat", "rag", "agent")

_PIECE = re.compile(r"\s?[^\W\d_]{1,4}|\s?\d{1,3}|\s?[^\w\s]|\s|_")
_STAMP = re.compile(r"\b(?:INFO|DEBUG|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d)")
_TOKEN_IDS = re.compile(r"prompt_token_ids: (\[[\d, ]*\])")
_TEXT = re.compile(r"prompt: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_VLLM = re.compile(r"(?:INFO|DEBUG|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[")
_STATISTICS = re.compile(r"Prefix cache hit rate: ([\d.]+)%")


@dataclass(frozen=True)
class _Prompt:
    tokens: list[int]
    output_tokens: int
    clock: float
    tenant: str


def read_log(source: str | Path | Trace, *, tokenize: Tokenize | None = None, block_tokens: int = 16,
             skip_bad: bool = False) -> Trace:  # fmt: skip
    """Read whatever holds requests.

    Args:
        source: A `Trace`, the name of a known or generated trace, or a file.
        tokenize: Text to token ids; by default an estimate, which is noted on the trace.
        block_tokens: Of logs with text; sharing is seen in whole blocks.
        skip_bad: Leave out rows that cannot be read, count and note them, instead of stopping at the first.

    Raises:
        InvalidInputError: No such file or trace, an empty file, a bad row (named), or a vLLM log without prompts.
    """
    if isinstance(source, Trace):
        return source
    if str(source) in GENERATED:
        return getattr(generators, str(source))()
    path = Path(source)
    if str(source) in known_traces() or not path.is_file() or not _is_text(path):
        return load_trace(source, skip_bad=skip_bad)
    text = path.read_text(encoding="utf-8", errors="replace")
    if _VLLM.search(text[:100_000]):
        rows, notes = _vllm_rows(text, path, tokenize), []
    elif '"hash_ids"' in text[:20_000]:
        return load_trace(path, skip_bad=skip_bad)
    else:
        rows, notes = _json_rows(text, tokenize or estimated_tokens), [] if tokenize else [ESTIMATED]
    return _trace(path, list(rows), notes, block_tokens=block_tokens, skip_bad=skip_bad)


def estimated_tokens(text: str) -> list[int]:
    """Pieces of up to four letters or three digits, numbered by what they are: equal text gives equal tokens."""
    return [_number_of(piece) for piece in _PIECE.findall(text)]


def _number_of(piece: str) -> int:
    return int.from_bytes(piece.encode()[:16].ljust(1, b"\0"), "little")


def _is_text(path: Path) -> bool:
    """Logs are text; archives and binary traces have their own readers."""
    with path.open("rb") as file:
        head = file.read(4096)
    return bool(head.strip()) and b"\0" not in head and not head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"))


# ---------------------------------------------------------------- OpenAI-style lines


def _json_rows(text: str, tokenize: Tokenize) -> Iterable[_Prompt | RowError]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _json_row(number, line, tokenize)


def _json_row(number: int, line: str, tokenize: Tokenize) -> _Prompt | RowError:
    try:
        outer = json.loads(line)
    except ValueError as error:
        return RowError(number, "not JSON", f"not JSON ({error}): {line[:60]!r}")
    if not isinstance(outer, dict):
        return RowError(number, "not an object", f"a JSON object is expected, got {line[:60]!r}")
    body = next((outer[key] for key in ("body", "request", "kwargs") if isinstance(outer.get(key), dict)), outer)
    try:
        prompt = _prompt_tokens(body, tokenize)
        response = outer.get("response") or {}
        usage = (response.get("body") or response).get("usage") or outer.get("usage") or {}
        output = int(usage.get("completion_tokens") or 0)
        stamp = next((outer[k] for k in ("timestamp", "created", "created_at", "time") if outer.get(k) is not None), 0)
        tenant = str(body.get("user") or outer.get("session_id") or outer.get("user") or "")
        return _Prompt(prompt, output, _clock(stamp, number), tenant)
    except KeyError as error:
        return RowError(number, "missing field", f"no {error} in it; needed is messages or prompt")
    except (TypeError, ValueError, AttributeError) as error:
        return RowError(number, "bad row", f"{type(error).__name__}: {error}")


def _prompt_tokens(body: dict[str, Any], tokenize: Tokenize) -> list[int]:
    """Tokens of a chat's messages, each with its role, or of a plain prompt: text or token ids."""
    if "messages" in body:
        parts = [json.dumps(body["tools"])] if body.get("tools") else []
        parts += [f"{message['role']}: {_content(message.get('content'))}" for message in body["messages"]]
        return tokenize("\n".join(parts))
    prompt = body["prompt"] if "prompt" in body else body.get("input")
    if isinstance(prompt, str):
        return tokenize(prompt)
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    if prompt is None:
        raise KeyError("messages or prompt")
    raise ValueError("prompt is neither a text nor a list of token ids")


def _content(content: Any) -> str:
    """The text of a message; of its parts those that are text."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _clock(stamp: Any, number: int) -> float:
    """Seconds: a number of s, ms or us, or an ISO time; the row's number where there is none."""
    if not stamp:
        return float(number)
    if isinstance(stamp, str) and not stamp.replace(".", "", 1).isdigit():
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    value = float(stamp)
    return value / (1e6 if value > 1e14 else 1e3 if value > 1e11 else 1.0)


# ---------------------------------------------------------------- vLLM's log


def _vllm_rows(text: str, path: Path, tokenize: Tokenize | None) -> Iterable[_Prompt | RowError]:
    rows = [row for row in _vllm_prompts(text, tokenize) if row is not None]
    if rows:
        return rows
    rates = _STATISTICS.findall(text)
    seen = f" Its own statistics end at a prefix cache hit rate of {rates[-1]} %." if rates else ""
    raise InvalidInputError(
        f"{path}: a vLLM log without prompts.{seen} Start vLLM with --enable-log-requests and "
        "VLLM_LOGGING_LEVEL=DEBUG, which logs prompt_token_ids, or log requests where they are sent"
    )


def _vllm_prompts(text: str, tokenize: Tokenize | None) -> Iterable[_Prompt | RowError | None]:
    for number, line in enumerate(text.splitlines(), 1):
        if "prompt_token_ids:" not in line and "Received request" not in line:
            continue
        stamp = _STAMP.search(line)
        clock = datetime.strptime(f"2000-{stamp[1]}", "%Y-%m-%d %H:%M:%S").timestamp() if stamp else float(number)
        ids, said = _TOKEN_IDS.search(line), _TEXT.search(line)
        if ids and ids[1] != "[]":
            yield _Prompt(json.loads(ids[1]), 0, clock, "")
        elif said:
            yield _Prompt((tokenize or estimated_tokens)(ast.literal_eval(said[1])), 0, clock, "")
        elif "prompt_token_ids:" in line:
            yield RowError(number, "cut short", "the line's prompt_token_ids do not end: raise --max-log-len")


# ---------------------------------------------------------------- prompts -> trace


def _trace(path: Path, rows: list[_Prompt | RowError], notes: list[str], *, block_tokens: int, skip_bad: bool
           ) -> Trace:  # fmt: skip
    bad = [row for row in rows if isinstance(row, RowError)]
    if bad and not skip_bad:
        raise InvalidInputError(f"{path}: {bad[0]}")
    prompts = [row for row in rows if isinstance(row, _Prompt) and row.tokens]
    if not prompts:
        raise InvalidInputError(f"{path}: no request in it that can be read")
    known: dict[tuple[int, ...], int] = {}
    tenants: dict[str, int] = {}
    blocks = [_blocks(prompt.tokens, block_tokens, known) for prompt in prompts]
    frame = pl.DataFrame({
        "timestamp": [prompt.clock for prompt in prompts],
        "input_tokens": [len(prompt.tokens) for prompt in prompts],
        "output_tokens": [prompt.output_tokens for prompt in prompts],
        "tenant": [tenants.setdefault(prompt.tenant, len(tenants)) for prompt in prompts],
        "block_ids": pl.Series(blocks, dtype=pl.List(pl.Int64)),
    })  # fmt: skip
    trace = trace_from_frame(frame, name=path.name.split(".")[0], block_tokens=block_tokens)
    counts = Counter(problem.kind for problem in bad)
    notes = [*notes, *(f"skipped {count} rows: {kind}" for kind, count in counts.items())]
    return replace(trace, notes=(*trace.notes, *notes))


def _blocks(tokens: list[int], size: int, known: dict[tuple[int, ...], int]) -> list[int]:
    """One id for each full block; equal ids mean equal tokens from the prompt's start to the block's end."""
    ids, above = [], -1
    for start in range(0, len(tokens) - size + 1, size):
        above = known.setdefault((above, *tokens[start : start + size]), len(known))
        ids.append(above)
    return ids
