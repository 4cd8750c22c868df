"""What a shared tier is known to hold: positive answers, remembered for a short time.

    lookup  remembered keys -> `contains` for the next ones, as long as every answer is yes -> how many lead

Other engines store into a shared tier and evict from it, so an answer ages. A wrong yes costs one load that misses; a
no is asked again each time, for another engine may just have stored the chunk.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Presence"]


class _Asked(Protocol):
    def contains(self, keys: Sequence[bytes]) -> list[bool]: ...


class Presence:
    """Remembers which keys a tier holds.

    Args:
        tier: Anything with `contains`; it decides how long a question may take.
        seconds: How long a yes is believed.
        limit: Keys remembered; the oldest answers go first.
        batch: Keys of one question, as many as fit into one round trip.
        clock: Seconds, monotonic.
    """

    def __init__(self, tier: _Asked, *, seconds: float = 2.0, limit: int = 100_000, batch: int = 64,
                 clock: Callable[[], float] = time.monotonic):  # fmt: skip
        self.tier, self.seconds, self.limit, self.batch = tier, seconds, limit, batch
        self._clock = clock
        self._known: OrderedDict[bytes, float] = OrderedDict()  # key -> when the answer is too old
        self._lock = threading.Lock()

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the keys, from the first on, the tier holds. Asks only for what it does not know."""
        number = 0
        while number < len(keys):
            number += self._leading_known(keys, number)
            asked = keys[number : number + self.batch]
            if not asked:
                break
            answers = self.tier.contains(asked)
            present = answers.index(False) if False in answers else len(answers)
            self._remember(asked[:present])
            number += present
            if present < len(asked):
                break
        return number

    def note(self, key: bytes) -> None:
        """The tier was seen to hold a key: it was just stored or read."""
        self._remember([key])

    def forget(self, key: bytes) -> None:
        """The tier was seen not to hold a key."""
        with self._lock:
            self._known.pop(key, None)

    def clear(self) -> None:
        """Believe nothing any more."""
        with self._lock:
            self._known.clear()

    def _leading_known(self, keys: Sequence[bytes], first: int) -> int:
        now = self._clock()
        with self._lock:
            for number in range(first, len(keys)):
                if self._known.get(keys[number], now) <= now:
                    return number - first
        return len(keys) - first

    def _remember(self, keys: Sequence[bytes]) -> None:
        until = self._clock() + self.seconds
        with self._lock:
            for key in keys:
                self._known[key] = until
                self._known.move_to_end(key)
            while len(self._known) > self.limit:
                self._known.popitem(last=False)
