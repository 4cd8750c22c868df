"""CacheExplorer: what an engine holds, how each prompt met it, and what happened last."""

import threading
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import polars as pl

from experiments.cache_state import CacheState, plot_prefix_tree, plot_prompt, read_events, tiers_text
from experiments.runs import Run
from experiments.units import share_text
from experiments.widgets import markup
from experiments.widgets.live_chart import LiveChart
from workbench.errors import InvalidInputError, UnknownNameError
from workbench.events import Event, Totals

__all__ = ["CacheExplorer"]

_LAST_EVENTS = 12
_FOLLOW_SECONDS = 0.5
_ABOUT = "Everything here is computed from the engine's events."


class CacheExplorer(widgets.VBox):
    """A panel over a live engine, a run or a frame of events.

    Args:
        source: A `CacheEngine`, a `Run`, the file of an engine in another process (`events_path`), or events as
            `workbench.events.events_frame` makes them.
        arm: Of a run with several arms that have events; the first by default.
    """

    def __init__(self, source: Any, *, arm: str | None = None):
        self._source, self._arm = source, arm
        self._events_seen = -1
        self._following = threading.Event()
        self.state = CacheState(self._events())
        self._request = widgets.Dropdown(description="Request", layout={"width": "320px"})
        self._refresh = widgets.Button(description="Refresh", tooltip="Read the events again")
        still = not (hasattr(source, "record") or isinstance(source, Path))
        self._follow = widgets.ToggleButton(description="Follow", tooltip="Read the events again twice a second",
                                            disabled=still)  # fmt: skip
        self._summary, self._stream = (widgets.HTML(layout={"width": "100%"}) for _ in range(2))
        self.prompt_chart, self.tree_chart = LiveChart(alt="chunks of a prompt"), LiveChart(alt="prefix tree")
        self._request.observe(lambda _: self._draw_prompt(), "value")
        self._refresh.on_click(lambda _: self.refresh())
        self._follow.observe(lambda change: self._set_following(change["new"]), "value")
        row = widgets.Box((self._request, self._refresh, self._follow), layout={"flex_flow": "row wrap"})
        head = widgets.HTML(markup.heading("Cache explorer", _ABOUT, kind="measured"))
        super().__init__(
            (head, self._summary, row, self.prompt_chart, self.tree_chart, self._stream), layout={"width": "100%"}
        )
        self.refresh()

    def refresh(self) -> "CacheExplorer":
        """Read the events again and redraw what changed."""
        events = self._events()
        if events.height == self._events_seen:
            return self
        self._events_seen = events.height
        self.state = CacheState(events)
        self._summary.value = self._summary_html(events)
        self._stream.value = markup.table(_last_events(events), caption="Last events", rows=_LAST_EVENTS)
        shown, names = self._request.value, self.state.requests
        self._request.options = names
        if names:
            self._request.value = shown if shown in names else names[-1]
        self._draw_prompt()
        tree = self.state.tree()
        self.tree_chart.show(
            plot_prefix_tree(tree), alt=f"Prefix tree of {tree.height} chunks; {tiers_text(self.state.tiers())}"
        )
        return self

    def figure(self, request: str | None = None) -> go.Figure:
        """The chunks of a request, the last by default, as a plain figure."""
        chosen = request if request is not None else next(reversed(self.state.requests), "")
        return plot_prompt(self.state.prompt(chosen), chosen)

    def tree_figure(self) -> go.Figure:
        """The prefix tree as a plain figure."""
        return plot_prefix_tree(self.state.tree())

    def close(self) -> None:
        """Stop following and take the panel away."""
        self._following.clear()
        super().close()

    def _events(self) -> pl.DataFrame:
        if isinstance(self._source, pl.DataFrame):
            return self._source
        if isinstance(self._source, Run):
            return _events_of_arm(self._source.events, self._arm)
        if isinstance(self._source, Path):
            return read_events(self._source)
        if hasattr(self._source, "record"):
            return self._source.record.frame()
        raise InvalidInputError(f"a CacheExplorer takes an engine, a run, a file of events or a frame of events, "
                                f"got {type(self._source).__name__}")  # fmt: skip

    def _draw_prompt(self) -> None:
        request = self._request.value or ""
        prompt = self.state.prompt(request)
        hits = prompt.filter(pl.col("outcome") == "hit").height
        self.prompt_chart.show(
            plot_prompt(prompt, request), alt=f"Request {request}: {hits} of {prompt.height} chunks hit"
        )

    def _summary_html(self, events: pl.DataFrame) -> str:
        totals = Totals()
        for fields in events.select(Event._fields).iter_rows():
            totals.add(Event(*fields))
        rates = totals.hit_rates()
        words = (
            f"Hit rate by tokens {share_text(rates['hit_rate'])}, by chunks {share_text(rates['hit_rate_by_chunks'])}, "
            f"by requests {share_text(rates['hit_rate_by_requests'])}; {tiers_text(self.state.tiers())}; "
            f"{totals.count('evict'):,} evictions"
        )
        return f'<div role="status">{markup.quiet(words)}</div>'

    def _set_following(self, follow: bool) -> None:
        if not follow:
            self._following.clear()
        elif not self._following.is_set():
            self._following.set()
            threading.Thread(target=self._watch, name="kvworkbench-follow", daemon=True).start()

    def _watch(self) -> None:
        pause = threading.Event()
        while self._following.is_set() and getattr(self._source, "is_open", True):
            self.refresh()
            pause.wait(_FOLLOW_SECONDS)
        self._follow.value = False  # the engine was closed


def _events_of_arm(events: pl.DataFrame, arm: str | None) -> pl.DataFrame:
    arms = events["arm"].unique(maintain_order=True).to_list()
    if arm is None:
        arm = arms[0] if arms else None
    elif arm not in arms:
        raise UnknownNameError("arm with events", arm, arms)
    return events.filter(pl.col("arm") == arm).drop("arm")


def _last_events(events: pl.DataFrame) -> pl.DataFrame:
    last = events.tail(_LAST_EVENTS).reverse()
    return last.select(
        "kind", "tier", "request", pl.col("key").str.head(12), "start", "tokens", "nbytes", "seconds", "reason"
    )
