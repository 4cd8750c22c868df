"""report.png: the main figures under the headline, drawn by one headless browser and put together."""

import tempfile
import textwrap
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from PIL import Image

from experiments.plots import plot_run
from experiments.plots._style import label_text, new_figure
from experiments.runs import Run
from experiments.summary import summary_table
from experiments.summary_text import headline

__all__ = ["write_picture"]

_COLUMNS = (("ttft", "hit_rates"), ("speedup", "ttft_parts"))  # the figures of each column, top to bottom
_COLUMN_PX = 960
_LINE_CHARACTERS = 190  # of the headline, at its size, across all columns


def write_picture(run: Run, badge: str) -> str:
    """Draw the main figures of a run into report.png. Returns why there is none, or "" if there is.

    Args:
        run: The run.
        badge: How the figures came about, for the line under each title.
    """
    from choreographer.errors import DevtoolsProtocolError
    from kaleido.errors import ChromeNotFoundError, KaleidoError

    figures = {name: plot_run(name, run.requests, run.events, badge=badge) for names in _COLUMNS for name in names}
    figures["title"] = _title(run)
    try:
        images = _drawn(figures)
    except ChromeNotFoundError:
        return "no Chromium or Chrome is installed (on Debian: apt-get install chromium); then write the report anew."
    except (KaleidoError, DevtoolsProtocolError, RuntimeError, OSError) as error:
        return f"the browser could not draw it ({type(error).__name__}: {error.args[0] if error.args else ''})."
    _joined(images).save(run.folder / "report.png", optimize=True)
    return ""


def _title(run: Run) -> go.Figure:
    words = headline(summary_table(run.requests, run.events))
    lines = "<br>".join(label_text(line) for line in textwrap.wrap(words, _LINE_CHARACTERS))
    figure = new_figure("KV reuse in vLLM", lines, template="light", height=130)
    figure.update_layout(title_font_size=24, title_subtitle_font_size=17)
    return figure.update_xaxes(visible=False).update_yaxes(visible=False)


def _drawn(figures: dict[str, go.Figure]) -> dict[str, Image.Image]:
    """Every figure as an image; without MathJax, which the browser would fetch from elsewhere."""
    from kaleido import write_fig_from_object_sync

    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{name}.png") for name in figures}
        orders = [{"fig": figure, "path": paths[name], "opts": _size(name, figure)} for name, figure in figures.items()]
        write_fig_from_object_sync(orders, kopts={"mathjax": False}, cancel_on_error=True)
        return {name: Image.open(path).convert("RGB") for name, path in paths.items()}


def _size(name: str, figure: go.Figure) -> dict[str, Any]:
    columns = len(_COLUMNS) if name == "title" else 1
    return {"width": _COLUMN_PX * columns, "height": figure["layout"]["height"]}


def _joined(images: dict[str, Image.Image]) -> Image.Image:
    """The title, and the columns below it."""
    top = images["title"].height
    heights = [sum(images[name].height for name in names) for names in _COLUMNS]
    canvas = Image.new("RGB", (_COLUMN_PX * len(_COLUMNS), top + max(heights)), "#ffffff")
    canvas.paste(images["title"], (0, 0))
    for column, names in enumerate(_COLUMNS):
        y = top
        for name in names:
            canvas.paste(images[name], (column * _COLUMN_PX, y))
            y += images[name].height
    return canvas
