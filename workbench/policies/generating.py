"""The module of a policy: its rewritten methods joined with the engine's templates, written to a file and imported.

The file is named by the hash of its text and lies in a cache folder (KVWORKBENCH_CACHE, else the user's), where numba's
disk cache serves the next process. numba is imported by the generated module alone.
"""

import ast
import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from platformdirs import user_cache_dir

from workbench.policies.base import CHUNK_FIELDS, ENGINE_SCALARS, PolicyForm
from workbench.policies.rewriting import Rewritten

__all__ = ["Built", "cache_folder", "import_generated", "new_module", "write_module"]

HERE = Path(__file__).parent
DEFAULTS = HERE / "_hooks.py"
ORDER = HERE / "_order.py"  # the template of the live engine and of prefix replay
SCORED = HERE / "_scored.py"
# Only what Python calls needs a wrapper for Python and a place in the disk cache, with all that it calls inlined.
ENTRY_MARK = "@njit(cache=True, nogil=True, no_cfunc_wrapper=True)\n"
INNER_MARK = "@njit(nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)\n"
LIVE_ENTRIES = ("act", "enter", "settle", "is_ghost")
FLAGS = ("LEAVES_ONLY", "REMOVES", "ADMITS")


@dataclass(frozen=True)
class Built:
    """A policy ready to run over one engine template.

    Attributes:
        form: The policy's form.
        path: The generated module.
        loops_path: The generated module of the replay loops, which imports the other; None for the live
            engine, and for plain Python, where both are one.
        compiled: False if it runs as plain Python.
        mentions: The fields and scalars that it uses.
        chunk_type, scalar_type, table_type: NumPy record types of the state.
    """

    form: PolicyForm
    path: Path
    loops_path: Path | None
    compiled: bool
    mentions: frozenset[str]
    chunk_type: np.dtype
    scalar_type: np.dtype
    table_type: np.dtype


def cache_folder() -> Path:
    """Where generated policy modules lie; created on first use."""
    root = os.environ.get("KVWORKBENCH_CACHE")
    folder = (Path(root) if root else Path(user_cache_dir("kvworkbench"))) / "policies"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def write_module(form: PolicyForm, parts: Rewritten | None, *, object_semantics: bool, loops: Path | None) -> Built:
    """Write the module of a policy, and of the loops that run it.

    Args:
        form: The policy's form.
        parts: Its rewritten methods; None writes the engine alone, uncompiled, for a policy that stays plain Python.
        object_semantics: Chunks are plain objects: no parents, no pins.
        loops: Template of the replay loops.
    """
    mentions = {*CHUNK_FIELDS, *ENGINE_SCALARS} if parts is None else parts.mentions
    flags = {f"USES_{name.upper()}": name in mentions for name in (*CHUNK_FIELDS, *ENGINE_SCALARS)}
    flags.update(
        LEAVES_ONLY=not object_semantics,
        REMOVES=form.scored or "on_remove" in form.methods,
        ADMITS="admit" in form.methods,
    )
    functions, constants = _functions_of(DEFAULTS, flags)
    for template in (None if object_semantics else ORDER, SCORED if form.scored else None):
        if template:
            more, values = _functions_of(template, flags)
            functions.update(more)
            constants.update(values)
    if parts:
        functions.update(parts.functions)
    functions["clear_fields"] = _clear_fields(form)
    head = [f'"""Generated from policy {form.name}; safe to delete."""', *constants.values()]
    head += list(parts.preamble.values()) if parts else []
    run, values = _functions_of(loops, flags) if loops else ({}, {})
    loops_path = None
    if parts is None:  # one file: its functions find each other, and the policy's, in one module
        path = _saved([*head, *values.values()], {**functions, **run}, None)
    else:
        path = _saved(head, functions, LIVE_ENTRIES)
        if loops:
            above = [f'"""Replay loops of policy {form.name}; safe to delete."""', f"from {path.stem} import *"]
            loops_path = _saved([*above, *values.values()], run, tuple(run))
    types = _record_types(form, mentions, object_semantics)
    return Built(form, path, loops_path, parts is not None, frozenset(mentions), *types)


def _functions_of(template: Path, flags: dict[str, bool]) -> tuple[dict[str, str], dict[str, str]]:
    """(function name -> source, constant -> its assignment) of a template, its flags answered."""
    functions: dict[str, str] = {}
    constants: dict[str, str] = {}
    for node in ast.parse(template.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = ast.unparse(_Fold(flags).visit(node))
        elif isinstance(node, ast.Assign) and not _only_flags(node):
            constants[ast.unparse(node.targets[0])] = ast.unparse(node)
    return functions, constants


def _clear_fields(form: PolicyForm) -> str:
    remembers = "is_ghost" in form.methods
    body = [] if remembers else [f"    _s[c].{name} = 0" for name in form.fields]
    return "def clear_fields(_s, _r, _t, c):\n" + "\n".join(body or ["    pass"])


def _only_flags(node: ast.Assign) -> bool:
    names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
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


class _UnsignedIndex(ast.NodeTransformer):
    """s[c] -> s[uint_(c)]: spares numba the test for an index from the end, which no chunk index is."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in ("s", "t", "_s", "_t", "resident"):
            node.slice = ast.Call(ast.Name("uint_", ast.Load()), [node.slice], [])
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


def _saved(head: list[str], functions: dict[str, str], entries: tuple[str, ...] | None) -> Path:
    """Write a module, unless it is there; `entries` get wrappers for Python, None leaves all uncompiled."""
    imports = "int_ = uint_ = int" if entries is None else "from numba import int64 as int_, njit, uint64 as uint_"
    parts = [head[0], imports, *head[1:]]
    for name, source in functions.items():
        mark = "" if entries is None else ENTRY_MARK if name in entries else INNER_MARK
        parts.append(mark + ast.unparse(_UnsignedIndex().visit(ast.parse(source))))
    text = "\n\n".join(parts) + "\n"
    path = cache_folder() / f"kvworkbench_policy_{hashlib.sha256(text.encode()).hexdigest()[:20]}.py"
    if not path.exists():  # never rewritten: numba's cache goes by the file's time
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    return path


def import_generated(path: Path) -> ModuleType:
    """Import a generated module, once in a process, under its file's name."""
    if path.stem not in sys.modules:
        module = new_module(path)
        sys.modules[path.stem] = module  # before it runs: numba's disk cache looks its functions up by module name
        try:
            module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
        except BaseException:
            del sys.modules[path.stem]
            raise
    return sys.modules[path.stem]


def new_module(path: Path) -> ModuleType:
    """An empty module object for a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)
