"""Plots: one file each, with `<name>_data` (frames in, frame out) and `plot_<name>` (that frame in, figure out).

    plot_names(), plot_run("ttft", requests, events)              # of a run, by name
    study_plot_names(), study.plot("hit_rate_heatmap")            # of a study
    plot_ttft(ttft_data(requests), template="dark")               # or by hand, with the frame to look at

A data function names the frames that it takes. `requests` and `events` are a run's, as `experiments.runs.Run` has them;
`study` is `Study.frame()`, and `study_requests` `Study.requests()`; a plot that takes anything else, such as a table of
codecs, is drawn by hand. Further arguments of a data function are options. To add a plot, add a file.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from pkgutil import iter_modules
from typing import Any

import plotly.graph_objects as go
import polars as pl

from workbench.errors import UnknownNameError

__all__ = ["plot_names", "plot_run", "plot_study", "resolve_plot", "study_plot_names"]

_RUN_FRAMES = ("requests", "events")
_STUDY_FRAMES = ("study", "study_requests")


def plot_names() -> list[str]:
    """Return the name of every plot of a run."""
    return [name for name in _all_names() if _frames(name) & set(_RUN_FRAMES)]


def study_plot_names() -> list[str]:
    """Return the name of every plot of a study: its own, and those of a run that need no events."""
    return [name for name in _all_names() if _frames(name) & set(_STUDY_FRAMES) or _frames(name) == {"requests"}]


def resolve_plot(name: str) -> tuple[Callable[..., pl.DataFrame], Callable[..., go.Figure]]:
    """Return a plot's data function and its drawing function.

    Raises:
        UnknownNameError: There is no such plot; the message lists those that exist.
    """
    if name not in _all_names():
        raise UnknownNameError("plot", name, _all_names())
    module = import_module(f"{__name__}.{name}")
    return getattr(module, f"{name}_data"), getattr(module, f"plot_{name}")


def plot_run(name: str, requests: pl.DataFrame, events: pl.DataFrame, *, template: str = "light",
             badge: str = "measured") -> go.Figure:  # fmt: skip
    """Draw a plot of a run.

    Args:
        name: One of `plot_names()`.
        requests: The run's requests.
        events: The run's events.
        template: "light", "dark" or the name of a plotly template.
        badge: How the figures came about, for the line under the title: "measured on ...", "simulated".
    """
    if name not in plot_names():
        raise UnknownNameError("plot of a run", name, plot_names())
    data, plot = resolve_plot(name)
    return plot(_data(data, {"requests": requests, "events": events}, {}), template=template, badge=badge)


def plot_study(name: str, study: pl.DataFrame, study_requests: pl.DataFrame, *, template: str = "light",
               badge: str = "", **options: Any) -> go.Figure:  # fmt: skip
    """Draw a plot of a study.

    Args:
        name: One of `study_plot_names()`.
        study: `Study.frame()`; failed and contaminated cells are left out.
        study_requests: `Study.requests()`.
        template: "light", "dark" or the name of a plotly template.
        badge: How the figures came about; by default as the cells say.
        options: Of the plot's data function, such as `measure="hit_rate_by_chunks"`.
    """
    if name not in study_plot_names():
        raise UnknownNameError("plot of a study", name, study_plot_names())
    data, plot = resolve_plot(name)
    if study.height:
        badge = badge or ", ".join(study["badge"].drop_nulls().unique(maintain_order=True))
        study = study.filter(pl.col("error") == "", pl.col("contaminated") == "")
    frames = {"study": study, "study_requests": study_requests, "requests": study_requests}
    return plot(_data(data, frames, options), template=template, badge=badge or "nothing measured yet")


def _data(data: Callable[..., pl.DataFrame], frames: Mapping[str, pl.DataFrame], options: Mapping[str, Any]) -> Any:
    wanted = [parameter for parameter in signature(data).parameters if parameter in frames]
    return data(**{parameter: frames[parameter] for parameter in wanted}, **options)


def _all_names() -> list[str]:
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def _frames(name: str) -> set[str]:
    """Frames of a run or of a study that a plot's data function takes."""
    return set(signature(resolve_plot(name)[0]).parameters) & {*_RUN_FRAMES, *_STUDY_FRAMES}
