"""Notebooks as files: run one headless, keep what a reader wants to see of it, and nothing else.

    notebooks/*.py (percent format, the source) -> run -> pictures beside the figures -> stripped -> notebooks/*.ipynb

`python -m experiments.notebook_files [names]` runs the named ones, or all, and writes the .ipynb files anew. They keep
results: text, tables and each figure as PNG. Panels, their state, counters and times are left out.
"""

import base64
import copy
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import plotly.graph_objects as go
from nbclient import NotebookClient
from traitlets.config import Config

from experiments.lab import NOTEBOOKS, lab_environment
from workbench.errors import CacheError, InvalidInputError

__all__ = ["add_pictures", "notebook_sources", "run_notebook", "strays", "strip", "write_notebook"]

FIGURE, PICTURE, PANEL = "application/vnd.plotly.v1+json", "image/png", "application/vnd.jupyter.widget-view+json"
LARGEST_FIGURE = 200_000  # bytes of JSON; beyond, only the picture is kept
LARGEST_NOTEBOOK = 1_000_000  # bytes
_WIDTH = 960


def notebook_sources() -> list[Path]:
    """The notebooks in percent format, in order."""
    return sorted(NOTEBOOKS.glob("[0-9]*.py"))


def run_notebook(source: Path, *, size: str = "quick", seconds: int = 600) -> Any:
    """Run a notebook from top to bottom in a kernel of its own.

    Args:
        source: In percent format, or .ipynb.
        size: KVWORKBENCH_SIZE for the kernel: "quick" or "full".
        seconds: The most for one cell.

    Returns:
        The notebook with its outputs, without the state of widgets.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    notebook = jupytext.read(source)
    with tempfile.TemporaryDirectory(prefix="kvw-") as folder:
        ipc = {"KernelManager": {"transport": "ipc"}, "ConnectionFileMixin": {"ip": str(Path(folder, "kernel"))}}
        client = NotebookClient(notebook, timeout=seconds, kernel_name="python3", store_widget_state=False,
                                resources={"metadata": {"path": str(source.parent)}}, config=Config(ipc))  # fmt: skip
        settings = {"KVWORKBENCH_SIZE": size, "KVWORKBENCH_RUNS": folder}  # no run of the reader's own
        client.execute(env={**lab_environment(), **settings})
    return notebook


def add_pictures(notebook: Any) -> None:
    """Draw every figure of the notebook as PNG, in one browser, beside its JSON; large JSON is then left out.

    Raises:
        kaleido.errors.ChromeNotFoundError: No browser is installed.
    """
    from kaleido import write_fig_from_object_sync

    bundles = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if FIGURE in output.get("data", {})
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.png") for number in range(len(bundles))]
        orders = [_order(bundle[FIGURE], path) for bundle, path in zip(bundles, paths, strict=True)]
        if orders:
            write_fig_from_object_sync(orders, kopts={"mathjax": False}, cancel_on_error=True)
        for bundle, path in zip(bundles, paths, strict=True):
            bundle[PICTURE] = base64.b64encode(path.read_bytes()).decode()
            if len(json.dumps(bundle[FIGURE])) > LARGEST_FIGURE:
                del bundle[FIGURE]


def strip(notebook: Any) -> Any:
    """A copy without panels, their state, warnings, counters, times and cell ids that change from run to run."""
    kept = copy.deepcopy(notebook)
    kept.metadata.pop("widgets", None)
    for number, cell in enumerate(kept.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.outputs = [o for o in cell.outputs if PANEL not in o.get("data", {}) and o.get("name") != "stderr"]
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = None
    return kept


def strays(notebook: Any) -> list[str]:
    """What a committed notebook should not hold, and what it lacks; empty if it is as it should be."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in outputs]
    text = nbformat.writes(notebook)
    checks = {
        "state of widgets": "widgets" in notebook.metadata or any(PANEL in bundle for bundle in data),
        "an error": any(output.output_type == "error" for output in outputs),
        "something on stderr": any(output.get("name") == "stderr" for output in outputs),
        "an execution count": any(cell.get("execution_count") for cell in notebook.cells),
        "no figure as PNG": not any(PICTURE in bundle for bundle in data),
        "a figure without PNG": any(FIGURE in bundle and PICTURE not in bundle for bundle in data),
        "no provenance line": not any("kvworkbench" in o.get("text", "") and "·" in o.get("text", "") for o in outputs),
        "a path of this machine": str(NOTEBOOKS.parent) in text or str(Path.home()) + "/" in text,
        f"more than {LARGEST_NOTEBOOK:,} bytes": len(text.encode()) > LARGEST_NOTEBOOK,
    }
    return [what for what, found in checks.items() if found]


def write_notebook(source: Path, *, size: str = "quick") -> Path:
    """Run a notebook and write its .ipynb beside it, stripped and with pictures.

    Raises:
        InvalidInputError: The result holds what it should not; it is not written.
    """
    notebook = run_notebook(source, size=size)
    add_pictures(notebook)
    kept = strip(notebook)
    if found := strays(kept):
        raise InvalidInputError(f"{source.name} holds {'; '.join(found)}")
    target = source.with_suffix(".ipynb")
    nbformat.write(kept, target)
    return target


def _order(figure: dict[str, Any], path: Path) -> dict[str, Any]:
    drawn = go.Figure(data=figure["data"], layout=figure["layout"])
    return {"fig": drawn, "path": path, "opts": {"width": _WIDTH, "height": drawn.layout.height or 450}}


def main(names: list[str]) -> None:
    """Write the .ipynb of the named notebooks, or of all."""
    for source in notebook_sources():
        if not names or source.stem in names:
            print(f"{write_notebook(source, size=os.environ.get('KVWORKBENCH_SIZE', 'quick'))}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CacheError as error:
        sys.exit(str(error))
