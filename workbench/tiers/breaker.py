"""Circuit breaker of the slower tiers: a medium that does not answer costs one time-out, then nothing.

    closed     calls go through
    open       calls are refused at once, while a thread waits out a rest
    half-open  that thread asks the medium; an answer closes the circuit, silence opens it for a longer rest

No caller ever waits for a probe: they run in the breaker's own thread, which lives only while the circuit is open.
"""

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["CircuitBreaker"]

logger = logging.getLogger(__name__)

# Seconds before each probe. The first is at once, since one dropped connection is no outage; the last bounds how long
# a server that is back goes unnoticed.
_RESTS = (0.0, 0.25, 0.5, 1.0, 2.0)

# A server that answers probes and fails the calls would otherwise be trusted again at once, and again.
_CALM_SECONDS = 10.0


class CircuitBreaker:
    """Opens when it is tripped and closes itself when the medium answers again.

    Args:
        name: Tier, for the log.
        probe: Asks the medium in the simplest way; True if it answered. It must end in bounded time and not raise.
    """

    def __init__(self, name: str, probe: Callable[[], bool]):
        self.name = name
        self.state = "closed"
        self.trips = 0  # how often it opened
        self.reason = ""  # what opened it last
        self._probe = probe
        self._step = 0
        self._last_trip = -_CALM_SECONDS
        self._stop = threading.Event()
        self._lock = threading.Lock()

    @property
    def allows(self) -> bool:
        """Whether a call may go through now."""
        return self.state == "closed"

    def trip(self, reason: str) -> None:
        """A call failed in a way that says the medium is away."""
        with self._lock:
            if self.state != "closed" or self._stop.is_set():
                return
            now = time.monotonic()
            self._step = self._step + 1 if now - self._last_trip < _CALM_SECONDS else 0
            self._last_trip = now
            self.state, self.reason = "open", reason
            self.trips += 1
            threading.Thread(target=self._recover, name=f"kv-{self.name}-probe", daemon=True).start()
        logger.warning("%s tier: %s; no calls until it answers again", self.name, reason)

    def close(self) -> None:
        """Stop probing. The circuit stays as it is."""
        self._stop.set()

    def _recover(self) -> None:
        while not self._stop.wait(_RESTS[min(self._step, len(_RESTS) - 1)]):
            self.state = "half-open"
            if self._probe():
                self.state = "closed"
                logger.warning("%s tier: it answers again", self.name)
                return
            self.state = "open"
            self._step += 1
