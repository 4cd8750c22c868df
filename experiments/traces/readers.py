"""Readers: files and frames -> Trace. The format is told by the file's name and first bytes, or given.

Bad rows (a missing column, a negative id, a block count that does not fit the prompt) stop the reader with the first
such row; with skip_bad they are left out, counted by kind and noted on the trace.
"""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl

from experiments.traces.jsonl import RowError, scan_lines
from experiments.traces.trace import Trace
from experiments.traces.tree import densify
from workbench.errors import InvalidInputError, UnknownNameError

__all__ = [
    "TRACE_FORMATS",
    "Tokenize",
    "data_folders",
    "find_trace",
    "known_traces",
    "load_trace",
    "trace_from_frame",
]

SESSION_GAP_SECONDS = 60.0  # kv-cache-tester sessions carry no start time: session k starts at 60 k seconds
ORACLE_RECORD = np.dtype([("clock", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Known:
    """A public trace: its file on the data path, how to read it, and where it comes from."""

    path: str
    format: str
    block_tokens: int
    source: str


KNOWN = {
    "mooncake_conversation": Known(
        "mooncake_conversation.jsonl", "mooncake", 512, "github.com/kvcache-ai/Mooncake, FAST25-release/traces"
    ),
    "mooncake_synthetic": Known(
        "mooncake_synthetic.jsonl", "mooncake", 512, "github.com/kvcache-ai/Mooncake, FAST25-release/traces"
    ),
    "weka_claude_code": Known("weka_claude_code.npz", "weka_npz", 64, "github.com/callanjfox/kv-cache-tester, traces"),
    "ragpulse": Known("ragpulse/0_trace.jsonl", "ragpulse", 128, "github.com/flashserve/RAGPulse, data"),
}


def known_traces() -> list[str]:
    """Names that load_trace takes besides paths."""
    return sorted(KNOWN)


def data_folders() -> list[Path]:
    """Where known traces are looked for: KVWORKBENCH_DATA, data/ in the project, then ../shared/traces beside it."""
    root = Path(__file__).resolve().parents[2]
    given = os.environ.get("KVWORKBENCH_DATA")
    return [*([Path(given)] if given else []), root / "data", root.parent / "shared" / "traces"]


def load_trace(
    source: str | Path,
    *,
    format: str | None = None,
    block_tokens: int | None = None,
    skip_bad: bool = False,
    tokenize: Tokenize | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a trace.

    Args:
        source: The name of a known trace, or a file (.gz and .zst are unpacked) or folder.
        format: One of TRACE_FORMATS; by default told from the file.
        block_tokens: Tokens of a block, where the format leaves it open.
        skip_bad: Leave bad rows out, count and note them, instead of stopping at the first.
        tokenize: For chat logs: text -> token ids.
        progress: Called with (bytes done, bytes in all) while JSON lines are read.

    Raises:
        InvalidInputError: No such file, an empty one, a broken archive, or a bad row, named.
    """
    path, known = find_trace(source)
    name = str(source) if known else path.name.split(".")[0]
    chosen = format or (known.format if known else _guess(path))
    if chosen not in TRACE_FORMATS:
        raise UnknownNameError("trace format", chosen, TRACE_FORMATS)
    size = block_tokens or (known.block_tokens if known else None)
    request = ReadRequest(path, name, size, skip_bad, tokenize, progress)
    trace = TRACE_FORMATS[chosen](request)
    if trace.requests == 0:
        raise InvalidInputError(f"{path}: no requests")
    return trace


@dataclass(frozen=True)
class ReadRequest:
    """What a reader is given; see load_trace."""

    path: Path
    name: str
    block_tokens: int | None = None
    skip_bad: bool = False
    tokenize: Tokenize | None = None
    progress: Callable[[int, int], None] | None = None


class Reader(Protocol):
    """One format: a request to read -> the trace."""

    def __call__(self, request: ReadRequest, /) -> Trace: ...


def trace_from_frame(frame: pl.DataFrame, *, name: str = "frame", block_tokens: int, skip_bad: bool = False) -> Trace:
    """A trace from a frame as Trace.frame() makes it.

    Args:
        frame: Columns block_ids (list of integers), input_tokens, and if known timestamp (s), output_tokens, tenant.
        name: What to call it.
        block_tokens: Tokens of a block.
        skip_bad: Leave bad rows out and count them.

    Raises:
        InvalidInputError: A missing column or a bad row.
    """
    missing = {"block_ids", "input_tokens"} - set(frame.columns)
    if missing:
        raise InvalidInputError(f"{name}: missing {', '.join(sorted(missing))}; got {', '.join(frame.columns)}")
    try:
        lists = frame["block_ids"].cast(pl.List(pl.Int64))
        input_tokens = frame["input_tokens"].cast(pl.Int64)
    except pl.exceptions.PolarsError as error:
        raise InvalidInputError(
            f"{name}: block_ids must hold lists of integers, input_tokens integers ({error})"
        ) from error
    problems = []
    for what, column in (("block_ids", lists), ("input_tokens", input_tokens)):
        nulls = column.is_null().to_numpy().nonzero()[0]
        problems += [RowError(int(row) + 1, "missing value", f"{what} is missing") for row in nulls]
    lists, input_tokens = lists.fill_null([]), input_tokens.fill_null(0)
    rows = len(frame)
    columns: dict[str, np.ndarray] = {
        "hash_ids": lists.explode(empty_as_null=False).to_numpy().astype(np.int64) if rows else np.empty(0, np.int64),
        "offsets": np.concatenate([[0], np.cumsum(lists.list.len().to_numpy(), dtype=np.int64)]),
        "row": np.arange(1, rows + 1),
        "input_length": input_tokens.to_numpy(),
    }
    for ours, theirs in (("timestamp", "timestamp"), ("output_length", "output_tokens"), ("chat_id", "tenant")):
        columns[ours] = frame[theirs].fill_null(0).to_numpy() if theirs in frame.columns else np.zeros(rows)
    return _assemble(columns, problems, ReadRequest(Path(name), name, skip_bad=skip_bad), block_tokens=block_tokens)


# Formats.


def _read_mooncake(request: ReadRequest) -> Trace:
    """Milliseconds, 512-token blocks, the prompt's tail included."""
    return _read_hash_lines(request, request.block_tokens or 512, 1e-3)


def _read_bailian(request: ReadRequest) -> Trace:
    """Seconds, 16-token blocks; chat_id is the tenant."""
    return _read_hash_lines(request, request.block_tokens or 16, 1.0)


def _read_hash_lines(request: ReadRequest, block_tokens: int, seconds: float) -> Trace:
    data = np.frombuffer(_unpacked(request.path), np.uint8)
    parts, problems, rows = [], [], 0
    for first, last in _pieces(data):
        columns, bad = scan_lines(data[first:last])
        columns["row"] = columns["row"] + rows
        parts.append(columns)
        problems += [RowError(p.row + rows, p.kind, p.message) for p in bad]
        rows += int(np.count_nonzero(data[first:last] == 10))
        if request.progress:
            request.progress(last, len(data))
    columns = _joined(parts)
    columns["timestamp"] = columns["timestamp"] * seconds
    return _assemble(columns, problems, request, block_tokens=block_tokens)


def _pieces(data: np.ndarray, size: int = 1 << 26) -> Iterable[tuple[int, int]]:
    """Whole lines, about 64 MiB at a time."""
    first = 0
    while first < len(data):
        last = min(first + size, len(data))
        while last < len(data) and data[last - 1] != 10:
            last += 1
        yield first, last
        first = last


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    names = parts[0] if parts else {"hash_ids": 0, "row": 0, "timestamp": 0, "input_length": 0, "output_length": 0}
    columns = {
        n: np.concatenate([part[n] for part in parts] or [np.empty(0, np.int64)]) for n in names if n != "offsets"
    }
    lengths = [np.diff(part["offsets"]) for part in parts]
    columns["offsets"] = np.concatenate([[0], np.cumsum(np.concatenate(lengths or [np.empty(0, np.int64)]))])
    columns.setdefault("chat_id", np.zeros(len(columns["row"]), np.int64))
    return columns


def _read_weka_npz(request: ReadRequest) -> Trace:
    """kv-cache-tester sessions packed into arrays: rows, off, ids."""
    try:
        with np.load(request.path, allow_pickle=False) as packed:
            rows, offsets, ids = packed["rows"], packed["off"], packed["ids"]
    except (KeyError, ValueError, OSError) as error:
        raise InvalidInputError(f"{request.path}: not a packed session file ({error})") from error
    started = rows[:, 0] * SESSION_GAP_SECONDS + rows[:, 2]
    columns = dict(
        hash_ids=ids, offsets=offsets, row=np.arange(1, len(rows) + 1), timestamp=started,
        input_length=rows[:, 3].astype(np.int64), output_length=rows[:, 4].astype(np.int64), chat_id=rows[:, 0],
    )  # fmt: skip
    note = f"start times are invented: session k starts at {SESSION_GAP_SECONDS:g} k seconds"
    return _assemble(columns, [], request, block_tokens=request.block_tokens or 64, note=note)


def _read_weka_sessions(request: ReadRequest) -> Trace:
    """kv-cache-tester sessions as JSON files of a folder; block ids are local to a session."""
    files = sorted(request.path.glob("*.json")) if request.path.is_dir() else [request.path]
    numbers: list[tuple[float, int, int, int]] = []
    ids: list[int] = []
    offsets, problems, block_tokens = [0], [], request.block_tokens or 64
    for session, file in enumerate(files):
        try:
            body = json.loads(_unpacked(file))
            block_tokens = int(body.get("block_size", block_tokens))
            renamed: dict[int, int] = {}
            base = 0 if not ids else max(ids) + 1
            for t, row in _session_requests(body["requests"], 0.0):
                numbers.append((SESSION_GAP_SECONDS * session + t, int(row["in"]), int(row["out"]), session))
                ids += [base + renamed.setdefault(int(b), len(renamed)) for b in row["hash_ids"]]
                offsets.append(len(ids))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(RowError(session + 1, "bad session", f"{file.name}: {type(error).__name__}: {error}"))
    table = np.array(numbers or np.empty((0, 4)))
    columns = dict(
        hash_ids=np.array(ids, np.int64), offsets=np.array(offsets), row=np.arange(1, len(numbers) + 1),
        timestamp=table[:, 0], input_length=table[:, 1], output_length=table[:, 2], chat_id=table[:, 3],
    )  # fmt: skip
    return _assemble(columns, problems, request, block_tokens=block_tokens)


def _session_requests(requests: list[dict[str, Any]], start: float) -> Iterable[tuple[float, dict[str, Any]]]:
    """Requests of a session, those of nested sub-agents with their parent's time added."""
    for row in requests:
        t = start + float(row.get("t", 0.0))
        if "requests" in row:
            yield from _session_requests(row["requests"], t)
        else:
            yield t, row


def _read_ragpulse(request: ReadRequest) -> Trace:
    """Requests as lists of component ids (system prompt, passages, history, web, user) with token lengths.

    A component is one block of its own size. Its place varies, so replay makes the ids name prefixes.
    """
    sizes: dict[int, int] = {}
    for file in sorted(request.path.parent.glob("[1-9]_*.jsonl")):
        for number, line in _lines(file):
            try:
                component, tokens = json.loads(line).values()
                sizes[int(component)] = int(tokens)
            except (ValueError, AttributeError) as error:
                raise InvalidInputError(f"{file}: row {number}: an id and a length are expected ({error})") from error
    rows = [_ragpulse_row(number, line, sizes) for number, line in _lines(request.path)]
    good = [row for row in rows if not isinstance(row, RowError)]
    ids = [b for _, _, _, _, blocks in good for b in blocks]
    sessions: dict[str, int] = {}
    columns = dict(
        hash_ids=np.array(ids, np.int64),
        offsets=np.concatenate([[0], np.cumsum([len(row[4]) for row in good], dtype=np.int64)]),
        row=np.arange(1, len(good) + 1),
        timestamp=np.array([row[0] for row in good], np.float64),
        input_length=np.array([sum(sizes[b] for b in row[4]) for row in good], np.int64),
        output_length=np.array([row[2] for row in good], np.int64),
        chat_id=np.array([sessions.setdefault(row[3], len(sessions)) for row in good], np.int64),
    )
    problems = [row for row in rows if isinstance(row, RowError)]
    return _assemble(columns, problems, request, block_tokens=request.block_tokens or 128, sizes=sizes)


def _ragpulse_row(number: int, line: str, sizes: dict[int, int]) -> Any:
    try:
        row = json.loads(line)
        blocks = [int(b) for part in row["hash_ids"].values() for b in part]
        unknown = [b for b in blocks if b not in sizes]
        if unknown:
            return RowError(number, "unknown component", f"component {unknown[0]} has no length")
        return float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), row["session_id"], blocks
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return RowError(number, "bad row", f"{type(error).__name__}: {error}")


def _read_oracle_general(request: ReadRequest) -> Trace:
    """libCacheSim's binary records (time, id, size, next access); each access becomes a request of one block."""
    data = _unpacked(request.path)
    if len(data) % ORACLE_RECORD.itemsize:
        raise InvalidInputError(
            f"{request.path}: {len(data)} bytes are not a whole number of oracleGeneral records "
            f"of {ORACLE_RECORD.itemsize} bytes"
        )
    records = np.frombuffer(data, ORACLE_RECORD)
    rows = len(records)
    ids, _ = _dense_unsigned(records["id"])
    block_tokens = request.block_tokens or 1
    columns = dict(
        hash_ids=ids, offsets=np.arange(rows + 1), row=np.arange(1, rows + 1), timestamp=records["clock"].astype(float),
        input_length=np.full(rows, block_tokens), output_length=np.zeros(rows, np.int64), chat_id=np.zeros(rows),
    )  # fmt: skip
    return _assemble(columns, [], request, block_tokens=block_tokens)


def _read_csv(request: ReadRequest) -> Trace:
    """Columns as Trace.frame() has them; block_ids as numbers between spaces."""
    try:
        frame = pl.read_csv(_unpacked(request.path), infer_schema_length=None)
    except pl.exceptions.PolarsError as error:
        raise InvalidInputError(f"{request.path}: not CSV ({error})") from error
    if "block_ids" in frame.columns:
        words = pl.col("block_ids").cast(pl.String).fill_null("").str.split(" ")
        frame = frame.with_columns(words.list.eval(pl.element().filter(pl.element() != "")))
    return _from_frame(frame, request)


def _read_parquet(request: ReadRequest) -> Trace:
    """Columns as Trace.frame() has them."""
    try:
        frame = pl.read_parquet(request.path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InvalidInputError(f"{request.path}: not Parquet ({error})") from error
    return _from_frame(frame, request)


def _from_frame(frame: pl.DataFrame, request: ReadRequest) -> Trace:
    if request.block_tokens is None:
        raise InvalidInputError(f"{request.path}: give block_tokens, the tokens of a block")
    return trace_from_frame(frame, name=request.name, block_tokens=request.block_tokens, skip_bad=request.skip_bad)


def _read_chat(request: ReadRequest) -> Trace:
    """Chat logs, one JSON object a line: `messages` as OpenAI's API takes them, or the prompt's text as `input`.

    Text is tokenised with `tokenize`; only full blocks are looked up, as a cache stores them.
    """
    if request.tokenize is None:
        raise InvalidInputError(f"{request.path}: a chat log needs tokenize=, a function from text to token ids")
    size = request.block_tokens or 16
    numbers, ids, offsets, problems = [], [], [0], []
    known: dict[tuple[int, ...], int] = {}  # (id of the block before, its tokens) -> id
    sessions: dict[str, int] = {}
    for row, line in _lines(request.path):
        try:
            body = json.loads(line)
            tokens = request.tokenize(_prompt_text(body))
            output = len(request.tokenize(str(body.get("output", ""))))
            session = sessions.setdefault(str(body.get("session_id", body.get("chat_id", ""))), len(sessions))
            clock = float(body.get("timestamp", row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(RowError(row, "bad row", f"{type(error).__name__}: {error}"))
            continue
        above = -1
        for start in range(0, len(tokens) - size + 1, size):
            above = known.setdefault((above, *tokens[start : start + size]), len(known))
            ids.append(above)
        offsets.append(len(ids))
        numbers.append((row, clock * (1e-6 if clock > 1e14 else 1.0), len(tokens), output, session))  # us or s
    table = np.array(numbers, np.float64).reshape(-1, 5)
    names = ("row", "timestamp", "input_length", "output_length", "chat_id")
    columns = {name: table[:, i] for i, name in enumerate(names)}
    columns.update(hash_ids=np.array(ids, np.int64), offsets=np.array(offsets))
    return _assemble(columns, problems, request, block_tokens=size)


def _prompt_text(body: dict[str, Any]) -> str:
    if "input" in body and "messages" not in body:
        return body["input"] if isinstance(body["input"], str) else json.dumps(body["input"])
    return "\n".join(f"{m['role']}: {_content_text(m.get('content'))}" for m in body["messages"])


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


TRACE_FORMATS: dict[str, Reader] = {
    "mooncake": _read_mooncake,
    "bailian": _read_bailian,
    "weka_npz": _read_weka_npz,
    "weka_sessions": _read_weka_sessions,
    "ragpulse": _read_ragpulse,
    "oracle_general": _read_oracle_general,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "chat": _read_chat,
}


# From columns to a trace.


def _assemble(
    columns: dict[str, np.ndarray],
    problems: list[RowError],
    request: ReadRequest,
    *,
    block_tokens: int,
    sizes: dict[int, int] | None = None,
    note: str = "",
) -> Trace:
    """Check the rows, drop the bad ones or stop, order by time, number the blocks densely."""
    lengths = np.diff(columns["offsets"])
    bad = _bad_rows(columns, lengths, block_tokens, equal_blocks=sizes is None)
    problems = sorted([*problems, *bad.values()], key=lambda problem: problem.row)
    if problems and not request.skip_bad:
        raise InvalidInputError(f"{request.path}: {problems[0]}")
    order = np.argsort(columns["timestamp"], kind="stable")
    if bad:
        order = order[~np.isin(order, list(bad))]
    ids, original = densify(_gather(columns["hash_ids"], columns["offsets"], order))
    counts = Counter(problem.kind for problem in problems)
    notes = [note] if note else []
    notes += [f"skipped {count} rows: {kind}" for kind, count in counts.items()]
    return Trace(
        name=request.name,
        ids=ids,
        offsets=np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)]).astype(np.int64),
        block_tokens=block_tokens,
        timestamps=np.ascontiguousarray(columns["timestamp"][order], np.float64),
        input_tokens=columns["input_length"][order].astype(np.int64),
        output_tokens=columns["output_length"][order].astype(np.int64),
        tenants=densify(columns["chat_id"][order].astype(np.int64))[0],
        block_sizes=None if sizes is None else np.array([sizes[int(b)] for b in original], np.int32),
        notes=tuple(notes),
    )


def _bad_rows(
    columns: dict[str, np.ndarray], lengths: np.ndarray, block_tokens: int, *, equal_blocks: bool
) -> dict[int, RowError]:
    """Index -> problem, the first found for each row."""
    tokens, rows = columns["input_length"], columns["row"]
    found: dict[int, RowError] = {}

    def note(mask: np.ndarray, kind: str, message: Callable[[int], str]) -> None:
        for i in np.flatnonzero(mask).tolist():
            found.setdefault(i, RowError(int(rows[i]), kind, message(i)))

    note(tokens < 0, "negative length", lambda i: f"input length {tokens[i]:g} is negative")
    note(columns["output_length"] < 0, "negative length", lambda i: f"output length {columns['output_length'][i]:g}")
    note(~np.isfinite(columns["timestamp"]), "bad time", lambda i: "the timestamp is not a number")
    if len(columns["hash_ids"]) and columns["hash_ids"].min() < 0:
        owner = np.repeat(np.arange(len(lengths)), lengths)
        negative = np.zeros(len(lengths), bool)
        negative[owner[columns["hash_ids"] < 0]] = True
        note(negative, "negative id", lambda i: "a block id is negative")
    if equal_blocks:
        full = tokens // block_tokens
        fits = (lengths == full) | (lengths == -(-tokens // block_tokens))
        note(
            ~fits,
            "block count",
            lambda i: f"{lengths[i]} blocks do not fit {tokens[i]:g} tokens in blocks of {block_tokens}",
        )
    return found


def _gather(ids: np.ndarray, offsets: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The ids of the rows in a new order."""
    if np.array_equal(order, np.arange(len(offsets) - 1)):
        return ids
    lengths = np.diff(offsets)[order]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(order) else np.empty(0, np.int64)
    return ids[np.repeat(offsets[:-1][order] - starts, lengths) + np.arange(lengths.sum())]


def _dense_unsigned(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dense numbers for 64-bit unsigned ids, which may not fit int64."""
    values, dense = np.unique(ids, return_inverse=True)
    return dense.reshape(-1).astype(np.int64), values


# Files.


def find_trace(source: str | Path) -> tuple[Path, Known | None]:
    """The file of a trace, and what is known of it if it was named and not given as a path.

    Raises:
        InvalidInputError: No such file, or a known trace that is on none of the data folders.
    """
    path = Path(source)
    if path.exists():
        return path, None
    known = KNOWN.get(str(source))
    if known is None:
        raise UnknownNameError("trace file or known trace", str(source), KNOWN)
    for folder in data_folders():
        if (folder / known.path).is_file():
            return folder / known.path, known
    looked = ", ".join(map(str, data_folders()))
    raise InvalidInputError(
        f"trace {source!r} is not on this machine: get {known.path} from {known.source} into one of {looked}"
    )


def _guess(path: Path) -> str:
    if path.is_dir() or path.suffix == ".json":
        return "weka_sessions"
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    by_name = {".csv": "csv", ".parquet": "parquet", ".npz": "weka_npz"}
    if suffixes and suffixes[-1] in by_name:
        return by_name[suffixes[-1]]
    if "oracleGeneral" in path.name or (suffixes and suffixes[-1] in (".oracle", ".bin")):
        return "oracle_general"
    first = next((line for _, line in _lines(path)), "")
    if '"messages"' in first or '"input"' in first:
        return "chat"
    if '"sys_prompt"' in first:
        return "ragpulse"
    return "bailian" if '"chat_id"' in first else "mooncake"


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """(row from 1, text) of the lines that are not empty."""
    text = _unpacked(path).decode("utf-8", errors="replace")
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _unpacked(path: Path) -> bytes:
    """The file's bytes, unpacked if it is gzip or zstd.

    Raises:
        InvalidInputError: It cannot be read, is empty, or its archive is broken or cut short.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        elif data[:4] == b"\x28\xb5\x2f\xfd":
            data = _unzstd(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInputError(f"{path}: the gzip file is broken or cut short ({error})") from error
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read ({error})") from error
    if not data.strip():
        raise InvalidInputError(f"{path}: the file is empty")
    return data


def _unzstd(data: bytes) -> bytes:
    import zstandard

    reader = zstandard.ZstdDecompressor().decompressobj(read_across_frames=False)
    try:
        out = reader.decompress(data)
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    if not reader.eof:
        raise EOFError("zstd frame ends early")
    return out
