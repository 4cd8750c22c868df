"""The same engine templates uncompiled, calling the methods of one policy instance: for what numba cannot compile."""

from types import ModuleType
from typing import Any

import numpy as np

from workbench.policies.base import HOOKS
from workbench.policies.generating import Built, new_module

__all__ = ["Column", "bind", "make_row"]


def bind(built: Built, instance: Any, s: list, t: list) -> ModuleType:
    """A module of its own for one run: its hooks call the instance, and the instance sees fields as columns."""
    module = new_module(built.path)
    module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    for name in HOOKS:
        if name in built.form.methods:
            setattr(module, name, _without_state(getattr(instance, name)))
    for name in built.chunk_type.names or ():
        if not name.startswith("_"):
            setattr(instance, name, Column(s, name))
    for name in built.form.table:
        setattr(instance, name, Column(t, name))
    return module


def _without_state(method: Any) -> Any:
    return lambda s, r, t, *arguments: method(*arguments)


class Column:
    """One field of all records, indexed like an array; it stays valid while the records grow.

    Args:
        rows: The records.
        name: The field.
    """

    def __init__(self, rows: list, name: str):
        self._rows, self._name = rows, name

    def __getitem__(self, index: int) -> Any:
        return getattr(self._row(index), self._name)

    def __setitem__(self, index: int, value: Any) -> None:
        setattr(self._row(index), self._name, value)

    def _row(self, index: int) -> Any:
        if not 0 <= index < len(self._rows):  # compiled, this would touch foreign memory
            raise IndexError(f"self.{self._name}[{index}]: indices are 0 to {len(self._rows) - 1}")
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array([getattr(row, self._name) for row in self._rows], dtype)


def make_row(kind: np.dtype) -> Any:
    """One record with every field 0; its numbers are Python's and do not wrap."""
    names = tuple(kind.names or ())
    if names not in _row_classes:
        _row_classes[names] = type("Row", (), {"__slots__": names})
    row = _row_classes[names]()
    for name in names:
        setattr(row, name, 0)
    return row


_row_classes: dict[tuple[str, ...], type] = {}
