"""Does reuse pay? Seconds of prefill and of loading, from a model's shape and a machine's speeds.

    shape, hardware, tiers -> CostModel -> TTFT with and without reuse, break-even length and bandwidth, room, dollars

A roofline: computing takes as long as the slower of arithmetic and of reading the weights; a hit saves the arithmetic
of its tokens and costs their bytes over the tier's bandwidth.

    prefill(a, b) = max(matmul / (peak * e_m) + attention / (peak * e_a), weights / (memory * e_b))
    TTFT(n, hit)  = fixed + prefill(hit, n) + [hit > 0] * (latency + kv_bytes(hit) / bandwidth)

Every figure from here is **modelled**. The efficiencies of a preset are assumptions; `calibrate` (cost_calibration.py)
replaces them with measured ones. Queueing, batching with other requests and overlap of loads with compute are not
modelled: the break-even is that of one request alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from experiments.cost_models import resolve_shape
from experiments.cost_shapes import KVShape
from experiments.hardware import TIERS, Hardware, TierSpeed, resolve_hardware
from experiments.replay_costs import ReuseCosts
from workbench.errors import InvalidInputError, UnknownNameError

__all__ = ["CostModel", "Efficiency", "cost_model", "predict"]

MILLION = 1e6


@dataclass(frozen=True)
class Efficiency:
    """What a serving engine reaches of a peak.

    Args:
        matmul: Of peak arithmetic, in matrix products. 0.5: large prefills of dense models on current GPUs reach about
            half of the dense peak (an assumption).
        attention: Of peak arithmetic, in attention. 0.35: FlashAttention-2 reports 0.5 to 0.7 for kernels alone, causal
            ones less (arXiv 2307.08691); an assumption.
        memory: Of peak memory bandwidth.
        fixed_s: Seconds of every request that no length changes: tokenising, scheduling, launching.
        source: Where they come from.
    """

    matmul: float = 0.5
    attention: float = 0.35
    memory: float = 0.7
    fixed_s: float = 0.01
    source: str = "assumed"


@dataclass(frozen=True)
class CostModel:
    """One model on one machine, with the tiers that KV is loaded from.

    Args:
        shape: See `experiments.cost_shapes.KVShape`.
        hardware: What computes.
        efficiency: What it reaches of its peaks.
        tiers: Media by name.
        kv_memory_share: Of the device's memory that weights and KV may take.
    """

    shape: KVShape
    hardware: Hardware
    efficiency: Efficiency = Efficiency()
    tiers: Mapping[str, TierSpeed] = field(default_factory=lambda: TIERS)
    kv_memory_share: float = 0.9

    @property
    def source(self) -> str:
        """How the figures come about, for a badge: where the efficiencies are from, and on what."""
        return f"modelled · {self.shape.name} on {self.hardware.name} · efficiencies {self.efficiency.source}"

    def with_bandwidth(self, tier: str, bytes_per_second: float) -> "CostModel":
        """The same with another speed of one tier."""
        if not bytes_per_second > 0:
            raise InvalidInputError(f"bandwidth is {bytes_per_second}; it must be above 0 bytes/s")
        speed = replace(self.tier(tier), bytes_per_second=bytes_per_second, source="as given", through_link=False)
        return replace(self, tiers={**self.tiers, tier: speed})

    def tier(self, name: str) -> TierSpeed:
        """A medium by name. Raises UnknownNameError."""
        if name not in self.tiers:
            raise UnknownNameError("tier", name, self.tiers)
        return self.tiers[name]

    # ---------------------------------------------------------------- seconds

    def prefill_seconds(self, start: Any, stop: Any) -> Any:
        """Seconds to compute tokens start..stop - 1 when the KV of those before is in the device's memory."""
        work, hardware, reached = self.shape.work(start, stop), self.hardware, self.efficiency
        arithmetic = work.matmul_flops / reached.matmul + work.attention_flops / reached.attention
        reading = (work.weight_bytes + self.shape.kv_bytes(start)) / (hardware.memory_bytes_per_second * reached.memory)
        return _plain(np.maximum(arithmetic / hardware.flops_per_second, reading))

    def load_bytes_per_second(self, tier: str) -> float:
        """What reaches the device: the tier's bandwidth or, if narrower, the host link's."""
        speed = self.tier(tier)
        link = self.hardware.link_bytes_per_second if speed.through_link else np.inf
        return min(speed.bytes_per_second, link)

    def load_seconds(self, tokens: Any, tier: str = "memory") -> Any:
        """Seconds to bring the KV of so many tokens from a tier; 0 for none."""
        nbytes = np.asarray(self.shape.kv_bytes(tokens), np.float64)
        seconds = self.tier(tier).latency_s + nbytes / self.load_bytes_per_second(tier)
        return _plain(np.where(nbytes > 0, seconds, 0.0))

    def ttft_seconds(self, prompt_tokens: Any, hit_tokens: Any = 0, *, tier: str | None = "memory") -> Any:
        """Time to first token of a request alone.

        Args:
            prompt_tokens: Length of the prompt.
            hit_tokens: Of its beginning, found in the tier; the last token is always computed.
            tier: Where they are found; None for the device's own memory, as in vLLM's prefix cache.
        """
        hit = np.minimum(hit_tokens, np.asarray(prompt_tokens) - 1)
        load = 0.0 if tier is None else self.load_seconds(hit, tier)
        return _plain(self.efficiency.fixed_s + self.prefill_seconds(hit, prompt_tokens) + load)

    def decode_seconds(self, context_tokens: float, *, requests: int = 1) -> float:
        """Seconds of one answer token for each of so many requests: the weights once, each context once."""
        kv = requests * self.shape.kv_bytes(context_tokens)
        reading = (self.shape.work(0, requests).weight_bytes + kv) / (
            self.hardware.memory_bytes_per_second * self.efficiency.memory
        )
        arithmetic = requests * 2 * self.shape.active_parameters
        return float(max(reading, arithmetic / (self.hardware.flops_per_second * self.efficiency.matmul)))

    def reuse_costs(self, tier: str = "memory") -> ReuseCosts:
        """The same for `replay(costs=...)`: for policies that weigh what a chunk costs, and for seconds saved.

        Equal to this model where prefill is bound by arithmetic and every layer attends to the whole prompt.
        """
        shape, reached = self.shape, self.efficiency
        layers, hidden = len(shape.layers), shape.hidden
        pair_flops, token_flops = (
            sum(values) / layers
            for values in zip(*((layer.pair_flops, layer.flops_per_token) for layer in shape.layers), strict=True)
        )
        return ReuseCosts(
            layers=layers, hidden=hidden, query_groups=2 * layers * hidden * shape.value_bytes / shape.bytes_per_token,
            value_bytes=shape.value_bytes, flops_per_second=self.hardware.flops_per_second * reached.matmul,
            load_bytes_per_second=self.load_bytes_per_second(tier),
            attention_factor=pair_flops / 2 / hidden * reached.matmul / reached.attention,
            dense_factor=token_flops / hidden**2,
        )  # fmt: skip

    # ---------------------------------------------------------------- where it begins to pay

    def saved_seconds(self, hit_tokens: Any, *, tier: str = "memory", new_tokens: int = 1) -> Any:
        """Seconds of TTFT that a hit saves before so many new tokens; negative where loading costs more."""
        total = np.asarray(hit_tokens) + new_tokens
        return _plain(self.ttft_seconds(total, 0) - self.ttft_seconds(total, hit_tokens, tier=tier))

    def break_even_tokens(self, tier: str = "memory", *, new_tokens: int = 1, overhead_s: float = 0.0,
                          longest: int = 1 << 20) -> int | None:  # fmt: skip
        """The shortest hit from which on reuse saves time; None if none up to `longest` does.

        Args:
            tier: Where the hit is loaded from.
            new_tokens: Tokens after the hit, computed either way.
            overhead_s: What looking up and connecting cost besides.
            longest: Where to stop.
        """

        return _first_paying(
            lambda hits: self.saved_seconds(hits, tier=tier, new_tokens=new_tokens) - overhead_s, longest
        )

    def break_even_prompt_tokens(self, hit_share: float, tier: str = "memory", *, longest: int = 1 << 20) -> int | None:
        """The shortest prompt from which on finding this share of it saves time; None if none up to `longest` does."""

        def saved(tokens: np.ndarray) -> Any:
            hits = np.floor(hit_share * tokens)
            return self.ttft_seconds(tokens) - self.ttft_seconds(tokens, hits, tier=tier)

        return _first_paying(saved, longest)

    def break_even_bandwidth(self, hit_tokens: int, *, new_tokens: int = 1, latency_s: float = 0.0) -> float | None:
        """Bytes/s below which loading a hit takes longer than computing it; None if the latency alone does."""
        total = hit_tokens + new_tokens
        saved = self.prefill_seconds(0, total) - self.prefill_seconds(hit_tokens, total) - latency_s
        return self.shape.kv_bytes(hit_tokens) / saved if saved > 0 else None

    # ---------------------------------------------------------------- room and money

    def kv_memory_bytes(self) -> float:
        """Bytes of the device's memory left for KV beside the weights; 0 where they do not fit."""
        return max(0.0, self.hardware.memory_bytes * self.kv_memory_share - self.shape.weight_bytes)

    def concurrent_requests(self, tokens: int) -> int:
        """Requests of so many tokens, prompt and answer, whose KV fits beside the weights."""
        return int(self.kv_memory_bytes() // self.shape.kv_bytes(tokens))

    def dollars_per_million_tokens(self, prompt_tokens: int, hit_share: float = 0.0, *, tier: str = "memory",
                                   overlapped: bool = False) -> float:  # fmt: skip
        """Dollars of a million prompt tokens, at the hardware's price an hour, one prompt after the other.

        Args:
            prompt_tokens: Length of each prompt.
            hit_share: Of each prompt's tokens, found in the tier.
            tier: Where.
            overlapped: The device computes other requests while it loads; otherwise it waits.
        """
        if not 0 <= hit_share <= 1:
            raise InvalidInputError(f"hit_share is {hit_share}; it is a share from 0 to 1")
        hit = min(int(hit_share * prompt_tokens), prompt_tokens - 1)
        busy = self.prefill_seconds(hit, prompt_tokens) + (0.0 if overlapped else self.load_seconds(hit, tier))
        return busy / prompt_tokens * MILLION * self.hardware.dollars_per_hour / 3600


def cost_model(model: Any = "llama-3-8b", hardware: Any = "h100", *, kv_dtype: str = "auto",
               efficiency: Efficiency = Efficiency()) -> CostModel:  # fmt: skip
    """A cost model by names.

    Args:
        model: A preset of `cost_models.MODELS`, a local Hugging Face config, or a `KVShape`.
        hardware: A preset of `hardware.HARDWARE`, several as "4xh100", or a `Hardware`.
        kv_dtype: Of the stored KV; "fp8" halves it.
        efficiency: Assumed, or from a calibration.
    """
    return CostModel(resolve_shape(model, kv_dtype=kv_dtype), resolve_hardware(hardware), efficiency)


def predict(*, model: Any = "llama-3-8b", hardware: Any = "h100", tier: str = "memory", prompt_tokens: int = 8192,
            hit_share: float = 0.9, kv_dtype: str = "auto", bytes_per_second: float | None = None
            ) -> dict[str, float | int | None]:  # fmt: skip
    """Everything about one setting in one row, for a study of kind "model" and for tables.

    Returns:
        ttft_s, ttft_cold_s, speedup, load_s, kv_bytes, break_even_tokens, break_even_bytes_per_second,
        concurrent_requests, dollars_per_million_tokens and the same without reuse.
    """
    costs = cost_model(model, hardware, kv_dtype=kv_dtype)
    if bytes_per_second:
        costs = costs.with_bandwidth(tier, bytes_per_second)
    hit = min(int(hit_share * prompt_tokens), prompt_tokens - 1)
    cold, warm = costs.ttft_seconds(prompt_tokens), costs.ttft_seconds(prompt_tokens, hit, tier=tier)
    return {
        "ttft_s": warm, "ttft_cold_s": cold, "speedup": cold / warm, "load_s": costs.load_seconds(hit, tier),
        "kv_bytes": costs.shape.kv_bytes(prompt_tokens),
        "break_even_tokens": costs.break_even_tokens(tier, new_tokens=prompt_tokens - hit),
        "break_even_bytes_per_second": costs.break_even_bandwidth(hit, new_tokens=prompt_tokens - hit) if hit else None,
        "concurrent_requests": costs.concurrent_requests(prompt_tokens),
        "dollars_per_million_tokens": costs.dollars_per_million_tokens(prompt_tokens, hit_share, tier=tier),
        "dollars_per_million_tokens_cold": costs.dollars_per_million_tokens(prompt_tokens),
    }  # fmt: skip


def _first_paying(saved: Callable[[np.ndarray], Any], longest: int) -> int | None:
    """The least number from which on, as far as a grid of 400 lengths shows, `saved` stays above 0."""

    def pays(tokens: Any) -> np.ndarray:
        return np.asarray(saved(np.asarray(tokens, np.float64))) > 0

    grid = np.unique(np.geomspace(1, longest, 400).astype(np.int64))
    losing = np.flatnonzero(~pays(grid))
    if not len(losing):
        return 1
    if losing[-1] == len(grid) - 1:
        return None
    low, high = int(grid[losing[-1]]), int(grid[losing[-1] + 1])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _plain(value: Any) -> Any:
    return float(value) if np.ndim(value) == 0 else value
