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
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.models import resolve_model
from experiments.peer_process import PeerError, PeerProcess
from experiments.quality import Passage, Prefix
from kernels.floats import decode16, encode16

__all__ = ["Pressed", "QuantizedCache", "missing_references", "references"]

PYTHON_VARIABLE = "KVWORKBENCH_REFERENCES_PYTHON"

_PRESSES = ("Knorm", "ExpectedAttention")
_REMOVED = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class QuantizedCache:
    """transformers' QuantizedCache of 4 or 2 bits, in groups of 64 values of a head."""

    library: str  # "quanto" or "hqq"
    bits: int
    folder: Path = field(repr=False, compare=False)  # in which arrays cross
    peer: PeerProcess = field(repr=False, compare=False)

    def __repr__(self) -> str:
        return f"quantized_cache(library={self.library!r}, bits={self.bits})"

    def send(self, prefix: Prefix) -> Passage:
        source, target = self.folder / "source.npy", self.folder / "target.npy"
        np.save(source, np.stack([prefix.keys, prefix.values]))
        cost = self.peer.ask("quantise", library=self.library, bits=self.bits, source=str(source), target=str(target))
        return Passage(*np.load(target), **cost)


@dataclass(frozen=True)
class Pressed:
    """One of kvpress's methods, with the share of tokens that it removes from each head."""

    press: str
    removed: float
    folder: Path = field(repr=False, compare=False)  # in which arrays cross
    peer: PeerProcess = field(repr=False, compare=False)

    def __repr__(self) -> str:
        return f"kvpress(press={self.press!r}, removed={self.removed})"

    def send(self, prefix: Prefix) -> Passage:
        target = self.folder / "target.npy"
        tokens = prefix.tokens[: prefix.num_tokens]
        self.peer.ask("press", press=self.press, removed=self.removed, tokens=tokens, target=str(target))
        kept = [decode16(encode16(part, "bfloat16"), "bfloat16") for part in np.load(target)]
        return Passage(*kept, sum(2 * part.size for part in kept), None, None)


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
        PeerError: They cannot be measured here; the message says why.
    """
    if missing := missing_references():
        raise PeerError(missing)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peer = PeerProcess(os.environ[PYTHON_VARIABLE], Path(__file__).with_name("_references_peer.py"))
        try:
            versions = peer.ask("open", model=str(resolve_model(model).path))
            quantised = [QuantizedCache(name, bits, folder, peer) for name in ("quanto", "hqq") for bits in (4, 2)]
            pressed = [Pressed(press, removed, folder, peer) for press in _PRESSES for removed in _REMOVED]
            yield [*quantised, *pressed], versions
        finally:
            peer.end()
