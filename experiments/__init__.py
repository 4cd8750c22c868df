"""Experiments: workloads, real serving runs, replays, studies and the plots drawn from them.

from experiments import compare
run = compare("smollm2", arms=["none", "memory"])
run.requests                      # polars
"""

from importlib import import_module

_HOMES = {
    "ARMS": "experiments.arms",
    "Arm": "experiments.arms",
    "CodecTable": "experiments.codec_table",
    "EngineProcess": "experiments.serving",
    "PolicyComparison": "experiments.policy_comparison",
    "Run": "experiments.runs",
    "ServerProcess": "experiments.server",
    "Study": "experiments.study",
    "advise": "experiments.advisor",
    "calibrate": "experiments.cost_calibration",
    "claims_table": "experiments.claims",
    "compare": "experiments.demo",
    "cost_model": "experiments.cost",
    "list_runs": "experiments.runs",
    "list_studies": "experiments.study",
    "long_document": "experiments.workloads.long_document",
    "make_workload": "experiments.workloads",
    "resolve_model": "experiments.models",
    "run_claims": "experiments.claims",
    "send_requests": "experiments.client",
    "summary_table": "experiments.summary",
    "write_report": "experiments.report",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """Load a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'experiments' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
