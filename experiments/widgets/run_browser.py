"""RunBrowser: the stored runs, two of them side by side, and a file to take along."""

from pathlib import Path

import ipywidgets as widgets
import polars as pl

from experiments.export import RUN_FORMATS, export_run
from experiments.paired import paired_difference, plot_paired_difference, settings_difference
from experiments.runs import RUNS_FOLDER, Run, list_runs
from experiments.units import seconds_text
from experiments.widgets import markup
from experiments.widgets.background import Background
from experiments.widgets.live_chart import LiveChart

__all__ = ["RunBrowser", "runs_frame"]

_ABOUT = "Choose two runs to see what was set differently and what that did to the same requests."


class RunBrowser(widgets.VBox):
    """A panel over a run store.

    Args:
        folder: Of the run store.
    """

    def __init__(self, folder: str | Path = RUNS_FOLDER):
        self.folder = Path(folder)
        self._work = Background(on_error=self._show_error, on_end=lambda: self._set_busy(False))
        self._filter = widgets.Text(description="Filter", placeholder="model, arm, name", continuous_update=True)
        self._first = widgets.Dropdown(description="First", layout={"width": "400px"})
        self._second = widgets.Dropdown(description="Second", layout={"width": "400px"})
        self._refresh = widgets.Button(description="Refresh", tooltip="Look for new runs")
        self._format = widgets.Dropdown(
            options=RUN_FORMATS,
            description="Export first as",
            style={"description_width": "initial"},
            layout={"width": "220px"},
        )
        self._export = widgets.Button(description="Export", tooltip="Write a file beside the run's folder")
        self._table, self._difference, self._message = (widgets.HTML(layout={"width": "100%"}) for _ in range(3))
        self.chart = LiveChart(plot_paired_difference(pl.DataFrame({"n": []})), alt="no two runs are chosen")
        self._filter.observe(lambda _: self._list(), "value")
        self._first.observe(lambda _: self._show_difference(), "value")
        self._second.observe(lambda _: self._show_difference(), "value")
        self._refresh.on_click(lambda _: self.refresh())
        self._export.on_click(lambda _: self._start_export())
        wrap = widgets.Layout(flex_flow="row wrap", width="100%")
        rows = (
            widgets.Box((self._filter, self._refresh), layout=wrap),
            self._table,
            widgets.Box((self._first, self._second), layout=wrap),
            self.chart,
            self._difference,
            widgets.Box((self._format, self._export), layout=wrap),
            self._message,
        )
        super().__init__(
            (widgets.HTML(markup.heading("Runs", _ABOUT, kind="measured")), *rows), layout={"width": "100%"}
        )
        self.refresh()

    def refresh(self) -> "RunBrowser":
        """Read the store again."""
        self._runs = {run.run_id: run for run in list_runs(self.folder)}
        self._frame = runs_frame(list(self._runs.values()))
        self._list()
        return self

    def choose(self, first: str, second: str) -> "RunBrowser":
        """Put two runs side by side, by their ids."""
        self._first.value, self._second.value = first, second
        return self

    def differences(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The settings and the measures that differ between the chosen two; see `experiments.paired`."""
        first, second = self._runs[str(self._first.value)], self._runs[str(self._second.value)]
        return settings_difference(first, second), paired_difference(first, second)

    def _list(self) -> None:
        words = self._filter.value.lower().split()
        shown = (
            self._frame.filter(
                pl.concat_str(pl.all().cast(pl.String), separator=" ", ignore_nulls=True)
                .str.to_lowercase()
                .str.contains(word, literal=True)
                for word in words
            )
            if words
            else self._frame
        )
        names = shown["run"].to_list()
        where = (
            f"no run in {self.folder}; `kvworkbench demo --quick` makes one"
            if not self._runs
            else "no run with these words"
        )
        self._table.value = markup.table(shown, rows=12) if names else markup.quiet(where)
        chosen = self._first.value, self._second.value
        newest, before = 0, min(1, len(names) - 1)  # the newest against the one before
        for menu, old, fallback in ((self._first, chosen[0], before), (self._second, chosen[1], newest)):
            menu.options = names
            if names:
                menu.value = old if old in names else names[fallback]
        self._show_difference()

    def _show_difference(self) -> None:
        if self._first.value not in self._runs or self._second.value not in self._runs:
            return
        if self._first.value == self._second.value:
            self._difference.value = markup.quiet("The same run twice: choose another second one.")
            return
        settings, measures = self.differences()
        alt = "; ".join(f"{row['arm']} {row['phase']}: {row['verdict']}" for row in measures.iter_rows(named=True))
        self.chart.show(plot_paired_difference(measures), alt=f"TTFT of the second run over the first. {alt}")
        readable = measures.with_columns(
            pl.col("first_median", "second_median").map_elements(seconds_text, pl.String),
            pl.col("ratio", "low", "high").round_sig_figs(3),
        )
        same = markup.quiet("No setting differs.")
        self._difference.value = markup.table(readable, caption="TTFT, same requests") + (
            same if settings.is_empty() else markup.table(settings, caption="Settings that differ")
        )

    def _start_export(self) -> None:
        if run := self._runs.get(str(self._first.value)):
            self._set_busy(True)
            self._work.start(lambda: self._write(run, str(self._format.value)))

    def _write(self, run: Run, suffix: str) -> None:
        path = export_run(run, run.folder.parent / f"{run.run_id}{suffix}")
        self._message.value = markup.quiet(f"Written: {path.resolve()}")

    def _set_busy(self, busy: bool) -> None:
        self._export.disabled = busy

    def _show_error(self, trace: str) -> None:
        self._message.value = markup.error_box("Not exported", [("error", trace.strip().splitlines()[-1])], trace=trace)


def runs_frame(runs: list[Run]) -> pl.DataFrame:
    """run, time, model, workload, arms, requests, failed: one row a run, the newest first."""
    rows = [_row(run) for run in reversed(runs)]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


_SCHEMA = {
    "run": pl.String,
    "time": pl.String,
    "model": pl.String,
    "workload": pl.String,
    "arms": pl.String,
    "requests": pl.Int64,
    "failed": pl.Int64,
}


def _row(run: Run) -> tuple[str | int | None, ...]:
    environment, requests = run.environment, run.requests
    arms = ", ".join(requests["arm"].unique(maintain_order=True))
    failed = requests.filter(pl.col("error").fill_null("") != "").height
    model, workload = environment.get("model") or {}, environment.get("workload") or {}
    return (
        run.run_id,
        str(environment.get("time") or "")[:16].replace("T", " "),
        model.get("name"),
        workload.get("description"),
        arms,
        requests["request_id"].n_unique(),
        failed,
    )
