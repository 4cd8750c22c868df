"""Tokens -> chunks. A chunk's key covers its own tokens and all that stands before them.

    root   = SHA-256(identity, scope)
    key(i) = SHA-256(key(i - 1), tokens of chunk i as int32, inputs that lie in chunk i)

The same tokens under the same identity and scope give the same keys in every process: nothing here depends on
Python's `hash`, on the environment or on how the tokens were passed.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.errors import InvalidInputError
from workbench.layout import Identity

__all__ = ["Chunk", "ChunkChain", "ChunkScope", "token_array"]

_MAX_TOKEN = 2**31 - 1


class Chunk(NamedTuple):
    """One stored unit: whole blocks of one prompt, named by a key that covers the whole prefix."""

    key: bytes
    parent: bytes  # key of the chunk before it; the root for the first
    start: int  # first token covered
    stop: int  # one past the last
    tokens: bytes  # the chunk's own tokens, int32 little-endian: a key nominates, tokens and bytes decide

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ChunkScope:
    """What differs from request to request and changes KV.

    Args:
        salt: Keeps tenants apart: another salt, another cache.
        lora: Name and content digest of the adapter, or ().
        inputs: (first token, one past the last, digest) of every multimodal input; it counts in each chunk that it
            touches.
    """

    salt: str = ""
    lora: tuple[str, ...] = ()
    inputs: tuple[tuple[int, int, str], ...] = ()

    def root(self, identity: Identity) -> bytes:
        """The parent key of a first chunk."""
        return hashlib.sha256(b"kvworkbench root" + identity.digest + _framed([self.salt, *self.lora])).digest()

    def inputs_within(self, start: int, stop: int) -> bytes:
        """Digests and offsets of the inputs that overlap tokens start..stop, or nothing."""
        within = [i for i in self.inputs if i[0] < stop and start < i[1]]
        return _framed([f"{first}:{digest}" for first, _, digest in within]) if within else b""


def _framed(texts: Sequence[str]) -> bytes:
    """Length-prefixed, so that ("ab", "c") and ("a", "bc") differ."""
    parts = [text.encode(errors="surrogatepass") for text in texts]  # a salt out of JSON may hold half a pair
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def token_array(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as int32, checked.

    Args:
        tokens: A list, tuple, NumPy array or CPU tensor of integers.

    Raises:
        InvalidInputError: Not a flat sequence of integers in 0..2^31-1. Nothing is wrapped, rounded or guessed.
    """
    array = _from_list(tokens) if isinstance(tokens, list | tuple) else _from_array(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInputError(f"token ids must be one row of integers; got {array.dtype} of shape {array.shape}")
    if array.size and (array.min() < 0 or array.max() > _MAX_TOKEN):
        raise InvalidInputError(f"token ids {array.min()}..{array.max()}; allowed are 0 to {_MAX_TOKEN}")
    return np.ascontiguousarray(array, dtype="<i4")


def _from_list(tokens: Sequence[int]) -> np.ndarray:
    """Packed by `struct`, which takes half the time of NumPy and refuses whatever is no integer, bar booleans."""
    try:
        array = np.frombuffer(struct.pack(f"<{len(tokens)}i", *tokens), "<i4")
    except struct.error:
        wrong = next((t for t in tokens if not isinstance(t, int | np.integer)), None)
        if wrong is None:
            raise InvalidInputError(f"token ids {min(tokens)}..{max(tokens)}; allowed are 0 to {_MAX_TOKEN}") from None
        raise InvalidInputError(f"token ids must be integers; got {type(wrong).__name__}") from None
    if any(isinstance(tokens[i], bool | np.bool_) for i in np.flatnonzero(array <= 1)):
        raise InvalidInputError("token ids must be integers; got bool")
    return array


def _from_array(tokens: object) -> np.ndarray:
    try:
        return np.asarray(tokens)
    except (TypeError, ValueError) as error:  # a tensor on a GPU or of a type that NumPy lacks, ragged rows
        raise InvalidInputError(
            f"token ids must be one row of integers; got {type(tokens).__name__}: {error}"
        ) from None


class ChunkChain:
    """The full chunks of one token sequence, hashed only as far as somebody asks, and extended as tokens arrive.

    Args:
        root: Parent key of the first chunk, from `ChunkScope.root`.
        chunk_tokens: Tokens of one chunk.
        scope: Supplies the inputs that lie inside chunks.
    """

    def __init__(self, root: bytes, chunk_tokens: int, scope: ChunkScope | None = None):
        self.chunk_tokens = chunk_tokens
        self._scope = scope if scope is not None and scope.inputs else None
        self.root = root
        self._chunks: list[Chunk] = []
        self._bytes = bytearray()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> "ChunkChain":
        """Append tokens; returns the chain itself. Raises InvalidInputError as `token_array` does."""
        self._bytes += token_array(tokens).tobytes()
        return self

    @property
    def num_tokens(self) -> int:
        return len(self._bytes) // 4

    def __len__(self) -> int:
        """Full chunks; a partial tail is none, its key would change with the next token."""
        return self.num_tokens // self.chunk_tokens

    def __getitem__(self, index: int) -> Chunk:
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        while len(self._chunks) <= index:
            self._chunks.append(self._next())
        return self._chunks[index]

    def __iter__(self) -> Iterator[Chunk]:
        return (self[index] for index in range(len(self)))

    def tokens(self) -> np.ndarray:
        """All tokens so far, int32; a copy."""
        return np.frombuffer(bytes(self._bytes), "<i4")

    def _next(self) -> Chunk:
        start = len(self._chunks) * self.chunk_tokens
        stop = start + self.chunk_tokens
        parent = self._chunks[-1].key if self._chunks else self.root
        own = bytes(self._bytes[4 * start : 4 * stop])
        inputs = self._scope.inputs_within(start, stop) if self._scope else b""
        return Chunk(hashlib.sha256(parent + own + inputs).digest(), parent, start, stop, own)
