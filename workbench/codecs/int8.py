"""Eight bits with a zero: keys per channel over the whole chunk, values per token and head. The default lossy codec."""

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
        keys: "channel", or "token" for one scale a token and head without a zero, as vLLM's int8_per_token_head.
    """

    keys: str = "channel"
    # Half a step of (max - min) / 255, the scale rounded up to bfloat16, and the rounding of the result.
    tolerance: ClassVar[float] = 1 / 255 * (1 + 2**-7) + 2**-8

    def _schemes(self, kv: KeysAndValues) -> tuple[Scheme, Scheme]:
        dtype, size = kv.layout.dtype, kv.layout.head_size
        if self.keys == "token":
            per_token = Scheme(code="int8", along="channels", group=size, dtype=dtype)
            return per_token, per_token
        keys = Scheme(code="uint8", along="tokens", group=token_group(kv.num_tokens, kv), dtype=dtype)
        return keys, Scheme(code="uint8", along="channels", group=size, dtype=dtype)
