"""Runs: make one, list them, report, explain and export them."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli._app import AsJson, Bar, RunsFolder, app, console, print_rows


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="smollm2, random:llama-8layer, a folder or a hub name.")] = "smollm2",
    quick: Annotated[bool, typer.Option("--quick", help="Shorter documents, fewer of them.")] = False,
    arms: Annotated[str, typer.Option(help="Comma-separated.")] = "none,prefix_cache,memory,disk",
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
    with Bar() as bar:
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
        {"run": r.run_id, "requests": r.requests.height,
         "arms": r.requests["arm"].unique(maintain_order=True).to_list(),
         "model": r.environment.get("model", {}).get("name"), "time": r.environment.get("time")}
        for r in list_runs(runs)
    ]  # fmt: skip
    print_rows(rows, as_json)


@app.command()
def explain(run: Annotated[Path, typer.Argument(help="A run's folder.")],
            arm: Annotated[str | None, typer.Option(help="Only this arm.")] = None) -> None:  # fmt: skip
    """Say why the cache did, or did not, make the first token come sooner.

    Example: `kvworkbench explain runs/20260101-120000-demo-ab12`
    """
    from experiments.explain_run import explain_run

    console.print(str(explain_run(run, arm=arm)), highlight=False, markup=False)


@app.command()
def export(source: Annotated[Path, typer.Argument(help="A notebook (.ipynb) or a run's folder.")],
           out: Annotated[Path | None, typer.Option("--out", "-o", help="Its suffix says the form.")] = None,
           ) -> None:  # fmt: skip
    """Write a notebook or a run as one page that opens offline, or a run as Parquet, CSV or PNG.

    Example: `kvworkbench export notebooks/04_write_a_policy.ipynb -o policy.html`
    """
    from experiments.export import export as write

    console.print(str(write(source, out)))
