"""Pages that follow from the code: one for each package, one for the command line."""

from pathlib import Path

import typer
from typer.cli import get_docs_for_click

__all__ = ["api_pages", "command_line_page"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_PACKAGES = ("kernels", "workbench", "experiments")
_FAST_VERSIONS = ("_numba", "_triton")  # of what stands beside them; the contract is there


def api_pages() -> dict[str, str]:
    """Name -> Markdown: one page a folder of modules, with every public module on it, in reading order."""
    pages: dict[str, str] = {}
    for package in _PACKAGES:
        for folder in [_ROOT / package, *sorted(path for path in (_ROOT / package).rglob("*") if path.is_dir())]:
            if modules := _modules_of(folder):
                first, *others = (f"::: {module}\n" for module in modules)
                name = ".".join(folder.relative_to(_ROOT).parts)
                pages[f"api/{name}.md"] = "\n".join([f"{first}    options:\n      heading_level: 1\n", *others])
    return pages


def command_line_page() -> str:
    """The commands with their options, from the application itself."""
    from experiments.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="kvworkbench")
    return get_docs_for_click(obj=command, ctx=context, name="kvworkbench", title="Command line")


def _modules_of(folder: Path) -> list[str]:
    """The public modules of a package's folder, the package itself first."""
    paths = sorted(folder.glob("*.py"))
    if folder / "__init__.py" not in paths:
        return []
    own = ".".join(folder.relative_to(_ROOT).parts)
    public = [path.stem for path in paths if not path.stem.startswith("_") and not path.stem.endswith(_FAST_VERSIONS)]
    return [own, *(f"{own}.{stem}" for stem in public)]
