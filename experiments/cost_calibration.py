"""The cost model, fitted to what was measured here, and how wrong it is where it was not fitted.

    requests of runs -> cells (medians) -> a random half fits, the others judge -> Calibration

    fixed_s, seconds a load costs whatever  least squares of relative errors, none below 0
    its size, the two arithmetic rates
    bandwidth of each tier                  bytes loaded / seconds of loading, from the engine's events
    memory bandwidth                        seconds between two answer tokens: weights and context are read once each

Medians are fitted, not requests. A neighbour on the machine slows single requests by times; the witness is in the
request itself: its answer tokens take longer, too, although nothing of the prompt explains it. Such requests are left
out, and counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from experiments.cost import CostModel, Efficiency
from experiments.cost_models import resolve_shape
from experiments.cost_shapes import KVShape
from experiments.hardware import TIERS, Hardware, TierSpeed, resolve_hardware
from experiments.runs import Run
from experiments.summary import NO_REUSE, PREFIX_CACHE
from workbench.errors import InvalidInputError

__all__ = ["Calibration", "calibrate", "cost_cells"]

_NEEDED = ("arm", "prompt_tokens", "cached_tokens", "ttft_s")
_LENGTH_STEP = 1.1  # prompts within about 10 % of length are one cell
_LEAST_CELLS = 4
_LEAST_REQUESTS = 3  # below, one request makes a cell's median: such cells count only if there is nothing else
_ROUNDS = 10
GOAL = 0.2


@dataclass(frozen=True)
class Calibration:
    """A fitted cost model and its errors.

    Attributes:
        model: `CostModel` with measured efficiencies and tiers.
        cells: One row a cell: arm, prompt_tokens, cached_tokens, n, ttft_s (median, measured), predicted_s, error
            (predicted / measured - 1), part ("fitted" or "held out").
        requests: Requests in the cells.
        disturbed: Requests left out, because the machine was busy with something else.
    """

    model: CostModel
    cells: pl.DataFrame
    requests: int
    disturbed: int

    @property
    def held_out(self) -> pl.DataFrame:
        """The cells that the fit has not seen."""
        return self.cells.filter(pl.col("part") == "held out")

    @property
    def median_error(self) -> float:
        """Median of the held-out cells' absolute relative errors."""
        return float(np.median(np.abs(self.held_out["error"].to_numpy())))

    @property
    def largest_error(self) -> float:
        """The worst held-out cell's."""
        return float(np.abs(self.held_out["error"].to_numpy()).max())

    def verdict(self) -> str:
        """One sentence: how well the held-out cells were predicted."""
        within = int((self.held_out["error"].abs() <= GOAL).sum())
        return (
            f"{within} of {self.held_out.height} held-out cells predicted within {GOAL:.0%}: median error "
            f"{self.median_error:.1%}, largest {self.largest_error:.1%} (n = {self.requests} requests, "
            f"{self.disturbed} disturbed ones left out)"
        )


def calibrate(source: Run | str | Path | pl.DataFrame | Sequence[Run], *, model: Any, hardware: Any = "epyc_core",
              split: bool = True, seed: int = 0, calm: float | None = 1.5) -> Calibration:  # fmt: skip
    """Fit the cost model to real requests.

    Args:
        source: Runs, a run's folder, or a frame of requests with arm, prompt_tokens, cached_tokens, ttft_s and, if
            known, load_s and itl_s; that of `Study.requests()`, whose tiers and codecs are then told apart.
        model: What was served: as `resolve_shape` takes it.
        hardware: What it ran on; its peaks only scale the efficiencies.
        split: Fit half of the cells and judge by the others; otherwise all fit, and none is held out.
        seed: Draws the half, evenly among the cells with a hit and those without.
        calm: Leave out requests whose answer tokens took more than so many times as long as those of the calmest tenth
            of that length; None keeps all.

    Raises:
        InvalidInputError: Columns are missing, or fewer than four cells.
    """
    shape, machine = resolve_shape(model), resolve_hardware(hardware)
    everything = _with_own_arms(_requests(source))
    requests = everything if calm is None else _calm(everything, calm)
    cells = cost_cells(requests)
    steady = cells.filter(pl.col("n") >= _LEAST_REQUESTS)
    cells = steady if steady.height >= _LEAST_CELLS else cells
    if cells.height < _LEAST_CELLS:
        raise InvalidInputError(f"{cells.height} cells of equal arm and length; a fit needs at least {_LEAST_CELLS}")
    cells = cells.with_columns(part=_parts(cells, seed) if split else pl.lit("fitted"))
    fitted = cells.filter(pl.col("part") == "fitted")
    efficiency, latency_s = _efficiency(fitted, shape, machine, requests)
    costs = CostModel(shape, machine, efficiency, _tiers(requests, shape, latency_s))
    predicted = [_predicted(costs, row) for row in cells.iter_rows(named=True)]
    cells = cells.with_columns(predicted_s=pl.Series(predicted, dtype=pl.Float64))
    cells = cells.with_columns(error=pl.col("predicted_s") / pl.col("ttft_s") - 1)
    return Calibration(costs, cells, int(cells["n"].sum()), everything.height - requests.height)


def cost_cells(requests: pl.DataFrame) -> pl.DataFrame:
    """Medians of the answered requests of an arm that have about the same length and hit, in order of arm and length.

    Returns:
        arm, prompt_tokens, cached_tokens, n, ttft_s, load_s.
    """
    missing = sorted(set(_NEEDED) - set(requests.columns))
    if missing:
        raise InvalidInputError(f"requests lack the columns {', '.join(missing)}")
    good = requests.filter(pl.col("ttft_s") > 0, pl.col("prompt_tokens") > 0)
    if "error" in good.columns:
        good = good.filter(pl.col("error").fill_null("") == "")
    if "load_s" not in good.columns:
        good = good.with_columns(load_s=pl.lit(0.0))
    bins = [_length_bin(name).alias(f"_{name}") for name in _NEEDED[1:3]]
    return (
        good.with_columns(pl.col("cached_tokens").fill_null(0)).with_columns(bins)
        .group_by("arm", "_prompt_tokens", "_cached_tokens")
        .agg(pl.col("prompt_tokens", "cached_tokens", "ttft_s", "load_s").median(), n=pl.len())
        .sort("arm", "prompt_tokens", "cached_tokens")
        .select("arm", "prompt_tokens", "cached_tokens", "n", "ttft_s", "load_s")
    )  # fmt: skip


def _with_own_arms(requests: pl.DataFrame) -> pl.DataFrame:
    """A study's arm "cache" has several tiers and codecs: each becomes an arm, "cache/disk/int8"."""
    columns = [name for name in ("tier", "codec") if name in requests.columns]
    if not columns or "arm" not in requests.columns:
        return requests
    full = pl.concat_str(["arm", *columns], separator="/", ignore_nulls=True)
    return requests.with_columns(pl.when(pl.col("arm").is_in([NO_REUSE, PREFIX_CACHE])).then("arm").otherwise(full)
                                 .alias("arm"))  # fmt: skip


def _parts(cells: pl.DataFrame, seed: int) -> pl.Series:
    """ "fitted" or "held out": half of the cells with a hit, and half of those without, at random."""
    rng, parts = np.random.default_rng(seed), np.full(cells.height, "held out", object)
    warm = (cells["cached_tokens"] > 0).to_numpy()
    for kind in (warm, ~warm):
        members = rng.permutation(np.flatnonzero(kind))
        parts[members[: -(-len(members) // 2)]] = "fitted"
    return pl.Series(parts.tolist(), dtype=pl.String)


def _length_bin(column: str) -> pl.Expr:
    """Lengths within a tenth of one another have the same number."""
    return ((pl.col(column) + 1).log() / math.log(_LENGTH_STEP)).round().cast(pl.Int64)


def _calm(requests: pl.DataFrame, limit: float) -> pl.DataFrame:
    """Requests whose answer tokens came about as fast as the machine can; all where they were not timed."""
    if "itl_s" not in requests.columns or "prompt_tokens" not in requests.columns:
        return requests
    calmest = pl.col("itl_s").quantile(0.1).over(_length_bin("prompt_tokens"))
    return requests.filter(pl.col("itl_s").is_null() | calmest.is_null() | (pl.col("itl_s") <= limit * calmest))


def _requests(source: Any) -> pl.DataFrame:
    if isinstance(source, pl.DataFrame):
        return source
    runs = [source] if isinstance(source, Run | str | Path) else source
    found = [run if isinstance(run, Run) else Run(Path(run)) for run in runs]
    return pl.concat([run.requests for run in found], how="diagonal_relaxed")


def _efficiency(cells: pl.DataFrame, shape: KVShape, machine: Hardware, requests: pl.DataFrame
                ) -> tuple[Efficiency, float]:  # fmt: skip
    """What the engine reaches, and the seconds that a load costs whatever its size."""
    prompt, hit = cells["prompt_tokens"].to_numpy(), cells["cached_tokens"].to_numpy()
    start = np.minimum(hit, prompt - 1)
    work = shape.work(start, prompt)
    memory = _memory_share(requests, shape, machine)
    reading = (work.weight_bytes + shape.kv_bytes(start)) / (machine.memory_bytes_per_second * memory)
    loads = cells["load_s"].fill_null(0.0).to_numpy()
    columns = np.stack([np.ones(len(loads)), loads > 0, work.matmul_flops, work.attention_flops], axis=1)
    seconds = cells["ttft_s"].to_numpy() - loads
    fixed, latency, matmul, attention = _fit(columns, reading, seconds)
    peak = machine.flops_per_second
    found = Efficiency(
        matmul=float(1 / (matmul * peak)) if matmul else math.inf,
        attention=float(1 / (attention * peak)) if attention else math.inf,
        memory=memory, fixed_s=float(fixed),
        source=f"measured, {len(seconds)} cells of {int(cells['n'].sum())} requests",
    )  # fmt: skip
    return found, float(latency)


def _fit(columns: np.ndarray, reading: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Seconds of a request, of a load, and of a FLOP of both kinds; cells bound by reading tell nothing of the FLOPs.

    Which cells these are follows from the fit, so it is repeated until the two agree.
    """
    bound, factors = np.zeros(len(seconds), bool), np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        shown = np.where(bound[:, None], columns * [1, 1, 0, 0], columns)
        factors = _least_squares(shown / seconds[:, None], 1 - np.where(bound, reading, 0.0) / seconds)
        again = columns[:, 2:] @ factors[2:] < reading
        if (again == bound).all():
            break
        bound = again
    return factors


def _least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Factors, none below 0, that bring the columns' weighted sum closest to the target: best of all subsets."""
    best, least = np.zeros(columns.shape[1]), np.inf
    for size in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), size):
            part = columns[:, chosen]
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            factors = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            miss = float(np.square(part @ factors - target).sum())
            if (factors >= 0).all() and miss < least:
                best, least = np.zeros(columns.shape[1]), miss
                best[list(chosen)] = factors
    return best


def _memory_share(requests: pl.DataFrame, shape: KVShape, machine: Hardware) -> float:
    """Bytes read for one answer token over the time between two, as a share of the peak; inf if none was timed."""
    if "itl_s" not in requests.columns or not requests["itl_s"].drop_nulls().len():
        return math.inf
    timed = requests.filter(pl.col("itl_s") > 0)
    nbytes = shape.work(0, 1).weight_bytes + np.asarray(shape.kv_bytes(timed["prompt_tokens"].to_numpy()))
    return float(np.median(nbytes / timed["itl_s"].to_numpy()) / machine.memory_bytes_per_second)


def _tiers(requests: pl.DataFrame, shape: KVShape, latency_s: float) -> dict[str, TierSpeed]:
    """A tier for each arm that loaded something; an arm's own name is the tier's."""
    found = dict(TIERS)
    if "load_s" not in requests.columns:
        return found
    loading = requests.filter(pl.col("load_s") > 0, pl.col("cached_tokens") > 0)
    for (arm,), rows in loading.group_by("arm", maintain_order=True):
        speeds = np.asarray(shape.kv_bytes(rows["cached_tokens"].to_numpy())) / rows["load_s"].to_numpy()
        found[str(arm)] = TierSpeed(str(arm), float(np.median(speeds)), latency_s, f"measured, {rows.height} loads",
                                    through_link=False)  # fmt: skip
    return found


def _predicted(costs: CostModel, cell: dict[str, Any]) -> float:
    loaded = cell["arm"] not in (NO_REUSE, PREFIX_CACHE) and cell["arm"] in costs.tiers
    return costs.ttft_seconds(cell["prompt_tokens"], cell["cached_tokens"], tier=cell["arm"] if loaded else None)
