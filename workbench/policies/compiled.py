"""A policy class joined with an engine template into a module: compiled by numba, or plain Python where that fails.

    policy class -> rewriting -> + _order.py (+ _scored.py) (+ replay loops) -> module file named by its hash -> import

The file lies in a cache folder (KVWORKBENCH_CACHE, else the user's), so numba's disk cache serves the next process.
numba is imported by the generated module alone.
"""

import ast
import copy
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from platformdirs import user_cache_dir

from workbench.policies.base import CHUNK_FIELDS, ENGINE_SCALARS, HOOKS, PolicyForm, form_of
from workbench.policies.rewriting import NotCompilableError, Rewritten, rewrite

__all__ = ["Built", "PlainPolicyWarning", "State", "build", "cache_folder", "make_state"]

HERE = Path(__file__).parent
DEFAULTS = HERE / "_hooks.py"
ORDER = HERE / "_order.py"  # the template of the live engine and of prefix replay
SCORED = HERE / "_scored.py"
FLAGS = ("LEAVES_ONLY", "REMOVES", "ADMITS")


class PlainPolicyWarning(UserWarning):
    """A policy runs as plain Python, slower, because it cannot be compiled; the message names the line and why."""


@dataclass(frozen=True)
class Built:
    """A policy ready to run over one engine template.

    Attributes:
        form: The policy's form.
        path: The generated module.
        compiled: False if it runs as plain Python.
        mentions: The fields and scalars that it uses.
        chunk_type, scalar_type, table_type: NumPy record types of the state.
    """

    form: PolicyForm
    path: Path
    compiled: bool
    mentions: frozenset[str]
    chunk_type: np.dtype
    scalar_type: np.dtype
    table_type: np.dtype


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


def cache_folder() -> Path:
    """Where generated policy modules lie; created on first use."""
    root = os.environ.get("KVWORKBENCH_CACHE")
    folder = (Path(root) if root else Path(user_cache_dir("kvworkbench"))) / "policies"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


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
    constants = {n: v for n, v in vars(cls).items() if isinstance(v, int | float) and n not in form.scalars}
    parts_of_engine = (DEFAULTS, None if object_semantics else ORDER, SCORED if form.scored else None, loops)
    templates = [path for path in parts_of_engine if path]
    try:
        parts = rewrite(form, constants)
        built = _write(form, parts, templates, object_semantics)
        if entry_points is not None:
            _compile_now(built, parts, policy, entry_points)
        return built
    except NotCompilableError as error:
        warnings.warn(f"policy {form.name} runs as plain Python, slower: {error}", PlainPolicyWarning, stacklevel=4)
        return _write(form, None, templates, object_semantics)


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
        module = _imported(built.path)
    else:
        s, t = ([_row(kind) for _ in range(n)] for kind, n in ((built.chunk_type, chunks), (built.table_type, length)))
        r = copy.deepcopy(policy)
        module = _bound(built, r, s, t)
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


# Writing the module.


def _write(form: PolicyForm, parts: Rewritten | None, templates: list[Path], object_semantics: bool) -> Built:
    mentions = {*CHUNK_FIELDS, *ENGINE_SCALARS} if parts is None else parts.mentions
    flags = {f"USES_{name.upper()}": name in mentions for name in (*CHUNK_FIELDS, *ENGINE_SCALARS)}
    flags.update(
        LEAVES_ONLY=not object_semantics,
        REMOVES=form.scored or "on_remove" in form.methods,
        ADMITS="admit" in form.methods,
    )
    own = dict(parts.functions) if parts else {}
    own["clear_fields"] = _clear_fields(form)
    functions: dict[str, str] = {}
    constants: dict[str, str] = {}
    for template in templates:
        for node in ast.parse(template.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                functions[node.name] = ast.unparse(_Fold(flags).visit(node))
            elif isinstance(node, ast.Assign) and not _only_flags(node):
                constants[ast.unparse(node.targets[0])] = ast.unparse(node)
    functions.update(own)
    text = _module_text(form, parts, functions, constants)
    chunk_type, scalar_type, table_type = _record_types(form, mentions, object_semantics)
    return Built(form, _saved(text), parts is not None, frozenset(mentions), chunk_type, scalar_type, table_type)


def _module_text(
    form: PolicyForm, parts: Rewritten | None, functions: dict[str, str], constants: dict[str, str]
) -> str:
    head = f'"""Generated from policy {form.name}; safe to delete."""'
    lines = [head, *constants.values()]
    mark = ""
    if parts is not None:
        lines += ["from numba import njit", *parts.preamble.values()]
        mark = "@njit(cache=True, nogil=True)\n"
    return "\n\n".join(lines + [mark + text for text in functions.values()]) + "\n"


def _clear_fields(form: PolicyForm) -> str:
    remembers = "is_ghost" in form.methods
    body = [] if remembers else [f"    _s[c].{name} = 0" for name in form.fields]
    return "def clear_fields(_s, _r, _t, c):\n" + "\n".join(body or ["    pass"])


def _only_flags(node: ast.Assign) -> bool:
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return all(name in FLAGS or name.startswith("USES_") for name in names)


class _Fold(ast.NodeTransformer):
    """Answer `if FLAG:` now, so that a field no policy mentions is neither stored nor maintained."""

    def __init__(self, flags: dict[str, bool]):
        self.flags = flags

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node):
            node.body = node.body[1:]
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if isinstance(node.test, ast.Name) and node.test.id in self.flags:
            return (node.body if self.flags[node.test.id] else node.orelse) or ast.Pass()
        return node


def _record_types(form: PolicyForm, mentions: set[str], object_semantics: bool) -> tuple[np.dtype, np.dtype, np.dtype]:
    chunk = dict(form.fields)
    chunk.update({name: CHUNK_FIELDS[name] for name in CHUNK_FIELDS if name in mentions})
    scalars = {name: "f8" if isinstance(value, float) else "i8" for name, value in form.scalars.items()}
    scalars.update(ENGINE_SCALARS, _broken="i8")
    table = dict(form.table)
    if not object_semantics:
        chunk.update(parent="i4", children="i4", _pins="i4", _next_buried="i4", _state="u1")
        scalars.update(_buried="i8", _held="i8")
    if form.scored:
        chunk.update(_order="i8")
        scalars.update(_heap="i8", _order="i8")
        table.update(_score="f8", _order="i8", _chunk="i4")
    types = chunk or {"_unused": "u1"}, scalars, table or {"_unused": "u1"}
    return tuple(np.dtype(list(fields.items()), align=True) for fields in types)  # type: ignore[return-value]


def _saved(text: str) -> Path:
    path = cache_folder() / f"policy_{hashlib.sha256(text.encode()).hexdigest()[:20]}.py"
    if not path.exists():  # never rewritten: numba's cache goes by the file's time
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    return path


def _imported(path: Path) -> ModuleType:
    name = f"kvworkbench_{path.stem}"
    if name not in sys.modules:
        module = _module_at(name, path)
        sys.modules[name] = module  # before it runs: numba's disk cache looks its functions up by module name
        try:
            module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _module_at(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


# Plain Python: the same template, uncompiled, calling the methods of one instance.


def _bound(built: Built, instance: Any, s: list, t: list) -> ModuleType:
    module = _module_at(f"plain_{built.path.stem}", built.path)
    module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    for name in HOOKS:
        if name in built.form.methods:
            setattr(module, name, _without_state(getattr(instance, name)))
    for name in built.chunk_type.names or ():
        if not name.startswith("_"):
            setattr(instance, name, _Column(s, name))
    for name in built.form.table:
        setattr(instance, name, _Column(t, name))
    return module


def _without_state(method: Any) -> Any:
    return lambda s, r, t, *arguments: method(*arguments)


class _Column:
    """One field of all records, indexed like an array."""

    def __init__(self, rows: list, name: str):
        self._rows, self._name = rows, name

    def __getitem__(self, index: int) -> Any:
        return getattr(self._rows[index], self._name)

    def __setitem__(self, index: int, value: Any) -> None:
        setattr(self._rows[index], self._name, value)

    def __len__(self) -> int:
        return len(self._rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array([getattr(row, self._name) for row in self._rows], dtype)


def _row(kind: np.dtype) -> Any:
    row = _row_class(tuple(kind.names or ()))()
    for name in kind.names or ():
        setattr(row, name, 0)
    return row


_row_classes: dict[tuple[str, ...], type] = {}


def _row_class(names: tuple[str, ...]) -> type:
    if names not in _row_classes:
        _row_classes[names] = type("Row", (), {"__slots__": names})
    return _row_classes[names]


def _grown(built: Built, rows: Any, kind: np.dtype, size: int) -> Any:
    if built.compiled:
        grown = np.zeros(size, kind)
        grown[: len(rows)] = rows
        return grown
    rows.extend(_row(kind) for _ in range(size - len(rows)))  # in place: the policy's columns read this list
    return rows
