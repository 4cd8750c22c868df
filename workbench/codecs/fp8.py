"""Eight-bit floats with one scale a token and head."""

from dataclasses import dataclass
from typing import ClassVar

from kernels.floats import FP8_MAX
from kernels.quantize import Scheme
from workbench.codecs.base import KeysAndValues
from workbench.codecs.quantized import QuantizedCodec
from workbench.errors import UnknownNameError

__all__ = ["FP8"]


@dataclass(frozen=True, kw_only=True, repr=False)
class FP8(QuantizedCodec):
    """Args:
    kind: "e4m3" (three mantissa bits), or "e5m2" (two, and a wider range that a scaled group has no use for).
    """

    kind: str = "e4m3"
    tolerance: ClassVar[float] = 2**-3 * (1 + 2**-7) + 2**-8  # half an ulp of e5m2

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in FP8_MAX:
            raise UnknownNameError("fp8 kind", self.kind, FP8_MAX)

    def _schemes(self, kv: KeysAndValues) -> tuple[Scheme, Scheme]:
        scheme = Scheme(code=self.kind, along="channels", group=kv.layout.head_size, dtype=kv.layout.dtype)
        return scheme, scheme
