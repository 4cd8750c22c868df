"""SweepPanel: a study to choose, start, watch, stop and take up again.

    SweepPanel(study)                        # display it, press Run
    SweepPanel.attach("runs/...-study-...")  # after a restart of the kernel, or for a study of another process

    choices -> Study -> a process of its own -> the study's folder -> read here five times a second -> chart and rows

The panel keeps nothing: what it shows is read from the folder. So a study goes on while the kernel restarts, and a
terminal or another notebook can watch, stop and resume it.
"""

import threading
import traceback
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import polars as pl

from experiments.runs import RUNS_FOLDER
from experiments.study import Study, StudyStatus
from experiments.study.curves import plot_sweep, sweep_axes, sweep_data, sweep_measures
from experiments.widgets import markup
from experiments.widgets.copy_text import CopyText
from experiments.widgets.live_chart import LiveChart
from experiments.widgets.row_table import RowTable
from experiments.widgets.sweep_form import KINDS, SweepForm
from workbench.errors import CacheError

__all__ = ["SweepPanel"]

_POLL_SECONDS, _IDLE_SECONDS = 0.2, 1.0
_ABOUT = "Runs in a process of its own, which outlives this kernel; all that is shown is read from the study's folder."
_DEFAULTS: dict[str, dict[str, list[Any]]] = {
    "replay": {"trace": ["chat"], "policy": ["lru", "s3fifo", "optimal"], "chunk_tokens": [64, 128, 256, 512],
               "capacity_tokens": [65536]},
    "serving": {"model": ["smollm2"], "workload": ["long_document"], "arm": ["none", "cache"], "tier": ["memory"],
                "chunk_tokens": [128, 256], "workload.groups": [2], "workload.document_tokens": [800],
                "workload.max_tokens": [8]},
    "model": {"model": ["llama-3-8b"], "hardware": ["l4", "h100"], "tier": ["memory", "disk"],
              "prompt_tokens": [512, 1024, 2048, 4096, 8192, 16384], "hit_share": [0.9]},
}  # fmt: skip


class SweepPanel(widgets.VBox):
    """A panel over a study.

    Args:
        study: The one to begin with; its settings fill the choices. A small replay by default.
        runs: Where studies that are made here go, unless `study` says another place.
    """

    def __init__(self, study: Study | None = None, *, runs: str | Path = RUNS_FOLDER):
        self.study = study if study is not None else _study("replay", _DEFAULTS["replay"], repeats=3, runs=Path(runs))
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._seen: tuple[Any, ...] = ()
        self._head, self._status, self._message, self._again = (widgets.HTML() for _ in range(4))
        self._make_controls()
        self.chart = LiveChart(alt="no cell is finished yet")
        self.table = RowTable(caption="Cells")
        self.copy_text = CopyText({})
        copy = widgets.VBox(
            (widgets.HTML(markup.quiet("Copy this sweep as")), self.copy_text), layout={"width": "100%"}
        )
        super().__init__(
            (self._head, self._kind, self._place, self._buttons, self._message, self._status, self.chart, self.table,
             copy, self._again),
            layout={"width": "100%"},
        )  # fmt: skip
        self._show_form()
        self.refresh()
        threading.Thread(target=self._watch, name="kvworkbench-sweep", daemon=True).start()

    @classmethod
    def attach(cls, folder: str | Path) -> "SweepPanel":
        """A panel over a study that exists: one that runs, was stopped, or is finished.

        Raises:
            InvalidInputError: The folder holds no study.
        """
        return cls(Study.open(Path(folder)))

    # ---------------------------------------------------------------- for code

    def start(self) -> "SweepPanel":
        """Begin, or take up again, in a process of its own."""
        self.study.start()
        return self.refresh()

    def run(self) -> "SweepPanel":
        """Measure every cell that has no good row yet, and return when that is done."""
        self.start().wait()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nobody runs the study any more; False when the time ran out first. An interrupt stops it."""
        try:
            status = self.study.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        self.refresh()
        return status.state != "running"

    def stop(self) -> None:
        """End within a second; finished cells stay."""
        self.study.stop()

    def frame(self) -> pl.DataFrame:
        """A row a finished cell; see `Study.frame`."""
        return self.study.frame()

    def figure(self, *, template: str = "light") -> go.Figure:
        """The points found so far as a plain figure."""
        return self._draw(self.study.frame(), template)

    def refresh(self) -> "SweepPanel":
        """Read the study's folder and redraw what changed."""
        with self._lock:
            status = self.study.status()
            self._show_status(status)
            seen = (id(self.study), status.state, status.done, status.failed, self._measure.value)
            if seen != self._seen:
                self._seen = seen
                self._show_rows(status)
        return self

    def close(self) -> None:
        """Stop watching and take the panel away; the study goes on."""
        self._closed.set()
        super().close()

    # ---------------------------------------------------------------- controls

    def _make_controls(self) -> None:
        self._kind = widgets.ToggleButtons(options=[(title, kind) for kind, title in KINDS.items()],
                                           value=self.study.kind, style={"button_width": "auto"})  # fmt: skip
        given = {name: [value] for name, value in self.study.fixed.items()} | dict(self.study.space)
        self._forms = {kind: SweepForm(kind, given if kind == self.study.kind else _DEFAULTS[kind]) for kind in KINDS}
        self._place = widgets.VBox()
        self._repeats = widgets.BoundedIntText(self.study.repeats, min=1, max=99, description="Repeats",
                                               layout={"width": "150px"})  # fmt: skip
        self._run = widgets.Button(description="Run", button_style="primary", tooltip="Begin a sweep of these choices")
        self._stop = widgets.Button(description="Stop", tooltip="End within a second; finished cells stay")
        self._resume = widgets.Button(description="Resume", tooltip="Measure the cells that are missing or failed")
        self._measure = widgets.Dropdown(options=_measures(self.study.kind), description="Shown",
                                         style={"description_width": "initial"}, layout={"width": "430px"})  # fmt: skip
        wrap = widgets.Layout(flex_flow="row wrap")
        self._buttons = widgets.Box((self._run, self._stop, self._resume, self._repeats, self._measure), layout=wrap)
        self._run.on_click(lambda _: self._try(self._run_as_chosen))
        self._stop.on_click(lambda _: self._try(self.stop))
        self._resume.on_click(lambda _: self._try(self.start))
        self._kind.observe(lambda _: self._show_form(), "value")
        self._measure.observe(lambda _: self.refresh(), "value")
        self._repeats.observe(lambda _: self._try(self._show_texts), "value")
        for form in self._forms.values():
            form.on_change(lambda: self._try(self._show_texts))

    def _show_form(self) -> None:
        """The choices of the chosen kind of study."""
        kind = str(self._kind.value)
        self._head.value = markup.heading(
            f"Sweep: {self.study.name}", _ABOUT, kind="measured" if kind == "serving" else "simulated"
        )
        self._place.children = (self._forms[kind],)
        self._try(self._show_texts)

    def _chosen(self) -> Study:
        """A study of what is chosen: the present one as long as nothing was changed."""
        form = self._forms[str(self._kind.value)]
        new = _study(form.kind, form.settings(), repeats=self._repeats.value, runs=self.study.runs, like=self.study)
        return self.study if new == self.study else new

    def _run_as_chosen(self) -> None:
        """A click on Run: a study that has rows is left as it is, and another one begun."""
        with self._lock:
            chosen = self._chosen()
            fresh = chosen is not self.study or self.study.status().state == "new"
            self.study = chosen if fresh else Study.from_yaml(chosen.to_yaml(), runs=chosen.runs)
            self.start()

    def _show_texts(self) -> None:
        chosen = self._chosen()
        self.copy_text.texts = {"Python": chosen.to_python(), "CLI": chosen.to_command(), "YAML": chosen.to_yaml()}
        self._run.tooltip = f"Begin a sweep of these choices: {chosen.total:,} cells"

    def _try(self, action: Callable[[], Any]) -> None:
        """Do what a control asks for; a mistake is shown in the panel."""
        self._message.value = ""
        try:
            action()
        except (CacheError, OSError) as error:
            self._message.value = markup.error_box("That cannot be run", [("why", str(error))])

    # ---------------------------------------------------------------- what is shown

    def _watch(self) -> None:
        """Until the panel is closed: a study may be started, stopped and resumed from elsewhere."""
        while not self._closed.is_set():
            try:
                self.refresh()
            except Exception:  # of a thread: nobody above could catch it, so the panel shows it
                trace = traceback.format_exc(limit=-6)
                self._message.value = markup.error_box("The study cannot be shown", [], trace=trace)
            running = self._seen[1:2] == ("running",)
            self._closed.wait(_POLL_SECONDS if running else _IDLE_SECONDS)

    def _show_status(self, status: StudyStatus) -> None:
        failed = f", {status.failed} failed" if status.failed else ""
        left = f", {_time_left(status.seconds_left)}" if status.state == "running" else ""
        doing = f": {status.current}" if status.current else ""
        words = f"cells{failed}, {_STATES[status.state]}{left}{doing}"
        text = markup.progress_text(status.done, status.total, words)
        if text != self._status.value:
            self._status.value = text

    def _show_rows(self, status: StudyStatus) -> None:
        running = status.state == "running"
        self._run.disabled, self._stop.disabled = running, not running
        self._resume.disabled = running or status.state == "new" or (status.done == status.total and not status.failed)
        if self._measure.options != _measures(self.study.kind):
            self._measure.options = _measures(self.study.kind)
        frame = self.study.frame()
        self.chart.show(self._draw(frame, "light"), alt=f"{self.study.name}: {status.done} of {status.total} cells")
        label = [*self.study.space, *(["repeat"] if self.study.repeats > 1 else [])]
        self.table.show(_rows(self.study, frame, label), key="cell", error="error", label=label)
        if status.state == "stopped" and not (self.study.folder / "stop").exists():
            said = _last_words(self.study.folder / "log.txt")
            self._message.value = markup.error_box("The process ended before the study did; Resume goes on", [],
                                                   trace=said, fold="the end of log.txt")  # fmt: skip
        if status.state != "new":
            line = f"SweepPanel.attach({str(self.study.folder)!r})"
            self._again.value = markup.quiet("After a restart of the kernel: ") + f"<code>{escape(line)}</code>"

    def _draw(self, frame: pl.DataFrame, template: str) -> go.Figure:
        kind, space = self.study.kind, {**{k: [v] for k, v in self.study.fixed.items()}, **self.study.space}
        measures = sweep_measures(kind)
        measure = next((m for m in measures if m.column == self._measure.value), measures[0])
        data = sweep_data(frame, space, measure)
        return plot_sweep(data, kind=kind, measure=measure, across=sweep_axes(space)[0], title=self.study.name,
                          template=template)  # fmt: skip


_STATES = {"new": "press Run", "running": "running", "stopped": "stopped", "finished": "done"}


def _study(
    kind: str, settings: Mapping[str, list[Any]], *, repeats: int, runs: Path, like: Study | None = None
) -> Study:
    """A study of these settings: several values are swept, one is fixed; the rest is as in another study."""
    swept = {name: values for name, values in settings.items() if len(values) > 1 or (like and name in like.space)}
    fixed = {name: values[0] for name, values in settings.items() if name not in swept}
    if not swept:
        swept, fixed = dict(settings), {}
    if like is None or like.kind != kind:
        return Study("sweep", kind=kind, space=swept, fixed=fixed, repeats=repeats, runs=runs)
    return Study(like.name, kind=kind, space=swept, fixed=fixed, repeats=repeats, search=like.search,
                 trials=like.trials, objective=like.objective, seed=like.seed, runs=runs)  # fmt: skip


def _measures(kind: str) -> tuple[tuple[str, str], ...]:
    return tuple((measure.title, measure.column) for measure in sweep_measures(kind))


def _rows(study: Study, frame: pl.DataFrame, label: list[str]) -> pl.DataFrame:
    """What the table shows of a study's frame: what was varied, what came out."""
    if frame.is_empty():
        return pl.DataFrame()
    found = [measure for measure in sweep_measures(study.kind) if measure.column in frame.columns]
    results = [(pl.col(m.column) * m.scale if m.scale != 1 else pl.col(m.column)).alias(m.short) for m in found]
    return frame.select("cell", *label, *results, pl.col("seconds").alias("took (s)"), "error")


def _last_words(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "time left not known yet"
    return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
