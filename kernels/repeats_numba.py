"""`subtract_echo` and `add_echo` for CPUs: one row at a time in a buffer that the first cache level holds.

A token waits for the one it refers to, so rows are scalar loops; the waits of neighbouring tokens overlap.
"""

import numpy as np
from numba import njit

from kernels.threads import run_units

__all__ = ["add_echo", "subtract_echo"]


def subtract_echo(
    source: np.ndarray, references: np.ndarray, places: np.ndarray, *, echoes: np.ndarray, out: np.ndarray
) -> None:
    _run(_subtract, source, references, places, echoes, out)


def add_echo(
    source: np.ndarray, references: np.ndarray, places: np.ndarray, *, echoes: np.ndarray, out: np.ndarray
) -> None:
    _run(_add, source, references, places, echoes, out)


def _run(kernel, source, references, places, echoes, out) -> None:
    streams, rows, tokens = source.shape
    # A place behind the row holds the symbol 128, whose echo is 128, for tokens that refer to none.
    targets = np.where(references == np.arange(tokens), tokens, references).astype(np.uint32)
    rest = (targets, places.astype(np.uint32), echoes, out.reshape(-1, tokens))
    run_units(kernel, streams * rows, 2 * source.nbytes, source.reshape(-1, tokens), *rest)


@njit(nogil=True, cache=True)
def _subtract(first, last, source, references, places, echoes, out):
    tokens, rows = source.shape[1], len(source) // len(references)
    row = np.empty(tokens + 1, np.uint8)
    row[tokens] = 128
    for unit in range(first, last):
        stream = unit // rows
        own, place, echo, line = references[stream], places[stream], echoes[stream], out[unit]
        row[:tokens] = source[unit]
        for t in range(tokens):
            line[place[t]] = row[t] - echo[row[own[t]]] + 128


@njit(nogil=True, cache=True)
def _add(first, last, source, references, places, echoes, out):
    tokens, rows = source.shape[1], len(source) // len(references)
    a, b, c, d = np.full((4, tokens + 1), 128, np.uint8)
    unit = first
    while unit < last:
        stream = unit // rows
        target, place, echo = references[stream], places[stream], echoes[stream]
        if unit + 4 > min(last, (stream + 1) * rows):
            for t in range(tokens):
                a[t] = source[unit, place[t]] + echo[a[target[t]]] - 128
            out[unit] = a[:tokens]
            unit += 1
            continue
        # Four rows side by side share the reads of the references and places.
        one, two, three, four = source[unit], source[unit + 1], source[unit + 2], source[unit + 3]
        for t in range(tokens):
            i, j = target[t], place[t]
            a[t] = one[j] + echo[a[i]] - 128
            b[t] = two[j] + echo[b[i]] - 128
            c[t] = three[j] + echo[c[i]] - 128
            d[t] = four[j] + echo[d[i]] - 128
        for i, row in enumerate((a, b, c, d)):
            out[unit + i] = row[:tokens]
        unit += 4
