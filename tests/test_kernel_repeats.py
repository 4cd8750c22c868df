"""Foretelling symbols: nothing is lost, every implementation agrees, and references that look ahead are refused."""

import numpy as np
import pytest

from kernels.repeats import add_echo, subtract_echo


def sample(streams: int, rows: int, tokens: int, seed: int = 0):
    """(symbols, references, places, echoes), all at random."""
    rng = np.random.default_rng(seed)
    symbols = rng.integers(0, 256, (streams, rows, tokens)).astype(np.uint8)
    references = (rng.random((streams, tokens)) * (np.arange(tokens) + 1)).astype(np.int64)
    echoes = rng.integers(0, 256, (streams, 256)).astype(np.uint8)
    echoes[:, 128] = 128
    return symbols, references, rng.random((streams, tokens)).argsort(1), echoes


@pytest.mark.parametrize("shape", [(2, 7, 40), (3, 4, 1), (1, 1, 300), (2, 9, 33), (0, 2, 8), (2, 0, 8)])
def test_what_is_subtracted_is_added_back(shape):
    symbols, references, places, echoes = sample(*shape)
    residuals = {impl: np.empty_like(symbols) for impl in subtract_echo.impls}
    for impl, out in residuals.items():
        subtract_echo(symbols, references, places, echoes=echoes, out=out, impl=impl)
        np.testing.assert_array_equal(out, residuals["reference"])
    for impl in add_echo.impls:
        out = np.empty_like(symbols)
        add_echo(residuals["reference"], references, places, echoes=echoes, out=out, impl=impl)
        np.testing.assert_array_equal(out, symbols)


def test_a_token_like_an_earlier_one_leaves_nothing():
    symbols, _, _, _ = sample(1, 5, 8)
    symbols[0, :, 6] = symbols[0, :, 2]
    references = np.arange(8)[None].copy()
    references[0, 6] = 2
    whole, out = np.arange(256, dtype=np.uint8)[None], np.empty_like(symbols)
    subtract_echo(symbols, references, np.arange(8)[None], echoes=whole, out=out)
    assert (out[0, :, 6] == 128).all()
    np.testing.assert_array_equal(out[0, :, :6], symbols[0, :, :6])


def test_what_does_not_fit_is_refused():
    symbols, references, places, echoes = sample(2, 3, 8)
    out = np.empty_like(symbols)
    ahead, twice, moved = references.copy(), places.copy(), echoes.copy()
    ahead[1, 2] = 3
    twice[0, 0] = twice[0, 1]
    moved[0, 128] = 127
    for bad in ((ahead, places, echoes), (references, twice, echoes), (references, places, moved)):
        with pytest.raises(ValueError):
            add_echo(symbols, bad[0], bad[1], echoes=bad[2], out=out)
    with pytest.raises(ValueError):
        add_echo(symbols, references, places, echoes=echoes, out=out[:, :, ::2])
