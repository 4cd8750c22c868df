"""The application, and how every command shows its progress and its rows."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = ["AsJson", "Bar", "RunsFolder", "app", "console", "print_rows"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False,
                  help="A KV-cache engine for LLM serving and the workbench around it.")  # fmt: skip
console = Console(width=None if sys.stdout.isatty() else 120)

RunsFolder = Annotated[Path, typer.Option(help="Folder of the run store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class Bar:
    """A progress bar with the time left on a terminal, plain lines elsewhere."""

    def __enter__(self) -> "Bar":
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._columns = Progress(TextColumn("{task.description:<60.60}"), BarColumn(), MofNCompleteColumn(),
                                 TextColumn("{task.fields[left]}"), console=console,
                                 disable=not console.is_terminal)  # fmt: skip
        self._task = self._columns.add_task("", total=None, left="")
        self._columns.start()
        return self

    def count(self, done: int, total: int) -> None:
        """Steps that have no names and take no time worth a line each."""
        if console.is_terminal:
            self._columns.update(self._task, completed=done, total=total)

    def show(self, progress: Any) -> None:
        left = "" if progress.seconds_left is None else f"about {progress.seconds_left / 60:.1f} min left"
        if console.is_terminal:
            self._columns.update(self._task, description=progress.what, completed=progress.done, total=progress.total,
                                 left=left)  # fmt: skip
        else:
            console.print(f"[{progress.done + 1}/{progress.total}] {progress.what}  {left}", highlight=False)

    def __exit__(self, *exc: object) -> None:
        self._columns.stop()


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    from rich.table import Table

    table = Table(*(rows[0] if rows else ["nothing"]))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6f}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)
