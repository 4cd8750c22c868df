"""`python -m experiments.benchmarks`: every benchmark at short size, one table."""

import argparse
import json
import time
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from rich.console import Console
from rich.table import Table

import experiments.benchmarks as package

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="full size: an hour instead of minutes")
    parser.add_argument("--only", help="one benchmark's name")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the JSON files")
    options = parser.parse_args()
    console, table = Console(), Table("work", "ours", "peer", "limit", "ratio", "goal", "met", title="benchmarks")
    names = [m.name for m in iter_modules(package.__path__) if hasattr(_load(m.name), "run")]
    for name in [options.only] if options.only else names:
        start = time.perf_counter()
        result = _load(name).run(short=not options.full)
        options.out.mkdir(exist_ok=True)
        (options.out / f"bench-{name}.json").write_text(json.dumps(result, indent=1, default=str))
        console.print(f"{name}: {time.perf_counter() - start:.0f} s")
        for line in result["rows"]:
            table.add_row(
                *(_cell(line[column]) for column in ("work", "ours", "peer", "limit", "ratio", "goal", "met"))
            )
    console.print(table)


def _load(name: str):
    """A benchmark's module; those whose name says what they need are loaded only by vLLM itself."""
    return import_module(f"{package.__name__}.{name}") if not name.startswith(("_", "vllm_")) else None


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
