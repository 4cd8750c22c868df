"""KIVI: keys per channel in groups of tokens, values per token in groups of channels (Liu et al., arXiv:2402.02750)."""

from dataclasses import dataclass

from kernels.quantize import Scheme
from workbench.codecs.base import KeysAndValues
from workbench.codecs.quantized import QuantizedCodec, channel_group, token_group
from workbench.errors import InvalidInputError

__all__ = ["Kivi"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Kivi(QuantizedCodec):
    """The residual window of the paper is left out: a stored chunk has no recent tokens.

    Args:
        bits: 4 or 2.
        group: Values that share a scale and a zero.
    """

    bits: int = 4
    group: int = 32

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in (2, 4):
            raise InvalidInputError(f"bits is {self.bits}; KIVI has 2 and 4")

    @property
    def tolerance(self) -> float:
        return 1 / (2**self.bits - 1) * (1 + 2**-7) + 2**-8

    def _schemes(self, kv: KeysAndValues) -> tuple[Scheme, Scheme]:
        code, dtype = f"uint{self.bits}", kv.layout.dtype
        keys = Scheme(code=code, along="tokens", group=token_group(self.group, kv), dtype=dtype)
        return keys, Scheme(code=code, along="channels", group=channel_group(self.group, kv), dtype=dtype)
