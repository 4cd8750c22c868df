"""Every error the workbench raises on purpose.

CacheError                        anything below
├── InvalidInputError             the caller's mistake: what was got and what is allowed (also a ValueError)
│   └── UnknownNameError          a name that stands for nothing; lists the names that do
├── LayoutError                   KV of a shape or dtype that this engine was not built for
├── CapacityError                 memory or disk that was asked for is not there
└── EngineRunningError            a second engine in a process that can hold only one
"""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CacheError",
    "CapacityError",
    "EngineRunningError",
    "InvalidInputError",
    "LayoutError",
    "UnknownNameError",
]


class CacheError(Exception):
    """Base class: `except CacheError` catches whatever the workbench raises on purpose."""


class InvalidInputError(CacheError, ValueError):
    """A caller's mistake. The message says what was got and what is allowed."""


class UnknownNameError(InvalidInputError):
    """A name that stands for nothing.

    Args:
        what: The kind of thing, as in "policy".
        got: The name that was asked for.
        allowed: The names that exist.
    """

    def __init__(self, what: str, got: object, allowed: Iterable[str]):
        names = sorted(allowed)
        near = get_close_matches(str(got), names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        super().__init__(f"no {what} {got!r}{hint}; there are {', '.join(names) or 'none'}")
        self.what, self.got, self.allowed = what, got, names

    def __reduce__(self):
        return type(self), (self.what, self.got, self.allowed)


class LayoutError(CacheError):
    """KV whose shape, dtype or page format this engine was not built for."""


class CapacityError(CacheError):
    """Memory or disk that was asked for is not available."""


class EngineRunningError(CacheError):
    """A process that can hold one engine already holds one."""
