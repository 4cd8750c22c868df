"""From the methods of a policy class to functions over arrays: `self.visited[c]` becomes `_s[c].visited`.

`self.head` becomes `_r.head` (the record of scalars), `self.sketch[i]` of the side table `_t[i].sketch`, and
`self.method(x)` a call of `method(_s, _r, _t, x)`. What cannot be rewritten raises NotCompilableError with the line.
"""

import ast
import inspect
import math
import textwrap
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from workbench.policies.base import CHUNK_FIELDS, ENGINE_SCALARS, HOOKS, PolicyForm

__all__ = ["NotCompilableError", "Rewritten", "rewrite"]

STATE = ("_s", "_r", "_t")
ALLOWED_MODULES = {math: "import math as {name}", np: "import numpy as {name}"}


class NotCompilableError(Exception):
    """A policy, or a line of it, is outside what can be compiled.

    Args:
        line: The line in the author's file or cell, 0 if unknown.
        text: That line.
        why: What cannot be compiled about it.
    """

    def __init__(self, line: int, text: str, why: str):
        super().__init__(f"line {line}: `{text.strip()}`: {why}" if line else why)
        self.line, self.text, self.why = line, text, why


@dataclass
class Rewritten:
    """The parts of a policy's module.

    Attributes:
        functions: Function name -> source over (_s, _r, _t, ...).
        preamble: Imports and constants that the functions use.
        mentions: Fields and scalars that the policy reads or writes by name.
        lines: Function name -> {line within its source: (line in the author's file, text)}.
    """

    functions: dict[str, str] = field(default_factory=dict)
    preamble: dict[str, str] = field(default_factory=dict)
    mentions: set[str] = field(default_factory=set)
    lines: dict[str, dict[int, tuple[int, str]]] = field(default_factory=dict)


def rewrite(form: PolicyForm, constants: dict[str, Any]) -> Rewritten:
    """Rewrite every method of a policy.

    Args:
        form: What @policy read from the class.
        constants: Other int and float attributes of the class; `self.NAME` becomes their value.

    Raises:
        NotCompilableError: The first line that cannot be rewritten.
    """
    result = Rewritten()
    for name, function in form.methods.items():
        if not name.startswith("__"):
            _add(result, name, function, _MethodRewriter(form, constants, result.mentions))
    return result


def _add(result: Rewritten, name: str, function: FunctionType, rewriter: "_MethodRewriter | None") -> None:
    tree, first_line, source = _parse(function)
    if rewriter is not None:
        rewriter.start(first_line, source)
        tree = rewriter.rewrite_method(tree)
    if rewriter is not None:
        name = _function_name(name)
    tree.name = name
    tree.decorator_list = []
    text = ast.unparse(ast.fix_missing_locations(tree))
    result.functions[name] = text
    result.lines[name] = _line_map(tree, ast.parse(text).body[0], first_line, source)
    _add_globals(result, function, first_line, source)


def _function_name(method: str) -> str:
    """The engine calls hooks by name; other methods must clash neither with it nor with the author's variables."""
    return method if method in HOOKS else f"self_{method}"


def _parse(function: FunctionType) -> tuple[ast.FunctionDef, int, list[str]]:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise NotCompilableError(0, "", f"the source of {function.__name__} is not available ({error})") from error
    tree = ast.parse(source).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise NotCompilableError(function.__code__.co_firstlineno, source, "only plain functions can be compiled")
    return tree, function.__code__.co_firstlineno, source.splitlines()


def _line_map(old: ast.AST, new: ast.AST, first_line: int, source: list[str]) -> dict[int, tuple[int, str]]:
    """Both trees have the same shape, so walking them in step pairs each new line with the author's."""
    lines = {}
    for a, b in zip(ast.walk(old), ast.walk(new), strict=False):
        if isinstance(b, ast.stmt) and hasattr(a, "lineno"):
            lines.setdefault(b.lineno, (first_line + a.lineno - 1, source[a.lineno - 1]))
    return lines


def _add_globals(result: Rewritten, function: FunctionType, first_line: int, source: list[str]) -> None:
    outer = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    values = {name: cell.cell_contents for name, cell in outer.items()}
    names = function.__code__.co_names
    values.update({name: function.__globals__[name] for name in names if name in function.__globals__})
    for name, value in values.items():
        value = getattr(value, "py_func", value)  # a numba function is compiled again from its source
        if isinstance(value, bool | int | float):
            result.preamble[name] = f"{name} = {value!r}" if math.isfinite(value) else f"{name} = float('{value}')"
        elif isinstance(value, ModuleType) and value in ALLOWED_MODULES:
            result.preamble[name] = ALLOWED_MODULES[value].format(name=name)
        elif isinstance(value, FunctionType):
            if name not in result.functions:
                result.functions[name] = ""  # a recursive function meets itself here
                _add(result, name, value, None)
        else:
            at = next((i for i, text in enumerate(source) if name in text), 0)
            why = (
                f"it uses the global {name!r}, a {type(value).__name__}; numbers, functions, math and numpy are allowed"
            )
            raise NotCompilableError(first_line + at, source[at], why)


class _MethodRewriter(ast.NodeTransformer):
    def __init__(self, form: PolicyForm, constants: dict[str, Any], mentions: set[str]):
        self.form, self.constants, self.mentions = form, constants, mentions
        self.this, self.first_line, self.source = "self", 1, [""]

    def start(self, first_line: int, source: list[str]) -> None:
        self.first_line, self.source = first_line, source

    def rewrite_method(self, tree: ast.FunctionDef) -> ast.FunctionDef:
        self.this = tree.args.args[0].arg
        tree.args.args = [ast.arg(name) for name in STATE] + tree.args.args[1:]
        for argument in tree.args.args:
            argument.annotation = None
        tree.returns = None
        if ast.get_docstring(tree):
            tree.body = tree.body[1:] or [ast.Pass()]
        tree.body = [self.visit(statement) for statement in tree.body]
        return tree

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        name = self._attribute(node.value)
        if name is None or name in self.form.scalars or name in ENGINE_SCALARS:
            return self.generic_visit(node)
        index = self.visit(node.slice)
        if name in CHUNK_FIELDS:
            self.mentions.add(name)
        elif name not in self.form.fields and name not in self.form.table:
            self._refuse(
                node, f"self.{name} is no field; declared are {', '.join([*self.form.fields, *self.form.table])}"
            )
        rows = "_t" if name in self.form.table else "_s"
        row = ast.Subscript(ast.Name(rows, ast.Load()), index, ast.Load())
        value = ast.copy_location(ast.Attribute(row, name, node.ctx), node)
        kind = {**self.form.fields, **self.form.table, **CHUNK_FIELDS}[name]
        if isinstance(node.ctx, ast.Load) and np.dtype(kind).kind in "iub":
            return ast.copy_location(ast.Call(ast.Name("int_", ast.Load()), [value], []), node)  # one integer type
        return value

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = self._attribute(node.func)
        if name is None:
            return self.generic_visit(node)
        if name not in self.form.methods:
            self._refuse(node, f"self.{name} is not a method of the policy")
        state: list[ast.expr] = [ast.Name(part, ast.Load()) for part in STATE]
        arguments = state + [self.visit(argument) for argument in node.args]
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        return ast.copy_location(ast.Call(ast.Name(_function_name(name), ast.Load()), arguments, keywords), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = self._attribute(node)
        if name is None:
            return self.generic_visit(node)
        if name in self.form.scalars or name in ENGINE_SCALARS:
            self.mentions.add(name)
            return ast.copy_location(ast.Attribute(ast.Name("_r", ast.Load()), name, node.ctx), node)
        if name in self.constants and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(self.constants[name]), node)
        if name in self.form.fields or name in CHUNK_FIELDS or name in self.form.table:
            self._refuse(node, f"self.{name} has one value for each chunk and is used as self.{name}[c]")
        self._refuse(node, f"self.{name} is not declared; add it to `fields` or `scalars`")
        raise AssertionError

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.this:
            self._refuse(node, f"`{self.this}` may only be used as {self.this}.name")
        return node

    def _attribute(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.this:
            return node.attr
        return None

    def _refuse(self, node: ast.expr, why: str) -> None:
        raise NotCompilableError(self.first_line + node.lineno - 1, self.source[node.lineno - 1], why)
