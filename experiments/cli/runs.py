"""Runs: make one, list them, report, explain and export them."""

import json
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


runs_app = typer.Typer(invoke_without_command=True)
app.add_typer(runs_app, name="runs")


@runs_app.callback()
def runs_list(context: typer.Context, runs: RunsFolder = Path("runs"), as_json: AsJson = False) -> None:
    """List the stored runs, or compare two of them.

    Example: `kvworkbench runs --json`
    """
    if context.invoked_subcommand is not None:
        return
    from experiments.runs import list_runs

    rows = [
        {"run": r.run_id, "requests": r.requests.height,
         "arms": r.requests["arm"].unique(maintain_order=True).to_list(),
         "model": r.environment.get("model", {}).get("name"), "time": r.environment.get("time")}
        for r in list_runs(runs)
    ]  # fmt: skip
    print_rows(rows, as_json)


@runs_app.command(name="compare")
def runs_compare(
    first: Annotated[Path, typer.Argument(help="A run's folder.")],
    second: Annotated[Path, typer.Argument(help="Another one's.")],
    measure: Annotated[str, typer.Option(help="ttft_s, load_s, prefill_s or e2e_s.")] = "ttft_s",
    as_json: AsJson = False,
) -> None:
    """Say what two runs did differently: settings, and the same requests in pairs with a 95 % interval.

    Example: `kvworkbench runs compare runs/20260101-120000-demo-ab12 runs/20260102-090000-demo-cd34`
    """
    from experiments.paired import paired_difference, settings_difference
    from experiments.runs import Run

    runs = Run(first), Run(second)
    settings, measures = settings_difference(*runs).to_dicts(), paired_difference(*runs, measure=measure).to_dicts()
    if as_json:
        print(json.dumps({"settings": settings, measure: measures}, indent=2, default=str))
        return
    console.print(f"{measure} of the second over the first; 1 is equal", highlight=False)
    print_rows(measures, as_json=False)
    console.print("settings that differ")
    print_rows(settings, as_json=False)


@app.command()
def explain(run: Annotated[Path, typer.Argument(help="A run's folder.")],
            arm: Annotated[str | None, typer.Option(help="Only this arm.")] = None,
            as_json: AsJson = False) -> None:  # fmt: skip
    """Say why the cache did, or did not, make the first token come sooner.

    Example: `kvworkbench explain runs/20260101-120000-demo-ab12`
    """
    from experiments.explain_run import explain_run

    found = explain_run(run, arm=arm)
    if as_json:
        print_rows(found.frame().to_dicts(), as_json)
    else:
        console.print(str(found), highlight=False, markup=False)


@app.command()
def export(source: Annotated[Path, typer.Argument(help="A notebook (.ipynb) or a run's folder.")],
           out: Annotated[Path | None, typer.Option("--out", "-o", help="Its suffix says the form.")] = None,
           ) -> None:  # fmt: skip
    """Write a notebook or a run as one page that opens offline, or a run as Parquet, CSV or PNG.

    Example: `kvworkbench export notebooks/04_write_a_policy.ipynb -o policy.html`
    """
    from experiments.export import export as write

    console.print(str(write(source, out)))
