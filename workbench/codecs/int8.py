"""Eight bits: keys per channel over the whole chunk with a zero, values per token and head. The default lossy codec."""

from dataclasses import dataclass
from typing import ClassVar

from kernels.quantize import Scheme
from workbench.codecs.base import KeysAndValues
from workbench.codecs.quantized import QuantizedCodec, token_group

__all__ = ["Int8"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8(QuantizedCodec):
    """Keys differ most between channels, values between tokens (KIVI, arXiv:2402.02750): scales follow that.

    Args:
        keys: "channel", or "token" for one scale a token and head, as vLLM's int8_per_token_head.
    """

    keys: str = "channel"
    # Half a step of (max - min) / 255, the scale rounded up to bfloat16, and the rounding of the result.
    tolerance: ClassVar[float] = 1 / 255 * (1 + 2**-7) + 2**-8

    def _schemes(self, kv: KeysAndValues) -> tuple[Scheme, Scheme]:
        dtype, size = kv.layout.dtype, kv.layout.head_size
        per_token = Scheme(code="int8", along="channels", group=size, dtype=dtype)
        if self.keys == "token":
            return per_token, per_token
        group = token_group(kv.num_tokens, kv)
        return Scheme(code="uint8", along="tokens", group=group, dtype=dtype), per_token
