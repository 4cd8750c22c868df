"""The notebooks: run headless from top to bottom, and the committed files hold results and nothing else."""

import ast
import copy
import re
import shutil

import jupytext
import nbformat
import pytest

from experiments.notebook_files import FIGURE, PICTURE, notebook_sources, run_notebook, strays, strip
from experiments.provenance import provenance
from workbench.errors import InvalidInputError

SOURCES = notebook_sources()
RUN_ELSEWHERE = {"00_quickstart"}  # by test_demo.py, in every CI run
SERVES = re.compile(r"kind=.serving|\bcompare\(|\bshare\(|\bEngineProcess\b|\brun_claim|run_live\(")  # starts real vLLM
RUN_HERE = [source for source in SOURCES if source.stem not in RUN_ELSEWHERE]
COMMITTED = [source.with_suffix(".ipynb") for source in SOURCES]


def named(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def code_of(path):
    return "\n".join(cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code")


def with_marks(path):
    """Real engines take minutes: such a notebook runs with the slow tests."""
    marks = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)] if SERVES.search(code_of(path)) else []
    return pytest.param(path, marks=marks, id=path.stem)


@pytest.mark.parametrize("path", map(with_marks, RUN_HERE))
def test_runs_from_top_to_bottom(path):
    if SERVES.search(code_of(path)):
        pytest.importorskip("vllm", reason="vLLM is not installed")
    if "redis" in code_of(path) and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    notebook = run_notebook(path, seconds=200)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(FIGURE in output.get("data", {}) for output in outputs), "a result is a plain figure"
    kept = strays(strip(notebook))
    assert set(kept) <= {"no figure as PNG", "a figure without PNG"}, "pictures are drawn when a notebook is committed"


@named(SOURCES)
def test_is_short_and_asks_something(path):
    cells = jupytext.read(path).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert len(code) < 10 and max(source.count("\n") + 1 for source in code) <= 18
    functions = [node for source in code for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in functions} <= {"touch", "score"}, "only the reader's own policy is written out"
    assert re.match(r"# .*\?", text) and "## Result" in text and "## What would change my mind" in text
    assert re.search(r"\*\*(measured|simulated)\*\*", text)


@named(COMMITTED)
def test_committed_file_holds_results_and_nothing_else(path):
    notebook = nbformat.read(path, 4)
    assert strays(notebook) == []
    shown = sum(len(cell.get("outputs", [])) for cell in notebook.cells)
    assert shown >= 3, "text, a figure and a table"


@named(COMMITTED)
def test_committed_file_is_paired_with_its_source(path):
    ours, source = nbformat.read(path, 4), jupytext.read(path.with_suffix(".py"))
    assert [cell.source for cell in ours.cells] == [cell.source for cell in source.cells]


def test_the_check_for_strays_can_fail():
    clean = nbformat.read(COMMITTED[0], 4)
    spoilt = copy.deepcopy(clean)
    spoilt.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}
    code = [cell for cell in spoilt.cells if cell.cell_type == "code"]
    code[0].execution_count = 3
    code[0].outputs = [nbformat.v4.new_output("stream", name="stderr", text="a warning")]
    code[1].outputs = [nbformat.v4.new_output("error", ename="E", evalue="e", traceback=[])]
    for cell in code:
        for output in cell.outputs:
            output.get("data", {}).pop(PICTURE, None)
    found = " ".join(strays(spoilt))
    for what in ("state of widgets", "execution count", "stderr", "an error", "no figure as PNG", "without PNG"):
        assert what in found
    assert strays(strip(clean)) == []


def test_every_notebook_is_run_somewhere():
    assert {source.stem for source in RUN_HERE} | RUN_ELSEWHERE == {source.stem for source in SOURCES}
    assert [path.stem for path in sorted(SOURCES[0].parent.glob("*.ipynb"))] == [source.stem for source in SOURCES]


def test_provenance_is_one_line_and_knows_two_kinds():
    line = provenance("simulated")
    assert re.fullmatch(r"simulated · .+ · kvworkbench .+ · \d{4}-\d\d-\d\d", line)
    with pytest.raises(InvalidInputError, match="measured or simulated"):
        provenance("guessed")
