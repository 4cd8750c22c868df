"""The command line: what the notebooks do, in a terminal. One file a group of commands; each is found by itself."""

import sys
from importlib import import_module
from pkgutil import iter_modules

from rich.console import Console

from experiments.cli._app import app
from workbench.errors import CacheError

__all__ = ["app", "main"]

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f"{__name__}.{_module.name}")


def main() -> None:
    """Entry point: a caller's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except CacheError as error:
        Console(stderr=True).print("error:", error, style="bold red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
