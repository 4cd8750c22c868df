"""JupyterLab on 127.0.0.1 that asks nothing of the network."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from platformdirs import user_cache_dir

__all__ = ["lab_command", "lab_environment", "start_lab"]

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"

# Settings that win over JupyterLab's defaults and yield to what the user chose.
_OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/extensionmanager-extension:plugin": {"enabled": False},
}


def lab_command(*, port: int = 8888, browser: bool = True, folder: Path = NOTEBOOKS, token: str | None = None,
                app_in_browser: bool = False) -> list[str]:  # fmt: skip
    """The command line of a JupyterLab.

    Args:
        port: 0 for any free port.
        browser: Open a window.
        folder: What it shows.
        token: Needed to enter; a random one by default.
        app_in_browser: Put the application object into the page, for tests that drive it.
    """
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}",
               f"--ServerApp.root_dir={folder}", "--LabApp.news_url=", "--LabApp.extension_manager=readonly",
               f"--LabApp.app_settings_dir={_settings_folder()}"]  # fmt: skip
    if token is not None:
        command.append(f"--IdentityProvider.token={token}")
    if app_in_browser:
        command.append("--LabApp.expose_app_in_browser=True")
    if not browser:
        command.append("--no-browser")
    if os.geteuid() == 0:
        command.append("--allow-root")
    return command


def lab_environment() -> dict[str, str]:
    """The environment of a JupyterLab: its kernels find the project wherever their notebook lies."""
    root = str(NOTEBOOKS.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def start_lab(*, port: int = 8888, browser: bool = True) -> int:
    """Run JupyterLab until it is stopped; returns its exit code."""
    return subprocess.call(lab_command(port=port, browser=browser), env=lab_environment())


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _settings_folder() -> Path:
    folder = Path(user_cache_dir("kvworkbench")) / "lab-settings"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overrides.json").write_text(json.dumps(_OVERRIDES, indent=2) + "\n")
    return folder
