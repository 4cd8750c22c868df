"""Real vLLM in small: a policy in the live engine beside its replay; two engines that share a tier."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli._app import AsJson, Bar, RunsFolder, app, console, print_rows
from experiments.cli.replay import policy_app


@policy_app.command(name="live")
def policy_live(
    spec: Annotated[str, typer.Argument(help="A name, file.py:Class or module:Class.")],
    rival: Annotated[str, typer.Option(help="A policy to serve the same prompts with.")] = "lru",
    model: Annotated[str, typer.Option(help="What `kvworkbench models` takes.")] = "random:llama-8layer",
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Serve prompts through real vLLM with a policy and with a rival; hits measured, and simulated beside them.

    Example: `kvworkbench policy live my_policies.py:Newest --rival sieve`
    """
    from experiments.live_policy import beside_replay, live_study

    where, colon, class_name = spec.rpartition(":")
    found = f"{Path(where).resolve()}{colon}{class_name}" if where.endswith(".py") else spec  # for another process
    study = live_study(found, rival=rival, model=model, runs=runs)
    with Bar() as bar:
        study.run(watch=lambda status: bar.count(status.done, status.total))
    print_rows(beside_replay(study).to_dicts(), as_json)
    for row in (row for row in study.rows() if row["error"]):
        console.print(f"failed: {row['settings']['policy']}: {row['error']}", highlight=False, markup=False)
    raise typer.Exit(1 if study.status().failed else 0)


@app.command()
def share(
    model: Annotated[str, typer.Option(help="What `kvworkbench models` takes.")] = "smollm2",
    tier: Annotated[str, typer.Option(help="redis (a server is started) or object_store (local files).")] = "redis",
    threads: Annotated[int, typer.Option(help="Compute threads of each engine; 0 for all cores.")] = 0,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="Two servers behind a router; one is replaced while requests run.")
    ] = False,
    runs: RunsFolder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Two real vLLM engines over one shared tier: what one computes, the other loads.

    With --rolling the exit code is 1 if a request failed while a server was replaced.

    Examples: `kvworkbench share --tier redis`, `kvworkbench share --rolling`
    """
    import polars as pl

    from experiments.sharing import share as share_engines

    if rolling:
        _roll(model, tier, threads, runs, as_json)
        return
    with Bar() as bar:
        run = share_engines(model, tier=tier, runs=runs, threads=threads, watch=bar.show)
    rows = run.requests.group_by("arm", "arm_label", maintain_order=True).agg(
        n=pl.len(), ttft_median_s=pl.col("ttft_s").median(), load_median_s=pl.col("load_s").median(),
        cached_tokens=pl.col("cached_tokens").sum(), prompt_tokens=pl.col("prompt_tokens").sum(),
    )  # fmt: skip
    print_rows(rows.to_dicts(), as_json)
    if not as_json:
        console.print(f"run     {run.folder}", highlight=False)


def _roll(model: str, tier: str, threads: int, runs: Path, as_json: bool) -> None:
    from experiments.rolling import roll
    from workbench.errors import InvalidInputError

    if tier != "redis":
        raise InvalidInputError(f"--rolling with --tier {tier}: servers that are replaced share Redis")
    with Bar() as bar:
        run = roll(model, runs=runs, threads=threads, watch=bar.show)
    found = run.environment["rolling"]
    rows = [
        {"server": server, "answered": answered, "found_of_others_tokens": found["found_of_others"].get(server, 0)}
        for server, answered in found["answered"].items()
    ]
    print_rows(rows, as_json)
    if not as_json:
        console.print(f"{found['failed']} of {found['requests']} requests failed; run {run.folder}", highlight=False)
    raise typer.Exit(1 if found["failed"] else 0)
