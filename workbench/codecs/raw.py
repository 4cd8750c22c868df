"""The bytes as they are: any dtype and page format."""

from dataclasses import dataclass

import numpy as np

from workbench.codecs.base import Codec, CorruptDataError
from workbench.layout import KVLayout

__all__ = ["Raw"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Raw(Codec):
    """No change; what is not stored smaller is at least moved at the speed of memory."""

    def encode(self, chunk: np.ndarray, layout: KVLayout) -> memoryview:
        return np.ascontiguousarray(chunk).reshape(-1).data

    def decode(self, data: bytes | memoryview, layout: KVLayout, out: np.ndarray) -> None:
        stored = np.frombuffer(data, np.uint8)
        if stored.size != out.size:
            raise CorruptDataError(f"{stored.size} bytes of data; {out.size} were expected")
        out[...] = stored.reshape(out.shape)

    def max_nbytes(self, layout: KVLayout) -> int:
        return layout.chunk_nbytes
