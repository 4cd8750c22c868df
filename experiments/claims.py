"""Published results about KV reuse, each with what a scaled-down run here gives, and a verdict.

    CLAIMS (claims_table.py) -> measure (claims_runs.py) -> stored figures -> verdict -> claims_table()

    run_claims(["chat_hit_rate"], Bench())     # measure anew and keep
    claims_table()                             # every claim, its figure, the cost model's, the verdict

The verdict follows from two numbers and one rule, `verdict_of`; nobody words it by hand:

| verdict              | the measured figure                                                                         |
|----------------------|---------------------------------------------------------------------------------------------|
| reproduced           | lies in the published range or within 25 % of it; meets a bound ("at least 70 %")           |
| reproduced in shape  | shows the effect in the same direction, at least half as large, or larger; a size (bytes,   |
|                      | milliseconds) lies between half and twice the published one                                 |
| not reproduced       | anything else                                                                               |
| not testable here    | there is no figure; the reason is given                                                     |
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import polars as pl

from experiments.claims_runs import Bench, Figures
from experiments.environment import describe_environment
from experiments.units import share_text
from workbench.errors import CacheError, UnknownNameError

__all__ = ["EXAMPLE_RESULTS", "Claim", "Measured", "Published", "claims_table", "load_measured", "run_claims",
           "save_measured", "verdict_of"]  # fmt: skip

EXAMPLE_RESULTS = Path(__file__).parent.parent / "notebooks" / "example_runs" / "claims.json"
TOLERANCE = 0.25
Verdict = Literal["reproduced", "reproduced in shape", "not reproduced", "not testable here", "not measured yet"]


@dataclass(frozen=True)
class Published:
    """A published number.

    Args:
        low, high: The range as published; equal for one number.
        unit: "share", "times", "ms", "tokens" or "points"; how it is written.
        bound: "range", or "least" or "most" where only one side was claimed.
        neutral: The figure that would mean no effect: 0 for a share, 1 for a factor; None where direction means
            nothing (a size, a time).
    """

    low: float
    high: float
    unit: str = "share"
    bound: Literal["range", "least", "most"] = "range"
    neutral: float | None = 0.0

    def __str__(self) -> str:
        if self.bound == "most":
            return f"at most {figure_text(self.high, self.unit)}"
        if self.bound == "least":
            return f"at least {figure_text(self.low, self.unit)}"
        low, high = figure_text(self.low, self.unit), figure_text(self.high, self.unit)
        return low if self.low == self.high else f"{low} to {high}"


@dataclass(frozen=True)
class Claim:
    """One row of the table.

    Args:
        name: Short, for the command line.
        source: Who says so, and where.
        workload, hardware: As published; "not named" where they are not.
        says: The result in words.
        published: The number.
        measure: What measures it here; None if nothing can.
        figure: Which of the measure's figures it is.
        modelled: The cost model's figure for the original hardware, or None.
        how: How the run here differs from the original, or why it cannot be run.
        kind: "measured", or "simulated" where the measure replays a trace.
    """

    name: str
    source: str
    workload: str
    hardware: str
    says: str
    published: Published
    measure: Callable[[Bench], Figures] | None = None
    figure: str = ""
    modelled: Callable[[], float] | None = None
    how: str = ""
    kind: Literal["measured", "simulated"] = "measured"


@dataclass(frozen=True)
class Measured:
    """What one measure gave.

    Args:
        measure: Name of the measure.
        figures: By name; empty if it failed.
        size: "quick" or "full".
        seconds: It took.
        model: What was served.
        runs: Names of its runs in the store.
        provenance: Machine, versions, commit, load, time.
        error: Why there are no figures.
    """

    measure: str
    figures: Figures
    size: str
    seconds: float
    model: str
    runs: list[str] = field(default_factory=list)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def verdict_of(published: Published, measured: float) -> Verdict:
    """The rule: see the table at the top."""
    if math.isnan(measured):
        return "not reproduced"
    if _is_within(published, measured):
        return "reproduced"
    return "reproduced in shape" if _is_in_shape(published, measured) else "not reproduced"


def _is_within(published: Published, measured: float) -> bool:
    """In the range or a quarter beyond its ends; a bound is met or not."""
    if published.bound == "least":
        return measured >= published.low
    if published.bound == "most":
        return measured <= published.high
    low, high = published.low, published.high
    return low - TOLERANCE * abs(low) <= measured <= high + TOLERANCE * abs(high)


def _is_in_shape(published: Published, measured: float) -> bool:
    """The same direction and at least half of the effect; of a size, which has no direction, half to twice."""
    if published.neutral is None:
        return published.low / 2 <= measured <= 2 * published.high
    effect = measured - published.neutral
    wanted = min((published.low - published.neutral, published.high - published.neutral), key=abs)
    return effect * wanted > 0 and abs(effect) >= abs(wanted) / 2


def run_claims(names: Iterable[str] = (), bench: Bench | None = None) -> list[Measured]:
    """Measure the named claims, or all that can be, and keep what was found; each measure runs once.

    Raises:
        UnknownNameError: No claim of that name.
    """
    bench = bench or Bench()
    measures = {claim.measure.__name__: claim.measure for claim in _chosen(names) if claim.measure}
    return [_measured(measure, bench) for measure in measures.values()]


def claims_table(names: Iterable[str] = (), *, runs: Path = Path("runs")) -> pl.DataFrame:
    """One row a claim: claim, source, says, published, measured, kind, modelled, verdict, how, when.

    Args:
        names: Claims; all by default.
        runs: The run store; what is not there is taken from the example results.
    """
    found = load_measured(runs)
    rows = [_row(claim, found.get(claim.measure.__name__) if claim.measure else None) for claim in _chosen(names)]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def load_measured(runs: Path = Path("runs")) -> dict[str, Measured]:
    """Measure -> its newest figures: those of this store, else the example ones."""
    found: dict[str, Measured] = {}
    if EXAMPLE_RESULTS.exists():
        found = {one["measure"]: Measured(**one) for one in json.loads(EXAMPLE_RESULTS.read_text())}
    for path in sorted(Path(runs).glob("claims/*.json")):
        one = Measured(**json.loads(path.read_text()))
        found[one.measure] = one
    return found


def save_measured(path: Path, *, runs: Path = Path("runs")) -> None:
    """Write what `load_measured` finds into one file, in the form of the example results."""
    found = sorted(load_measured(runs).values(), key=lambda one: one.measure)
    rounded = [{**asdict(one), "figures": {name: round(value, 6) for name, value in one.figures.items()}}
               for one in found]  # fmt: skip
    path.write_text("[\n" + ",\n".join(json.dumps(one) for one in rounded) + "\n]\n")


def figure_text(value: float | None, unit: str) -> str:
    """A figure with its unit."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    if unit == "share":
        return share_text(value)
    digits = f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{digits} {'x' if unit == 'times' else unit}"


_SCHEMA = dict.fromkeys(
    ("claim", "source", "workload", "hardware", "says", "published", "measured", "kind", "modelled", "verdict", "how",
     "when"), pl.String,
)  # fmt: skip


def _chosen(names: Iterable[str]) -> list[Claim]:
    from experiments.claims_list import CLAIMS

    by_name = {claim.name: claim for claim in CLAIMS}
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in by_name:
            raise UnknownNameError("claim", name, by_name)
    return [by_name[name] for name in wanted] or list(CLAIMS)


def _measured(measure: Callable[[Bench], Figures], bench: Bench) -> Measured:
    """Run one measure; a failure is a result with its reason, so that the others go on."""
    began, before = time.perf_counter(), len(bench.made)
    figures: Figures = {}
    error = ""
    try:
        figures = measure(bench)
    except CacheError as problem:
        error = str(problem).strip().splitlines()[0]
    found = Measured(measure.__name__, figures, bench.size, round(time.perf_counter() - began, 1), bench.spec,
                     bench.made[before:], describe_environment(), error)  # fmt: skip
    folder = Path(bench.runs) / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(found), indent=2)
    partial = folder / f".{measure.__name__}.partial"
    partial.write_text(text + "\n")
    partial.replace(folder / f"{measure.__name__}.json")
    return found


def _row(claim: Claim, found: Measured | None) -> tuple[str, ...]:
    value = found.figures.get(claim.figure) if found else None
    how = claim.how
    if claim.measure is None:
        verdict = "not testable here"
    elif found is None:
        verdict, how = "not measured yet", f"kvworkbench claims {claim.name} --run"
    elif value is None:
        verdict, how = "not testable here", found.error or f"the measure gave no {claim.figure}"
    else:
        verdict = verdict_of(claim.published, value)
    modelled = claim.modelled() if claim.modelled else None
    unit = claim.published.unit
    kind, when = (claim.kind, _when(found)) if value is not None else ("", "")
    return (claim.name, claim.source, claim.workload, claim.hardware, claim.says, str(claim.published),
            figure_text(value, unit), kind, figure_text(modelled, unit), verdict, how, when)  # fmt: skip


def _when(found: Measured | None) -> str:
    if found is None or not found.provenance:
        return ""
    machine = found.provenance
    return f"{found.model}, {found.size}, {machine.get('cpu')}, {str(machine.get('time'))[:10]}"
