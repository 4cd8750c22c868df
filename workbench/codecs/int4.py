"""Four bits, a scale and a zero for each group of channels of a token."""

from dataclasses import dataclass
from typing import ClassVar

from kernels.quantize import Scheme
from workbench.codecs.base import KeysAndValues
from workbench.codecs.quantized import QuantizedCodec, channel_group

__all__ = ["Int4"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Int4(QuantizedCodec):
    """Args:
    group: Channels that share a scale; cut to a divisor of the head size.
    """

    group: int = 64
    tolerance: ClassVar[float] = 1 / 15 * (1 + 2**-7) + 2**-8

    def _schemes(self, kv: KeysAndValues) -> tuple[Scheme, Scheme]:
        group = channel_group(self.group, kv)
        scheme = Scheme(code="uint4", along="channels", group=group, dtype=kv.layout.dtype)
        return scheme, scheme
