"""Hit rates of every policy on every trace: our own beside LRU, the best of the others at each capacity, and OPTIMAL.

    python -m experiments.benchmarks.policies --out policies.json [--short]

Simulated: prefix semantics, tail first. Capacities run from 0.3 % to half of a trace's chunks, evenly on a log scale;
the best of the others is chosen anew at each, so that no single policy has to be as good everywhere. The own policy was
shaped on the two Mooncake traces and the first 10 million accesses of the coding-agent trace; the others are held out.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import row
from experiments.replay import replay
from experiments.traces import Trace, agent, chat, load_trace, rag
from workbench.errors import InvalidInputError
from workbench.policies import policy_names

__all__ = ["compare_policies", "run"]

OWN = "gittins"
FUTURE = ("belady", "optimal")
MILLIONS = 10_000_000


def _later_sessions() -> Trace:
    """Accesses 20 to 30 million of the coding-agent trace."""
    trace = load_trace("weka_claude_code")
    return trace.tail(accesses=2 * MILLIONS).head(accesses=MILLIONS)


TRACES: dict[str, Callable[[], Trace]] = {
    "mooncake_conversation": lambda: load_trace("mooncake_conversation"),
    "mooncake_synthetic": lambda: load_trace("mooncake_synthetic"),
    "weka_claude_code, first 10M": lambda: load_trace("weka_claude_code").head(accesses=MILLIONS),
    "weka_claude_code, 20M to 30M": _later_sessions,
    "ragpulse": lambda: load_trace("ragpulse"),
    "generated chat": lambda: chat(sessions=2_000),
    "generated rag": lambda: rag(requests=4_000),
    "generated agent": lambda: agent(sessions=150),
}


def compare_policies(
    trace: Trace, *, names: list[str] | None = None, capacities: int = 10
) -> tuple[list[int], dict[str, list[float]]]:
    """Hit rates by tokens of policies on one trace.

    Args:
        trace: From experiments.traces.
        names: Policies; by default all that are shipped or saved.
        capacities: How many.

    Returns:
        Capacities in chunks; policy -> hit rate at each of them.
    """
    trace = trace.as_prefixes()
    grid = sorted({int(c) for c in np.geomspace(max(8, 0.003 * trace.distinct), 0.5 * trace.distinct, capacities)})
    rates = {
        name: [replay(trace, name, capacity_chunks=capacity).hit_rate for capacity in grid]
        for name in names or policy_names()
    }
    return grid, rates


def run(*, short: bool = False) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        short: The generated traces alone, four capacities and a few policies.

    Returns:
        results, one for each trace; rows of the table of all benchmarks; and what was left out.
    """
    results, rows, left_out = [], [], []
    for name, load in TRACES.items():
        if short and not name.startswith("generated"):
            continue
        try:
            trace = load()
        except InvalidInputError as error:
            left_out.append(f"{name}: {error}")
            continue
        few = ["lru", "arc", "s3fifo", "workload_aware", "optimal", OWN] if short else None
        grid, rates = compare_policies(trace, names=few, capacities=4 if short else 10)
        results.append(_summary(name, grid, rates))
        rows.append(_row(results[-1]))
    return {"results": results, "rows": rows, "left_out": left_out}


def _summary(name: str, grid: list[int], rates: dict[str, list[float]]) -> dict[str, Any]:
    others = [policy for policy in rates if policy != OWN and policy not in FUTURE]
    best = [max(others, key=lambda policy: rates[policy][i]) for i in range(len(grid))]
    ahead = [100 * (rates[OWN][i] - rates[best[i]][i]) for i in range(len(grid))]
    return {"trace": name, "capacities": grid, "hit_rates": rates, "best_other": best, "points_ahead": ahead}


def _row(result: dict[str, Any]) -> dict[str, Any]:
    ahead = result["points_ahead"]
    leads = sum(points > 0.005 for points in ahead)
    level = sum(abs(points) <= 0.005 for points in ahead)
    work = f"hit rate on {result['trace']}: points ahead of the best other policy at each capacity (simulated)"
    most = f"{min(ahead):+.2f} to {max(ahead):+.2f}, leads at {leads} and level at {level} of {len(ahead)} capacities"
    mean = float(np.mean(ahead))
    return row(work, ours=round(mean, 2), peer=most, goal="> 0 on average", met=mean > 0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here; printed in any case")
    parser.add_argument("--short", action="store_true", help="generated traces and a few policies only")
    options = parser.parse_args()
    report = json.dumps(run(short=options.short), indent=1)
    if options.out:
        options.out.write_text(report)
    print(report)


if __name__ == "__main__":
    main()
