"""A policy class made ready to run: compiled by numba, or plain Python where that fails.

policy class -> rewriting -> generating (+ _hooks, _order, _scored, replay loops) -> a module; State -> its arrays
"""

import ast
import copy
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.policies.base import PolicyError, PolicyForm, form_of
from workbench.policies.generating import Built, import_generated, write_module
from workbench.policies.plain import bind, make_row
from workbench.policies.rewriting import NotCompilableError, Rewritten, rewrite

__all__ = ["Built", "PlainPolicyWarning", "State", "build", "make_state", "try_out"]


LINES_A_REQUEST = 20_000  # of plain Python when a policy is tried out; shipped ones need some hundred


class PlainPolicyWarning(UserWarning):
    """A policy runs as plain Python, slower, because it cannot be compiled; the message names the line and why."""


@dataclass
class State:
    """One run's arrays: `s[c]` is chunk c, `r` the scalars, `t` the side table; `module` has the engine's functions."""

    built: Built
    module: Any
    s: Any
    r: Any
    t: Any

    def get(self, c: int, name: str) -> Any:
        """One field of chunk c."""
        return self.s[c][name] if self.built.compiled else getattr(self.s[c], name)

    def put(self, c: int, name: str, value: Any) -> None:
        """Set one field of chunk c."""
        if self.built.compiled:
            self.s[c][name] = value
        else:
            setattr(self.s[c], name, value)

    def put_scalar(self, name: str, value: Any) -> None:
        """Set one scalar."""
        _write_scalar(self.r, name, value)

    def get_scalar(self, name: str) -> Any:
        """Read one scalar."""
        return self.r[name] if self.built.compiled else getattr(self.r, name)

    def clear(self, c: int) -> None:
        """Zero every field of chunk c."""
        if self.built.compiled:
            self.s[c] = np.zeros((), self.built.chunk_type)
        else:
            for name in self.built.chunk_type.names or ():
                setattr(self.s[c], name, 0)

    def set_column(self, name: str, values: Any) -> None:
        """Set a field of every chunk, if the policy or the engine has that field."""
        if name not in (self.built.chunk_type.names or ()):
            return
        if self.built.compiled:
            self.s[name] = values
        else:
            for row, value in zip(self.s, np.broadcast_to(values, len(self.s)).tolist(), strict=True):
                setattr(row, name, value)

    def grow(self, chunks: int) -> None:
        """Make room for chunk indices below `chunks`; new records are zero."""
        self.s = _grown(self.built, self.s, self.built.chunk_type, chunks)
        length = _table_length(self.built.form, chunks)
        if length > len(self.t):  # table_entries stays: what is hashed into the table keeps its place
            self.t = _grown(self.built, self.t, self.built.table_type, length)


def build(policy: Any, *, object_semantics: bool = False, loops: Path | None = None, entry_points: Any = None) -> Built:
    """Write (or find) the module of a policy.

    Args:
        policy: A policy class or instance.
        object_semantics: Chunks are plain objects: no parents, no pins (replay only).
        loops: A further template, with the replay loops, that calls the functions of the others.
        entry_points: Called with a small State; it compiles the functions that will be used, so that a policy that
            numba refuses falls back to plain Python here and not in the middle of a run.

    Returns:
        The built policy; with a PlainPolicyWarning it is plain Python.
    """
    key = (policy if isinstance(policy, type) else type(policy), object_semantics, loops)
    if key not in _built:
        _built[key] = _build(policy, object_semantics, loops, entry_points)
    return _built[key]


_built: dict[Any, Built] = {}


def _build(policy: Any, object_semantics: bool, loops: Path | None, entry_points: Any) -> Built:
    policy = policy() if isinstance(policy, type) else policy
    cls, form = type(policy), form_of(policy)
    if not getattr(cls, "compile", True):
        return write_module(form, None, object_semantics=object_semantics, loops=loops)
    constants = {n: v for n, v in vars(cls).items() if isinstance(v, int | float) and n not in form.scalars}
    try_out(policy)
    try:
        parts = rewrite(form, constants)
        built = write_module(form, parts, object_semantics=object_semantics, loops=loops)
        if entry_points is not None:
            _compile_now(built, parts, policy, entry_points)
        return built
    except NotCompilableError as error:
        warnings.warn(f"policy {form.name} runs as plain Python, slower: {error}", PlainPolicyWarning, stacklevel=4)
        return write_module(form, None, object_semantics=object_semantics, loops=loops)


def try_out(policy: Any, requests: int = 40) -> None:
    """Run a policy as plain Python on a few made-up requests, where a mistake is an error and not foreign memory.

    Raises:
        PolicyError: One of its methods raised, returned no number, or did not end; names the line. (Which chunk evict()
            returns is checked in every run.)
    """
    form = form_of(policy)
    built = write_module(form, None, object_semantics=False, loops=None)
    state = make_state(built, policy, chunks=24, capacity=6)
    for name in ("score",) if form.scored else ("evict",):
        setattr(state.module, name, _returning_a_number(name, getattr(state.module, name)))
    try:
        with _ending(requests * LINES_A_REQUEST):
            _made_up_requests(state, requests)
    except Exception as error:
        raise PolicyError(_where(error, form, policy)) from error


def _made_up_requests(state: State, requests: int) -> None:
    m, s, r, t = state.module, state.s, state.r, state.t
    resident: set[int] = set()
    for request in range(requests):
        r.now, r.request = 0.5 * request, request
        c = request * request % 8  # chunks c, c + 8, c + 16 are a prefix
        chain = [c, c + 8, c + 16][: 1 + request % 3]
        for above, b in zip([-1, *chain], chain, strict=False):
            if b not in resident and len(resident) == 6:
                victim = m.next_victim(s, r, t, b)
                if victim < 0:
                    return
                resident.remove(victim)
            if b not in resident and (above < 0 or above in resident):
                s[b].parent = above
                m.enter(s, r, t, b)
                resident.add(b)
        m.settle(s, r, t, [b for b in chain if b in resident], 0, sum(b in resident for b in chain), True)


def _returning_a_number(name: str, method: Any) -> Any:
    def checked(*arguments: Any) -> Any:
        value = method(*arguments)
        if not isinstance(value, int | float | np.number):
            wanted = "the number of a chunk" if name == "evict" else "a number"
            raise TypeError(f"{name}() returned {value!r}; it must return {wanted}")
        return value

    return checked


@contextmanager
def _ending(lines: int) -> Iterator[None]:
    """Raise after so many lines of Python: compiled, a loop without end would hang the whole process."""
    left = lines

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(f"no end after {lines:,} lines; is there a loop that never stops?")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _where(error: Exception, form: PolicyForm, policy: Any) -> str:
    own = {getattr(policy, name).__code__.co_filename for name in form.methods if hasattr(policy, name)}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in own]
    line = f"line {frames[-1].lineno}: `{frames[-1].line}`: " if frames else ""
    return f"policy {form.name}: {line}{type(error).__name__}: {error}"


def _compile_now(built: Built, parts: Rewritten, policy: Any, entry_points: Any) -> None:
    from numba.core.errors import NumbaError

    try:
        entry_points(make_state(built, policy, chunks=4, capacity=2))
    except NumbaError as error:
        raise _blame(built, parts, error) from error


def _blame(built: Built, parts: Rewritten, error: Exception) -> NotCompilableError:
    """Find the author's line in numba's message, which names lines of the generated file."""
    message = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    text = built.path.read_text()
    starts = {node.name: node.lineno for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    why = next((line for line in message.splitlines()[1:] if line.strip() and not line.startswith("During")), message)
    for number in map(int, re.findall(rf"{re.escape(built.path.name)}\W+line (\d+)|$", message)[:-1] or []):
        for name, start in starts.items():
            line, source = parts.lines.get(name, {}).get(number - start + 1, (0, ""))
            if line:
                return NotCompilableError(line, source, f"numba: {why.strip()}")
    return NotCompilableError(0, "", f"numba: {why.strip()}")


def make_state(built: Built, policy: Any, *, chunks: int, capacity: int, resident: int = 0) -> State:
    """Fresh state for one run.

    Args:
        built: From build().
        policy: An instance: its settings are copied, it is never changed.
        chunks: Chunk indices are below this.
        capacity: Chunks the tier holds.
        resident: The most chunks that are ever in it, if that can be more.
    """
    form = built.form
    entries, length = _table_entries(form, capacity), _table_length(form, max(capacity, resident))
    if built.compiled:
        s: Any = np.zeros(chunks, built.chunk_type)
        t: Any = np.zeros(length, built.table_type)
        r: Any = np.zeros(1, built.scalar_type)[0]
        module = import_generated(built.path)
        if built.loops_path:
            module = import_generated(built.loops_path)
    else:
        s, t = (
            [make_row(kind) for _ in range(n)] for kind, n in ((built.chunk_type, chunks), (built.table_type, length))
        )
        r = copy.deepcopy(policy)
        module = bind(built, r, s, t)
        for name in built.scalar_type.names or ():
            _write_scalar(r, name, 0)
    for name in form.scalars:
        _write_scalar(r, name, getattr(policy, name))
    known = dict(_buried=-1, incoming=-1, capacity=capacity, table_entries=entries)
    for name in known.keys() & set(built.scalar_type.names or ()):
        _write_scalar(r, name, known[name])
    return State(built, module, s, r, t)


def _write_scalar(r: Any, name: str, value: float) -> None:
    if isinstance(r, np.void):
        r[name] = value
    else:
        setattr(r, name, value)


def _table_entries(form: PolicyForm, capacity: int) -> int:
    wanted = max(form.table_min, form.table_size * capacity, 1)
    return 1 << (wanted - 1).bit_length()


def _table_length(form: PolicyForm, resident: int) -> int:
    heap = 2 * resident + 64 if form.scored else 0  # one live entry for each chunk and room for stale ones
    return max(heap, _table_entries(form, resident) if form.table else 1)


def _grown(built: Built, rows: Any, kind: np.dtype, size: int) -> Any:
    if built.compiled:
        grown = np.zeros(size, kind)
        grown[: len(rows)] = rows
        return grown
    rows.extend(make_row(kind) for _ in range(size - len(rows)))  # in place: the policy's columns read this list
    return rows
