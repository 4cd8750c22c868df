"""What reusing a chunk costs and saves: prefill seconds by position, bytes, load seconds.

Prefill arithmetic after Mooncake (FAST'25, equation 1): flops(n) = layers * (a n^2 d + b n d^2) with a = 4, b = 22.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["ReuseCosts"]


@dataclass(frozen=True)
class ReuseCosts:
    """Costs for one model on one machine. The default is LLaMA3-70B on 8 x 312 TFLOPS over a 128 GB/s link.

    Attributes:
        layers: Transformer layers.
        hidden: Model width d.
        query_groups: Query heads that share one KV head.
        value_bytes: Bytes of one stored K or V value.
        flops_per_second: Arithmetic rate of prefill.
        load_bytes_per_second: From the tier that holds the chunk.
        attention_factor, dense_factor: a and b of the equation.
    """

    layers: int = 80
    hidden: int = 8192
    query_groups: int = 8
    value_bytes: float = 2
    flops_per_second: float = 8 * 312e12
    load_bytes_per_second: float = 128e9
    attention_factor: float = 4.0
    dense_factor: float = 22.0

    @property
    def bytes_per_token(self) -> float:
        """K and V of all layers."""
        return 2 * self.layers * self.hidden / self.query_groups * self.value_bytes

    def nbytes(self, tokens: np.ndarray) -> np.ndarray:
        """int64, stored bytes of so many tokens."""
        return (np.asarray(tokens) * self.bytes_per_token).astype(np.int64)

    def recompute_seconds(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Seconds to prefill tokens start..stop - 1 of a prompt when all before are there."""
        return self._prefill(stop) - self._prefill(start)

    def load_seconds(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds to load so many tokens."""
        return np.asarray(tokens) * self.bytes_per_token / self.load_bytes_per_second

    def seconds_saved(self, hit_tokens: np.ndarray) -> np.ndarray:
        """Prefill seconds saved by a prefix hit of so many tokens, less the seconds to load it."""
        return self._prefill(hit_tokens) - self.load_seconds(hit_tokens)

    def _prefill(self, tokens: np.ndarray) -> np.ndarray:
        n, d = np.asarray(tokens, np.float64), float(self.hidden)
        flops = self.layers * (self.attention_factor * n * n * d + self.dense_factor * n * d * d)
        return flops / self.flops_per_second
