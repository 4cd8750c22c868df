"""The settings that a study may have, and the values that they may take."""

import difflib
import math
import os
from collections.abc import Sequence
from typing import Any

from workbench.errors import InvalidInputError

__all__ = ["KINDS", "check_setting", "plain_value", "plain_values"]

# Settings of each kind; a name that ends in a dot stands for all that begin so.
KINDS = {
    "serving": ("model", "workload", "workload.", "arm", "tier", "chunk_tokens", "codec", "policy", "memory_bytes",
                "disk_bytes", "redis_url", "object_store_url", "request_rate", "concurrency", "threads", "cache.",
                "vllm."),
    "replay": ("trace", "trace.", "policy", "capacity_chunks", "capacity_tokens", "chunk_tokens", "semantics",
               "touch_order"),
    "model": ("",),
}  # fmt: skip


def plain_values(name: str, values: Sequence[Any]) -> list[Any]:
    if isinstance(values, str | bytes) or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
        raise InvalidInputError(f"{name} is {values!r}; space takes a list of values for each setting")
    plain = [plain_value(name, value) for value in values]
    if not plain or len({(type(v), v) for v in plain}) < len(plain):
        raise InvalidInputError(f"{name} has the values {plain}; at least one is needed, and each once")
    return plain


def plain_value(name: str, value: Any) -> Any:
    """A value that YAML and JSON write and read as it is."""
    if hasattr(value, "item"):
        value = value.item()  # of NumPy
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InvalidInputError(f"{name} has the value {value!r}; a setting is a text, a finite number, a bool or None")


def check_setting(name: str, kind: str) -> None:
    allowed = KINDS[kind]
    if name in allowed or any(name.startswith(a) and len(name) > len(a) for a in allowed if not a or a.endswith(".")):
        return
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(f"{a}<name>" if a.endswith(".") else a for a in allowed)
    raise InvalidInputError(f"a {kind} study has no setting {name!r}; {hint}there are {shown}")
