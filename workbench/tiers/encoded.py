"""Any tier with a codec before it: what lies there is smaller, and whoever reads pays for decoding.

write   chunk -> codec -> frame | code | key -> the tier
read    the tier -> frame and key checked -> codec -> chunk
frame   8 bytes: length of the code; 8 bytes: digest of the codec's repr

The key at the end tells a code that is shorter than its frame says, behind which another chunk's bytes would be read.
"""

import hashlib
import logging
import struct
import threading
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from workbench.chunks import Chunk
from workbench.codecs import Codec, CorruptDataError, UnrepresentableError
from workbench.layout import KVLayout
from workbench.tiers.base import Changes, StoredChunk, Tier

__all__ = ["EncodedTier"]

logger = logging.getLogger(__name__)

_FRAME = struct.Struct("<Q8s")
_KEY_NBYTES = 32
_AROUND = _FRAME.size + _KEY_NBYTES


class EncodedTier(Tier):
    """Encodes on the way in and decodes on the way out, in the thread that moves the chunk.

    Args:
        tier: Where the code goes.
        codec: Turns a chunk into bytes and back.
        layout: What a chunk looks like.

    Raises:
        InvalidInputError: The codec cannot work on this layout.
    """

    def __init__(self, tier: Tier, codec: Codec, layout: KVLayout):
        self.tier, self.codec, self.layout = tier, codec, layout
        self.name, self.shared, self.survives = tier.name, tier.shared, tier.survives
        self.exact, self.breaker = codec.tolerance == 0.0, tier.breaker
        self._most = _AROUND + codec.max_nbytes(layout)
        self._digest = hashlib.sha256(repr(codec).encode()).digest()[:8]
        self._scratch = threading.local()

    def read(self, chunk: Chunk, out: np.ndarray, *, at_most: bool = False) -> str:
        code = self._buffer()
        if reason := self.tier.read(chunk, code, at_most=True):
            return reason
        nbytes, digest = _FRAME.unpack_from(code)
        end = _FRAME.size + nbytes
        if (
            digest != self._digest
            or end + _KEY_NBYTES > self._most
            or bytes(code[end : end + _KEY_NBYTES]) != chunk.key
        ):
            return self._refuse(chunk, "mismatch")
        try:
            self.codec.decode(code[_FRAME.size : end].data, self.layout, self._as_chunk(out))
        except CorruptDataError as error:  # its checksum was right: it was written so
            logger.warning("a chunk of the %s tier cannot be decoded: %s", self.name, error)
            return self._refuse(chunk, "corrupt")
        return ""

    def write(self, chunk: Chunk, payload: np.ndarray) -> tuple[str, int]:
        try:
            code = memoryview(self.codec.encode(self._as_chunk(payload), self.layout))
        except UnrepresentableError:
            return "unrepresentable", 0
        framed = self._buffer()[: _AROUND + code.nbytes]
        _FRAME.pack_into(framed, 0, code.nbytes, self._digest)
        framed[_FRAME.size : -_KEY_NBYTES] = np.frombuffer(code, np.uint8)
        framed[-_KEY_NBYTES:] = np.frombuffer(chunk.key, np.uint8)
        return self.tier.write(chunk, framed)

    def erase(self, key: bytes) -> None:
        self.tier.erase(key)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self.tier.contains(keys)

    def nbytes_of(self, payload_nbytes: int, tokens: int) -> int:
        """The most that a chunk may take: what a codec of variable rate makes of it is known only afterwards."""
        return self.tier.nbytes_of(self._most, tokens)

    def scan(self) -> Iterator[StoredChunk]:
        return self.tier.scan()

    def changes(self, resident: Collection[bytes]) -> Changes:
        return self.tier.changes(resident)

    def close(self) -> None:
        self.tier.close()

    def _refuse(self, chunk: Chunk, reason: str) -> str:
        self.tier.erase(chunk.key)
        return reason

    def _as_chunk(self, payload: np.ndarray) -> np.ndarray:
        return payload.reshape(self.layout.num_layers, -1, self.layout.page_nbytes)

    def _buffer(self) -> np.ndarray:
        """Memory of this thread's own, as large as any code: touched once, used for every chunk."""
        if not hasattr(self._scratch, "code"):
            self._scratch.code = np.zeros(self._most, np.uint8)
        return self._scratch.code
