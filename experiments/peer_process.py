"""A peer that lives in an interpreter of its own, because its packages do not go together with ours.

a line of JSON to it: {"do": ..., more}    ->    a line of JSON from it: the answer, or {"error": ...}
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from workbench.errors import CacheError

__all__ = ["PeerError", "PeerProcess"]


class PeerError(CacheError):
    """The peer could not do what it was asked for."""


class PeerProcess:
    """A script that does what it is asked.

    Args:
        python: Its interpreter.
        script: Reads orders and writes answers, a line each.
        environment: Variables beside those of this process.
    """

    def __init__(self, python: str, script: Path, **environment: str):
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen([python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, text=True, env={**own, **environment})  # fmt: skip

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """One order, one answer. Raises PeerError."""
        try:
            print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"the peer ended at {do!r} with exit code {self._process.wait(10)}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{do}: {answer['error']}")
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
