"""The report is one file that asks nothing of anybody, shows what the run holds, and runs nothing a string holds."""

import asyncio
import base64
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console
from synthetic_run import ARMS, synthetic_run

from experiments.plots import plot_names
from experiments.report import machine_badge, print_summary, write_report
from experiments.report.answers import compared_answers
from experiments.report.texts import FIGURES, environment_tables, method_notes
from experiments.runs import Run
from experiments.summary import summary_table
from experiments.summary_text import headline, summary_sheets
from workbench.errors import InvalidInputError

NO_BROWSER = "/nonexistent/chromium"
HAS_BROWSER = bool(shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser"))


class Page(HTMLParser):
    """The parts of a page that the tests look at."""

    def __init__(self, path: Path):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open[-1:] == ["script"]:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data
        elif self._open[-1:] != ["style"]:
            self.text += data

    def blocks(self, kind: str) -> dict[str, dict]:
        return {a["data-plot"]: json.loads(text) for a, text in self.scripts if a.get("class") == kind}


@pytest.fixture(scope="module", autouse=True)
def no_browser():
    """Most tests need no picture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROWSER_PATH", NO_BROWSER)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return synthetic_run(memory_chunks=80).save(tmp_path_factory.mktemp("runs") / "synthetic")


@pytest.fixture(scope="module")
def page(run) -> Page:
    return Page(write_report(run.folder))


def save(folder: Path, **options) -> Run:
    return synthetic_run(**options).save(folder)


# --- one file


def test_the_page_loads_nothing(page):
    loading = {"src", "srcset", "data", "poster", "action", "background"}
    assert not [(tag, a) for tag, attrs in page.elements for a in attrs if a in loading]
    assert {attrs.get("href", "#")[0] for tag, attrs in page.elements if tag in ("a", "link")} == {"#"}
    assert not [tag for tag, _ in page.elements if tag in ("iframe", "object", "embed", "link", "base", "form", "img")]
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy and "http" not in policy
    style = re.search(r"<style>(.*?)</style>", page.source, re.DOTALL)[1]
    assert "url(" not in style and "@import" not in style


def test_plotly_is_in_the_page_once_and_sends_nothing_to_a_cloud(page):
    assert page.source.count("plotly.js v") == 1
    own = page.scripts[-1][1]
    assert "showSendToCloud: false" in own and 'plotlyServerURL: ""' in own
    assert not [attrs for attrs, text in page.scripts if "MathJax.js" in text and "plotly.js v" not in text]
    assert len(page.source.encode()) < 8 * 2**20


def test_every_plot_is_in_the_page_with_its_caption_and_its_text(page):
    assert sorted(FIGURES) == plot_names()
    blocks = page.blocks("figure")
    assert sorted(blocks) == [f"plot-{name}" for name in plot_names()]
    for name, figure in blocks.items():
        assert figure["data"] and "template" not in figure["layout"]
        div = next(attrs for tag, attrs in page.elements if attrs.get("id") == name)
        assert div["role"] == "img" and "measured on Made Up 9000, 2 threads" in div["aria-label"]
    assert all(caption in page.text for caption in FIGURES.values())


def test_both_colour_schemes_are_in_the_page(page):
    templates = json.loads(next(text for attrs, text in page.scripts if attrs.get("id") == "templates"))
    backgrounds = {name: template["layout"]["paper_bgcolor"] for name, template in templates.items()}
    assert backgrounds == {"light": "#ffffff", "dark": "#171a21"}
    assert "prefers-color-scheme: dark" in page.source.split("</style>")[0]
    for background in backgrounds.values():
        assert f"--card: {background}" in page.source


# --- what it says


def test_the_page_says_what_was_run_and_what_came_out(page, run):
    table = summary_table(run.requests, run.events)
    assert headline(table) in page.text
    assert (
        "Synthetic-135M-Instruct in vLLM 0.32.0 on Made Up 9000 with 2 threads answered 20 prompts "
        "(made-up questions on made-up documents) in 4 ways: no reuse; vLLM's prefix cache; engine, memory tier; "
        "engine, disk tier after a restart."
    ) in page.text
    for sheet in summary_sheets(table):
        assert all(cell in page.text for row in sheet.rows for cell in (*row, *sheet.header))


def test_the_page_explains_near_ties_and_only_settings_that_were_used(page, run):
    for word in ("nobind", "eager mode", "almost tied", "bfloat16", "single-process", "page cache", "load average"):
        assert word in page.text
    arms = {"none": {"thread_binding": "auto", "enforce_eager": False, "dtype": "torch.float32"}}
    notes = " ".join(method_notes(run.events.filter(pl.col("tier") != "disk"), {"arms": arms}))
    assert "float32" in notes
    assert not [word for word in ("nobind", "eager", "bfloat16", "page cache", "load average") if word in notes]


def test_answers_that_differ_are_marked_and_come_first(run):
    answers = compared_answers(run.requests)
    assert len(answers) == 20
    assert [entry["name"] for entry in answers if entry["differs"]] == ["g0-d0-q1", "g1-d0-q1"]
    first = answers[0]
    assert first["differs"] and first["verdict"] == "2 different answers, from token 7"
    same, other = first["answers"]
    assert same["who"] == "vLLM's prefix cache; engine, memory tier; engine, disk tier after a restart"
    assert other["who"] == "no reuse" and not any(part["marked"] for part in same["parts"])
    texts = {row["arm"]: row["text"] for row in run.requests.filter(pl.col("request_id") == "g0-d0-q1").to_dicts()}
    assert "".join(part["text"] for part in other["parts"]) == texts["none"]
    unmarked = "".join(part["text"] for part in other["parts"] if not part["marked"])
    assert " ".join(texts["none"].split()[:7]) in unmarked
    assert any(part["marked"] for part in other["parts"])
    assert answers[-1]["verdict"] == "4 answers, all equal (16 tokens)"


def test_answers_are_compared_without_a_prefix_cache_and_when_one_is_empty(run):
    alone = run.requests.filter(pl.col("arm") != "prefix_cache")
    assert compared_answers(alone)[0]["answers"][0]["who"] == "no reuse"
    silent = pl.col("arm") == "disk"
    requests = run.requests.with_columns(
        text=pl.when(silent).then(pl.lit("")).otherwise("text"),
        token_ids=pl.when(silent).then(pl.lit([], pl.List(pl.Int64))).otherwise("token_ids"),
    )
    entry = compared_answers(requests)[0]
    assert entry["answers"][-1]["parts"] == [{"text": "(nothing)", "marked": True}]


def test_settings_stand_once_where_all_arms_agree(run):
    tables = dict(environment_tables(run.environment))
    assert dict(tables["machine and source"])["commit"] == "0" * 40
    arms = dict(tables["arms"])
    assert arms["thread_binding"] == "nobind"
    assert arms["prefix_caching"] == "none: no, prefix_cache: yes, memory: no, disk: no"
    assert "origin nowhere" in dict(tables["workload"])["sources"]


@pytest.mark.parametrize(
    ("environment", "badge"),
    [
        ({"cpu": "AMD EPYC 7B13 64-Core Processor", "arms": {"none": {"threads": 2}}}, "AMD EPYC 7B13, 2 threads"),
        ({"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz"}, "Intel Xeon"),
        ({"cpu": "x", "gpus": ["NVIDIA L4, 23034 MiB"], "arms": {"none": {"threads": 8}}}, "NVIDIA L4"),
        ({}, "an unnamed processor"),
    ],
)
def test_the_badge_names_the_machine(environment, badge):
    assert machine_badge(environment) == f"measured on {badge}"


# --- what strings may hold


def test_strings_are_shown_and_not_run(tmp_path):
    evil = '</script><script>alert("x")</script><img src=x onerror=alert(1)><!-- {{ 7 * 7 }}'
    made = synthetic_run(groups=1)
    columns = ("arm_label", "question", "text")
    made.requests = made.requests.with_columns(
        *(pl.lit(evil).alias(column) for column in columns), request_id=pl.col("request_id") + evil
    )
    made.environment["model"]["name"] = made.environment["cpu"] = made.environment["method"] = evil
    made.environment["workload"] = {"description": evil, evil: evil}
    shown = Page(write_report(made.save(tmp_path / "evil").folder))
    assert not [tag for tag, _ in shown.elements if tag == "img"]
    assert not [attrs for _, attrs in shown.elements if "onerror" in attrs]
    assert len(shown.scripts) == 1 + len(FIGURES) + 2 and not [t for _, t in shown.scripts if t.startswith("alert")]
    assert evil in shown.text and "49" not in shown.text.split("Answers side by side")[1].split("Environment")[0]
    assert evil not in shown.source and len(shown.blocks("figure")) == len(FIGURES)


# --- other runs


def test_a_run_without_answers_gives_a_page_that_says_so(tmp_path):
    made = synthetic_run(groups=1)
    made.requests = made.requests.with_columns(error=pl.lit("gone"), ttft_s=pl.lit(None, pl.Float64))
    made.events = made.events.clear()
    shown = Page(write_report(made.save(tmp_path / "failed").folder))
    assert "nothing to compare" in shown.text and "No request was answered." in shown.text
    assert all("no data" in json.dumps(figure) for figure in shown.blocks("figure").values())


def test_an_empty_run_gives_a_page(tmp_path):
    made = synthetic_run(groups=1)
    made.requests, made.events, made.environment = made.requests.clear(), made.events.clear(), {}
    assert "nothing to compare" in Page(write_report(made.save(tmp_path / "empty").folder)).text


def test_few_requests_give_no_median(tmp_path):
    shown = Page(write_report(save(tmp_path / "few", groups=2, documents=2).folder))
    assert "n too small" in shown.text and "Too few pairs for a median" in shown.text


def test_a_large_run_stays_a_small_page(tmp_path):
    run = save(tmp_path / "large", groups=200, documents=2, questions=2)
    path = write_report(run.folder)
    assert run.requests.height == 3200 and path.stat().st_size < 8 * 2**20
    assert "700 more prompts are in requests.parquet" in Page(path).text


def test_no_run_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="is not a run"):
        write_report(tmp_path)


def test_the_summary_is_printed(run):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(run.folder, console)
    printed = " ".join(console.export_text().split())
    assert "Time to first token" in printed and headline(summary_table(run.requests, run.events)) in printed


# --- the picture


def test_without_a_browser_the_page_says_why_there_is_no_picture(page, run):
    assert "There is no report.png: no Chromium or Chrome is installed" in page.text
    assert not (run.folder / "report.png").exists()


def test_a_browser_that_fails_costs_only_the_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", "/bin/false")
    run = save(tmp_path / "broken", groups=1)
    assert (
        "There is no report.png: the browser could not draw it (BrowserFailedError"
        in Page(write_report(run.folder)).text
    )


@pytest.mark.browser
@pytest.mark.skipif(not HAS_BROWSER, reason="no Chromium or Chrome is installed")
def test_the_picture_is_drawn_inside_a_running_event_loop_as_in_a_notebook(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.delenv("BROWSER_PATH")
    run = save(tmp_path / "picture")

    async def cell() -> Path:
        return write_report(run.folder)

    assert "There is no report.png" not in asyncio.run(cell()).read_text()
    picture = Image.open(run.folder / "report.png").convert("L")
    assert picture.width == 1920 and 900 < picture.height < 2000
    histogram = picture.histogram()
    assert sum(histogram[:128]) > 10_000 and sum(histogram[250:]) > 0.7 * picture.width * picture.height


@pytest.mark.browser
@pytest.mark.skipif(not HAS_BROWSER, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_every_figure_offline_in_both_colour_schemes(page, run, scheme, monkeypatch, tmp_path):
    monkeypatch.delenv("BROWSER_PATH")
    seen = asyncio.run(_opened(run.folder / "report.html", scheme))
    assert seen["requests"] == [(run.folder / "report.html").as_uri()]
    assert seen["errors"] == []
    assert seen["drawn"] == len(FIGURES) and seen["overflow"] == 0
    assert seen["background"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(23, 26, 33)"}[scheme]
    assert len(seen["png"]) > 20_000


_DRAWN = "[...document.querySelectorAll('.plot')].filter(plot => plot.querySelector('.main-svg')).length"


async def _opened(path: Path, scheme: str) -> dict:
    """Open the page in a browser; what it asked for, what went wrong, what it drew."""
    import choreographer

    told = []

    async def note(message):
        told.append(message)

    async with choreographer.Browser(headless=True) as browser:
        tab = await browser.create_tab()
        for domain in ("Network", "Log", "Runtime", "Page"):
            await tab.send_command(f"{domain}.enable")
        for name in (
            "Network.requestWillBeSent",
            "Log.entryAdded",
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
        ):
            tab.subscribe(name, note, repeating=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        size = {"width": 1008, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await tab.send_command("Emulation.setEmulatedMedia", {"features": features})
        await tab.send_command("Emulation.setDeviceMetricsOverride", size)
        await tab.send_command("Page.navigate", {"url": path.as_uri()})
        drawn = await _value_when(tab, _DRAWN, len(FIGURES))
        background = await _value(tab, "getComputedStyle(document.querySelector('.plot .main-svg')).backgroundColor")
        overflow = await _value(tab, "document.documentElement.scrollWidth - document.documentElement.clientWidth")
        shot = await tab.send_command("Page.captureScreenshot", {"format": "png"})
    return {
        "requests": [m["params"]["request"]["url"] for m in told if m["method"] == "Network.requestWillBeSent"],
        "errors": [m["params"] for m in told if m["method"] != "Network.requestWillBeSent"],
        "drawn": drawn, "background": background, "overflow": overflow, "png": base64.b64decode(shot["result"]["data"]),
    }  # fmt: skip


async def _value(tab, expression: str):
    answer = await tab.send_command("Runtime.evaluate", {"expression": expression, "returnByValue": True})
    return answer["result"]["result"].get("value")


async def _value_when(tab, expression: str, wanted, seconds: float = 60):
    """The expression's value once it is what is wanted, or after that time whatever it is then."""
    for _ in range(int(seconds / 0.25)):
        if (value := await _value(tab, expression)) == wanted:
            return value
        await asyncio.sleep(0.25)
    return value


def test_the_synthetic_run_has_the_columns_of_a_real_one(run):
    assert list(ARMS) == list(dict.fromkeys(run.requests.sort("order")["arm"]))
    assert run.events.columns[-1] == "arm" and set(run.events["arm"]) == {"memory", "disk"}
