"""Which points a study measures, and in which order.

space -> every point (grid) | some of them (random) | one after another, chosen by what was found (Bayesian)
points x repeats -> cells, arms side by side, rotating from repeat to repeat
"""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import CacheError, InvalidInputError

__all__ = ["BayesianSearch", "Cell", "grid_size", "in_blocks", "make_cell", "parse_objective", "space_points"]

Point = dict[str, Any]

# Setting by which cells are compared with one another: those that differ in nothing else run side by side.
COMPARED = "arm"
# Proposals that were measured already, in a row, before the search takes any point that was not.
_STALE_PROPOSALS = 20


@dataclass(frozen=True)
class Cell:
    """One measurement: a point of the space, once.

    Args:
        key: Names the cell in its study; the same settings, repeat and seed give the same key.
        settings: Everything that was set, fixed settings among them.
        repeat: Number of the repetition, from 0.
        seed: Of workload or trace; each repeat has its own.
    """

    key: str
    settings: Point
    repeat: int
    seed: int

    def label(self, names: Iterable[str]) -> str:
        """The cell for people, in one line: these settings, and which repeat."""
        text = ", ".join(f"{name} {self.settings[name]}" for name in names)
        return f"{text} (repeat {self.repeat})" if self.repeat else text


def make_cell(settings: Point, repeat: int, seed: int) -> Cell:
    """A cell with its key."""
    text = json.dumps([settings, repeat, seed], sort_keys=True)
    return Cell(hashlib.sha256(text.encode()).hexdigest()[:16], settings, repeat, seed + repeat)


# ---------------------------------------------------------------- points


def grid_size(space: Mapping[str, Sequence[Any]]) -> int:
    """Points of the whole grid."""
    return math.prod(len(values) for values in space.values())


def space_points(space: Mapping[str, Sequence[Any]], *, trials: int | None = None, seed: int = 0) -> list[Point]:
    """Every point of the grid, the last setting changing fastest; or so many of them, chosen at random."""
    if trials is None or trials >= grid_size(space):
        return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    chosen = random.Random(f"points {seed}").sample(range(grid_size(space)), trials)
    return [_point(space, number) for number in chosen]


def _point(space: Mapping[str, Sequence[Any]], number: int) -> Point:
    """Point `number` of the grid."""
    values = {}
    for name, choices in reversed(space.items()):
        number, place = divmod(number, len(choices))
        values[name] = choices[place]
    return {name: values[name] for name in space}


# ---------------------------------------------------------------- order


def in_blocks(cells: Iterable[Cell], *, engine_of: Callable[[Cell], Hashable] | None = None,
           engines_at_once: int = 1) -> list[list[Cell]]:  # fmt: skip
    """Cells in running order, cut into blocks that one worker runs in a row.

    Inside a block repeats go round: every point once, then every point again, starting one further each time; cells
    that differ in the arm alone stand side by side, their order rotating as well. So neither the machine's mood nor
    the place behind another arm falls on one of them only.

    Args:
        cells: In any order.
        engine_of: Cell -> name of the serving engine that it needs. A block then holds all cells of its engines, and
            at most `engines_at_once` of them, so that each is started once. Without it every cell is its own block.
        engines_at_once: Engines that are alive together.
    """
    cells = list(cells)
    if engine_of is None:
        return [[cell] for cell in _rotated(cells)]
    by_engines: dict[Hashable, list[Cell]] = {}
    engines: dict[Hashable, set[Hashable]] = {}
    for group in _comparisons(cells).values():
        needed = dict.fromkeys(engine_of(cell) for cell in group)  # in order, each once
        key = tuple(needed)
        by_engines.setdefault(key, []).extend(group)
        engines[key] = set(needed)
    packed: list[tuple[set[Hashable], list[Cell]]] = []
    for key, group in by_engines.items():
        if packed and len(packed[-1][0] | engines[key]) <= engines_at_once:
            packed[-1][0].update(engines[key])
            packed[-1][1].extend(group)
        else:
            packed.append((set(engines[key]), list(group)))
    return [_rotated(group) for _, group in packed]


def _comparisons(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Cells that differ in arm and repeat alone, together."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        others = {name: value for name, value in cell.settings.items() if name != COMPARED}
        groups.setdefault(json.dumps(others, sort_keys=True), []).append(cell)
    return groups


def _rotated(cells: Iterable[Cell]) -> list[Cell]:
    groups = list(_comparisons(cells).values())
    repeats = sorted({cell.repeat for group in groups for cell in group})
    ordered = []
    for repeat in repeats:
        for place, group in enumerate(_turned(groups, repeat)):
            ordered += _turned([cell for cell in group if cell.repeat == repeat], repeat + place)
    return ordered


def _turned(items: list, turns: int) -> list:
    turn = turns % len(items) if items else 0
    return items[turn:] + items[:turn]


# ---------------------------------------------------------------- Bayesian search


class BayesianSearch:
    """Chooses the next point by what the earlier ones gave (Optuna's tree-structured Parzen estimator).

    Args:
        space: Values of each setting. Numbers are searched by rank, everything else as categories.
        maximize: True if a greater objective is better.
        seed: Of the sampler.
        known: (point, objective) of earlier trials, None for those that failed.
    """

    def __init__(self, space: Mapping[str, Sequence[Any]], *, maximize: bool, seed: int,
                 known: Sequence[tuple[Point, float | None]] = ()):  # fmt: skip
        try:
            import optuna
        except ImportError:
            raise CacheError("search='bayes' needs Optuna: pip install 'kvworkbench[study]'") from None

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self.space, self._known = optuna, space, dict[str, float | None]()
        self._study = optuna.create_study(
            direction="maximize" if maximize else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed + len(known), n_startup_trials=5),
        )
        self._ranges = {name: self._range(values) for name, values in space.items()}
        self._random = random.Random(f"search {seed}")
        for point, objective in known:
            self.tell(point, objective)

    def ask(self) -> Point | None:
        """The next point, one that was not measured yet; None when every point was."""
        if len(self._known) >= grid_size(self.space):
            return None
        for _ in range(_STALE_PROPOSALS):
            trial = self._study.ask(self._ranges)
            point = {name: values[int(trial.params[name])] for name, values in self.space.items()}
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)  # its result comes through `tell`
            if _name(point) not in self._known:
                return point
        fresh = [p for p in space_points(self.space) if _name(p) not in self._known]
        return self._random.choice(fresh)

    def tell(self, point: Point, objective: float | None) -> None:
        """What a point gave; None if it failed."""
        self._known[_name(point)] = objective
        if objective is None:
            return
        places = {name: list(values).index(point[name]) for name, values in self.space.items()}
        self._study.add_trial(
            self._optuna.trial.create_trial(params=places, distributions=self._ranges, value=objective)
        )

    def _range(self, values: Sequence[Any]) -> Any:
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if numbers and list(values) == sorted(values):
            return self._optuna.distributions.IntDistribution(0, len(values) - 1)
        return self._optuna.distributions.CategoricalDistribution(list(range(len(values))))


def parse_objective(objective: str) -> tuple[str, bool]:
    """The column, and whether more of it is better: 'max hit_rate' gives ("hit_rate", True)."""
    way, _, column = objective.partition(" ")
    if way not in ("min", "max") or not column.strip():
        raise InvalidInputError(f"objective is {objective!r}; give 'min <column>' or 'max <column>', as 'max hit_rate'")
    return column.strip(), way == "max"


def _name(point: Point) -> str:
    return json.dumps(point, sort_keys=True)
