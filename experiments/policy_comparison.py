"""A policy beside others on the same traces: hit-rate curves, point by point, and a verdict with its uncertainty.

    policy -> check_policy -> replay of each (capacity, policy, trace) -> frame -> figure, verdict

Traces of several seeds, or contiguous parts of one recorded trace, say how far a difference can be trusted. Every
figure here is simulated. The replay is the prefix semantics of the live engine, touched tail first as vLLM does.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from experiments.intervals import Interval, mean_interval
from experiments.policy_curves import CEILING, OPTIMUM, curve_data, plot_curves
from experiments.replay import replay
from experiments.traces import Trace, agent, chat, known_traces, load_trace, rag
from workbench.errors import CacheError, InvalidInputError, UnknownNameError
from workbench.policies import resolve_policy
from workbench.policies.base import form_of
from workbench.testing import check_policy

__all__ = ["GENERATED_TRACES", "BrokenPolicy", "PolicyComparison", "available_traces"]

GENERATED_TRACES: dict[str, Callable[..., Trace]] = {"chat": chat, "rag": rag, "agent": agent}
_PARTS = 20  # contiguous parts of a recorded trace


@dataclass(frozen=True)
class BrokenPolicy:
    """A policy that does not keep its contract, for people.

    Args:
        name: Of the class.
        what: The promise that broke, with the victim.
        where: Capacity and seed of the walk or replay in which it broke.
        trace: The traceback, "" if the policy's own code did not raise.
    """

    name: str
    what: str
    where: str
    trace: str = ""

    CONTRACT = (
        "evict() returns one chunk that was inserted and has not left since; what was inserted comes out exactly once; "
        "compiled or plain, the class names the same victims."
    )

    def __str__(self) -> str:
        return f"{self.name} breaks the contract of a policy ({self.where}): {self.what}\nThe contract: {self.CONTRACT}"


class PolicyComparison:
    """One policy beside others; `steps` does the work, and everything else reads what it has found so far.

    Args:
        policy: A class decorated with @policy, an instance or a name.
        rivals: Policies to compare with; the verdict is against the first.
        trace: "chat", "rag" or "agent" are generated; other names, paths and traces as `load_trace` takes them.
        seeds: How many traces are generated.
        capacities: How many capacities, from a hundredth to half of all the chunks there are.
        bytes_per_token: Of KV, for the axis; 128 KiB is Llama-3.1-8B in bfloat16.
    """

    def __init__(
        self,
        policy: Any,
        *,
        rivals: Sequence[Any] = ("lru", "arc", "s3fifo"),
        trace: str | Trace = "chat",
        seeds: int = 5,
        capacities: int = 7,
        bytes_per_token: int = 131072,
    ):
        if not rivals or seeds < 1 or capacities < 1 or bytes_per_token < 1:
            raise InvalidInputError("a comparison needs at least 1 rival, 1 seed, 1 capacity and 1 byte a token")
        self.policy = resolve_policy(policy)
        self.rivals = {_label(spec): resolve_policy(spec) for spec in rivals}
        self.trace, self.seeds, self.capacities, self.bytes_per_token = trace, seeds, capacities, bytes_per_token
        self.name = form_of(self.policy).name
        if self.name in self.rivals:
            raise InvalidInputError(f"{self.name} cannot be compared with itself; rivals are {', '.join(self.rivals)}")
        self.broken: BrokenPolicy | None = None
        self._rows: list[dict[str, Any]] = []

    # ---------------------------------------------------------------- the work

    @cached_property
    def traces(self) -> list[Trace]:
        """The traces, with ids that name prefixes: one for each seed, or the one that was given."""
        if isinstance(self.trace, str) and self.trace in GENERATED_TRACES:
            return [GENERATED_TRACES[self.trace](seed=seed).as_prefixes() for seed in range(self.seeds)]
        trace = self.trace if isinstance(self.trace, Trace) else load_trace(_known(self.trace))
        return [trace.as_prefixes()]

    @cached_property
    def capacities_chunks(self) -> list[int]:
        """Capacities in chunks, the same for every trace."""
        distinct = self.traces[0].distinct
        found = np.geomspace(max(2, distinct / 100), max(3, distinct / 2), self.capacities)
        return sorted({int(capacity) for capacity in found})

    @property
    def total(self) -> int:
        """Points in all."""
        return len(self.capacities_chunks) * (len(self._orders()) + 1)

    @property
    def done(self) -> int:
        """Points found so far."""
        return self.frame().select("policy", "capacity_chunks").n_unique()

    def check(self) -> bool:
        """Hold the policy to its contract; what breaks is kept in `broken`."""
        try:
            check_policy(self.policy)
        except AssertionError as error:
            self.broken = BrokenPolicy(self.name, str(error), "capacity 24 chunks, random requests, seed 0")
        except CacheError as error:
            self.broken = BrokenPolicy(self.name, str(error), "capacity 24 chunks, random requests, seed 0")
        except Exception as error:  # the reader's own code: whatever it raises is shown, not swallowed
            self.broken = BrokenPolicy(
                self.name,
                f"{type(error).__name__}: {error}",
                "capacity 24 chunks, seed 0",
                traceback.format_exc(limit=-4),
            )
        return self.broken is None

    def steps(self) -> Iterator[tuple[str, int]]:
        """Find every point; yields (policy, capacity) after each, so that a caller can draw or stop there."""
        if not self.check():
            return
        self._rows.clear()
        for capacity in self.capacities_chunks:
            yield self._ceiling(capacity)
            for label, policy in self._orders().items():
                for number, trace in enumerate(self.traces):
                    try:
                        self._rows += self._measure(label, policy, capacity, number, trace)
                    except CacheError as error:
                        self.broken = BrokenPolicy(label, str(error), f"capacity {capacity} chunks, seed {number}")
                        return
                yield label, capacity

    def run(self) -> "PolicyComparison":
        """Find every point now."""
        for _ in self.steps():
            pass
        return self

    def _orders(self) -> dict[str, Any]:
        return {self.name: self.policy, **self.rivals, OPTIMUM: resolve_policy("optimal")}

    def _ceiling(self, capacity: int) -> tuple[str, int]:
        for number, rate in enumerate(self._unlimited):
            self._rows.append(self._row(CEILING, capacity, number, rate, None, None))
        return CEILING, capacity

    @cached_property
    def _unlimited(self) -> list[float]:
        return [replay(t, "lru", capacity_chunks=t.distinct + int(t.lengths.max())).hit_rate for t in self.traces]

    def _measure(self, label: str, policy: Any, capacity: int, number: int, trace: Trace) -> list[dict[str, Any]]:
        result = replay(trace, policy, capacity_chunks=capacity)
        orphaned = self._orphaned(policy, capacity, trace) if label == self.name else None
        found = result.hit_tokens
        if len(self.traces) > 1:
            return [self._row(label, capacity, number, result.hit_rate, orphaned, None)]
        parts = np.array_split(np.arange(trace.requests), min(_PARTS, trace.requests))
        asked = trace.input_tokens
        return [
            self._row(
                label, capacity, number, float(found[p].sum() / max(1, asked[p].sum())), orphaned, int(asked[p].sum())
            )
            for number, p in enumerate(parts)
        ]

    def _orphaned(self, policy: Any, capacity: int, trace: Trace) -> float:
        """Share of found chunks behind a missing one, if nothing kept a parent from going before its child."""
        loose = replay(trace, policy, capacity_chunks=capacity, semantics="object")
        return 1.0 - float(loose.leading_chunks.sum()) / max(1, int(loose.hit_chunks.sum()))

    def _row(
        self, policy: str, capacity: int, sample: int, rate: float, orphaned: float | None, weight: int | None
    ) -> dict[str, Any]:
        nbytes = capacity * self.traces[0].block_tokens * self.bytes_per_token
        return {
            "policy": policy,
            "capacity_chunks": capacity,
            "capacity_gib": nbytes / 2**30,
            "sample": sample,
            "hit_rate": rate,
            "orphaned_share": orphaned,
            "tokens": weight,
        }

    # ---------------------------------------------------------------- what was found

    @property
    def samples_are(self) -> str:
        """What n counts."""
        return "seeds" if len(self.traces) > 1 else "parts of one trace"

    def frame(self) -> pl.DataFrame:
        """policy, capacity_chunks, capacity_gib, sample, hit_rate (by tokens), orphaned_share, tokens."""
        return pl.DataFrame(self._rows, schema=_SCHEMA)

    def table(self) -> pl.DataFrame:
        """Hit rate in per cent, a row a policy and a column a capacity."""
        points = curve_data(self.frame()).with_columns(
            capacity=pl.format("{} GiB", pl.col("capacity_gib").round_sig_figs(3)),
            percent=(100 * pl.col("hit_rate")).round(1),
        )
        return points.pivot("capacity", index="policy", values="percent")

    def difference(self, rival: str | None = None) -> Interval:
        """Points of hit rate that the policy is ahead, mean over the capacities that both have, over samples."""
        return mean_interval(self._differences(rival or next(iter(self.rivals)))["ahead"].to_numpy())

    def verdict(self) -> str:
        """One sentence: how far ahead or behind the first rival, how sure, and where most."""
        rival = next(iter(self.rivals))
        if self.broken:
            return str(self.broken)
        ahead = self._differences(rival)
        if ahead.is_empty():
            return "no data yet"
        interval = self.difference(rival)
        points = self._by_capacity(rival)
        best, worst = points.sort("ahead").row(-1, named=True), points.sort("ahead").row(0, named=True)
        spread = "" if interval.n < 2 else f" (95 % interval {interval.low:+.1f} to {interval.high:+.1f})"
        return (
            f"{self.name} against {rival} on {self.traces[0].name}: {interval.mean:+.1f} points of hit rate{spread}, "
            f"mean over {points.height} capacities, n = {interval.n} {self.samples_are}. "
            f"Best {best['ahead']:+.1f} at {best['capacity_gib']:.3g} GiB, "
            f"worst {worst['ahead']:+.1f} at {worst['capacity_gib']:.3g} GiB. {_meaning(self.name, interval)}"
            f"{self._against_the_best(rival)}"
        )

    def _against_the_best(self, first: str) -> str:
        """The other rival that is hardest to beat, in words; "" if there is none."""
        others = [rival for rival in self.rivals if rival != first and not self._differences(rival).is_empty()]
        if not others:
            return ""
        hardest = min(others, key=lambda rival: self.difference(rival).mean)
        return f" Of the others {hardest} is hardest to beat: {self.difference(hardest).mean:+.1f}."

    def orphaned_share(self) -> float | None:
        """The greatest share of found chunks that lie behind a missing one; None before there is a point."""
        return self.frame()["orphaned_share"].max()  # type: ignore[return-value]

    def orphaned_text(self) -> str:
        """What becomes of the policy where nothing keeps a parent from going before its child."""
        share = self.orphaned_share()
        if share is None:
            return ""
        if share < 0.0005:
            return "Orphaned chunks: none, even in a cache that does not protect parents."
        return (
            f"Orphaned chunks: in a cache that does not protect parents, up to {100 * share:.1f} % of the found chunks "
            "would lie behind a missing one, of no use."
        )

    def figure(self, *, template: str = "light") -> go.Figure:
        """The curves found so far."""
        return plot_curves(
            curve_data(self.frame()),
            own=self.name,
            title=f"Hit rate on {self.traces[0].name}",
            samples_are=self.samples_are,
            bytes_per_token=self.bytes_per_token,
            template=template,
        )

    def _paired(self, rival: str) -> pl.DataFrame:
        keys = ["capacity_chunks", "capacity_gib", "sample"]
        found = self.frame()
        own, other = (found.filter(pl.col("policy") == name).select(*keys, "hit_rate") for name in (self.name, rival))
        return own.join(other, on=keys, suffix="_rival").with_columns(
            ahead=100 * (pl.col("hit_rate") - pl.col("hit_rate_rival"))
        )

    def _differences(self, rival: str) -> pl.DataFrame:
        return self._paired(rival).group_by("sample", maintain_order=True).agg(pl.col("ahead").mean())

    def _by_capacity(self, rival: str) -> pl.DataFrame:
        return self._paired(rival).group_by("capacity_gib", maintain_order=True).agg(pl.col("ahead").mean())


_SCHEMA = {
    "policy": pl.String,
    "capacity_chunks": pl.Int64,
    "capacity_gib": pl.Float64,
    "sample": pl.Int64,
    "hit_rate": pl.Float64,
    "orphaned_share": pl.Float64,
    "tokens": pl.Int64,
}


def available_traces() -> list[str]:
    """The generated traces, then the recorded ones that are found on the data path."""
    return [*GENERATED_TRACES, *(name for name in known_traces() if _is_there(name))]


def _meaning(name: str, interval: Interval) -> str:
    if interval.n < 2:
        return "One sample says nothing about chance."
    if not interval.excludes_zero:
        return "The interval holds zero: no difference is shown."
    return f"{name} is {'ahead' if interval.mean > 0 else 'behind'}: the interval excludes zero."


def _label(spec: Any) -> str:
    return spec if isinstance(spec, str) else form_of(spec).name


def _known(name: str) -> str:
    if "/" in name or "." in name or name in known_traces():
        return name
    raise UnknownNameError("trace", name, [*GENERATED_TRACES, *known_traces()])


def _is_there(name: str) -> bool:
    from experiments.traces.readers import KNOWN, data_folders

    return any((folder / KNOWN[name].path).exists() for folder in data_folders())
