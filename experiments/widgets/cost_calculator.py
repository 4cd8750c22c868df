"""CostCalculator: does reuse pay for this model on this machine? The break-even moves with the sliders."""

import math
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import polars as pl

from experiments.cost import CostModel, cost_model
from experiments.cost_models import MODELS
from experiments.hardware import HARDWARE, TIERS
from experiments.plots.break_even import break_even_curve, plot_break_even
from experiments.units import bytes_text, seconds_text, share_text, times_text
from experiments.widgets import markup
from experiments.widgets.live_chart import LiveChart

__all__ = ["CostCalculator"]

_ABOUT = "A roofline and the bytes to load: one request alone, no queue. Prices and efficiencies are assumptions."
_WIDE = {"width": "430px"}
_STYLE = {"description_width": "120px"}
_GIGA = 1e9
_KV_DTYPES = ("auto", "fp8", "int4")


class CostCalculator(widgets.VBox):
    """A panel over the cost model.

    Args:
        model: A preset, a local Hugging Face config or a `KVShape`.
        hardware: A preset, several as "4xh100", or a `Hardware`.
        costs: A calibrated cost model, which then stands for model and hardware.
        tier: Where a hit is loaded from.
        prompt_tokens, hit_share: The request that the figures are of.
    """

    def __init__(self, model: Any = "llama-3-8b", hardware: Any = "h100", *, costs: CostModel | None = None,
                 tier: str = "memory", prompt_tokens: int = 8192, hit_share: float = 0.9):  # fmt: skip
        self._given = costs
        self._own_choices = {str(getattr(spec, "name", spec)): spec for spec in (model, hardware)}
        self._make_controls(model, hardware, tier, prompt_tokens, hit_share)
        self.chart = LiveChart(alt="time to first token against prompt length")
        self._summary = widgets.HTML(layout={"width": "100%"})
        wrap = widgets.Layout(flex_flow="row wrap", width="100%")
        choices = widgets.Box((widgets.VBox((self._model, self._hardware, self._dtype)),
                               widgets.VBox((self._prompt, self._share, self._tier, self._bandwidth))),
                              layout=wrap)  # fmt: skip
        head = widgets.HTML(markup.heading("Cost calculator", _ABOUT, kind="modelled"))
        super().__init__((head, choices, self._summary, self.chart), layout={"width": "100%"})
        for control in (self._model, self._hardware, self._dtype, self._tier):
            control.observe(lambda _: self._use_tiers_own_bandwidth(), "value")
        for control in (self._prompt, self._share, self._bandwidth):
            control.observe(lambda _: self._draw(), "value")
        self._use_tiers_own_bandwidth()

    @property
    def costs(self) -> CostModel:
        """The cost model with what is chosen now."""
        found = self._given
        if found is None:
            model, hardware = (
                self._own_choices.get(name, name) for name in (str(self._model.value), str(self._hardware.value))
            )
            found = cost_model(model, hardware, kv_dtype=str(self._dtype.value))
        return found.with_bandwidth(self._tier_name, self._bandwidth.value * _GIGA)

    def table(self) -> pl.DataFrame:
        """What the panel says, as a frame: one row, with its units in the names."""
        costs, prompt, share, tier = self.costs, int(self._prompt.value), self._share.value, self._tier_name
        hit = min(int(share * prompt), prompt - 1)
        cold, warm = costs.ttft_seconds(prompt), costs.ttft_seconds(prompt, hit, tier=tier)
        need = costs.break_even_bandwidth(hit, new_tokens=prompt - hit) if hit else None
        return pl.DataFrame({
            "ttft_cold_s": cold, "ttft_s": warm, "speedup": cold / warm, "load_s": costs.load_seconds(hit, tier),
            "kv_bytes": costs.shape.kv_bytes(prompt),
            "break_even_tokens": costs.break_even_prompt_tokens(share, tier),
            "break_even_bytes_per_second": need,
            "concurrent_requests": costs.concurrent_requests(prompt),
            "dollars_per_million_tokens": costs.dollars_per_million_tokens(prompt, share, tier=tier),
            "dollars_per_million_tokens_cold": costs.dollars_per_million_tokens(prompt),
        })  # fmt: skip

    def figure(self, *, template: str = "light") -> go.Figure:
        """The chart as a plain figure."""
        longest = max(4096, 2 * int(self._prompt.value))
        data = break_even_curve(self.costs, tiers=[self._tier_name], hit_share=self._share.value, longest=longest)
        return plot_break_even(data, template=template, badge=self.costs.source)

    # ---------------------------------------------------------------- the panel

    @property
    def _tier_name(self) -> str:
        return str(self._tier.value)

    def _make_controls(self, model: Any, hardware: Any, tier: str, prompt_tokens: int, hit_share: float) -> None:
        fixed = self._given is not None
        tiers = self._given.tiers if self._given is not None else TIERS
        chosen = [str(getattr(spec, "name", spec)) for spec in (model, hardware)]
        if self._given is not None:
            chosen = [self._given.shape.name, self._given.hardware.name]
        self._model = widgets.Dropdown(options=list(dict.fromkeys([chosen[0], *MODELS])), value=chosen[0],
                                       description="Model", disabled=fixed, layout=_WIDE, style=_STYLE)  # fmt: skip
        self._hardware = widgets.Dropdown(options=list(dict.fromkeys([chosen[1], *HARDWARE])), value=chosen[1],
                                          description="Hardware", disabled=fixed, layout=_WIDE,
                                          style=_STYLE)  # fmt: skip
        self._dtype = widgets.Dropdown(options=_KV_DTYPES, description="KV dtype", disabled=fixed, layout=_WIDE,
                                       style=_STYLE)  # fmt: skip
        self._tier = widgets.Dropdown(options=[(speed.name, name) for name, speed in tiers.items()], value=tier,
                                      description="Hits come from", layout=_WIDE, style=_STYLE)  # fmt: skip
        self._prompt = widgets.FloatLogSlider(prompt_tokens, base=2, min=6, max=20, step=0.25, readout_format=",.0f",
                                              description="Prompt (tokens)", layout=_WIDE, style=_STYLE)  # fmt: skip
        self._share = widgets.FloatSlider(hit_share, min=0, max=1, step=0.01, readout_format=".0%",
                                          description="Reused share", layout=_WIDE, style=_STYLE)  # fmt: skip
        self._bandwidth = widgets.FloatLogSlider(10, base=10, min=-3, max=3, step=0.02, readout_format=".3g",
                                                 description="Tier (GB/s)", layout=_WIDE, style=_STYLE)  # fmt: skip

    def _use_tiers_own_bandwidth(self) -> None:
        """Another machine or tier: the slider goes to what its datasheet gives."""
        if self._given is not None:
            own = self._given.load_bytes_per_second(self._tier_name)
        else:
            hardware = self._own_choices.get(str(self._hardware.value), str(self._hardware.value))
            own = cost_model("llama-3-8b", hardware).load_bytes_per_second(self._tier_name)
        before = self._bandwidth.value
        self._bandwidth.value = min(max(own / _GIGA, 1e-3), 1e3)
        if self._bandwidth.value == before:
            self._draw()

    def _draw(self) -> None:
        row = self.table().row(0, named=True)
        self._summary.value = f'<div role="status">{markup.quiet(_sentence(row))}</div>'
        self.chart.show(self.figure(), alt=f"Time to first token against prompt length. {_sentence(row)}")


def _sentence(row: dict[str, Any]) -> str:
    """The panel's figures in words."""
    first = row["break_even_tokens"]
    pays = f"Reuse pays from prompts of {first:,} tokens on" if first else "Reuse does not pay at any length"
    need = row["break_even_bytes_per_second"]
    speed = f"; at this length a tier must give {need / _GIGA:.3g} GB/s" if need and math.isfinite(need) else ""
    saved = 1 - row["dollars_per_million_tokens"] / row["dollars_per_million_tokens_cold"]
    change = f"{share_text(abs(saved))} {'saved' if saved >= 0 else 'more'}"
    return (
        f"{pays}{speed}. TTFT {seconds_text(row['ttft_cold_s'])} without, {seconds_text(row['ttft_s'])} with reuse: "
        f"{times_text(row['speedup'])} times as fast; loading takes {seconds_text(row['load_s'])}. KV "
        f"{bytes_text(row['kv_bytes'])} a request, room for {row['concurrent_requests']:,} at once. "
        f"${row['dollars_per_million_tokens_cold']:.4f} a million prompt tokens without, "
        f"${row['dollars_per_million_tokens']:.4f} with: {change}."
    )
