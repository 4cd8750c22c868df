"""A run as one page that opens anywhere: report.html, self-contained and interactive, and report.png beside it.

run folder -> summary, plots, method, answers, environment -> report.html (script inside, no request) + report.png
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from rich.console import Console

from experiments.plots import plot_run
from experiments.plots._style import TEMPLATES
from experiments.report.answers import compared_answers
from experiments.report.page import PAGE
from experiments.report.picture import write_picture
from experiments.report.texts import (
    FIGURES,
    TABLE_NOTE,
    answers_note,
    environment_tables,
    machine_badge,
    method_notes,
    what_was_run,
)
from experiments.runs import Run
from experiments.summary import summary_table
from experiments.summary_text import headline, render_summary, sooner_text, summary_sheets
from experiments.units import seconds_text

__all__ = ["machine_badge", "print_summary", "write_report"]

# Beyond so many requests the marks carry no texts, so that the page stays small.
_REQUESTS_WITH_TEXTS = 3000
_ANSWERS_SHOWN = 100


def write_report(run_folder: str | Path) -> Path:
    """Write report.html and, if a Chromium or Chrome is installed, report.png into a run's folder.

    Returns:
        The page's path. Without a picture the page says why at its end.

    Raises:
        InvalidInputError: The folder holds no run.
    """
    run = Run(Path(run_folder))
    fault = write_picture(run, machine_badge(run.environment))
    page = Environment(autoescape=True).from_string(PAGE).render(_contents(run, fault))
    path = run.folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def print_summary(run_folder: str | Path, console: Console | None = None) -> None:
    """Print a run's tables and its headline."""
    run = Run(Path(run_folder))
    table = summary_table(run.requests, run.events)
    console = console if console is not None else Console()
    console.print(render_summary(table))
    console.print(headline(table), markup=False)


def _contents(run: Run, picture_fault: str) -> dict[str, Any]:
    """What the page's template takes; strings are escaped there, scripts and JSON are not."""
    requests, environment = run.requests, run.environment
    table = summary_table(requests, run.events)
    answers = compared_answers(requests)
    return {
        "title": "KV reuse in vLLM",
        "run_id": run.run_id,
        "time": environment.get("time"),
        "what": what_was_run(requests, environment),
        "headline": headline(table),
        "cards": list(_cards(table)),
        "sheets": summary_sheets(table),
        "table_note": TABLE_NOTE,
        "figures": [_figure(name, run) for name in FIGURES],
        "notes": list(method_notes(run.events, environment)),
        "answers_note": answers_note(len(answers), sum(a["differs"] for a in answers), _ANSWERS_SHOWN),
        "questions": answers[:_ANSWERS_SHOWN],
        "environment": list(environment_tables(environment)),
        "picture_note": f"There is no report.png: {picture_fault}" if picture_fault else "",
        "templates": _json({name: template.to_plotly_json() for name, template in TEMPLATES.items()}),
        "plotly_script": Markup(get_plotlyjs().replace("</script", "<\\/script")),
    }


def _cards(table: pl.DataFrame) -> Iterator[dict[str, str]]:
    """The times to first token of repeated questions, one card an arm."""
    for row in table.filter(pl.col("phase") == "again").iter_rows(named=True):
        if row["ttft_median_s"] is None:
            continue
        against = [] if row["speedup_median"] is None else [sooner_text(row["speedup_median"])]
        yield {
            "name": row["arm_label"],
            "value": seconds_text(row["ttft_median_s"]),
            "note": ", ".join([*against, f"n\u00a0=\u00a0{row['n']}"]),
        }


def _figure(name: str, run: Run) -> dict[str, Any]:
    figure = plot_run(name, run.requests, run.events, badge=machine_badge(run.environment))
    if run.requests.height > _REQUESTS_WITH_TEXTS:
        figure.update_traces(hovertext=None, hoverinfo="x+y")
    drawn = json.loads(str(figure.to_json()))
    layout = drawn["layout"]
    del layout["template"]  # the page sets it by the reader's colour scheme
    return {
        "name": name,
        "json": _json(drawn),
        "caption": FIGURES[name],
        "alt": f"{layout['title']['text']}. {layout['title']['subtitle']['text']}",
        "height": layout["height"],
    }


def _json(value: Any) -> Markup:
    """JSON that can stand in a script element: without a character that could end it."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))
