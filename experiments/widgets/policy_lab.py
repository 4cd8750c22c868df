"""PolicyLab: try a policy of your own against others, and watch its curve grow.

lab = PolicyLab(MyPolicy)         # display it, press Run
lab.run().verdict()               # the same without a front end
"""

import hashlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import polars as pl

from experiments.live_policy import beside_replay, live_study
from experiments.plots._style import no_data_figure
from experiments.policy_comparison import PolicyComparison, available_traces
from experiments.policy_curves import OPTIMUM
from experiments.policy_source import module_text
from experiments.runs import RUNS_FOLDER
from experiments.study import Study
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
_LIVE_SECONDS = 0.3  # between two looks at a run under vLLM
_FUTURE_ONLY = ("belady", "optimal")  # drawn anyway, as the bound
_VLLM_IS_THERE = importlib.util.find_spec("vllm") is not None
_ABOUT = "The class is checked against the contract of a policy, then replayed at every capacity beside the others."


class PolicyLab(widgets.VBox):
    """A panel around `PolicyComparison`.

    Args:
        policy: A class decorated with @policy, an instance or a name.
        rivals, trace, seeds, capacities, bytes_per_token: As `PolicyComparison` takes them.
        runs: Folder of the run store, for runs under real vLLM.
    """

    def __init__(self, policy: Any, *, rivals: Sequence[str] = ("lru", "arc", "s3fifo"), trace: str | Trace = "chat",
                 seeds: int = 5, capacities: int = 7, bytes_per_token: int = 131072,
                 runs: str | Path = RUNS_FOLDER):  # fmt: skip
        self._policy, self._runs = resolve_policy(policy), Path(runs)
        self._given = trace if isinstance(trace, Trace) else None
        self._settings = {"capacities": capacities, "bytes_per_token": bytes_per_token}
        self._drawn_at = 0.0
        self.comparison = PolicyComparison(self._policy, rivals=rivals, trace=trace, seeds=seeds, **self._settings)
        self._work = Background(on_error=self._show_error, on_end=self._finish)
        self._make_controls(rivals, trace, seeds)
        self.chart = LiveChart(_empty("press Run"), alt="hit-rate curves, no point yet")
        self._status, self._verdict, self._message, self._live_rows = (
            widgets.HTML(layout={"width": "100%"}) for _ in range(4)
        )
        title = f"Policy lab: {form_of(self._policy).name}"
        children = (widgets.HTML(markup.heading(title, _ABOUT, kind="simulated")), self._choices, self._buttons,
                    self._status, self.chart, self._verdict, self._message, self._live_rows)  # fmt: skip
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
        path = Path(folder) / f"{cls.__name__.lower()}.py"
        path.write_text(module_text(cls, path.name))
        return path

    def live_study(self) -> Study:
        """Its policy and the first rival under real vLLM, not started yet; see `experiments.live_policy`.

        The class is written into the run store, where the engine's process imports it; a built-in one goes by name.

        Raises:
            InvalidInputError: Python does not know the class's source, or the object has settings of its own.
        """
        cls = type(self._policy)
        if vars(self._policy) != vars(cls()):
            raise InvalidInputError(f"{self._policy!r} has settings of its own; write them into the class, of which "
                                    "the engine's process makes its object")  # fmt: skip
        package, _, name = cls.__module__.rpartition(".")
        spec = name if package == "workbench.policies" else self._written(cls)
        return live_study(spec, rival=next(iter(self.comparison.rivals)), runs=self._runs)

    def run_live(self) -> pl.DataFrame:
        """Run that study to its end; returns measured hits beside simulated ones, see `beside_replay`."""
        study = self.live_study()
        study.start()
        self._follow_live(study)
        return beside_replay(study)

    def _written(self, cls: type) -> str:
        """The class in a file of the run store that is named after its text: a study that exists keeps its own."""
        digest = hashlib.sha256(module_text(cls, "").encode()).hexdigest()[:8]
        path = (self._runs / "policies" / f"{cls.__name__.lower()}_{digest}.py").resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module_text(cls, path.name))
        return f"{path}:{cls.__name__}"

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
        self._live = widgets.Button(description="Run live under vLLM", layout={"width": "auto"},
                                    tooltip="Serve prompts with it, in a process of its own")  # fmt: skip
        self._check.disabled = self._live.disabled = not _VLLM_IS_THERE
        self._export = widgets.Button(description="Export", tooltip="Write the class into a file of its own")
        self._run.on_click(lambda _: self._run_as_chosen())
        self._stop.on_click(lambda _: self.stop())
        self._check.on_click(lambda _: self._start(self._show_check))
        self._live.on_click(lambda _: self._start(self._show_live))
        self._export.on_click(lambda _: self._show_export())
        wrap = widgets.Layout(flex_flow="row wrap", width="100%")
        left = widgets.VBox((self._trace, self._seeds))
        self._choices = widgets.Box((left, self._rivals), layout=wrap)
        self._buttons = widgets.Box((self._run, self._stop, self._check, self._live, self._export), layout=wrap)

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
        self._check.disabled = self._live.disabled = running or not _VLLM_IS_THERE

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

    def _show_live(self) -> None:
        study = self.live_study()
        study.start()
        self._follow_live(study)
        again = f"SweepPanel.attach({str(study.folder)!r})"
        failed = [row["error"] for row in study.rows() if row["error"]]
        self._message.value = markup.quiet(f"{'; '.join(failed) or 'Under real vLLM: done.'} Every figure: {again}")

    def _follow_live(self, study: Study) -> None:
        """Show a study's rows until it is over; a click on Stop stops it."""
        shown = -1
        while (status := study.status()).state == "running":
            if self._work.stopping:
                study.stop()
            words = f"of {status.total} policies served; {status.current or 'starting vLLM, about half a minute'}"
            self._message.value = markup.quiet(f"{status.done} {words}")
            shown = self._show_live_rows(study, shown)
            time.sleep(_LIVE_SECONDS)
        self._show_live_rows(study, shown)

    def _show_live_rows(self, study: Study, shown: int) -> int:
        done = len(study.rows())
        if done and done != shown:
            title = "The live engine under real vLLM beside the replay of the same prompts"
            self._live_rows.value = markup.table(beside_replay(study), caption=title)
        return done

    def _show_export(self) -> None:
        try:
            path = self.export()
        except (InvalidInputError, OSError) as error:
            self._message.value = markup.error_box("Not exported", [("why", str(error))])
            return
        name = f"{path.name}:{type(self._policy).__name__}"
        self._message.value = markup.quiet(f"Written to {path.resolve()}. In the engine and in vLLM: policy = {name!r}")


def _verdict_html(found: PolicyComparison) -> str:
    gap = f"The policy that knows the future is {-found.difference(OPTIMUM).mean:.1f} points ahead of it."
    return (
        f'<div style="border-left:5px solid #0072B2;padding:6px 12px;line-height:1.5"><b>{escape(found.verdict())}'
        f"</b><br>{markup.quiet(gap)} {markup.quiet(found.orphaned_text())}</div>"
    )


def _empty(why: str) -> go.Figure:
    return no_data_figure("Hit rate against capacity", why, template="light", badge="simulated")
