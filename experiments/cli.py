"""The command line: what the notebooks do, in a terminal."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from workbench.errors import CacheError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=True, rich_markup_mode="markdown", pretty_exceptions_enable=False,
                  help="A KV-cache engine for LLM serving and the workbench around it.")  # fmt: skip
console = Console(width=None if sys.stdout.isatty() else 120)

RunsFolder = Annotated[Path, typer.Option(help="Folder of the run store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="smollm2, random:llama-8layer, a folder or a Hugging Face name.")] = "smollm2",
    quick: Annotated[bool, typer.Option("--quick", help="Shorter documents, fewer of them.")] = False,
    arms: Annotated[str, typer.Option(help="Comma-separated: none, prefix_cache, memory, disk.")] = "none,prefix_cache,memory,disk",
    threads: Annotated[int, typer.Option(help="Compute threads of each engine; 0 for all cores.")] = 0,
    seed: Annotated[int, typer.Option(help="Chooses texts and questions.")] = 0,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Real vLLM with and without reuse: the same long prompts, a table and an interactive report.

    Example: `kvworkbench demo --quick`
    """
    from experiments.demo import compare, demo_workload
    from experiments.models import resolve_model
    from experiments.report import print_summary, write_report

    source = resolve_model(model)
    workload = demo_workload(source, quick=quick, seed=seed)
    with _Bar() as bar:
        run = compare(source, workload, arms=arms.split(","), runs=runs, threads=threads, watch=bar.show, name="demo")
    print_summary(run.folder, console)
    report = write_report(run.folder)
    console.print(f"\nrun     {run.folder}\nreport  {report}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Write report.html and report.png of a run anew.

    Example: `kvworkbench report runs/20260101-120000-demo-ab12`
    """
    from experiments.report import write_report
    from experiments.runs import Run

    console.print(str(write_report(Run(run).folder)))


@app.command(name="runs")
def runs_command(runs: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """List the stored runs.

    Example: `kvworkbench runs --json`
    """
    from experiments.runs import list_runs

    rows = [
        {"run": r.run_id, "requests": r.requests.height, "arms": r.requests["arm"].unique(maintain_order=True).to_list(),
         "model": r.environment.get("model", {}).get("name"), "time": r.environment.get("time")}
        for r in list_runs(runs)
    ]  # fmt: skip
    _print_rows(rows, as_json)


@app.command()
def models(spec: Annotated[str, typer.Argument(help="A model to prepare.")] = "smollm2", as_json: AsJson = False) -> None:
    """Prepare a model and say where it lies.

    Example: `kvworkbench models random:llama-8layer`
    """
    from experiments.models import resolve_model

    _print_rows([{k: str(v) for k, v in vars(resolve_model(spec)).items()}], as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Tell what this machine can do, what is missing, and the command that mends it.

    Example: `kvworkbench doctor`
    """
    from experiments.doctor import examine

    findings = examine()
    _print_rows(findings, as_json)
    if any(finding["state"] == "missing" and finding["needed"] == "yes" for finding in findings):
        raise typer.Exit(1)


@app.command()
def lab(port: Annotated[int, typer.Option(help="0 for any free port.")] = 8888,
        browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True) -> None:  # fmt: skip
    """Open JupyterLab on 127.0.0.1 with the notebooks.

    Example: `kvworkbench lab --no-browser`
    """
    import subprocess

    notebooks = Path(__file__).parent.parent / "notebooks"
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}",
               f"--ServerApp.root_dir={notebooks}"]  # fmt: skip
    if not browser:
        command.append("--no-browser")
    if os.geteuid() == 0:
        command.append("--allow-root")
    raise typer.Exit(subprocess.call(command))


class _Bar:
    """A progress bar with the time left on a terminal, plain lines elsewhere."""

    def __enter__(self) -> "_Bar":
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._columns = Progress(TextColumn("{task.description:<60.60}"), BarColumn(), MofNCompleteColumn(),
                                 TextColumn("{task.fields[left]}"), console=console,
                                 disable=not console.is_terminal)  # fmt: skip
        self._task = self._columns.add_task("", total=None, left="")
        self._columns.start()
        return self

    def show(self, progress: Any) -> None:
        left = "" if progress.seconds_left is None else f"about {progress.seconds_left / 60:.1f} min left"
        if console.is_terminal:
            self._columns.update(self._task, description=progress.what, completed=progress.done, total=progress.total, left=left)
        else:
            console.print(f"[{progress.done + 1}/{progress.total}] {progress.what}  {left}", highlight=False)

    def __exit__(self, *exc: object) -> None:
        self._columns.stop()


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
        return
    from rich.table import Table

    table = Table(*(rows[0] if rows else ["nothing"]))
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    """Entry point: a caller's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except CacheError as error:
        Console(stderr=True).print(f"[bold red]error[/] {error}", highlight=False, markup=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
