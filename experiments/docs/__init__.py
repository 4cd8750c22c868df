"""The documentation site: guides written by hand, the rest from the code.

    pages/*.md + README.md + ARCHITECTURE.md + one page a package + the command line -> zensical -> HTML

`python -m experiments.docs` builds it; any warning is an error.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.docs.reference import api_pages, command_line_page
from workbench.errors import CacheError

__all__ = ["DocsError", "build_docs", "collect_pages"]

ROOT = Path(__file__).resolve().parent.parent.parent
HAND_WRITTEN = Path(__file__).with_name("pages")
_PAGES = {"README.md": "index.md", "ARCHITECTURE.md": "architecture.md"}


class DocsError(CacheError):
    """The site was not built, or with warnings."""


def build_docs(target: str | Path = "build/docs") -> Path:
    """Write the site; returns its first page.

    Args:
        target: A folder; `pages` and `site` in it are made anew.

    Raises:
        DocsError: The builder warned of something or failed; the message is what it said.
    """
    target = Path(target).resolve()
    for made in ("pages", "site"):
        shutil.rmtree(target / made, ignore_errors=True)
    pages = collect_pages(target / "pages")
    reference = ", ".join(f'{{ "{page.stem}" = "api/{page.name}" }}' for page in pages if page.parent.name == "api")
    settings = Path(__file__).with_name("zensical.toml").read_text()
    (target / "zensical.toml").write_text(settings.replace("@ROOT@", str(ROOT)).replace('"@API@"', reference))
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=target,
                           capture_output=True, text=True, check=False)  # fmt: skip
    said = re.sub(r"\x1b\[[0-9;]*m", "", built.stdout + built.stderr).partition("Traceback")[0]
    if built.returncode or "warning" in said.lower():
        raise DocsError(f"the documentation does not build without warnings:\n{said}")
    return target / "site" / "index.html"


def collect_pages(folder: Path) -> list[Path]:
    """Write every page of the site as Markdown into a folder."""
    folder.mkdir(parents=True)
    pages = {path.name: path.read_text() for path in sorted(HAND_WRITTEN.glob("*.md"))}
    pages["index.md"] = _relinked((ROOT / "README.md").read_text())
    pages["architecture.md"] = _relinked((ROOT / "ARCHITECTURE.md").read_text())
    pages["command_line.md"] = command_line_page()
    pages |= api_pages()
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copytree(ROOT / "notebooks" / "images", folder / "images")
    return sorted(folder.rglob("*.md"))


def _relinked(text: str) -> str:
    """Links between files of the repository as links between pages; a file that has no page is named instead."""

    def link(match: re.Match[str]) -> str:
        shown, target = match.groups()
        return f"[{shown}]({_PAGES[target]})" if target in _PAGES else f"{shown} (`{target}`)"

    text = text.replace("](notebooks/images/", "](images/")
    return re.sub(r"(?<!!)\[([^]\n]+)\]\((?!https?:|#)([^)\s]+)\)", link, text)
