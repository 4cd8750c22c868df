"""How every plot looks: colour-blind-safe arms, light and dark, axes with units, and what an empty plot says.

Colours are those of Okabe and Ito (Color Universal Design, 2008); a marker and a dash go with each, so that no plot
needs its colours to be read.
"""

from html import escape
from math import ceil, floor, log10
from typing import Any, NamedTuple

import plotly.graph_objects as go

from experiments.summary import PHASE_TEXT

__all__ = [
    "COLOR_SCALE",
    "LINE_STYLES",
    "PALETTE",
    "PART_STYLES",
    "REFERENCE_COLOR",
    "TEMPLATES",
    "ArmStyle",
    "arm_styles",
    "bar_fill",
    "label_text",
    "line_style",
    "new_figure",
    "no_data_figure",
    "phase_text",
    "point_marker",
    "row_label",
    "seconds_axis",
]

REFERENCE_COLOR = "#888888"  # legible on both backgrounds
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


# black, orange, sky blue, bluish green, yellow, blue, vermilion, reddish purple, and a grey
PALETTE = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")


class ArmStyle(NamedTuple):
    """What tells one arm from the others."""

    color: str
    symbol: str
    dash: str
    pattern: str  # of bars


_KNOWN = {
    "none": ArmStyle(PALETTE[6], "circle", "solid", ""),
    "prefix_cache": ArmStyle(PALETTE[1], "square", "dash", "/"),
    "memory": ArmStyle(PALETTE[5], "diamond", "longdash", "x"),
    "disk": ArmStyle(PALETTE[3], "triangle-up", "dot", "."),
}
_FURTHER = (
    ArmStyle(PALETTE[7], "star", "dashdot", "\\"),
    ArmStyle(PALETTE[2], "cross", "longdashdot", "-"),
    ArmStyle(PALETTE[8], "x", "dash", "|"),
    ArmStyle(PALETTE[4], "hexagon", "dot", "+"),
)

# Lines that are not arms, in order: colour, symbol and dash.
LINE_STYLES = (
    (PALETTE[5], "circle", "solid"),
    (PALETTE[6], "square", "dash"),
    (PALETTE[3], "diamond", "dot"),
    (PALETTE[7], "triangle-up", "dashdot"),
    (PALETTE[1], "cross", "longdash"),
    (PALETTE[2], "x", "longdashdot"),
    (PALETTE[8], "star", "dash"),
)

# For values as colours, legible on light and dark alike: blue over grey to orange.
COLOR_SCALE = ((0.0, PALETTE[5]), (0.5, "#8E8E93"), (1.0, PALETTE[1]))

# Parts of a time, bottom to top: colour and bar pattern.
PART_STYLES = {
    "queue": (PALETTE[8], "/"),
    "lookup": (PALETTE[1], "x"),
    "load": (PALETTE[2], ""),
    "prefill": (PALETTE[7], "."),
    "rest": (PALETTE[4], "\\"),
}


def arm_styles(arms: list[str]) -> dict[str, ArmStyle]:
    """The style of each arm: a fixed one for the demo's, the further ones in order for the others."""
    others = [arm for arm in arms if arm not in _KNOWN]
    further = {arm: _FURTHER[number % len(_FURTHER)] for number, arm in enumerate(others)}
    return {arm: _KNOWN.get(arm) or further[arm] for arm in arms}


def line_style(number: int) -> tuple[str, str, str]:
    """Colour, symbol and dash of line `number`; the first 49 differ."""
    turn, place = divmod(number, len(LINE_STYLES))
    _, symbol, dash = LINE_STYLES[(place + turn) % len(LINE_STYLES)]
    return LINE_STYLES[place][0], symbol, dash


def phase_text(phase: str) -> str:
    """A phase for people."""
    return label_text(PHASE_TEXT.get(phase, phase))


def row_label(arm_label: str, phase: str, n: int) -> str:
    """The name of a row of marks."""
    return f"{label_text(arm_label)}, {label_text(phase)} (n = {n})"


def point_marker(style: ArmStyle, phase: str, size: int = 10) -> dict[str, Any]:
    """The mark of a request of an arm: open for a first question, filled for a repeated one."""
    symbol = f"{style.symbol}-open" if phase == "first" else style.symbol
    return {
        "symbol": symbol,
        "size": size,
        "color": style.color,
        "opacity": 0.8,
        "line": {"width": 1.6, "color": style.color},
    }


def bar_fill(color: str, pattern: str) -> dict[str, Any]:
    """A bar in its colour, hatched in white."""
    return {"color": color, "line": {"width": 0},
            "pattern": {"shape": pattern, "fillmode": "replace", "bgcolor": color, "fgcolor": "rgba(255,255,255,0.75)",
                        "solidity": 0.22, "size": 7}}  # fmt: skip


def label_text(text: Any) -> str:
    """A string from outside, for a label: plotly reads tags in its texts."""
    return escape(str(text), quote=False)


def _template(ink: str, paper: str, grid: str, quiet: str) -> go.layout.Template:
    axis = {
        "gridcolor": grid, "zerolinecolor": grid, "linecolor": grid, "ticks": "outside", "tickcolor": grid,
        "automargin": True, "title": {"standoff": 10, "font": {"size": 13}},
    }  # fmt: skip
    return go.layout.Template(
        layout={
            "font": {"family": _FONT, "size": 13, "color": ink},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "title": {"x": 0, "xref": "container", "xanchor": "left", "font": {"size": 17},
                      "subtitle": {"font": {"size": 12.5, "color": quiet}}},
            "xaxis": axis,
            "yaxis": axis,
            "annotationdefaults": {"font": {"color": ink}},
            "hoverlabel": {"align": "left", "font": {"family": _FONT, "size": 13}},
            "hovermode": "closest",
            "modebar": {"color": quiet, "activecolor": ink, "bgcolor": "rgba(0,0,0,0)"},
        }
    )  # fmt: skip


TEMPLATES = {
    "light": _template(ink="#1c2024", paper="#ffffff", grid="#e1e4e8", quiet="#5b6470"),
    "dark": _template(ink="#e6e9ee", paper="#171a21", grid="#323844", quiet="#9aa4b2"),
}


def new_figure(title: str, subtitle: str, *, template: str, height: int, figure: go.Figure | None = None) -> go.Figure:
    """A figure with the house's title, margins and legend; as wide as its place, drawn for 960 px.

    Args:
        title: What is shown.
        subtitle: How it came about and from how many values.
        template: "light", "dark" or a template that plotly knows.
        height: In pixels.
        figure: One with subplots; a new one by default.
    """
    figure = figure if figure is not None else go.Figure()
    figure.update_layout(
        template=TEMPLATES.get(template, template),
        title={"text": title, "subtitle": {"text": subtitle}, "y": 1, "yref": "container", "yanchor": "top",
               "pad": {"t": 18, "l": 16}},
        height=height,
        autosize=True,
        margin={"l": 16, "r": 24, "t": 92, "b": 16},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"},
    )  # fmt: skip
    return figure


def no_data_figure(title: str, why: str, *, template: str, badge: str) -> go.Figure:
    """What a plot shows when there is nothing to show."""
    figure = new_figure(title, label_text(badge), template=template, height=260)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=f"<b>no data</b><br>{label_text(why)}", x=0.5, y=0.5, xref="paper", yref="paper",
                          showarrow=False, font={"size": 15})  # fmt: skip
    return figure


def seconds_axis(values: list[float], **settings: Any) -> dict[str, Any]:
    """A logarithmic axis of seconds around the values, with ticks such as "50 ms" and "2 s"."""
    low, high = min(values), max(values)
    first, last = log10(low) - 0.12, log10(high) + 0.12
    steps = (1, 2, 5) if last - first > 0.8 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    ticks = [step * 10.0**power for power in range(floor(first), ceil(last) + 1) for step in steps]
    return {"type": "log", "range": [first, last], "tickvals": ticks, "ticktext": [_tick(t) for t in ticks], **settings}


def _tick(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9999 * scale:
            return f"{seconds / scale:g} {unit}"
    return f"{seconds:g} s"
