"""Studies: run one from its description, list them, stop one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.cli._app import AsJson, Bar, RunsFolder, app, console, print_rows

if TYPE_CHECKING:
    from experiments.study import Study, StudyStatus

studies_app = typer.Typer(invoke_without_command=True, help="List studies; stop one; show its cells.")
app.add_typer(studies_app, name="studies")
_Folder = Annotated[Path, typer.Argument(help="A study's folder.")]


@app.command()
def sweep(
    study: Annotated[str, typer.Argument(help="A study's YAML file, or - for standard input.")] = "",
    resume: Annotated[Path | None, typer.Option(help="Folder of a study: run what is left of it.")] = None,
    executor: Annotated[str, typer.Option(help="local (processes of this machine) or ray (a cluster).")] = "local",
    workers: Annotated[int, typer.Option(help="Cells at the same time; 0: one a machine for vLLM, else a core.")] = 0,
    detach: Annotated[bool, typer.Option("--detach", help="Run in a process that outlives this terminal.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print an example of a study's YAML and end.")] = False,
    as_json: AsJson = False,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Run a study: a grid of settings, one row each; stopped or killed, it goes on where it was with --resume.

    Exit code 1 if a cell failed or the study was stopped.

    Examples: `kvworkbench sweep --example > study.yaml`, `kvworkbench sweep study.yaml`,
    `kvworkbench sweep --resume runs/20260101-120000-study-chunks-ab12`
    """
    from experiments.study.texts import EXAMPLE

    if example:
        print(EXAMPLE, end="")
        return
    chosen = _chosen(study, resume, runs)
    if detach:
        pid = chosen.start(executor, workers=workers or None)
        print_rows([{"study": str(chosen.folder), "pid": pid}], as_json)
        return
    if not as_json:
        console.print(f"study  {chosen.folder}", highlight=False)
    with Bar() as bar:
        chosen.run(executor, (lambda status: None) if as_json else _shown_on(bar), workers=workers or None)
    _print_result(chosen, as_json)
    status = chosen.status()
    raise typer.Exit(1 if status.failed or status.state != "finished" else 0)


@studies_app.callback()
def studies(context: typer.Context, as_json: AsJson = False, runs: RunsFolder = Path("runs")) -> None:
    """List the studies of the run store, oldest first.

    Examples: `kvworkbench studies`, `kvworkbench studies stop runs/20260101-120000-study-chunks-ab12`
    """
    if context.invoked_subcommand is not None:
        return
    from experiments.study import list_studies

    rows = []
    for study in list_studies(runs):
        status = study.status()
        rows.append({"study": study.folder.name, "kind": study.kind, "state": status.state, "done": status.done,
                     "failed": status.failed, "total": status.total, "seconds_left": status.seconds_left,
                     "pid": status.pid if status.state == "running" else None})  # fmt: skip
    print_rows(rows, as_json)


@studies_app.command(name="stop")
def studies_stop(folder: _Folder) -> None:
    """Stop a study, whichever process runs it: within a second, with every finished cell kept.

    Example: `kvworkbench studies stop runs/20260101-120000-study-chunks-ab12`
    """
    from experiments.study import Study

    study = Study.open(folder)
    study.stop()
    status = study.wait(10)
    console.print(f"{status.state}: {status.done} of {status.total} cells done", highlight=False)
    raise typer.Exit(1 if status.state == "running" else 0)


@studies_app.command(name="show")
def studies_show(folder: _Folder, as_json: AsJson = False) -> None:
    """Show the rows of a study, those that failed with their error.

    Example: `kvworkbench studies show runs/20260101-120000-study-chunks-ab12`
    """
    from experiments.study import Study

    _print_result(Study.open(folder), as_json)


def _chosen(source: str, resume: Path | None, runs: Path) -> "Study":
    from experiments.study import Study
    from workbench.errors import InvalidInputError

    if bool(source) == (resume is not None):
        raise InvalidInputError("sweep takes a study's YAML file or --resume FOLDER, one of them; "
                                "`kvworkbench sweep --example` prints a YAML file")  # fmt: skip
    if resume is not None:
        return Study.open(resume)
    return Study.from_yaml(sys.stdin.read() if source == "-" else Path(source), runs=runs)


def _shown_on(bar: Bar) -> Any:
    """Show the status on a progress bar; in a plain log, a line for each cell that is finished."""
    from experiments.serving import Progress

    shown = -1

    def show(status: "StudyStatus") -> None:
        nonlocal shown
        if status.current and (console.is_terminal or status.done > shown):
            shown = status.done
            bar.show(Progress(status.done, status.total, status.current, status.seconds_left))

    return show


def _print_result(study: "Study", as_json: bool) -> None:
    """What was varied, the main results and the errors; everything as JSON."""
    frame = study.frame()
    if as_json:
        print_rows(frame.to_dicts(), as_json)
        return
    main = [name for name in ("hit_rate", "ttft_s", "ttft_warm_s", "ttft_cold_s", "load_s", "evictions", "speedup",
                              "requests_per_s") if name in frame.columns]  # fmt: skip
    print_rows(frame.select(*study.space, "repeat", *main, "seconds", "error", "contaminated").to_dicts(), as_json)
    status = study.status()
    badge = "measured" if study.kind == "serving" else "simulated"
    console.print(f"{badge}; {status.state}: {status.done} of {status.total} cells, {status.failed} failed",
                  highlight=False)  # fmt: skip
