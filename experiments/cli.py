"""The command line: what the notebooks do, in a terminal."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from workbench.errors import CacheError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False,
                  help="A KV-cache engine for LLM serving and the workbench around it.")  # fmt: skip
console = Console(width=None if sys.stdout.isatty() else 120)

RunsFolder = Annotated[Path, typer.Option(help="Folder of the run store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


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
        {"run": r.run_id, "requests": r.requests.height,
         "arms": r.requests["arm"].unique(maintain_order=True).to_list(),
         "model": r.environment.get("model", {}).get("name"), "time": r.environment.get("time")}
        for r in list_runs(runs)
    ]  # fmt: skip
    _print_rows(rows, as_json)


@app.command()
def models(spec: Annotated[str, typer.Argument(help="A model.")] = "smollm2", as_json: AsJson = False) -> None:
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
    """Open JupyterLab on 127.0.0.1 with the notebooks; nothing leaves the machine.

    Example: `kvworkbench lab --no-browser`
    """
    from experiments.lab import start_lab

    raise typer.Exit(start_lab(port=port, browser=browser))


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


@app.command()
def traces(as_json: AsJson = False) -> None:
    """List the traces that are known by name, whether they are here, and where they come from.

    Example: `kvworkbench traces`
    """
    from experiments.traces.readers import KNOWN, data_folders

    rows = []
    for name, known in sorted(KNOWN.items()):
        found = next((folder / known.path for folder in data_folders() if (folder / known.path).exists()), None)
        rows.append({"trace": name, "here": "yes" if found else "no", "block_tokens": known.block_tokens,
                     "origin": known.source, "put_it_in": "" if found else "data/ or $KVWORKBENCH_DATA"})  # fmt: skip
    _print_rows(rows, as_json)


@app.command()
def replay(
    trace: Annotated[str, typer.Argument(help="A known trace, a file, or chat, rag, agent, zipf (generated).")] = "",
    policies: Annotated[
        str, typer.Option("--policy", help="Names, file.py:Class, module:Class.")
    ] = "lru,s3fifo,optimal",
    capacities: Annotated[str, typer.Option(help="Comma-separated, in chunks; a grid by default.")] = "",
    semantics: Annotated[str, typer.Option(help="prefix (the engine's) or object (of web caches).")] = "prefix",
    touch_order: Annotated[str, typer.Option(help="tail_first (as vLLM) or head_first.")] = "tail_first",
    table: Annotated[str | None, typer.Option(help="Recompute a published table instead; 'list' lists them.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out and count them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate: a trace through eviction policies at compiled speed.

    Examples: `kvworkbench replay mooncake_conversation --policy lru,mine.py:Mine`,
    `kvworkbench replay --table kvcache_simulator`
    """
    if table is not None:
        from experiments.tables import TABLES, reproduce

        rows = [{"table": name} for name in TABLES] if table == "list" else reproduce(table).to_dicts()
        _print_rows(rows, as_json)
        return
    from experiments.curves import hit_rate_curve

    loaded = _trace(trace, skip_bad)
    chosen = [int(c) for c in capacities.split(",")] if capacities else _capacity_grid(loaded.distinct)
    with _Bar() as bar:
        frame = hit_rate_curve(loaded, policies.split(","), capacities_chunks=chosen, semantics=semantics,
                               touch_order=touch_order, progress=bar.count)  # fmt: skip
    shown = ("policy", "capacity_chunks", "hit_rate", "hit_rate_by_chunks", "hit_rate_by_requests", "evictions",
             "cpu_seconds")  # fmt: skip
    console.print(f"simulated: {loaded.name}, {loaded.requests:,} requests, {loaded.accesses:,} block accesses, "
                  f"{loaded.distinct:,} distinct blocks of {loaded.block_tokens} tokens; {semantics}, {touch_order}",
                  highlight=False)  # fmt: skip
    _print_rows(frame.select(shown).to_dicts(), as_json)


def _trace(name: str, skip_bad: bool) -> Any:
    from experiments.traces import generators
    from experiments.traces.readers import known_traces, load_trace
    from workbench.errors import InvalidInputError

    generated = ("chat", "rag", "agent", "zipf")
    if not name:
        raise InvalidInputError(f"replay needs a trace: one of {', '.join([*known_traces(), *generated])}, or a file")
    return getattr(generators, name)() if name in generated else load_trace(name, skip_bad=skip_bad)


def _capacity_grid(distinct: int) -> list[int]:
    return sorted({max(1, round(distinct * share)) for share in (0.01, 0.03, 0.1, 0.3, 1.0)})


policy_app = typer.Typer(no_args_is_help=True, help="Eviction policies: list them, check your own.")
app.add_typer(policy_app, name="policy")


@policy_app.command(name="list")
def policy_list(as_json: AsJson = False) -> None:
    """List the policies by name.

    Example: `kvworkbench policy list`
    """
    from workbench.policies import policy_names

    _print_rows([{"policy": name} for name in policy_names()], as_json)


@policy_app.command(name="check")
def policy_check(spec: Annotated[str, typer.Argument(help="A name, file.py:Class or module:Class.")]) -> None:
    """Run the contract suite on a policy: a broken one is named with the step at which it broke.

    Example: `kvworkbench policy check my_policies.py:Newest`
    """
    from workbench.testing import check_policy

    check_policy(spec)
    console.print(f"{spec} keeps the contract")


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


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
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


def main() -> None:
    """Entry point: a caller's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except CacheError as error:
        Console(stderr=True).print("error:", error, style="bold red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
