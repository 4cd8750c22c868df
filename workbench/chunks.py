"""Tokens -> chunks. A chunk's key covers its own tokens and all that stands before them.

    root   = SHA-256(identity, scope)
    key(i) = SHA-256(key(i - 1), tokens of chunk i as int32, inputs that lie in chunk i)

Chunks end every `chunk_tokens` tokens or, with `Boundaries`, where the text has a seam. The same tokens under the same
identity and scope give the same keys in every process: nothing here depends on Python's `hash`, on the environment or
on how the tokens were passed.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.errors import InvalidInputError
from workbench.layout import Identity, KVLayout

__all__ = ["Boundaries", "Chunk", "ChunkChain", "ChunkScope", "common_tokens", "token_array"]

_MAX_TOKEN = 2**31 - 1

# Stands before the key of a chunk that is shorter than a full one: its tokens must not be taken for others' inputs.
_SHORT = b"kvworkbench short chunk"


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

    def is_text_alone(self, chunk_tokens: int) -> bool:
        """Whether the key covers the tokens and nothing else: no image, say, lies in the chunk.

        Args:
            chunk_tokens: Tokens of a full chunk.
        """
        return self.key == _key_of(self.parent, self.tokens, self.num_tokens, chunk_tokens)


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
        return self.root_under(identity.digest)

    def root_under(self, digest: bytes) -> bytes:
        """`root`, for one who has the identity's digest at hand."""
        return hashlib.sha256(b"kvworkbench root" + digest + _framed([self.salt, *self.lora])).digest()

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
    if isinstance(tokens, list | tuple):
        return _from_list(tokens)
    array = _from_array(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInputError(f"token ids must be one row of integers; got {array.dtype} of shape {array.shape}")
    if array.size and (array.min() < 0 or array.max() > _MAX_TOKEN):
        raise _out_of_range(array.min(), array.max())
    return np.ascontiguousarray(array, dtype="<i4")


def _from_list(tokens: Sequence[int]) -> np.ndarray:
    """Packed by `struct`, which takes half the time of NumPy and refuses whatever is no integer, bar booleans."""
    try:
        array = np.frombuffer(struct.Struct(f"<{len(tokens)}i").pack(*tokens), "<i4")  # a lone *tokens is copied once
    except struct.error:
        wrong = next((t for t in tokens if not isinstance(t, int | np.integer)), None)
        if wrong is None:
            raise _out_of_range(min(tokens), max(tokens)) from None
        raise InvalidInputError(f"token ids must be integers; got {type(wrong).__name__}") from None
    least = array.min() if tokens else 2
    if least < 0:
        raise _out_of_range(least, array.max())
    if least < 2 and any(isinstance(tokens[i], bool | np.bool_) for i in np.flatnonzero(array < 2)):
        raise InvalidInputError("token ids must be integers; got bool")
    return array


def _out_of_range(least: int, most: int) -> InvalidInputError:
    return InvalidInputError(f"token ids {least}..{most}; allowed are 0 to {_MAX_TOKEN}")


def _from_array(tokens: object) -> np.ndarray:
    try:
        return np.asarray(tokens)
    except (TypeError, ValueError) as error:  # a tensor on a GPU or of a type that NumPy lacks, ragged rows
        raise InvalidInputError(
            f"token ids must be one row of integers; got {type(tokens).__name__}: {error}"
        ) from None


def common_tokens(a: bytes | np.ndarray, b: bytes | np.ndarray) -> int:
    """How many leading tokens two rows of int32, arrays or their bytes, have in common."""
    length = min(len(memoryview(a).cast("B")), len(memoryview(b).cast("B"))) // 4
    different = np.frombuffer(a, "<i4", length) != np.frombuffer(b, "<i4", length) if length else np.zeros(0, bool)
    return int(different.argmax()) if different.any() else length


def _key_of(parent: bytes, own: bytes | bytearray, num_tokens: int, chunk_tokens: int) -> bytes:
    if num_tokens == chunk_tokens:
        return hashlib.sha256(parent + own).digest()
    return hashlib.sha256(_SHORT + num_tokens.to_bytes(4, "little") + parent + own).digest()


class Boundaries:
    """Chunk ends that follow the text, so that a prefix that ends with a turn is reused to its last whole block.

    A chunk ends at the first border of a block, `min_tokens` or more behind its start, behind which the text has a
    seam before the next border; at the latest it is full. Where a chunk ends depends on the tokens before the seam
    alone, so the same prefix is cut in the same way in every prompt.

    Args:
        tokens: Ids of the tokens that end a sentence, a turn or a document.
        min_tokens: The fewest tokens of a chunk, a multiple of `block_size`.
        max_tokens: The most, a multiple of `block_size`: a full chunk.
        block_size: Tokens of a block.

    Raises:
        InvalidInputError: No token, a size that is no multiple of the block size, or the least above the most.
    """

    def __init__(self, tokens: Sequence[int], *, min_tokens: int, max_tokens: int, block_size: int):
        self._tokens = np.unique(token_array(list(tokens)))
        self.min_tokens, self.max_tokens, self.block_size = min_tokens, max_tokens, block_size
        if not self._tokens.size:
            raise InvalidInputError("chunks are to end at certain tokens, but none is named")
        if not 0 < min_tokens <= max_tokens or min_tokens % block_size or max_tokens % block_size:
            raise InvalidInputError(
                f"chunks of {min_tokens} to {max_tokens} tokens; both must be multiples of the block size {block_size} "
                f"and the first at most the second"
            )

    @classmethod
    def of(cls, layout: KVLayout, tokens: Sequence[int], min_tokens: int = 0) -> "Boundaries | None":
        """Boundaries of a layout's chunks, none without tokens; 0 for a quarter of a full chunk at least."""
        least = min_tokens or layout.block_size * max(1, layout.blocks_per_chunk // 4)
        sizes = {"min_tokens": least, "max_tokens": layout.chunk_tokens, "block_size": layout.block_size}
        return cls(tokens, **sizes) if tokens else None

    def ends(self, start: int, first: int, tokens: np.ndarray) -> list[int]:
        """Ends of the chunks that `tokens`, at positions from `first` on, bring to light after the one before `start`.

        Called for each piece of a prompt in turn, it finds what one call for the whole prompt would.
        """
        found: list[int] = []
        for seam in (first + 1 + np.flatnonzero(np.isin(tokens, self._tokens))).tolist():
            end = seam // self.block_size * self.block_size
            while end - start > self.max_tokens:
                found.append(start := start + self.max_tokens)
            if end - start >= self.min_tokens:
                found.append(start := end)
        while first + len(tokens) - start >= self.max_tokens:
            found.append(start := start + self.max_tokens)
        return found


class ChunkChain:
    """The whole chunks of one token sequence, hashed only as far as somebody asks, and extended as tokens arrive.

    Args:
        root: Parent key of the first chunk, from `ChunkScope.root`.
        chunk_tokens: Tokens of a full chunk.
        scope: Supplies the inputs that lie inside chunks.
        boundaries: Where chunks end before they are full; without, every chunk is full.
    """

    def __init__(self, root: bytes, chunk_tokens: int, scope: ChunkScope | None = None,
                 boundaries: Boundaries | None = None):  # fmt: skip
        self.chunk_tokens = chunk_tokens
        self._scope = scope if scope is not None and scope.inputs else None
        self._boundaries = boundaries
        self.root = root
        self._keys: list[bytes] = []
        self._cuts: list[int] = []  # ends that the boundaries gave
        self._ends: Sequence[int] = range(0)  # one past each chunk's last token
        self._bytes = bytearray()

    def extend(self, tokens: Sequence[int] | np.ndarray) -> "ChunkChain":
        """Append tokens; returns the chain itself. Raises InvalidInputError as `token_array` does."""
        more = token_array(tokens)
        if self._boundaries is None:
            self._ends = range(self.chunk_tokens, self.num_tokens + len(more) + 1, self.chunk_tokens)
        else:
            self._cuts += self._boundaries.ends(self.end(len(self)), self.num_tokens, more)
            self._ends = self._cuts
        self._bytes += memoryview(more)
        return self

    @property
    def num_tokens(self) -> int:
        return len(self._bytes) // 4

    def __len__(self) -> int:
        """Whole chunks. The tail behind them is none: its key would change with the next token."""
        return len(self._ends)

    def __getitem__(self, index: int) -> Chunk:
        if not 0 <= index < len(self._ends):
            raise IndexError(f"chunk {index} of {len(self)}")
        while len(self._keys) <= index:
            self._hash_next()
        start, stop = self.end(index), self._ends[index]
        return Chunk(self._keys[index], self.parent(index), start, stop, bytes(self._bytes[4 * start : 4 * stop]))

    def __iter__(self) -> Iterator[Chunk]:
        return (self[index] for index in range(len(self)))

    def keys(self, first: int = 0) -> Iterator[bytes]:
        """Keys of the chunks from `first` on; each is hashed when its turn comes."""
        while len(self._keys) < first:
            self._hash_next()
        known = self._keys
        for index in range(first, len(self._ends)):
            if len(known) == index:
                self._hash_next()
            yield known[index]

    def end(self, chunks: int) -> int:
        """Tokens that the first so many chunks cover."""
        return self._ends[chunks - 1] if chunks else 0

    def whole(self, tokens: int) -> int:
        """Chunks that end at or before a position."""
        return bisect_right(self._ends, tokens)

    def parent(self, index: int) -> bytes:
        """Key of what stands before a chunk; the root before the first."""
        while len(self._keys) < index:
            self._hash_next()
        return self._keys[index - 1] if index else self.root

    def part(self, index: int, stop: int) -> Chunk:
        """Tokens from the start of chunk `index` to `stop` as a chunk of their own: a tail, or what another prompt's
        tail may be. Raises IndexError if that is no chunk of at most the full size."""
        start = self.end(index)
        if not start < stop <= min(self.num_tokens, start + self.chunk_tokens):
            raise IndexError(f"no chunk from token {start} to {stop} of {self.num_tokens}")
        parent = self.parent(index)
        return Chunk(self._key(parent, start, stop), parent, start, stop, bytes(self._bytes[4 * start : 4 * stop]))

    def following(self, index: int) -> bytes:
        """Tokens behind the first `index` chunks, at most a full chunk's: as far as they alone, and not an input
        (an image, say) among them, say what their KV is."""
        start = self.end(index)
        stop = min(self.num_tokens, start + self.chunk_tokens)
        if self._scope is not None:
            stop = min([stop, *(max(start, first) for first, last, _ in self._scope.inputs if last > start)])
        return bytes(self._bytes[4 * start : 4 * stop])

    def goes_through(self, chunk: Chunk) -> bool:
        """Whether these are the tokens of the chunk, all of them, at its place."""
        return self._bytes[4 * chunk.start : 4 * chunk.stop] == chunk.tokens

    def tokens(self) -> np.ndarray:
        """All tokens so far, int32; a copy."""
        return np.frombuffer(bytes(self._bytes), "<i4")

    def _hash_next(self) -> None:
        keys, ends = self._keys, self._ends
        index = len(keys)
        parent, start = (keys[-1], ends[index - 1]) if index else (self.root, 0)
        keys.append(self._key(parent, start, ends[index]))

    def _key(self, parent: bytes, start: int, stop: int) -> bytes:
        own = self._bytes[4 * start : 4 * stop]
        if self._scope is not None:
            own += self._scope.inputs_within(start, stop)
        return _key_of(parent, own, stop - start, self.chunk_tokens)
