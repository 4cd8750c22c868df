"""Should this traffic be cached, where, and how much of it? Advice from a request log.

    log -> Trace (advisor_logs.py) -> sharing                                   counted in the log
                                   -> hit rate of each tier at its size         simulated: prefix LRU by replay
                                   -> TTFT with and without it                  modelled: cost.py
                                   -> verdict

    print(advise("requests.jsonl", model="llama-3-8b", hardware="h100"))

What is not in a log is not in the advice: queueing, batching, and what other instances hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from experiments.advisor_logs import Tokenize, read_log
from experiments.cost import CostModel, cost_model
from experiments.curves import LruCurve, lru_curve
from experiments.plots._style import PALETTE, REFERENCE_COLOR, label_text, new_figure
from experiments.replay import replay
from experiments.traces import Trace
from experiments.units import bytes_text, seconds_text, share_text, times_text
from workbench.errors import InvalidInputError

__all__ = ["DEFAULT_SIZES", "Advice", "Sharing", "advise"]

GIB = 2**30
DEFAULT_SIZES: Mapping[str, Sequence[float]] = {
    "memory": (16 * GIB, 64 * GIB, 256 * GIB), "disk": (1024 * GIB, 4096 * GIB), "redis": (256 * GIB, 1024 * GIB),
}  # fmt: skip
_ENOUGH = 0.95  # of the ceiling: more room buys next to nothing
_SYMBOLS = ("diamond", "square", "triangle-up", "circle", "star")
_LITTLE = 0.05  # sharing below which a cache is not worth its trouble
_WORTH = 0.05  # of mean TTFT: what a tier must save


@dataclass(frozen=True)
class Sharing:
    """What the log itself shows, whatever the cache.

    Attributes:
        requests, prompt_tokens: How many.
        median_prompt_tokens: Half of the prompts are shorter.
        ceiling: Hit tokens / prompt tokens of a cache that forgets nothing.
        reused_requests: Share of the requests that find anything.
        one_off_tokens: Share of the prompt tokens that no later request asks for again.
        short_requests: Share of the prompts below the break-even length.
        span_s: Seconds from the first request to the last; 0 where the log has no times.
    """

    requests: int
    prompt_tokens: int
    median_prompt_tokens: float
    ceiling: float
    reused_requests: float
    one_off_tokens: float
    short_requests: float
    span_s: float


@dataclass(frozen=True)
class Advice:
    """What was found in a log; prints as text.

    Args:
        trace: The log as a trace.
        costs: The cost model behind every TTFT.
        sizes: Tier -> capacities in bytes that were looked at.
    """

    trace: Trace
    costs: CostModel
    sizes: Mapping[str, Sequence[float]]

    @cached_property
    def curve(self) -> LruCurve:
        """Exact hit rate by chunks at every capacity (simulated)."""
        return lru_curve(self.trace)

    @cached_property
    def sharing(self) -> Sharing:
        """Counted in the log."""
        trace, hits = self.trace, self._hits(max(1, self.trace.distinct))
        prompt = trace.input_tokens
        tokens = trace.chunk_tokens()[trace.ids].astype(np.int64)
        uses = np.bincount(trace.ids, minlength=trace.distinct)[trace.ids]
        whole = max(1, int(prompt.sum()))
        return Sharing(
            requests=trace.requests, prompt_tokens=int(prompt.sum()), median_prompt_tokens=float(np.median(prompt)),
            ceiling=float(hits.sum() / whole), reused_requests=float(np.mean(hits > 0)),
            one_off_tokens=float(1 - tokens[uses > 1].sum() / whole),
            short_requests=float(np.mean(prompt < self.break_even_tokens)),
            span_s=float(np.ptp(trace.timestamps)),
        )  # fmt: skip

    @cached_property
    def break_even_tokens(self) -> float:
        """The shortest prompt that gains where the log's share of it is in the best tier (modelled); inf if none."""
        share = float(self._hits(max(1, self.trace.distinct)).sum() / max(1, self.trace.input_tokens.sum()))
        found = [self.costs.break_even_prompt_tokens(share, tier) for tier in self.sizes]
        return float(min((tokens for tokens in found if tokens), default=np.inf))

    @cached_property
    def table(self) -> pl.DataFrame:
        """One row a tier and size, after "no reuse" and the device's own cache.

        Returns:
            tier, capacity_bytes, hit_rate (simulated, of prompt tokens), ttft_mean_s, ttft_median_s, ttft_p95_s
            (modelled), saved (share of the mean TTFT without reuse), dollars_per_million_tokens (modelled).
        """
        own_bytes = self.costs.kv_memory_bytes()
        own = self._hits(self._chunks(own_bytes))
        none = np.zeros_like(own)
        rows = [self._row("no reuse", 0.0, none, none, None), self._row("device", own_bytes, own, none, None)]
        for tier, sizes in self.sizes.items():
            for nbytes in sizes:
                both = np.maximum(own, self._hits(self._chunks(nbytes)))
                rows.append(self._row(tier, nbytes, own, both - own, tier))
        frame = pl.DataFrame(rows, orient="row", schema=_SCHEMA)
        return frame.with_columns(saved=1 - pl.col("ttft_mean_s") / frame["ttft_mean_s"][0])

    @property
    def best(self) -> dict[str, Any]:
        """The row with the lowest mean TTFT; of those within 2 % of it, the smallest."""
        near = self.table.filter(pl.col("ttft_mean_s") <= 1.02 * pl.col("ttft_mean_s").min())
        return near.sort("capacity_bytes").row(0, named=True)

    def verdict(self) -> str:
        """One sentence: cache or not, where, how large."""
        found, best = self.sharing, self.best
        if found.ceiling < _LITTLE:
            return (
                f"Do not cache: only {share_text(found.ceiling)} of the prompt tokens were ever asked for before; "
                "this is one-off traffic."
            )
        if found.short_requests > 0.5 and best["saved"] < _WORTH:
            return (
                f"Do not cache: {share_text(found.short_requests)} of the prompts are shorter than the break-even "
                f"of {self.break_even_tokens:,.0f} tokens."
            )
        own = self.table.filter(pl.col("tier") == "device").row(0, named=True)
        if best["tier"] == "no reuse" or best["saved"] < _WORTH:
            return (
                f"Do not cache on these tiers: loading a hit takes as long as computing it; the best saves "
                f"{share_text(max(0.0, best['saved']))} of TTFT."
            )
        alone = share_text(own["hit_rate"])
        if best["tier"] == "device" or own["hit_rate"] >= _ENOUGH * found.ceiling:
            return (
                f"The device's own prefix cache is enough: it finds {alone} of the tokens, "
                f"{share_text(found.ceiling)} would be possible; a tier pays across restarts and engines only."
            )
        return (
            f"Cache in {best['tier']} with {bytes_text(best['capacity_bytes'])}: {share_text(best['hit_rate'])} of "
            f"the prompt tokens hit ({alone} in the device's own cache alone), mean TTFT "
            f"{seconds_text(best['ttft_mean_s'])} instead of {seconds_text(self.table['ttft_mean_s'][0])}."
        )

    def remarks(self) -> list[str]:
        """What else the log shows, each with its number."""
        found, knee = self.sharing, self.curve.knee()
        gain = self.table["ttft_mean_s"][0] / self.best["ttft_mean_s"]
        lines = [
            f"{share_text(found.ceiling)} of the prompt tokens could hit (counted), "
            f"{share_text(found.reused_requests)} of the requests find something, "
            f"{share_text(found.one_off_tokens)} of the tokens are asked for once",
            "no length of prompt gains from loading (modelled)"
            if np.isinf(self.break_even_tokens)
            else f"prompts of {self.break_even_tokens:,.0f} tokens or more gain (modelled); "
            f"{share_text(found.short_requests)} of the prompts are shorter",
            f"beyond {bytes_text(knee * self._chunk_bytes)} each further byte buys much less (simulated; the knee)",
            f"the best setting is {times_text(gain)} times as fast to the first token as no reuse (modelled)",
        ]
        return [*lines, *self.trace.notes]

    def figure(self, *, template: str = "light") -> go.Figure:
        """Hit rate against capacity, with the tiers that were looked at."""
        points = self.curve.frame()
        figure = new_figure(
            f"Hit rate by capacity: {label_text(self.trace.name)}",
            f"simulated · prefix LRU · {self.trace.requests:,} requests · KV of {label_text(self.costs.shape.name)}",
            template=template, height=420,
        )  # fmt: skip
        sizes = (points["capacity_chunks"] * self._chunk_bytes / GIB).to_list()
        figure.add_scatter(x=sizes, y=(100 * points["hit_rate_by_chunks"]).to_list(), mode="lines", name="by chunks",
                           line={"color": PALETTE[5], "width": 3})  # fmt: skip
        rows = self.table.filter(pl.col("capacity_bytes") > 0)
        for number, ((tier,), group) in enumerate(rows.group_by("tier", maintain_order=True)):
            hover = [
                f"{tier}, {bytes_text(row['capacity_bytes'])}<br>mean TTFT {seconds_text(row['ttft_mean_s'])}, modelled"
                for row in group.iter_rows(named=True)
            ]
            figure.add_scatter(x=(group["capacity_bytes"] / GIB).to_list(), y=(100 * group["hit_rate"]).to_list(),
                               mode="markers", name=f"{label_text(tier)}, by tokens", hovertext=hover, hoverinfo="text",
                               marker={"color": PALETTE[1 + number], "symbol": _SYMBOLS[number % len(_SYMBOLS)],
                                       "size": 11, "line": {"width": 1}})  # fmt: skip
        figure.add_hline(y=100 * self.sharing.ceiling, line={"color": REFERENCE_COLOR, "dash": "dash"})
        figure.update_xaxes(title="capacity (GiB, log scale)", type="log")
        figure.update_yaxes(title="hit rate (%)", rangemode="tozero")
        return figure

    def __str__(self) -> str:
        head = (f"{self.trace.name}: {self.sharing.requests:,} requests, {self.sharing.prompt_tokens:,} prompt tokens, "
                f"half of the prompts below {self.sharing.median_prompt_tokens:,.0f}")  # fmt: skip
        return "\n".join([self.verdict(), "", head, *(f"  - {line}" for line in self.remarks()),
                          f"  - {self.costs.source}"])  # fmt: skip

    # ---------------------------------------------------------------- parts

    @property
    def _chunk_bytes(self) -> float:
        return self.costs.shape.bytes_per_token * self.trace.block_tokens

    def _chunks(self, nbytes: float) -> int:
        return int(min(nbytes // self._chunk_bytes, self.trace.distinct))

    def _hits(self, chunks: int) -> np.ndarray:
        """int64[requests], hit tokens of prefix LRU with room for so many chunks."""
        if chunks < 1:
            return np.zeros(self.trace.requests, np.int64)
        return replay(self.trace, "lru", capacity_chunks=chunks).hit_tokens

    def _row(self, name: str, nbytes: float, own: np.ndarray, loaded: np.ndarray, tier: str | None) -> tuple:
        prompt = np.maximum(1, self.trace.input_tokens)
        hits = np.minimum(own + loaded, prompt - 1)
        seconds = self.costs.ttft_seconds(prompt, hits, tier=None)
        if tier is not None:
            loading = self.costs.load_seconds(loaded, tier)
            longer = loading > self.costs.prefill_seconds(0, own + loaded) - self.costs.prefill_seconds(0, own)
            # A hit that takes longer to load than to compute is computed.
            seconds = np.where(longer, self.costs.ttft_seconds(prompt, np.minimum(own, prompt - 1), tier=None),
                               seconds + loading)  # fmt: skip
        busy = float((seconds - self.costs.efficiency.fixed_s).sum() / prompt.sum())
        dollars = busy * 1e6 * self.costs.hardware.dollars_per_hour / 3600
        return (name, float(nbytes), float(hits.sum() / prompt.sum()), float(seconds.mean()),
                float(np.median(seconds)), float(np.quantile(seconds, 0.95)), dollars)  # fmt: skip


_SCHEMA = {
    "tier": pl.String, "capacity_bytes": pl.Float64, "hit_rate": pl.Float64, "ttft_mean_s": pl.Float64,
    "ttft_median_s": pl.Float64, "ttft_p95_s": pl.Float64, "dollars_per_million_tokens": pl.Float64,
}  # fmt: skip


def advise(source: str | Path | Trace, *, model: Any = "llama-3-8b", hardware: Any = "h100",
           sizes: Mapping[str, Sequence[float]] = DEFAULT_SIZES, tokenize: Tokenize | None = None,
           costs: CostModel | None = None, skip_bad: bool = False) -> Advice:  # fmt: skip
    """Read a log and say what a cache would do for it.

    Args:
        source: An OpenAI-style JSONL log, a vLLM log, a trace file, or the name of a known or generated trace.
        model, hardware: Of the cost model, as `cost_model` takes them.
        sizes: Tier -> capacities in bytes to look at.
        tokenize: Text to token ids, for logs of text; an estimate by default.
        costs: A calibrated cost model instead of `model` and `hardware`.
        skip_bad: Leave out bad rows, and count them, instead of stopping at the first.

    Raises:
        InvalidInputError: The log cannot be read, a tier is not known, or a size is not above 0.
    """
    costs = costs or cost_model(model, hardware)
    for tier, capacities in sizes.items():
        costs.tier(tier)
        if not all(nbytes > 0 for nbytes in capacities):
            raise InvalidInputError(f"sizes of {tier} are {list(capacities)}; each must be above 0 bytes")
    trace = read_log(source, tokenize=tokenize, skip_bad=skip_bad).as_prefixes()
    return Advice(trace, costs, dict(sizes))
