"""Entropy-coded uniform quantisation: no calibration, and the fewest bits at a given quality.

    (keys turned back by position ->) mean of each channel off -> one step for the whole layer -> rounded -> rANS

At high rate a uniform quantiser with an ideal entropy coder stays within 0.25 bit of the rate-distortion bound of any
source (Gish and Pierce, 1968), and one step for all channels is what minimises the mean squared error. Loud channels
spend more bits, quiet ones nearly none; an outlier costs its own bits and widens nobody's scale.
"""

from dataclasses import dataclass

import numpy as np

from kernels.floats import decode16, encode16
from kernels.rope import angles_of, rope, unrope
from kernels.symbols import channel_moments, from_symbols, to_symbols
from kernels.tiles import Tiles
from workbench.codecs.base import CorruptDataError, KeysAndValues, KVCodec, UnrepresentableError
from workbench.codecs.payload import PayloadReader, PayloadWriter, sections_nbytes
from workbench.codecs.symbol_coding import coded_nbytes, read_symbols, write_symbols
from workbench.errors import InvalidInputError

__all__ = ["ECSQ"]

# Bases of the rotary embedding in use: none, Llama 1 and 2, SmolLM2, Llama 3, Qwen and Mistral.
_THETAS = (0.0, 1e4, 1e5, 5e5, 1e6)


@dataclass(frozen=True, kw_only=True, repr=False)
class ECSQ(KVCodec):
    """The quality knob is the step: halving it costs one bit a value and quarters the error.

    Args:
        step: Step of the keys over the RMS of the layer's keys without their means.
        value_step: The same of the values; None for `step`.
        rope_theta: Base of the model's rotary embedding, if it is a plain half-split one (Llama, Qwen): keys are turned
            back by it before they are coded, which takes a quarter of the error off at the same size. 0: as they are;
            None: the base in use among models, or 0, that fits each chunk best.
    """

    sink_tokens: int = 4
    step: float = 0.4
    value_step: float | None = None
    rope_theta: float | None = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.rope_theta is not None and self.rope_theta < 0:
            raise InvalidInputError(f"rope_theta is {self.rope_theta}; it must be positive, 0 for none, or None")
        for name, step in (("step", self.step), ("value_step", self.value_step)):
            if step is not None and not 2**-6 <= step <= 16:
                raise InvalidInputError(f"{name} is {step}; it must be from 1/64 to 16")

    @property
    def tolerance(self) -> float:
        # Half a step; the residual's RMS is at most twice the largest |x|. Never above 127 steps, so none is clipped.
        # Turning a pair of channels mixes their errors: at most 1.5 times as much in one.
        return max(self.step, self.value_step or 0, 1 / 127) * (1 + 2**-6 if self.rope_theta == 0 else 1.5) + 2**-6

    def _write(self, kv: KeysAndValues, writer: PayloadWriter) -> None:
        blocks, dtype = np.arange(kv.num_blocks), kv.layout.dtype
        keys, theta = Tiles(kv.keys), self.rope_theta
        if theta is None:
            theta = _best_theta(kv)
            writer.append(np.array([theta], np.float64))
        if theta:
            plain, turned = _turned(keys, kv)
            unrope(keys, blocks, angles=_angles(kv, theta), plain=plain, dtype=dtype)
            keys = turned
        finer = None
        for tiles, relative_step in ((keys, self.step), (Tiles(kv.values), self.value_step or self.step)):
            means, rms = self._means_and_rms(tiles, blocks, dtype)
            finer = self._step_factors(rms) if finer is None else finer  # of the keys, for the values, too
            symbols = np.empty(_symbols_shape(tiles, kv), np.uint8)
            steps = np.maximum(rms * finer * np.float32(relative_step), np.float32(2.0**-100))
            numbers = {"means": decode16(means, dtype), "symbols": symbols, "dtype": dtype}
            to_symbols(tiles, blocks, steps=_each_token(steps, kv), **numbers)
            clipped = ((symbols == 1) | (symbols == 255)).any((1, 2))
            if clipped.any():
                steps[clipped] = np.maximum(steps, _widest(tiles, dtype, numbers["means"]) / np.float32(126))[clipped]
                to_symbols(tiles, blocks, steps=_each_token(steps, kv), **numbers)
            writer.append(steps)
            writer.append(means)
            self._write_coded(symbols, writer)

    def _read(self, kv: KeysAndValues, reader: PayloadReader) -> None:
        blocks, dtype = np.arange(kv.num_blocks), kv.layout.dtype
        keys, theta = Tiles(kv.keys), self.rope_theta
        if theta is None:
            theta = float(reader.section((1,), np.float64)[0])
            if theta not in _THETAS:
                raise CorruptDataError(f"a rotary base of {theta}; this codec knows {_THETAS}")
        plain, turned = _turned(keys, kv) if theta else (None, keys)
        for tiles in (turned, Tiles(kv.values)):
            steps = reader.section((tiles.num_layers,), np.float32)
            means = reader.section((tiles.num_layers, tiles.num_heads, tiles.head_size), np.uint16)
            if not np.isfinite(steps).all():
                raise CorruptDataError("a step is not a finite number")
            symbols = np.empty(_symbols_shape(tiles, kv), np.uint8)
            self._read_coded(symbols, reader)
            numbers = {"means": decode16(means, dtype), "steps": _each_token(steps, kv), "symbols": symbols}
            from_symbols(tiles, blocks, dtype=dtype, **numbers)
        if plain is not None:
            rope(keys, blocks, angles=_angles(kv, theta), plain=plain, dtype=dtype)

    def _nbytes(self, kv: KeysAndValues) -> int:
        layers, _, heads, _, size = kv.keys.shape
        part = sections_nbytes(((layers,), 4), ((layers, heads, size), 2))
        return 2 * (part + self._coded_nbytes(_symbols_shape(Tiles(kv.keys), kv))) + sections_nbytes(((1,), 8))

    def _step_factors(self, key_rms: np.ndarray) -> np.ndarray:
        """What the steps of each layer's keys and values are multiplied by, float32."""
        return np.ones_like(key_rms)

    def _write_coded(self, symbols: np.ndarray, writer: PayloadWriter) -> None:
        """Append symbols (layers, channels, tokens)."""
        write_symbols(symbols, writer)

    def _read_coded(self, symbols: np.ndarray, reader: PayloadReader) -> None:
        read_symbols(symbols, reader)

    def _coded_nbytes(self, shape: tuple[int, int, int]) -> int:
        """Bytes that `_write_coded` needs at most."""
        return coded_nbytes(shape)

    def _means_and_rms(self, tiles: Tiles, blocks: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """Bits of the mean of each channel, and the RMS of each layer without them, float32."""
        shape = (tiles.num_layers, tiles.num_heads, tiles.head_size)
        sums, squares = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        channel_moments(tiles, blocks, sums=sums, squares=squares, dtype=dtype)
        if not (np.isfinite(sums).all() and np.isfinite(squares).all()):
            raise UnrepresentableError(
                f"the chunk holds NaN or infinity (or numbers above 10^18); {self!r} cannot keep them"
            )
        count = blocks.size * tiles.block_size
        means = encode16(sums / np.float32(count), dtype)
        exact = decode16(means, dtype)
        power = squares / np.float32(count) - exact * (2 * sums / np.float32(count) - exact)
        return means, np.sqrt(np.maximum(power, 0).mean((1, 2))).astype(np.float32)


def _angles(kv: KeysAndValues, theta: float) -> np.ndarray:
    return angles_of(kv.num_tokens, kv.layout.head_size, theta)


def _best_theta(kv: KeysAndValues) -> float:
    """The base after which most of the keys' energy lies in the channels' means, as it does before rotation."""
    size = kv.layout.head_size
    if size % 2:
        return 0.0
    layers = np.unique(np.linspace(0, len(kv.keys) - 1, 4).astype(int))
    keys = decode16(np.ascontiguousarray(kv.keys[layers].transpose(0, 2, 1, 3, 4)), kv.layout.dtype)
    keys = keys.reshape(-1, kv.num_tokens, size)
    energy = {}
    with np.errstate(all="ignore"):  # numbers that are not finite are refused later
        pairs = keys[..., : size // 2] + 1j * keys[..., size // 2 :]
        for theta in _THETAS:
            turn = np.exp(-1j * angles_of(kv.num_tokens, size, theta)) if theta else 1.0
            energy[theta] = float(np.square(np.abs((pairs * turn).mean(1))).sum())
    best = max(_THETAS, key=energy.__getitem__)
    return best if energy[best] > 1.05 * energy[0.0] else 0.0


def _symbols_shape(tiles: Tiles, kv: KeysAndValues) -> tuple[int, int, int]:
    return tiles.num_layers, tiles.num_heads * tiles.head_size, kv.num_tokens


def _each_token(steps: np.ndarray, kv: KeysAndValues) -> np.ndarray:
    return np.repeat(steps[:, None], kv.num_tokens, axis=1)


def _turned(keys: Tiles, kv: KeysAndValues) -> tuple[np.ndarray, Tiles]:
    """(memory for the keys of one chunk without their positions, the same as tiles)."""
    plain = np.empty((keys.num_layers, kv.num_blocks, keys.num_heads, keys.rows, keys.columns), np.uint16)
    return plain, Tiles(plain if keys.token_major else plain.swapaxes(-1, -2))


def _widest(tiles: Tiles, dtype: str, means: np.ndarray) -> np.ndarray:
    """Largest distance of a value from its channel's mean, for each layer."""
    values = decode16(np.ascontiguousarray(tiles.pages), dtype)
    return np.abs(values - means[:, None, :, None, :]).max((1, 2, 3, 4))
