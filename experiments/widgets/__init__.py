"""Panels for a notebook: a live chart, and what is built on it.

    from experiments.widgets import PolicyLab
    lab = PolicyLab(MyPolicy)         # a panel where it is displayed; lab.run() without a front end

Each panel is a view: what it computes stands in a module of its own that needs no notebook. Panels start threads for
their work; threads never print.
"""

from importlib import import_module

_HOMES = {
    "CacheExplorer": "experiments.widgets.cache_explorer",
    "CostCalculator": "experiments.widgets.cost_calculator",
    "ExplainCard": "experiments.widgets.explain_card",
    "LiveChart": "experiments.widgets.live_chart",
    "PolicyLab": "experiments.widgets.policy_lab",
    "RunBrowser": "experiments.widgets.run_browser",
    "SweepPanel": "experiments.widgets.sweep_panel",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """Load a panel when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'experiments.widgets' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
