"""Symbols of tokens foretold from those of earlier tokens like them, in whole numbers, so that nothing is lost.

    subtract_echo(symbols, references, places, echoes=..., out=residuals)
    add_echo(residuals, references, places, echoes=..., out=symbols)          the inverse

With q = symbols, r = residuals, all modulo 256, token t of stream s and any row:

    r[s, row, places[s, t]] = q[s, row, t] - echo + 128
    echo = echoes[s, q[s, row, references[s, t]]]      128 where references[s, t] is t: no earlier token is like it

symbols, residuals  (streams, rows, tokens) uint8, contiguous
references          (streams, tokens) int64, from 0 to t: an earlier token, or t itself for none
places              (streams, tokens) int64, a permutation of the tokens of each stream
echoes              (streams, 256) uint8: what a symbol leads to expect in a token like it; 128 leads to 128
"""

import numpy as np

from kernels.dispatch import dispatch

__all__ = ["add_echo", "subtract_echo"]


def _check(
    source: np.ndarray, references: np.ndarray, places: np.ndarray, *, echoes: np.ndarray, out: np.ndarray
) -> None:
    for name, array in (("source", source), ("out", out)):
        if array.ndim != 3 or array.shape != source.shape or array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; both must be contiguous uint8 of one shape")
    streams, _, tokens = source.shape
    for name, array in (("references", references), ("places", places)):
        if array.shape != (streams, tokens) or array.dtype != np.int64 or not array.flags.c_contiguous:
            raise ValueError(f"{name} are {array.dtype} {array.shape}; they must be int64 {(streams, tokens)}")
    if echoes.shape != (streams, 256) or echoes.dtype != np.uint8 or not echoes.flags.c_contiguous:
        raise ValueError(f"echoes are {echoes.dtype} {echoes.shape}; they must be uint8 {(streams, 256)}")
    if (echoes[:, 128] != 128).any():
        raise ValueError("the echo of symbol 128 is not 128")
    if ((references < 0) | (references > np.arange(tokens))).any():
        raise ValueError("a reference is not an earlier token or the token itself")
    if (np.sort(places, axis=1) != np.arange(tokens)).any():
        raise ValueError("places are not a permutation of the tokens")


def _subtract_echo_reference(
    source: np.ndarray, references: np.ndarray, places: np.ndarray, *, echoes: np.ndarray, out: np.ndarray
) -> None:
    tokens = np.arange(source.shape[2])
    for stream, symbols in enumerate(source):
        echo = echoes[stream][symbols[:, references[stream]]]
        echo[:, references[stream] == tokens] = 128
        out[stream][:, places[stream]] = symbols - echo + np.uint8(128)


def _add_echo_reference(
    source: np.ndarray, references: np.ndarray, places: np.ndarray, *, echoes: np.ndarray, out: np.ndarray
) -> None:
    for stream, residuals in enumerate(source):
        symbols = out[stream]
        for token, reference in enumerate(references[stream]):
            echo = np.uint8(128) if reference == token else echoes[stream][symbols[:, reference]]
            symbols[:, token] = residuals[:, places[stream, token]] + echo - np.uint8(128)


subtract_echo = dispatch(_subtract_echo_reference, check=_check, numba="kernels.repeats_numba:subtract_echo")
add_echo = dispatch(_add_echo_reference, check=_check, numba="kernels.repeats_numba:add_echo")
