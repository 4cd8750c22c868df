"""Keyed seal of a record, for tiers that others can write to.

    record = header | payload | HMAC-SHA-256(key, header | payload)

Checksums guard against damage; whoever can write to a shared tier can also write a checksum. Without the key nobody
can make a record that a sealed tier accepts. The header names key, parent and tokens, so that a sealed record is of no
use under another name. A seal hides nothing: the payload stays readable.
"""

import hmac
import os

from workbench.errors import InvalidInputError

__all__ = ["MAC_KEY_VARIABLE", "Seal", "seal_from_environment"]

MAC_KEY_VARIABLE = "KVWORKBENCH_MAC_KEY"
_LEAST_CHARACTERS = 32


class Seal:
    """Makes and checks the tags of records.

    Args:
        key: Secret that all engines of the tier share.

    Raises:
        InvalidInputError: The key is shorter than 32 characters.
    """

    nbytes = 32  # of a tag

    def __init__(self, key: bytes):
        if len(key) < _LEAST_CHARACTERS:
            raise InvalidInputError(f"the MAC key has {len(key)} characters; it must have at least {_LEAST_CHARACTERS}")
        self._key = key

    def tag(self, *parts) -> bytes:
        """Tag over the parts in order; each is anything with a buffer."""
        mac = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()

    def holds(self, tag: bytes | bytearray, *parts) -> bool:
        """Whether the tag is that of the parts; takes the same time for any wrong one."""
        return hmac.compare_digest(bytes(tag), self.tag(*parts))


def seal_from_environment() -> Seal | None:
    """The seal of `KVWORKBENCH_MAC_KEY`, or None when that is not set."""
    key = os.environ.get(MAC_KEY_VARIABLE, "")
    return Seal(key.encode()) if key else None
