"""The panels in a real JupyterLab, driven by a real Chromium: `pytest -m browser`.

Screenshots stay in the temporary folder of the test.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
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


CHARTS_CELL = """
import threading, time
import ipywidgets as widgets
import plotly.graph_objects as go
from experiments.widgets import LiveChart

charts = [LiveChart(alt=f"chart {n}") for n in range(4)]
def update():
    for step in range(1, 61):
        for chart in charts:
            chart.show(go.Figure(go.Scatter(y=list(range(step + 1)), mode="markers")), alt=f"{step} steps")
        time.sleep(0.02)
button = widgets.Button(description="Begin")
button.on_click(lambda _: threading.Thread(target=update, daemon=True).start())
widgets.VBox([button, widgets.GridBox(charts, layout={"grid_template_columns": "1fr 1fr"})])
"""


def write_notebook(path, *cells) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A JupyterLab over two notebooks and two runs; yields a function from a notebook's name to its address."""
    tmp_path = tmp_path_factory.mktemp("lab")
    synthetic_run(memory_chunks=20).save(tmp_path / "work" / "runs" / "20260101-cramped")
    synthetic_run(seed=1).save(tmp_path / "work" / "runs" / "20260102-roomy")
    write_notebook(tmp_path / "work" / "panel.ipynb", CELL, BROKEN_CELL, *RUN_CELLS)
    write_notebook(tmp_path / "work" / "charts.ipynb", CHARTS_CELL)
    port = free_port()
    command = lab_command(port=port, browser=False, folder=tmp_path / "work", token=TOKEN, app_in_browser=True)
    environment = {**lab_environment(), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
                   "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings")}  # fmt: skip
    with (tmp_path / "lab.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for_port(port, process)
            yield lambda name: f"http://127.0.0.1:{port}/lab/tree/{name}.ipynb?token={TOKEN}&reset"
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
def page(tmp_path):
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
        page.folder = tmp_path
        page.shot = lambda name: page.screenshot(path=str(tmp_path / f"{name}.png"))
        yield page
        browser.close()


def is_foreign(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob", "file") and parts.hostname != "127.0.0.1"


def run_all(page) -> None:
    page.wait_for_selector("#jp-main-statusbar >> text=| Idle", timeout=60_000)  # the toolbar says so too early
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")


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
    broken.locator(".jupyter-button:has-text('Run')").click()
    wait_until(page, lambda: page.locator("[role=alert]:has-text('returned 7')").count(), "the box of a broken policy")
    broken.scroll_into_view_if_needed()
    page.shot("broken")

    for number, name in enumerate(("runs", "explain", "figure", "explorer"), start=2):
        cell = page.locator(".jp-Cell").nth(number)
        cell.scroll_into_view_if_needed()
        cell.locator(".jp-OutputArea-output").first.wait_for()
        page.wait_for_timeout(500)
        cell.locator(".jp-OutputArea").screenshot(path=page.folder / f"{name}.png")
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


def test_four_charts_keep_up_and_none_is_lost_to_an_early_click(server, page):
    page.goto(server("charts"))
    run_all(page)
    button = page.locator(".jupyter-button:has-text('Begin')").first
    wait_until(page, button.is_visible, "the charts")
    received = sum(page.received)
    page.wait_for_timeout(200)
    button.click()
    frames = page.evaluate(COUNT_FRAMES)
    wait_until(page, lambda: page.locator("[role=img][aria-label='60 steps']").count() == 4, "all four at the end")
    for chart in page.locator("[role=img]").all():
        wait_until(page, lambda chart=chart: chart.locator(".points path").count() == 61, "every point of every chart")
    print(
        f"{frames:.0f} frames a second, {sum(page.received) / 1e6:.2f} MB in all, {received / 1e6:.2f} before the click"
    )
    assert frames > 10 and sum(page.received) < 8e6 and page.faults == []  # 20 and more unless the machine is busy


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
