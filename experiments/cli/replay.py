"""Simulation: traces through eviction policies; the policies themselves."""

from typing import Annotated, Any

import typer

from experiments.cli._app import AsJson, Bar, app, console, print_rows


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
    print_rows(rows, as_json)


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
    live: Annotated[bool, typer.Option(help="With --table: run the peer itself now (needs its package).")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out and count them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate: a trace through eviction policies at compiled speed.

    Examples: `kvworkbench replay mooncake_conversation --policy lru,mine.py:Mine`,
    `kvworkbench replay --table kvcache_simulator`
    """
    if table is not None:
        from experiments.tables import TABLES, reproduce

        rows = [{"table": name} for name in TABLES] if table == "list" else reproduce(table, live=live).to_dicts()
        print_rows(rows, as_json)
        return
    from experiments.curves import hit_rate_curve

    loaded = _trace(trace, skip_bad)
    chosen = [int(c) for c in capacities.split(",")] if capacities else _capacity_grid(loaded.distinct)
    with Bar() as bar:
        frame = hit_rate_curve(loaded, policies.split(","), capacities_chunks=chosen, semantics=semantics,
                               touch_order=touch_order, progress=bar.count)  # fmt: skip
    shown = ("policy", "capacity_chunks", "hit_rate", "hit_rate_by_chunks", "hit_rate_by_requests", "evictions",
             "cpu_seconds")  # fmt: skip
    console.print(f"simulated: {loaded.name}, {loaded.requests:,} requests, {loaded.accesses:,} block accesses, "
                  f"{loaded.distinct:,} distinct blocks of {loaded.block_tokens} tokens; {semantics}, {touch_order}",
                  highlight=False)  # fmt: skip
    print_rows(frame.select(shown).to_dicts(), as_json)


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

    print_rows([{"policy": name} for name in policy_names()], as_json)


@policy_app.command(name="check")
def policy_check(spec: Annotated[str, typer.Argument(help="A name, file.py:Class or module:Class.")]) -> None:
    """Run the contract suite on a policy: a broken one is named with the step at which it broke.

    Example: `kvworkbench policy check my_policies.py:Newest`
    """
    from workbench.testing import check_policy

    check_policy(spec)
    console.print(f"{spec} keeps the contract")
