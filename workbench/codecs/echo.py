"""ECSQ, and each token foretold from an earlier token of the chunk that is most like it.

    symbols of ECSQ -> minus the echo of an earlier token -> tokens sorted by loudness into classes -> rANS

Half the tokens of a text have occurred within the last 256, and a token's keys (turned back by position) and values
are much like those of its last occurrence: nearly equal in the first layers, where they depend on the token alone, and
still correlated in the last. The codec sees no tokens: it finds, for every few layers, the earlier token that foretells
each best. Foretelling is done on the rounded symbols, so that at equal steps keys and values come back exactly
as ECSQ's would.

Layers differ in what an error does: where keys are loud, attention picks few tokens, and neither the errors of its
scores nor those of the values average out. The RMS of a layer's keys over the median layer's tells such layers without
calibration: with one layer rounded at a time, its logarithm correlates with that of the KL by 0.46 (keys) and 0.48
(values) on SmolLM2-135M, by 0.68 and 0.78 on Qwen2.5-Coder-0.5B (one text). Their steps are finer (`focus`).

What was tried to lower the bits of ECSQ at equal loss, and what it gave in bits a value (SmolLM2-135M, chunks of 256
tokens, 2026-11; about 3.2 to begin with; where the loss changes, scaled to a KL of 0.006 on four texts):

| tried                                                              | bits           | kept |
|--------------------------------------------------------------------|----------------|------|
| keys turned back by position                                       | -0.12          | yes  |
| echoes of earlier tokens, references for every four layers         | -0.30 to -0.46 | yes  |
| four loudness classes of tokens, on top of echoes                  | -0.10 to -0.15 | yes  |
| eight classes; four classes without echoes                         | -0.01          | no   |
| references for each layer                                          | +0.01          | no   |
| keys' channel pairs turned to their principal axes                 | -0.02          | no   |
| keys' (values') step times 0.8 of the other's                      | +0.10 (+0.02)  | no   |
| steps by the square root of a layer's loudness, of keys (values)   | +0.03 (+0.07)  | no   |
| steps of keys and values by the loudness of a layer's keys: finer  | -0.2           | yes  |
| a step for each head instead of each layer                         | +0.16          | no   |

Not tried: trellis-coded quantisation, which theory gives up to 0.17 bits, and the sum of two earlier tokens.
"""

import math
from dataclasses import dataclass

import numpy as np

from kernels.repeats import add_echo, subtract_echo
from workbench.codecs.base import CorruptDataError
from workbench.codecs.ecsq import ECSQ
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes
from workbench.codecs.symbol_coding import classed_nbytes, read_classed, write_classed
from workbench.errors import InvalidInputError

__all__ = ["Echo"]

_LAYERS_TOGETHER = 4  # layers that share their references: one byte a token
_CLASSES = 4
_LOUDNESS = np.log2(np.square(np.arange(256, dtype=np.float32) - 128) + np.float32(0.1))  # of a symbol, about its bits
_COARSEST = 1.5  # times the step, of the layers with the quietest keys
_WORTH = 0.02  # a reference has to take so much off the logarithm of the energy


@dataclass(frozen=True, kw_only=True, repr=False)
class Echo(ECSQ):
    """The other args are ECSQ's; the base of the rotary embedding is found out by itself.

    Args:
        focus: The steps of a layer's keys and values fall with this power of its keys' RMS over that of the median
            layer, by half or one and a half at most; 0 for the same relative step in all layers.
    """

    step: float = 0.45
    rope_theta: float | None = None
    focus: float = 2.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.focus <= 4:
            raise InvalidInputError(f"focus is {self.focus}; it must be from 0 to 4")

    @property
    def tolerance(self) -> float:
        return super().tolerance * (_COARSEST if self.focus else 1)

    def _step_factors(self, key_rms: np.ndarray) -> np.ndarray:
        if not self.focus:
            return super()._step_factors(key_rms)
        loudness = np.maximum(key_rms, 2.0**-100) / max(float(np.median(key_rms)), 2.0**-100)
        return np.clip(loudness ** -np.float32(self.focus), 0.5, _COARSEST).astype(np.float32)

    def _write_coded(self, symbols: np.ndarray, writer: PayloadWriter) -> None:
        layers, _, tokens = symbols.shape
        references, weights = _find_references(symbols)
        echoes, residuals = _echoes(weights), np.empty_like(symbols)
        every = _of_each_layer(references, layers)
        subtract_echo(symbols, every, np.tile(np.arange(tokens), (layers, 1)), echoes=echoes, out=residuals)
        classes = _classes_of(residuals)
        subtract_echo(symbols, every, _places_of(classes), echoes=echoes, out=residuals)
        writer.append(references.astype(_number_type(tokens)))
        writer.append(weights)
        writer.append(_packed(classes))
        write_classed(residuals.reshape(_classed_shape(symbols.shape)), writer)

    def _read_coded(self, symbols: np.ndarray, reader: PayloadReader) -> None:
        layers, _, tokens = symbols.shape
        references = reader.section((_groups(layers), tokens), _number_type(tokens)).astype(np.int64)
        if (references > np.arange(tokens)).any():
            raise CorruptDataError("a token is foretold from a later one")
        echoes = _echoes(reader.section((layers,), np.uint8))
        places = _places_of(_unpacked(reader.section((layers, -(-tokens // 4)), np.uint8), tokens))
        residuals = np.empty_like(symbols)
        read_classed(residuals.reshape(_classed_shape(symbols.shape)), reader)
        add_echo(residuals, _of_each_layer(references, layers), places, echoes=echoes, out=symbols)

    def _coded_nbytes(self, shape: tuple[int, int, int]) -> int:
        layers, _, tokens = shape
        references = ((_groups(layers), tokens), np.dtype(_number_type(tokens)).itemsize)
        side = sections_nbytes(references, ((layers,), 1), ((layers, -(-tokens // 4)), 1))
        return side + classed_nbytes(_classed_shape(shape))


def _groups(layers: int) -> int:
    return -(-layers // _LAYERS_TOGETHER)


def _of_each_layer(references: np.ndarray, layers: int) -> np.ndarray:
    return np.ascontiguousarray(np.repeat(references, _LAYERS_TOGETHER, axis=0)[:layers].astype(np.int64))


def _number_type(tokens: int) -> type:
    return np.uint8 if tokens <= 256 else np.uint16 if tokens <= 65536 else np.uint32


def _classed_shape(shape: tuple[int, int, int]) -> tuple[int, int, int, int]:
    layers, channels, tokens = shape
    classes = math.gcd(_CLASSES, tokens)
    return layers, channels, classes, tokens // classes


def _find_references(symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(references (groups, tokens), weights (layers,) uint8 in 1/255 of a whole echo)."""
    layers, _, tokens = symbols.shape
    references = np.zeros((_groups(layers), tokens), np.int64)
    weights = np.zeros(layers, np.uint8)
    for group in range(len(references)):
        members = slice(group * _LAYERS_TOGETHER, min((group + 1) * _LAYERS_TOGETHER, layers))
        likeness = np.stack([_likeness(layer) for layer in symbols[members]])
        references[group], found = _references_of(likeness)
        weights[members] = np.rint(found * 255)
    return references, weights


def _likeness(symbols: np.ndarray) -> np.ndarray:
    """Inner products (tokens, tokens) of one layer's tokens, every channel as loud as its bits are many."""
    numbers = symbols.astype(np.float32) - 128
    numbers /= np.sqrt(np.square(numbers).mean(1, keepdims=True) + 0.5)
    return numbers.T @ numbers / np.float32(len(numbers))


def _references_of(likeness: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The earlier token that leaves the least of each, itself where none helps; and the best weight of each layer."""
    layers, tokens, _ = likeness.shape
    own = np.arange(tokens)
    energy = likeness[:, own, own]
    later = own >= own[:, None]
    weights = np.full(layers, 0.7, np.float32)
    references = own
    for _ in range(3):
        scale = weights[:, None, None]
        left = energy[:, :, None] - 2 * scale * likeness + np.square(scale) * energy[:, None]
        change = np.log(left + 0.1).mean(0) - np.log(energy + 0.1).mean(0)[:, None]
        change[later] = np.inf
        best = change.argmin(1)
        references = np.where(change[own, best] < -_WORTH, best, own)
        used = np.flatnonzero(references != own)
        shared = likeness[:, used, references[used]].sum(1)
        weights = np.clip(shared / np.maximum(energy[:, references[used]].sum(1), 1e-6), 0, 1)
    return references, weights


def _echoes(weights: np.ndarray) -> np.ndarray:
    """(layers, 256): what each symbol leads to expect."""
    numbers = np.arange(256) - 128
    return (np.rint(numbers * (weights[:, None] / 255)) + 128).astype(np.uint8)


def _classes_of(residuals: np.ndarray) -> np.ndarray:
    """(layers, tokens): quartile of each token's loudness in its layer; as many tokens in each."""
    _, _, count, size = _classed_shape(residuals.shape)
    loudness = np.stack([_LOUDNESS[layer].mean(0) for layer in residuals])
    order = loudness.argsort(1, kind="stable")
    classes = np.empty(order.shape, np.uint8)
    np.put_along_axis(classes, order, np.repeat(np.arange(count, dtype=np.uint8), size)[None], 1)
    return classes


def _places_of(classes: np.ndarray) -> np.ndarray:
    """Where each token stands: class by class, in order within one."""
    places = np.empty(classes.shape, np.int64)
    np.put_along_axis(places, classes.argsort(1, kind="stable"), np.arange(classes.shape[1])[None], 1)
    return places


def _packed(classes: np.ndarray) -> np.ndarray:
    """Four to a byte."""
    layers, tokens = classes.shape
    padded = np.zeros((layers, -(-tokens // 4), 4), np.uint8)
    padded.reshape(layers, -1)[:, :tokens] = classes
    return padded[..., 0] | padded[..., 1] << 2 | padded[..., 2] << 4 | padded[..., 3] << 6


def _unpacked(packed: np.ndarray, tokens: int) -> np.ndarray:
    return (packed[..., None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(packed), -1)[:, :tokens]
