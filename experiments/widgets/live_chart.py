"""A plotly chart that can change while it is looked at.

    plotly.js (one widget a kernel) -> LiveChart: two synced texts, drawn by Plotly.react

A new figure costs its JSON and nothing else. The state is the figure itself, so a page that is reloaded, or a click
before the first paint, finds it whole. Colours follow JupyterLab's theme without a new run.
"""

import json
from functools import cache
from pathlib import Path

import anywidget
import plotly
import plotly.graph_objects as go
import plotly.io as pio
import traitlets
from ipywidgets import widget_serialization

from experiments.plots._style import TEMPLATES

__all__ = ["PLOT_CONFIG", "LiveChart", "plotly_library"]

# Shared by every place that draws: no logo, nothing that would send a figure anywhere.
PLOT_CONFIG = {"responsive": True, "displaylogo": False, "showSendToCloud": False, "plotlyServerURL": "",
               "scrollZoom": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}  # fmt: skip

# A figure that is the result of a cell gets the same buttons: none there uploads it either.
pio.renderers["plotly_mimetype"].config.update(PLOT_CONFIG)

_PLOTLY_JS = Path(str(plotly.__file__)).parent / "package_data" / "plotly.min.js"
_EXPORT = "\nglobalThis.kvworkbenchPlotly = globalThis.Plotly;\nexport default { render({ el }) { el.remove(); } };\n"

_CHART_JS = """
const templates = TEMPLATES;
const config = CONFIG;
async function plotly(model) {
  await model.widget_manager.get_model(model.get("library").replace("IPY_MODEL_", ""));
  for (let tries = 0; tries < 1200 && !globalThis.kvworkbenchPlotly; tries++)
    await new Promise(resolve => setTimeout(resolve, 50));
  if (!globalThis.kvworkbenchPlotly) throw Error("plotly.js did not arrive from the kernel");
  return globalThis.kvworkbenchPlotly;
}
const isDark = () => document.body.dataset.jpThemeLight === "false";
async function render({ model, el }) {
  const box = document.createElement("div");
  box.style.width = el.style.width = "100%";
  el.style.minWidth = "0";
  box.setAttribute("role", "img");
  el.append(box);
  const height = () => { box.style.minHeight = (JSON.parse(model.get("spec")).layout.height || 400) + "px"; };
  height();
  const Plotly = await plotly(model);
  let queued = false, gone = false;
  const draw = () => {
    queued = false;
    if (gone || !el.isConnected) return;
    const { data, layout } = JSON.parse(model.get("spec"));
    const template = templates[isDark() ? "dark" : "light"];
    height();
    box.setAttribute("aria-label", model.get("alt"));
    Plotly.react(box, data, { ...layout, template, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" },
                 config);
  };
  const ask = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
  model.on("change:spec", ask);
  model.on("change:alt", ask);
  const theme = new MutationObserver(ask);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  const size = new ResizeObserver(() => {
    if (!box.offsetWidth) return;
    box.classList.contains("js-plotly-plot") ? Plotly.Plots.resize(box) : ask();
  });
  size.observe(el);
  ask();
  return () => {
    gone = true;
    model.off("change:spec", ask);
    model.off("change:alt", ask);
    theme.disconnect();
    size.disconnect();
    Plotly.purge(box);
  };
}
export default { render };
"""


class _PlotlyLibrary(anywidget.AnyWidget):
    """plotly.js, for all charts of the kernel; the front end loads it as soon as the widget exists."""

    _esm = _PLOTLY_JS.read_text(encoding="utf-8") + _EXPORT


@cache
def plotly_library() -> _PlotlyLibrary:
    """The one widget that carries plotly.js to the page: about 5 MB, sent once."""
    return _PlotlyLibrary()


class LiveChart(anywidget.AnyWidget):
    """A chart whose figure can be replaced at any time, from any thread.

    Args:
        figure: What to show first; empty axes by default.
        alt: What the chart says, for those who do not see it.
    """

    _esm = _CHART_JS.replace("TEMPLATES", json.dumps({n: t.to_plotly_json() for n, t in TEMPLATES.items()})).replace(
        "CONFIG", json.dumps(PLOT_CONFIG)
    )
    library = traitlets.Any().tag(sync=True, **widget_serialization)
    spec = traitlets.Unicode().tag(sync=True)
    alt = traitlets.Unicode().tag(sync=True)

    def __init__(self, figure: go.Figure | None = None, *, alt: str = "chart, still empty"):
        super().__init__(library=plotly_library(), spec=_spec(figure or go.Figure()), alt=alt)
        self.layout.width = "100%"

    def show(self, figure: go.Figure, *, alt: str) -> None:
        """Draw another figure in the same place."""
        with self.hold_sync():
            self.alt = alt
            self.spec = _spec(figure)


def _spec(figure: go.Figure) -> str:
    """The figure without its template, which the page sets by its theme."""
    drawn = json.loads(str(figure.to_json(validate=False)))
    drawn["layout"].pop("template", None)
    return json.dumps({"data": drawn["data"], "layout": drawn["layout"]}, separators=(",", ":"))
