"""Other libraries' ways to make a prefix's KV smaller, measured as codecs are: rows to compare ours with.

    with references("smollm2") as (methods, versions):
        measure_quality(model, [*codecs, *methods])

| row                                      | what                                                                     |
|------------------------------------------|--------------------------------------------------------------------------|
| `quantized_cache(library, bits)`         | transformers' QuantizedCache, the whole prefix at once, bfloat16 scales  |
| `kvpress(press, removed)`                | NVIDIA's kvpress: tokens left out, head by head; the others in bfloat16  |

KVWORKBENCH_REFERENCES_PYTHON names an interpreter that has them; how to make one stands in `_references_peer.py`. None
of them is a codec: they change a cache in place, and what kvpress leaves has no pages. The presses compared know no
question; those that do (SnapKV scores tokens by the attention of the last 64, in use the question) are left out.
"""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.models import resolve_model
from experiments.quality import Passage, Prefix
from kernels.floats import decode16, encode16
from workbench.errors import CacheError

__all__ = ["Pressed", "QuantizedCache", "ReferencesError", "missing_references", "references"]

PYTHON_VARIABLE = "KVWORKBENCH_REFERENCES_PYTHON"

_PRESSES = ("Knorm", "ExpectedAttention")
_REMOVED = (0.25, 0.5, 0.75)


class ReferencesError(CacheError):
    """The other libraries could not do what they were asked for."""


@dataclass(frozen=True)
class QuantizedCache:
    """transformers' QuantizedCache of 4 or 2 bits, in groups of 64 values of a head."""

    library: str  # "quanto" or "hqq"
    bits: int
    peer: "_Peer" = field(repr=False, compare=False)

    def __repr__(self) -> str:
        return f"quantized_cache(library={self.library!r}, bits={self.bits})"

    def send(self, prefix: Prefix) -> Passage:
        source, target = self.peer.path("source"), self.peer.path("target")
        np.save(source, np.stack([prefix.keys, prefix.values]))
        cost = self.peer.ask("quantise", library=self.library, bits=self.bits, source=source, target=target)
        return Passage(*np.load(target), **cost)


@dataclass(frozen=True)
class Pressed:
    """One of kvpress's methods, with the share of tokens that it removes from each head."""

    press: str
    removed: float
    peer: "_Peer" = field(repr=False, compare=False)

    def __repr__(self) -> str:
        return f"kvpress(press={self.press!r}, removed={self.removed})"

    def send(self, prefix: Prefix) -> Passage:
        target = self.peer.path("target")
        tokens = prefix.tokens[: prefix.num_tokens]
        self.peer.ask("press", press=self.press, removed=self.removed, tokens=tokens, target=target)
        kept = [decode16(encode16(part, "bfloat16"), "bfloat16") for part in np.load(target)]
        return Passage(*kept, sum(2 * part.size for part in kept), None, None)


class _Peer:
    """The process that the libraries live in."""

    def __init__(self, python: str, folder: str):
        self._folder = folder
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        script = str(Path(__file__).with_name("_references_peer.py"))
        self._process = subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, text=True, env=environment)  # fmt: skip

    def path(self, name: str) -> str:
        """A file that arrays cross in."""
        return os.path.join(self._folder, f"{name}.npy")

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """One order, one answer. Raises ReferencesError."""
        try:
            print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ReferencesError(f"the references' process ended at {do!r} with exit code {self._process.wait(10)}")
        answer = json.loads(line)
        if "error" in answer:
            raise ReferencesError(f"{do}: {answer['error']}")
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def missing_references() -> str:
    """Why the references cannot be measured; empty if they can."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        return f"{PYTHON_VARIABLE} names no interpreter with kvpress, optimum-quanto and hqq"
    return "" if os.access(python, os.X_OK) else f"{PYTHON_VARIABLE} is {python!r}, which cannot be run"


@contextlib.contextmanager
def references(model: str) -> Iterator[tuple[list[QuantizedCache | Pressed], dict[str, str]]]:
    """The methods to measure a model with, and the versions of their libraries.

    Raises:
        ReferencesError: They cannot be measured here; the message says why.
    """
    if missing := missing_references():
        raise ReferencesError(missing)
    with tempfile.TemporaryDirectory() as folder:
        peer = _Peer(os.environ[PYTHON_VARIABLE], folder)
        try:
            versions = peer.ask("open", model=str(resolve_model(model).path))
            quantised = [QuantizedCache(library, bits, peer) for library in ("quanto", "hqq") for bits in (4, 2)]
            yield [*quantised, *(Pressed(press, removed, peer) for press in _PRESSES for removed in _REMOVED)], versions
        finally:
            peer.end()
