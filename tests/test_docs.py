"""The documentation: its pages build without a warning, its examples run, and it knows every command and module."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import experiments.docs as docs
from experiments.cli import app
from experiments.docs.reference import api_pages, command_line_page

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "experiments" / "docs" / "pages").glob("*.md"))


def commands(command=None, path=()):
    """(path, command) of every command, groups among them."""
    command = command or typer.main.get_command(app)
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def blocks_of(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_example_of_a_guide_runs_as_it_stands(page, tmp_path):
    """In a process of its own, from a file: a policy's source must be there to read."""
    script = tmp_path / "example.py"
    script.write_text(blocks_of(page))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0 and done.stdout, done.stderr


def test_each_thing_that_can_be_added_has_a_guide_of_one_page():
    assert {page.stem for page in GUIDES} == {
        f"your_{what}" for what in ("policy", "tier", "codec", "workload", "plot")
    }
    for page in GUIDES:
        text = page.read_text()
        assert "**Where:**" in text and "**Held to:**" in text and len(text) < 6000
        named = re.findall(r"`((?:workbench|experiments|tests|kernels)/[\w/.]*\w)", text)
        assert named and all((ROOT / name).exists() for name in named), named


def test_the_site_builds_without_a_warning_and_asks_nothing_of_others(tmp_path):
    pytest.importorskip("zensical", reason="zensical is not installed: pip install 'kvworkbench[dev]'")
    first = docs.build_docs(tmp_path / "docs")
    pages = {path.relative_to(first.parent).as_posix(): path.read_text() for path in first.parent.rglob("*.html")}
    assert {"index.html", "architecture.html", "command_line.html", "your_tier.html", "api/workbench.html"} <= set(
        pages
    )
    assert "CacheEngine" in pages["api/workbench.html"] and "gather_pages" in pages["api/kernels.html"]
    for name, text in pages.items():
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"?(https?://[^\" >]+)", text)
        assert not [url for url in loaded if "canonical" not in url], f"{name} loads {loaded}"
        assert name == "404.html" or "<h1" in text


def test_a_warning_is_an_error(tmp_path, monkeypatch):
    pytest.importorskip("zensical", reason="zensical is not installed: pip install 'kvworkbench[dev]'")
    pages = tmp_path / "hand_written"
    shutil.copytree(ROOT / "experiments" / "docs" / "pages", pages)
    (pages / "your_plot.md").write_text("# Your plot\n\n[nothing](not_there.md)\n")
    monkeypatch.setattr(docs, "HAND_WRITTEN", pages)
    monkeypatch.setattr(docs, "api_pages", lambda: {"api/kernels.md": "# kernels\n"})
    with pytest.raises(docs.DocsError, match="not_there"):
        docs.build_docs(tmp_path / "docs")


def test_every_public_module_is_in_the_reference():
    text = "".join(api_pages().values())
    files = [path.relative_to(ROOT) for package in ("kernels", "workbench", "experiments")
             for path in (ROOT / package).rglob("*.py")]  # fmt: skip
    public = [file.with_suffix("").parts for file in files if not file.stem.startswith("_")]
    missing = {".".join(parts) for parts in public if f"::: {'.'.join(parts)}\n" not in text}
    assert all(name.endswith(("_numba", "_triton")) for name in missing), missing


def test_every_command_is_on_the_page_and_shows_an_example():
    page = command_line_page()
    for path, command in commands():
        name = " ".join(("kvworkbench", *path))
        assert f"`{name}`" in page or not path
        if command.callback is not None and path:
            assert f"`{name}" in (command.callback.__doc__ or ""), f"{name} has no example of itself"


def test_every_command_that_prints_rows_can_print_json():
    for path, command in commands():
        code = getattr(command.callback, "__wrapped__", command.callback) if command.callback else None
        if code is not None and "print_rows" in code.__code__.co_names:
            assert any("--json" in parameter.opts for parameter in command.params), path


@pytest.mark.parametrize("typed, expected", [("pol", "policy"), ("policy ch", "check"), ("runs comp", "compare")])
def test_the_shell_completes_commands(typed, expected):
    words = f"kvworkbench {typed}"
    asked = {"_KVWORKBENCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = CliRunner().invoke(app, [], prog_name="kvworkbench", env=asked)
    assert expected in done.stdout.split()


def test_completion_installs_itself(tmp_path, monkeypatch):
    """Into the start-up file of a shell whose home is empty; which shell is said, as none started this test."""
    (tmp_path / ".bashrc").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(app, ["--install-completion", "bash"], prog_name="kvworkbench")
    assert done.exit_code == 0, done.output
    assert "kvworkbench" in (tmp_path / ".bashrc").read_text()
