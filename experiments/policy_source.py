"""A policy class as the text of a module of its own, so that another process can import it."""

import ast
import inspect
import textwrap

from workbench.errors import InvalidInputError

__all__ = ["module_text"]


def module_text(cls: type, file_name: str) -> str:
    """A module that holds the class alone.

    Args:
        cls: Decorated with @policy; also one from a notebook's cell.
        file_name: What the module will be called.

    Raises:
        InvalidInputError: Python does not know the class's source.
    """
    source = _source_of(cls)
    modules = {"math.": "import math", "np.": "import numpy as np"}
    imports = [line for name, line in modules.items() if name in source]
    head = [f'"""A policy for kvworkbench: {file_name}:{cls.__name__}."""', *imports,
            f"from workbench.policies import policy\n\n__all__ = [{cls.__name__!r}]\n", source]  # fmt: skip
    return "\n\n".join(head)


def _source_of(cls: type) -> str:
    """The text of a class, also of one from a notebook's cell, which Python finds by its methods only."""
    try:
        method = next(f for f in vars(cls).values() if inspect.isfunction(f) and f.__module__ == cls.__module__)
        lines, _ = inspect.findsource(method)
    except (StopIteration, OSError, TypeError) as error:
        raise InvalidInputError(f"the source of {cls.__name__} is not known") from error
    first = method.__code__.co_firstlineno
    for node in ast.walk(ast.parse("".join(lines))):
        if (
            isinstance(node, ast.ClassDef)
            and node.name == cls.__name__
            and node.lineno <= first <= (node.end_lineno or 0)
        ):
            start = min(part.lineno for part in (node, *node.decorator_list))
            return textwrap.dedent("".join(lines[start - 1 : node.end_lineno]))
    raise InvalidInputError(f"the source of {cls.__name__} is not known: no class statement around its methods")
