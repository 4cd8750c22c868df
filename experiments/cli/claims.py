"""Published results beside what runs here give."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli._app import AsJson, Bar, RunsFolder, app, console, print_rows


@app.command()
def claims(
    names: Annotated[list[str] | None, typer.Argument(help="Claims; all by default.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Measure anew instead of showing what is stored.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Larger runs: minutes instead of one or two.")] = False,
    model: Annotated[str, typer.Option(help="smollm2, random:llama-8layer, a folder or a hub name.")] = "smollm2",
    threads: Annotated[int, typer.Option(help="Compute threads of each engine; 0 for all cores.")] = 0,
    runs: RunsFolder = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="Write every figure there is into one JSON file as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Published results on KV reuse, each with a scaled-down real run, the cost model's figure, and a verdict.

    LMCache's own rows need KVWORKBENCH_LMCACHE_PYTHON, the python of an environment with LMCache.

    Examples: `kvworkbench claims`, `kvworkbench claims same_prefix_throughput --run`
    """
    from experiments.claims import claims_table, run_claims, save_measured
    from experiments.claims_runs import Bench

    names = names or []
    if run:
        with Bar() as bar:
            run_claims(names, Bench(model, "full" if full else "quick", threads, runs, bar.show))
    if out:
        save_measured(out, runs=runs)
    rows = claims_table(names, runs=runs).to_dicts()
    if as_json or len(names) == 1:
        print_rows(rows if as_json else [{"": key, names[0]: value} for key, value in rows[0].items()], as_json)
        return
    print_rows([{key: row[key] for key in ("claim", "says", "measured", "modelled", "verdict")} for row in rows], False)
    counted = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in dict.fromkeys(
        row["verdict"] for row in rows)}  # fmt: skip
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counted.items()), highlight=False)
