"""Plots: one file each, with `<name>_data` (frames in, frame out) and `plot_<name>` (that frame in, figure out).

    plot_names(), plot_run("ttft", requests, events)              # by name
    plot_ttft(ttft_data(requests), template="dark")               # or by hand, with the frame to look at

A data function names the frames that it takes: `requests`, `events` or both, as `experiments.runs.Run` has them. To
add a plot, add a file.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pkgutil import iter_modules

import plotly.graph_objects as go
import polars as pl

from workbench.errors import UnknownNameError

__all__ = ["plot_names", "plot_run", "resolve_plot"]


def plot_names() -> list[str]:
    """Return every plot's name: the files of this folder, bar those that start with an underscore."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def resolve_plot(name: str) -> tuple[Callable[..., pl.DataFrame], Callable[..., go.Figure]]:
    """Return a plot's data function and its drawing function.

    Raises:
        UnknownNameError: There is no such plot; the message lists those that exist.
    """
    if name not in plot_names():
        raise UnknownNameError("plot", name, plot_names())
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
    data, plot = resolve_plot(name)
    frames = {"requests": requests, "events": events}
    wanted = [parameter for parameter in signature(data).parameters if parameter in frames]
    return plot(data(**{parameter: frames[parameter] for parameter in wanted}), template=template, badge=badge)
