"""Results to take along: a notebook or a run as one page that opens anywhere, a run as Parquet, CSV or PNG.

    export("notebooks/04_write_a_policy.ipynb", "policy.html")
    export("runs/20260101-120000-demo-ab12", "demo.parquet")

A page holds plotly.js once, its figures stay interactive, and it asks nothing of any server.
"""

import html
import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import polars as pl
from nbconvert import HTMLExporter
from nbconvert.preprocessors import Preprocessor
from plotly.offline import get_plotlyjs

from experiments.runs import Run
from experiments.widgets.live_chart import PLOT_CONFIG
from workbench.errors import InvalidInputError

__all__ = ["RUN_FORMATS", "export", "export_notebook", "export_run"]

RUN_FORMATS = (".html", ".png", ".parquet", ".csv")
_PLOTLY, _WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"
_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:\">"
)
_SCRIPT = """<script>addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("script.kv-figure")) {
    const figure = JSON.parse(block.textContent);
    Plotly.newPlot(block.previousElementSibling, figure.data, figure.layout, CONFIG);
  }
});</script>"""


def export(source: str | Path, target: str | Path | None = None) -> Path:
    """Export a notebook or a run.

    Args:
        source: A notebook (.ipynb with its outputs) or a run's folder.
        target: A file; its suffix says the form. By default a page beside the source.

    Raises:
        InvalidInputError: Neither a notebook nor a run, or a form that it has not.
    """
    source = Path(source)
    if source.suffix == ".ipynb":
        return export_notebook(source, Path(target) if target else source.with_suffix(".html"))
    return export_run(Run(source), Path(target) if target else source / "report.html")


def export_notebook(source: Path, target: Path) -> Path:
    """Write a notebook's cells and outputs as one page; figures stay interactive, panels are left out.

    Raises:
        InvalidInputError: There is no such notebook, it was never run, or the target is no page.
    """
    if target.suffix != ".html":
        raise InvalidInputError(f"a notebook becomes a page: {target.name!r} must end in .html")
    if not source.is_file():
        raise InvalidInputError(f"no notebook {str(source)!r}")
    notebook = nbformat.read(source, 4)
    if not any(cell.get("outputs") for cell in notebook.cells):
        raise InvalidInputError(f"{source} holds no outputs; run it first: jupyter execute --inplace {source}")
    exporter = HTMLExporter(mathjax_url="", require_js_url="", jquery_url="", widget_renderer_url="", embed_images=True,
                            exclude_input_prompt=True, exclude_output_prompt=True)  # fmt: skip
    exporter.register_preprocessor(_InlineFigures, enabled=True)
    page, resources = exporter.from_notebook_node(notebook, {"metadata": {"name": source.stem}})
    head = _POLICY
    if resources["kv_figures"]:
        plotly = get_plotlyjs().replace("</script", "<\\/script")
        head += f"<script>{plotly}</script>{_SCRIPT.replace('CONFIG', json.dumps(PLOT_CONFIG))}"
    target.write_text(page.replace("<head>", f"<head>{head}", 1), encoding="utf-8")
    return target


def export_run(run: Run, target: Path) -> Path:
    """Write a run's report (.html), its picture (.png), or its requests (.parquet, .csv).

    Raises:
        InvalidInputError: Another suffix, or no picture could be drawn.
    """
    if target.suffix not in RUN_FORMATS:
        raise InvalidInputError(f"cannot write {target.name!r}: use {', '.join(RUN_FORMATS)}")
    if target.suffix == ".parquet":
        run.requests.write_parquet(target)
    elif target.suffix == ".csv":
        _flat(run.requests).write_csv(target)
    else:
        from experiments.report import write_report

        made = write_report(run.folder).with_suffix(target.suffix)
        if not made.exists():
            raise InvalidInputError("no picture: it needs Chromium (on Debian: apt-get install chromium)")
        if made.resolve() != target.resolve():
            shutil.copyfile(made, target)
    return target


def _flat(frame: pl.DataFrame) -> pl.DataFrame:
    """Lists as texts, for a format without lists."""
    lists = [name for name, kind in frame.schema.items() if isinstance(kind, pl.List)]
    return frame.with_columns(pl.col(name).cast(pl.List(pl.String)).list.join(" ") for name in lists)


class _InlineFigures(Preprocessor):
    """Each plotly figure becomes a place in the page with its JSON beside it; panels become a line of text."""

    def preprocess(self, nb: Any, resources: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        resources["kv_figures"] = 0
        nb.metadata.pop("widgets", None)
        for cell in nb.cells:
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if _PLOTLY in data:
                    output["data"] = {"text/html": _figure_html(data[_PLOTLY])}
                    resources["kv_figures"] += 1
                elif _WIDGET in data:
                    output["data"] = {"text/plain": "(an interactive panel: open the notebook to use it)"}
        return nb, resources


def _figure_html(figure: dict[str, Any]) -> str:
    layout = figure.get("layout", {})
    title = layout.get("title") or {}
    alt = title.get("text", "figure") if isinstance(title, dict) else str(title)
    drawn = json.dumps({"data": figure["data"], "layout": layout}).replace("<", "\\u003c")
    height = int(layout.get("height") or 450)
    return (
        f'<div role="img" aria-label="{html.escape(str(alt), quote=True)}" style="width:100%;height:{height}px"></div>'
        f'<script type="application/json" class="kv-figure">{drawn}</script>'
    )
