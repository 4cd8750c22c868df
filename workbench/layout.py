"""What KV looks like in the serving engine's pages, and the identity that seeds every chunk key.

page   the KV of one block of one layer: `block_size` tokens x `num_kv_heads` heads x (K | V)
chunk  (num_layers, blocks_per_chunk, page_nbytes) uint8: whole pages, in the engine's own form
"""

import hashlib
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from workbench.errors import InvalidInputError

__all__ = ["FORMAT_VERSION", "Identity", "KVLayout", "PAGE_FORMATS"]

# Part of every key: a new value turns all that was stored before into misses.
FORMAT_VERSION = 1

_DTYPE_NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1, "uint8": 1}

PAGE_FORMATS = {
    "token-major": "per (block, head): [token][K | V]; vLLM's [B, H, N, 2D] on GPUs",
    "vllm-cpu-vec": "per (block, head): K as [D][token], then V as [token][D]; vLLM's CPU backend without AMX",
    "opaque": "whole pages only: no view of single tokens (AMX packing, quantised KV dtypes)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape of KV in memory.

    Args:
        num_layers: Layers that hold KV (of this rank).
        num_kv_heads: KV heads of this rank.
        head_size: Elements of one key; a value has as many.
        block_size: Tokens of one block (a page of the serving engine's cache).
        chunk_tokens: Tokens of one chunk, a multiple of `block_size`.
        dtype: Element type: bfloat16, float16, float32, fp8_e4m3, fp8_e5m2 or uint8.
        page_format: How the bytes of a page are ordered; a key of `PAGE_FORMATS`.

    Raises:
        InvalidInputError: A size is not positive, or `chunk_tokens` is not a multiple of `block_size`.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int = 16
    chunk_tokens: int = 256
    dtype: str = "bfloat16"
    page_format: str = "token-major"

    def __post_init__(self):
        for name in ("num_layers", "num_kv_heads", "head_size", "block_size", "chunk_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise InvalidInputError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.chunk_tokens % self.block_size:
            raise InvalidInputError(
                f"chunk_tokens {self.chunk_tokens} is not a multiple of the block size {self.block_size}; "
                f"the nearest allowed are {self._nearest_chunk_tokens()}"
            )
        if self.dtype not in _DTYPE_NBYTES:
            raise InvalidInputError(f"dtype {self.dtype!r} is not one of {', '.join(_DTYPE_NBYTES)}")
        if self.page_format not in PAGE_FORMATS:
            raise InvalidInputError(f"page_format {self.page_format!r} is not one of {', '.join(PAGE_FORMATS)}")

    def _nearest_chunk_tokens(self) -> str:
        below = self.chunk_tokens // self.block_size * self.block_size
        return " and ".join(str(n) for n in (below, below + self.block_size) if n)

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_size

    @property
    def dtype_nbytes(self) -> int:
        return _DTYPE_NBYTES[self.dtype]

    @property
    def page_nbytes(self) -> int:
        """Bytes of one block of one layer, K and V."""
        return self.block_size * self.num_kv_heads * 2 * self.head_size * self.dtype_nbytes

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, all layers, uncompressed."""
        return self.num_layers * self.blocks_per_chunk * self.page_nbytes

    @property
    def token_nbytes(self) -> int:
        """Bytes of KV of one token, all layers, uncompressed."""
        return self.chunk_nbytes // self.chunk_tokens

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that so many tokens take, the last one perhaps filled in part."""
        return -(-num_tokens // self.block_size)

    @property
    def chunk_shape(self) -> tuple[int, int, int]:
        return self.num_layers, self.blocks_per_chunk, self.page_nbytes

    def keys_and_values(self, chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Strided views of a chunk's keys and values, both indexed [layer, block, head, token, element].

        Args:
            chunk: uint8 of shape `chunk_shape`, or any leading part of its blocks.

        Returns:
            Two views (no copy) of unsigned integers as wide as the dtype: bits, not numbers.

        Raises:
            InvalidInputError: The page format has no view of single tokens.
        """
        layers, blocks, _ = chunk.shape
        heads, tokens, size = self.num_kv_heads, self.block_size, self.head_size
        bits = chunk.view(f"u{self.dtype_nbytes}")
        if self.page_format == "token-major":
            both = bits.reshape(layers, blocks, heads, tokens, 2 * size)
            return both[..., :size], both[..., size:]
        if self.page_format == "vllm-cpu-vec":
            both = bits.reshape(layers, blocks, heads, 2, tokens * size)
            keys = both[:, :, :, 0].reshape(layers, blocks, heads, size, tokens).swapaxes(-1, -2)
            return keys, both[:, :, :, 1].reshape(layers, blocks, heads, tokens, size)
        raise InvalidInputError(f"page format {self.page_format!r} is {PAGE_FORMATS[self.page_format]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything beside the tokens that changes KV: one field different, and no chunk is shared.

    Fields are declared here and nowhere else; `digest` covers each of them, so a new field cannot be forgotten.
    What differs from request to request (LoRA, cache salt, multimodal inputs) stands in `ChunkScope` instead.

    Args:
        layout: Shape, dtype, block and chunk size, page format.
        weights: Digest of the weights, not the model's name.
        architecture: The model class, as in "LlamaForCausalLM".
        model_dtype: Element type of the computation.
        kv_scales: Scales of a quantised KV cache, or "".
        rope: Position encoding settings.
        attention: Sliding windows and KV groups, layer by layer, and the attention implementation.
        tensor_parallel: (rank, size).
        pipeline_parallel: (rank, size).
        isa: Instruction set that decides the page packing on CPUs, or "".
        codec: Name and parameters of the codec, "raw" for none.
        extra: Anything else an adapter must keep apart.
    """

    layout: KVLayout
    weights: str
    architecture: str = ""
    model_dtype: str = ""
    kv_scales: str = ""
    rope: str = ""
    attention: str = ""
    tensor_parallel: tuple[int, int] = (0, 1)
    pipeline_parallel: tuple[int, int] = (0, 1)
    isa: str = ""
    codec: str = "raw"
    extra: tuple[str, ...] = field(default=())

    @property
    def digest(self) -> bytes:
        """SHA-256 over every field by name and value, each length-prefixed, and the format version."""
        sha = hashlib.sha256(b"kvworkbench identity")
        for part in _flatten("", self):
            sha.update(len(part).to_bytes(4, "little") + part)
        sha.update(FORMAT_VERSION.to_bytes(4, "little"))
        return sha.digest()


def _flatten(name: str, value: Any) -> list[bytes]:
    if isinstance(value, KVLayout | Identity):
        return [part for f in fields(value) for part in _flatten(f"{name}.{f.name}", getattr(value, f.name))]
    return [name.encode(), _plain_bytes(name, value)]


def _plain_bytes(name: str, value: Any) -> bytes:
    """A setting as bytes. Not by `repr`, which differs between releases, between int and NumPy's, list and tuple."""
    if isinstance(value, str):
        return b"s" + value.encode(errors="surrogatepass")
    if isinstance(value, int | np.integer):
        return b"i%d" % int(value)
    if isinstance(value, tuple | list):
        parts = [_plain_bytes(name, part) for part in value]
        return b"t" + b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    raise InvalidInputError(f"identity{name} holds {value!r}; allowed are texts, whole numbers and tuples of these")
