"""PolicyLab: try a policy of your own against others, and watch its curve grow.

lab = PolicyLab(MyPolicy)         # display it, press Run
lab.run().verdict()               # the same without a front end
"""

import ast
import importlib.util
import inspect
import textwrap
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import polars as pl

from experiments.plots._style import no_data_figure
from experiments.policy_comparison import PolicyComparison, available_traces
from experiments.policy_curves import OPTIMUM
from experiments.traces import Trace
from experiments.vllm_check import VllmCheck, check_in_vllm
from experiments.widgets import markup
from experiments.widgets.background import Background
from experiments.widgets.live_chart import LiveChart
from workbench.errors import InvalidInputError
from workbench.policies import policy_names, resolve_policy
from workbench.policies.base import form_of

__all__ = ["PolicyLab"]

_REDRAW_SECONDS = 0.1
_FUTURE_ONLY = ("belady", "optimal")  # drawn anyway, as the bound
_VLLM_IS_THERE = importlib.util.find_spec("vllm") is not None
_ABOUT = "The class is checked against the contract of a policy, then replayed at every capacity beside the others."


class PolicyLab(widgets.VBox):
    """A panel around `PolicyComparison`.

    Args:
        policy: A class decorated with @policy, an instance or a name.
        rivals, trace, seeds, capacities, bytes_per_token: As `PolicyComparison` takes them.
    """

    def __init__(self, policy: Any, *, rivals: Sequence[str] = ("lru", "arc", "s3fifo"), trace: str | Trace = "chat",
                 seeds: int = 5, capacities: int = 7, bytes_per_token: int = 131072):  # fmt: skip
        self._policy = resolve_policy(policy)
        self._given = trace if isinstance(trace, Trace) else None
        self._settings = {"capacities": capacities, "bytes_per_token": bytes_per_token}
        self._drawn_at = 0.0
        self.comparison = PolicyComparison(self._policy, rivals=rivals, trace=trace, seeds=seeds, **self._settings)
        self._work = Background(on_error=self._show_error, on_end=self._finish)
        self._make_controls(rivals, trace, seeds)
        self.chart = LiveChart(_empty("press Run"), alt="hit-rate curves, no point yet")
        self._status, self._verdict, self._message = (widgets.HTML(layout={"width": "100%"}) for _ in range(3))
        title = f"Policy lab: {form_of(self._policy).name}"
        children = (widgets.HTML(markup.heading(title, _ABOUT, kind="simulated")), self._choices, self._buttons,
                    self._status, self.chart, self._verdict, self._message)  # fmt: skip
        super().__init__(children, layout={"width": "100%"})
        self._status.value = markup.progress_text(0, 0, "press Run")

    # ---------------------------------------------------------------- for code

    def start(self) -> "PolicyLab":
        """Begin in a thread; `wait` for it or watch the panel."""
        self._start(self._measure)
        return self

    def run(self) -> "PolicyLab":
        """Find every point and return when it is done."""
        self.start().wait()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the work is over; False when the time ran out first."""
        return self._work.wait(timeout)

    def stop(self) -> None:
        """End after the current point. What was found stays."""
        self._work.stop()

    @property
    def running(self) -> bool:
        return self._work.running

    def verdict(self) -> str:
        """One sentence: how far ahead or behind, and how sure."""
        return self.comparison.verdict()

    def frame(self) -> pl.DataFrame:
        """Every value found so far; see `PolicyComparison.frame`."""
        return self.comparison.frame()

    def table(self) -> pl.DataFrame:
        """Hit rates in per cent, a row a policy, a column a capacity."""
        return self.comparison.table()

    def figure(self, *, template: str = "light") -> go.Figure:
        """The curves as a plain figure."""
        return self.comparison.figure(template=template)

    def export(self, folder: str | Path = ".") -> Path:
        """Write the class into a file of its own, which the engine and the command line take as `file.py:Class`.

        Raises:
            InvalidInputError: Python does not know the class's source.
        """
        cls = type(self._policy)
        source = _source_of(cls)
        path = Path(folder) / f"{cls.__name__.lower()}.py"
        modules = {"math.": "import math", "np.": "import numpy as np"}
        imports = [line for name, line in modules.items() if name in source]
        head = [f'"""A policy for kvworkbench: {path.name}:{cls.__name__}."""', *imports,
                f"from workbench.policies import policy\n\n__all__ = [{cls.__name__!r}]\n", source]  # fmt: skip
        path.write_text("\n\n".join(head))
        return path

    # ---------------------------------------------------------------- the panel

    def _make_controls(self, rivals: Sequence[str], trace: str | Trace, seeds: int) -> None:
        names = [trace.name] if isinstance(trace, Trace) else list(dict.fromkeys([trace, *available_traces()]))
        self._trace = widgets.Dropdown(options=names, description="Trace", disabled=self._given is not None)
        own = form_of(self._policy).name
        others = [name for name in policy_names() if name not in _FUTURE_ONLY and name != own]
        self._rivals = widgets.SelectMultiple(options=list(dict.fromkeys([*rivals, *others])), value=tuple(rivals),
                                              rows=5, description="Against")  # fmt: skip
        self._seeds = widgets.BoundedIntText(seeds, min=1, max=30, description="Seeds", layout={"width": "160px"})
        self._run = widgets.Button(description="Run", button_style="primary", tooltip="Check and replay the policy")
        self._stop = widgets.Button(description="Stop", disabled=True, tooltip="End after the current point")
        self._check = widgets.Button(description="Check in vLLM's manager", layout={"width": "auto"},
                                     tooltip="Replay through vLLM's own offloading manager")  # fmt: skip
        self._check.disabled = not _VLLM_IS_THERE
        self._export = widgets.Button(description="Export", tooltip="Write the class into a file of its own")
        self._run.on_click(lambda _: self._run_as_chosen())
        self._stop.on_click(lambda _: self.stop())
        self._check.on_click(lambda _: self._start(self._show_check))
        self._export.on_click(lambda _: self._show_export())
        wrap = widgets.Layout(flex_flow="row wrap", width="100%")
        left = widgets.VBox((self._trace, self._seeds))
        self._choices = widgets.Box((left, self._rivals), layout=wrap)
        self._buttons = widgets.Box((self._run, self._stop, self._check, self._export), layout=wrap)

    def _run_as_chosen(self) -> None:
        """A click on Run: the choices of the panel become the comparison."""
        if self.running:
            return
        trace = self._given if self._given is not None else str(self._trace.value)
        rivals = self._rivals.value or ("lru",)
        self.comparison = PolicyComparison(self._policy, rivals=rivals, trace=trace, seeds=self._seeds.value,
                                           **self._settings)  # fmt: skip
        self.start()

    def _measure(self) -> None:
        self._message.value = self._verdict.value = ""
        self._status.value = markup.progress_text(0, 0, "checking the contract, compiling")
        for name, capacity in self.comparison.steps():
            self._draw(f"points; {name} at {capacity:,} chunks")
            if self._work.stopping:
                return

    def _draw(self, what: str, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._drawn_at < _REDRAW_SECONDS:
            return
        self._drawn_at = time.monotonic()
        found = self.comparison
        self._status.value = markup.progress_text(found.done, found.total, what)
        self.chart.show(found.figure(), alt=f"Hit rate against capacity. {found.verdict()}")

    def _finish(self) -> None:
        found = self.comparison
        if found.broken:
            broken = found.broken
            self._status.value = ""
            self.chart.show(_empty(f"{broken.name} does not keep the contract"), alt="no curve: the policy is broken")
            self._verdict.value = markup.error_box(
                f"{broken.name} breaks the contract of a policy",
                [("where", broken.where), ("what", broken.what), ("contract", broken.CONTRACT)], trace=broken.trace,
            )  # fmt: skip
        elif not found.frame().is_empty():
            self._draw("points, stopped" if self._work.stopping else "points, done", now=True)
            self._verdict.value = _verdict_html(found)
        self._set_running(False)

    def _set_running(self, running: bool) -> None:
        self._run.disabled, self._stop.disabled = running, not running
        self._check.disabled = running or not _VLLM_IS_THERE

    def _show_error(self, trace: str) -> None:
        self._message.value = markup.error_box(
            "It did not work", [("error", trace.strip().splitlines()[-1])], trace=trace
        )

    def check_in_vllm(self) -> VllmCheck:
        """Replay the first trace in vLLM's own manager, at the middle one of the capacities that hold every request."""
        trace = self.comparison.traces[0]
        enough = [c for c in self.comparison.capacities_chunks if c > trace.lengths.max()]
        capacity = enough[len(enough) // 2] if enough else int(trace.lengths.max()) + 1
        return check_in_vllm(self._policy, trace, capacity_chunks=capacity)

    def _start(self, work: Callable[[], None]) -> None:
        if not self._work.running:
            self._set_running(True)  # before the thread, which sets it back at its end
            self._work.start(work)

    def _show_check(self) -> None:
        self._message.value = markup.quiet("Importing vLLM and replaying; this takes about half a minute.")
        self._message.value = markup.quiet(self.check_in_vllm().text)

    def _show_export(self) -> None:
        try:
            path = self.export()
        except (InvalidInputError, OSError) as error:
            self._message.value = markup.error_box("Not exported", [("why", str(error))])
            return
        name = f"{path.name}:{type(self._policy).__name__}"
        self._message.value = markup.quiet(f"Written to {path.resolve()}. In the engine and in vLLM: policy = {name!r}")


def _source_of(cls: type) -> str:
    """The text of a class, also of one from a notebook's cell, which Python finds by its methods only."""
    try:
        method = next(f for f in vars(cls).values() if inspect.isfunction(f) and f.__module__ == cls.__module__)
        lines, _ = inspect.findsource(method)
    except (StopIteration, OSError, TypeError) as error:
        raise InvalidInputError(f"the source of {cls.__name__} is not known") from error
    first = method.__code__.co_firstlineno
    for node in ast.walk(ast.parse("".join(lines))):
        if (
            isinstance(node, ast.ClassDef)
            and node.name == cls.__name__
            and node.lineno <= first <= (node.end_lineno or 0)
        ):
            start = min(part.lineno for part in (node, *node.decorator_list))
            return textwrap.dedent("".join(lines[start - 1 : node.end_lineno]))
    raise InvalidInputError(f"the source of {cls.__name__} is not known: no class statement around its methods")


def _verdict_html(found: PolicyComparison) -> str:
    gap = f"The policy that knows the future is {-found.difference(OPTIMUM).mean:.1f} points ahead of it."
    return (
        f'<div style="border-left:5px solid #0072B2;padding:6px 12px;line-height:1.5"><b>{escape(found.verdict())}'
        f"</b><br>{markup.quiet(gap)} {markup.quiet(found.orphaned_text())}</div>"
    )


def _empty(why: str) -> go.Figure:
    return no_data_figure("Hit rate against capacity", why, template="light", badge="simulated")
