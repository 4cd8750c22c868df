"""The self-describing form of a stored chunk: a fixed header, the chunk's tokens, padding, the payload.

    offset  size  field
    0       8     magic "KVWBCHNK"
    8       4     format version
    12      4     header size in bytes, tokens and padding included; the payload begins there
    16      32    key
    48      32    parent key
    80      32    identity digest
    112     4     first token
    116     4     one past the last token
    120     8     payload size in bytes
    128     16    xxh3-128 of the payload
    144     16    xxh3-128 of the header up to here and of the tokens
    160     ...   tokens, int32

All integers little-endian. A reader compares key, parent, place and tokens with what it asked for, so that neither a
damaged nor a foreign record is ever taken for the right one; the checksums guard against damage, not against malice.
"""

import struct
from typing import NamedTuple

import numpy as np
import xxhash

from workbench.chunks import Chunk
from workbench.layout import FORMAT_VERSION

__all__ = ["ALIGNMENT", "MAX_HEADER", "RecordHeader", "header_nbytes", "pack_header", "parse_header"]

MAGIC = b"KVWBCHNK"
ALIGNMENT = 4096  # the payload begins on a page border, as direct I/O wants it
_FIXED = struct.Struct("<8sII32s32s32sIIQ16s")
_SEAL = 16
MAX_HEADER = 1 << 24
_MAX_POSITION = 2**31 - 1


class RecordHeader(NamedTuple):
    """A header whose own checksum is right."""

    header_nbytes: int
    key: bytes
    parent: bytes
    identity: bytes
    start: int
    stop: int
    payload_nbytes: int
    payload_digest: bytes
    tokens: bytes

    def describes(self, chunk: Chunk) -> bool:
        """Whether this is the record of exactly this chunk."""
        place = (self.key, self.parent, self.start, self.stop, self.tokens)
        return place == (chunk.key, chunk.parent, chunk.start, chunk.stop, chunk.tokens)


def header_nbytes(num_tokens: int) -> int:
    """Bytes before the payload for a chunk of so many tokens."""
    return -(-(_FIXED.size + _SEAL + 4 * num_tokens) // ALIGNMENT) * ALIGNMENT


def pack_header(chunk: Chunk, identity: bytes, payload: np.ndarray, *, digest: bytes | None = None) -> bytes:
    """Header of a chunk's record, padded to where the payload begins. `digest` is the payload's, if it is known."""
    size = header_nbytes(chunk.num_tokens)
    digest = digest or xxhash.xxh3_128_digest(payload)
    fixed = _FIXED.pack(MAGIC, FORMAT_VERSION, size, chunk.key, chunk.parent, identity, chunk.start, chunk.stop,
                        payload.nbytes, digest)  # fmt: skip
    sealed = fixed + xxhash.xxh3_128_digest(fixed + chunk.tokens) + chunk.tokens
    return sealed.ljust(size, b"\0")


def parse_header(data: bytes | memoryview) -> RecordHeader | None:
    """The header at the start of a record; None if it is not one, is of another version or is damaged.

    `data` must hold the whole header, `header_nbytes` of its tokens; more does not matter.
    """
    if len(data) < _FIXED.size + _SEAL:
        return None
    magic, version, size, key, parent, identity, start, stop, nbytes, digest = _FIXED.unpack_from(data)
    begin = _FIXED.size + _SEAL
    end = begin + 4 * (stop - start)
    if magic != MAGIC or version != FORMAT_VERSION or not begin < end <= size <= min(len(data), MAX_HEADER):
        return None
    if stop > _MAX_POSITION:
        return None
    tokens = bytes(data[begin:end])
    if xxhash.xxh3_128_digest(bytes(data[: _FIXED.size]) + tokens) != bytes(data[_FIXED.size : begin]):
        return None
    return RecordHeader(size, key, parent, identity, start, stop, nbytes, digest, tokens)
