"""The panels in a real JupyterLab, driven by a real Chromium: `pytest -m browser`.

Screenshots stay in build/screenshots.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from synthetic_run import synthetic_run

from experiments.export import export
from experiments.lab import free_port, lab_command, lab_environment
from experiments.notebook_files import notebook_sources

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TOKEN = "for-this-test-only"
SHOTS = Path(__file__).parent.parent / "build" / "screenshots"
CELL = """
from experiments.widgets import PolicyLab
from workbench.policies import policy

@policy
class TwoHit:
    fields = dict(uses="i4")
    def touch(self, c):
        self.uses[c] += 1
    def score(self, c):
        return float(min(self.uses[c], 2) * 1000000 + self.request - self.depth[c])

lab = PolicyLab(TwoHit, seeds=3)
lab
"""
BROKEN_CELL = """
@policy
class Broken:
    def on_insert(self, c): pass
    def on_hit(self, c): pass
    def evict(self): return 7

broken = PolicyLab(Broken)
broken
"""
RUN_CELLS = (
    """
from pathlib import Path
from experiments.runs import Run
from experiments.widgets import CacheExplorer, ExplainCard, RunBrowser
RunBrowser("runs")
""",
    """ExplainCard("runs/20260101-cramped", arm="memory")""",
    """lab.figure()""",
    """CacheExplorer(Run(Path("runs/20260101-cramped")), arm="memory")""",
)

SWEEP_CELL = """
from pathlib import Path
from experiments.study import Study
from experiments.widgets import SweepPanel

study = Study("chunks", kind="replay", repeats=6, runs="runs",
              space={"chunk_tokens": [64, 96, 128, 256, 512], "policy": ["lru", "s3fifo", "arc", "optimal"]},
              fixed={"trace": "chat", "trace.sessions": 6000, "capacity_tokens": 150000})
panel = SweepPanel(study)
panel
"""
ATTACH_CELL = """
from experiments.study import list_studies
from experiments.widgets import SweepPanel

SweepPanel.attach(list_studies("runs")[-1].folder)
"""
SERVING_CELL = """
from experiments.study import Study
from experiments.widgets import SweepPanel

SweepPanel(Study("real", kind="serving", space={"arm": ["none", "cache"], "codec": ["raw", "int8"]},
                 fixed={"model": "smollm2", "workload": "long_document", "workload.document_tokens": 800}, runs="runs"))
"""

CHARTS_CELL = """
import threading, time
import ipywidgets as widgets
import plotly.graph_objects as go
from experiments.widgets import LiveChart

charts = [LiveChart(alt=f"chart {n}") for n in range(4)]
rounds = iter(range(1, 100))
def update(number):
    for step in range(1, 61):
        for chart in charts:
            chart.show(go.Figure(go.Scatter(y=list(range(step + 1)), mode="markers")), alt=f"{number}: {step} steps")
        time.sleep(0.02)
button = widgets.Button(description="Begin")
button.on_click(lambda _: threading.Thread(target=update, args=(next(rounds),), daemon=True).start())
widgets.VBox([button, widgets.GridBox(charts, layout={"grid_template_columns": "1fr 1fr"})])
"""


def write_notebook(path, *cells) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A JupyterLab over two notebooks and two runs; yields a function from a notebook's name to its address."""
    tmp_path = tmp_path_factory.mktemp("lab")
    synthetic_run(memory_chunks=20).save(tmp_path / "work" / "runs" / "20260101-cramped")
    synthetic_run(seed=1).save(tmp_path / "work" / "runs" / "20260102-roomy")
    write_notebook(tmp_path / "work" / "panel.ipynb", CELL, BROKEN_CELL, *RUN_CELLS)
    write_notebook(tmp_path / "work" / "charts.ipynb", CHARTS_CELL)
    write_notebook(tmp_path / "work" / "sweep" / "sweep.ipynb", SWEEP_CELL, ATTACH_CELL, SERVING_CELL)
    port = free_port()
    command = lab_command(port=port, browser=False, folder=tmp_path / "work", token=TOKEN, app_in_browser=True)
    environment = {**lab_environment(), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
                   "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings")}  # fmt: skip
    with (tmp_path / "lab.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for_port(port, process)
            address = lambda name: f"http://127.0.0.1:{port}/lab/tree/{name}.ipynb?token={TOKEN}&reset"  # noqa: E731
            address.folder = tmp_path / "work"
            yield address
        finally:
            process.terminate()
            process.wait(20)


def wait_for_port(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start; exit code {process.poll()}")


@pytest.fixture
def page():
    """A page that may reach this machine only, with a list of what it asked elsewhere and of its console errors."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        page = browser.new_page(viewport={"width": 1500, "height": 1300})
        page.foreign, page.faults, page.received = [], [], []
        page.on("request", lambda r: page.foreign.append(r.url) if is_foreign(r.url) else None)
        page.on("console", lambda m: page.faults.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: page.faults.append(str(e)))
        page.on("websocket", lambda s: s.on("framereceived", lambda data: page.received.append(len(data))))
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.shot = lambda name: page.screenshot(path=str(SHOTS / f"{name}.png"))
        yield page
        browser.close()


def machine_is_busy() -> bool:
    """Others compute here, so that times say little."""
    return os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)


def is_foreign(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob", "file") and parts.hostname != "127.0.0.1"


def run_all(page) -> None:
    page.wait_for_selector("#jp-main-statusbar >> text=| Idle", timeout=60_000)  # the toolbar says so too early
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")


def run_cell(page, number: int):
    """Run one cell; returns it."""
    cell = page.locator(".jp-Cell").nth(number)
    cell.scroll_into_view_if_needed()
    cell.locator(".jp-InputArea-editor").click()
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell'); }")
    return cell


def lines_drawn(page) -> int:
    return page.locator(".jp-Cell").first.locator(".scatterlayer .trace").count()


def points_drawn(page) -> int:
    return page.locator(".jp-Cell").first.locator(".scatterlayer .points path").count()


def errors_of_cells(page) -> list[str]:
    return page.locator(
        ".jp-OutputArea-output[data-mime-type*='stderr'], .jp-OutputArea-output[data-mime-type*='error']"
    ).all_inner_texts()


def wait_until(page, ready, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return
        assert not (said := errors_of_cells(page)), said
        page.wait_for_timeout(50)
    page.shot("too-late")
    raise AssertionError(f"{what}: not within {seconds} s; console said {page.faults}")


def test_a_panel_is_drawn_while_it_runs_and_survives_reload_and_theme(server, page):
    page.goto(server("panel"))
    run_all(page)
    run = page.locator(".jupyter-button:has-text('Run')").first
    wait_until(page, run.is_visible, "the panel")
    run.click()  # at once: a chart that is not drawn yet must not lose what comes
    wait_until(page, lambda: points_drawn(page) > 0, "first points")
    first = points_drawn(page)
    wait_until(page, lambda: page.locator("text=42 of 42 points, done").count(), "all points")
    wait_until(page, lambda: points_drawn(page) > first, "the plot changes")
    assert lines_drawn(page) == 6, "own policy, three rivals, the future, the ceiling"
    assert page.locator("[role=img][aria-label*='TwoHit against lru']").count() == 1
    page.shot("light")

    broken = page.locator(".jp-Cell").nth(1)
    broken.locator(".jupyter-button:has-text('Run')").first.click()
    wait_until(page, lambda: page.locator("[role=alert]:has-text('returned 7')").count(), "the box of a broken policy")
    broken.scroll_into_view_if_needed()
    page.shot("broken")

    for number, name in enumerate(("runs", "explain", "figure", "explorer"), start=2):
        cell = page.locator(".jp-Cell").nth(number)
        cell.scroll_into_view_if_needed()
        cell.locator(".jp-OutputArea-output").first.wait_for()
        page.wait_for_timeout(500)
        cell.locator(".jp-OutputArea").screenshot(path=SHOTS / f"{name}.png")
    assert page.locator(".jp-Cell").nth(5).locator("[role=img] .slice").count() > 20, "the prefix tree"
    page.locator(".jp-Cell").first.scroll_into_view_if_needed()

    page.evaluate("() => { window.jupyterapp.commands.execute('docmanager:save'); }")
    page.wait_for_timeout(1000)
    page.reload()
    wait_until(page, lambda: lines_drawn(page) == 6, "the plot after a reload")
    page.evaluate("() => { window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'}); }")
    wait_until(page, lambda: page.evaluate("document.body.dataset.jpThemeLight") == "false", "the dark theme")
    wait_until(page, lambda: ink(page) == "rgb(230, 233, 238)", "ink of the dark theme")
    page.wait_for_timeout(300)
    page.shot("dark")

    buttons = page.locator(".modebar-btn").evaluate_all("all => all.map(button => button.dataset.title ?? '')")
    assert any("Download" in title for title in buttons) and not any(
        "hare" in title or "loud" in title for title in buttons
    )
    assert page.locator("text=/Would you like to (get notified|receive)/").count() == 0
    assert page.foreign == []
    assert page.faults == []
    assert sum(page.received) < 16e6, "two page loads, plotly.js once each"


def test_a_sweep_is_stopped_resumed_and_outlives_its_kernel(server, page):
    page.goto(server("sweep/sweep"))
    page.wait_for_selector("#jp-main-statusbar >> text=| Idle", timeout=60_000)
    cell = run_cell(page, 0)
    button = lambda name: cell.locator(f".jupyter-button:has-text('{name}')").first  # noqa: E731
    status = cell.locator("[role=status]").first
    points = cell.locator(".scatterlayer .points path")
    wait_until(page, button("Run").is_visible, "the panel")
    button("Run").click()  # at once
    wait_until(page, lambda: points.count() > 0, "first points")
    first = points.count()
    wait_until(page, lambda: points.count() > first, "the plot changes")

    button("Stop").click()
    wait_until(page, lambda: "stopped" in status.inner_text(), "the stop", seconds=10)
    folder = next((server.folder / "sweep" / "runs").glob("*-study-chunks-*"))
    done = len(list((folder / "cells").glob("*.json")))
    asked, ended = (folder / "stop").stat().st_mtime, json.loads((folder / "status.json").read_text())["updated"]
    print(f"ended {ended - asked:.2f} s after the stop")
    assert 0 < done < 120 and ended - asked < (3.0 if machine_is_busy() else 1.0)
    page.shot("sweep-stopped")

    button("Resume").click()
    wait_until(page, lambda: len(list((folder / "cells").glob("*.json"))) > done, "more cells")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:restart-kernel'); }")
    page.locator(".jp-Dialog button:has-text('Restart')").click()
    page.wait_for_selector("#jp-main-statusbar >> text=| Idle", timeout=60_000)
    page.locator(".jp-Cell").first.locator(".jp-InputArea-editor").click()
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:clear-cell-output'); }")
    page.faults.clear()  # the first panel's widgets have no kernel behind them any more
    cell = run_cell(page, 1)
    status = cell.locator("[role=status]").first
    wait_until(page, status.is_visible, "the panel of the study that goes on")
    wait_until(page, lambda: "120 of 120 cells, 24 failed, done" in status.inner_text(), "the end", seconds=120)
    rows = [json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")]
    assert len({row["key"] for row in rows}) == len(rows) == 120, "whole, and no cell twice"
    assert sum("96" in row["error"] for row in rows) == 24
    wait_until(page, lambda: cell.locator(".scatterlayer .points path").count() == 16, "every point")

    failed = cell.locator("summary:has-text('failed')").first
    failed.click()
    assert "a chunk is a whole number of them" in failed.locator("..").inner_text()
    page.shot("sweep-failed-cell")
    cell.locator("button:has-text('CLI')").click()
    assert cell.locator("pre:visible").last.inner_text().startswith("kvworkbench sweep - <<'STUDY'")
    cell.locator("button[aria-label='Copy the CLI text']").click()
    wait_until(page, lambda: cell.locator("text=/^(copied|selected)/").count(), "what became of the copy")
    cell.locator("th button:has-text('hit rate')").first.click()
    assert cell.locator("th[aria-sort=ascending]").count() == 1

    page.evaluate("() => { window.jupyterapp.commands.execute('docmanager:save'); }")
    page.wait_for_timeout(1000)
    page.reload()
    cell = page.locator(".jp-Cell").nth(1)
    wait_until(page, lambda: cell.locator(".scatterlayer .points path").count() == 16, "the plot after a reload")
    assert nameless_controls(cell) == [] and too_wide(cell) == []
    for theme, color in (("Light", "rgb(28, 32, 36)"), ("Dark", "rgb(230, 233, 238)")):  # whatever a test before chose
        page.evaluate("name => { window.jupyterapp.commands.execute('apputils:change-theme', {theme: name}); }",
                      f"JupyterLab {theme}")  # fmt: skip
        wait_until(page, lambda color=color: ink(page) == color, f"ink of the theme {theme}")
        page.wait_for_timeout(300)
        cell.locator(".jp-OutputArea").screenshot(path=SHOTS / f"sweep-{theme.lower()}.png")
    real = run_cell(page, 2)
    wait_until(page, lambda: real.locator("select").count() > 5, "the panel for real vLLM")
    assert nameless_controls(real) == [] and too_wide(real) == []
    real.locator(".jp-OutputArea").screenshot(path=SHOTS / "sweep-serving.png")
    assert page.foreign == [] and page.faults == []


def nameless_controls(cell) -> list[str]:
    """Controls that a screen reader could not name."""
    return cell.locator("button, input, select, textarea, [role=img]").evaluate_all("""all => all.filter(e =>
        !(e.getAttribute('aria-label') || e.title || e.textContent.trim() || (e.labels && e.labels.length) ||
          e.closest('.modebar'))).map(e => e.outerHTML.slice(0, 200))""")


def too_wide(cell) -> list[str]:
    """Parts of a panel that reach beyond the cell's right edge."""
    return cell.locator(".jp-OutputArea-output").first.evaluate("""output => {
      const edge = output.getBoundingClientRect().right + 1;
      return [...output.querySelectorAll('button, input, select, label, .js-plotly-plot, .lm-Widget')]
        .filter(e => e.offsetWidth && e.getBoundingClientRect().right > edge).map(e => e.outerHTML.slice(0, 160));
    }""")


def test_four_charts_keep_up_and_none_is_lost_to_an_early_click(server, page):
    page.goto(server("charts"))
    run_all(page)
    button = page.locator(".jupyter-button:has-text('Begin')").first
    wait_until(page, button.is_visible, "the charts")
    received = sum(page.received)
    page.wait_for_timeout(200)
    button.click()
    frames = page.evaluate(COUNT_FRAMES)
    wait_until_drawn(page, round=1)
    print(
        f"{frames:.0f} frames a second, {sum(page.received) / 1e6:.2f} MB in all, {received / 1e6:.2f} before the click"
    )
    assert frames > (10 if machine_is_busy() else 20) and sum(page.received) < 8e6
    page.evaluate("() => { window.jupyterapp.commands.execute('docmanager:save'); }")
    page.wait_for_timeout(1000)
    for number in range(2, 6):  # with the one above, five loads of the page with a click 0.2 s after the button shows
        page.reload()
        wait_until(page, button.is_visible, "the charts")
        page.wait_for_timeout(200)
        button.click()
        wait_until_drawn(page, round=number)
    assert page.foreign == [] and page.faults == []


def wait_until_drawn(page, *, round: int) -> None:
    wait_until(page, lambda: page.locator(f"[role=img][aria-label='{round}: 60 steps']").count() == 4, "all four")
    for chart in page.locator("[role=img]").all():
        wait_until(page, lambda chart=chart: chart.locator(".points path").count() == 61, "every point of every chart")


COUNT_FRAMES = """() => new Promise(resolve => {
  const start = performance.now();
  let frames = 0;
  const next = () => {
    const seconds = (performance.now() - start) / 1000;
    ++frames && seconds < 3 ? requestAnimationFrame(next) : resolve(frames / seconds);
  };
  requestAnimationFrame(next);
})"""


def test_an_exported_notebook_opens_offline_with_its_figures(page, tmp_path):
    source = next(path for path in notebook_sources() if path.stem == "04_write_a_policy").with_suffix(".ipynb")
    target = export(source, tmp_path / "page.html")
    page.goto(target.as_uri())
    page.wait_for_selector(".js-plotly-plot .scatterlayer .trace", state="attached")
    page.shot("exported")
    assert page.locator(".js-plotly-plot").count() == 1 and target.stat().st_size < 8e6
    assert page.foreign == [] and page.faults == []


def ink(page) -> str:
    return page.evaluate("""() => {
      const tick = document.querySelector('.jp-OutputArea .xtick text');
      return tick ? getComputedStyle(tick).fill : '';
    }""")
