"""Codecs of the workbench as serdes of LMCache's multiprocess server.

    from workbench.connectors.lmcache_serde import register
    register()        # then, in an L2 adapter's configuration:
    {"type": "fs", "base_path": "/cache", "serde": {"type": "kvworkbench", "codec": "int8", "num_kv_heads": 8}}

    [2, L, T, H * D] tensor -> (L, 1 block, H, T, K | V) chunk -> codec -> length, payload, zeros -> byte tensor

LMCache 0.5.6 stores the whole buffer that `estimate_serialized_size` asked for, not the bytes that were written. A
codec of fixed rate fills it; for one of variable rate, say how many bits a value it may take (`bits_per_value`): a
chunk that needs more is not stored, and is computed again.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.codecs import Codec, CorruptDataError, resolve_codec
from workbench.errors import CapacityError, InvalidInputError
from workbench.layout import KVLayout

__all__ = ["CodecDeserializer", "CodecSerializer", "register"]

_LENGTH_NBYTES = 8


class _Serde:
    """Args:
    codec: A codec or its name.
    num_kv_heads: KV heads of one rank: LMCache's shapes hold heads times head size only.
    bits_per_value: Room for one value; None for the most that the codec can need.
    """

    def __init__(self, codec: Codec | str, *, num_kv_heads: int, bits_per_value: float | None = None):
        self.codec = resolve_codec(codec)
        self.num_kv_heads = num_kv_heads
        self.bits_per_value = bits_per_value

    def _layout(self, shape: tuple[int, ...], dtype: Any) -> KVLayout:
        if len(shape) != 4 or shape[0] != 2 or shape[3] % self.num_kv_heads:
            raise InvalidInputError(
                f"KV of shape {tuple(shape)}; it must be (2, layers, tokens, {self.num_kv_heads} heads * head size)"
            )
        _, layers, tokens, hidden = map(int, shape)
        size = hidden // self.num_kv_heads
        common = {"num_kv_heads": self.num_kv_heads, "head_size": size, "block_size": tokens, "chunk_tokens": tokens}
        return KVLayout(num_layers=layers, dtype=str(dtype).removeprefix("torch."), **common)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Bytes of the buffer for one object, whatever its chunk turns out to need."""
        total = 0
        for shape, dtype in zip(layout_desc.shapes, layout_desc.dtypes, strict=True):
            layout = self._layout(shape, dtype)
            if self.bits_per_value is None:
                total += self.codec.max_nbytes(layout) + _LENGTH_NBYTES
            else:
                total += math.ceil(math.prod(shape) * self.bits_per_value / 8)
        return total


class CodecSerializer(_Serde):
    """LMCache's `Serializer`."""

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode src's tensor into dst's bytes; returns how many were written.

        Raises:
            CapacityError: The chunk needs more than `bits_per_value` gives it.
            UnrepresentableError: It holds NaN or infinity and the codec is lossy.
        """
        layout = self._layout(src.tensor.shape, src.tensor.dtype)
        chunk = np.empty(layout.chunk_shape, np.uint8)
        for view, part in zip(layout.keys_and_values(chunk), _parts(src.tensor, layout), strict=True):
            view[:, 0] = part
        payload = np.frombuffer(self.codec.encode(chunk, layout), np.uint8)
        buffer, stop = _bytes_of(dst.tensor), _LENGTH_NBYTES + len(payload)
        if stop > len(buffer):
            raise CapacityError(f"{self.codec!r} needs {stop} bytes for this chunk; the buffer has {len(buffer)}")
        buffer[:_LENGTH_NBYTES] = np.frombuffer(len(payload).to_bytes(_LENGTH_NBYTES, "little"), np.uint8)
        buffer[_LENGTH_NBYTES:stop] = payload
        buffer[stop:] = 0
        return stop


class CodecDeserializer(_Serde):
    """LMCache's `Deserializer`."""

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode src's bytes into dst's tensor.

        Raises:
            CorruptDataError: They are not what this codec wrote for a tensor of this shape.
        """
        layout, buffer = self._layout(dst.tensor.shape, dst.tensor.dtype), _bytes_of(src.tensor)
        length = int.from_bytes(buffer[:_LENGTH_NBYTES].tobytes(), "little")
        if len(buffer) < _LENGTH_NBYTES or length > len(buffer) - _LENGTH_NBYTES:
            raise CorruptDataError(f"a payload of {length} bytes in a buffer of {len(buffer)}")
        chunk = np.empty(layout.chunk_shape, np.uint8)
        self.codec.decode(buffer[_LENGTH_NBYTES : _LENGTH_NBYTES + length].tobytes(), layout, chunk)
        for view, part in zip(layout.keys_and_values(chunk), _parts(dst.tensor, layout), strict=True):
            part[...] = view[:, 0]


def _bytes_of(tensor: Any) -> np.ndarray:
    """A contiguous CPU tensor's bytes, shared."""
    import torch

    return tensor.view(torch.uint8).reshape(-1).numpy()


def _parts(tensor: Any, layout: KVLayout) -> np.ndarray:
    """(2, L, H, T, D) view of the bits of a (2, L, T, H * D) tensor."""
    bits = _bytes_of(tensor).view(f"u{layout.dtype_nbytes}")
    shape = (2, layout.num_layers, layout.chunk_tokens, layout.num_kv_heads, layout.head_size)
    return bits.reshape(shape).swapaxes(2, 3)


def register(name: str = "kvworkbench") -> None:
    """Make the codecs known to LMCache under a serde type; once a process."""
    from lmcache.v1.distributed.serde import (  # pyright: ignore[reportMissingImports]  # optional
        AsyncSerdeProcessor,
        get_registered_serde_types,
        register_serde_factory,
    )

    def make(options: Mapping[str, object]) -> Any:
        settings: dict[str, Any] = {k: v for k, v in options.items() if k != "max_workers"}
        codec = settings.pop("codec", "int8")
        workers = int(options.get("max_workers", 1))  # type: ignore[call-overload]
        pair: tuple[Any, Any] = CodecSerializer(codec, **settings), CodecDeserializer(codec, **settings)
        return AsyncSerdeProcessor(*pair, max_workers=workers)

    if name not in get_registered_serde_types():
        register_serde_factory(name, make)
