"""What lies in a tier from before, and what other processes bring and take: found out in a thread of its own.

    start   everything that lies there -> sorted by last use -> taken over piece by piece
    later   now and then: what came, what went -> counted, or no longer

The thread looks, which may take seconds; the control plane takes note in short pieces, in between the calls of others.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from workbench.control import ControlPlane
from workbench.orders import Order
from workbench.tiers.base import Tier

__all__ = ["Survey"]

logger = logging.getLogger(__name__)


class Survey:
    """Keeps a control plane's books in step with a directory.

    Args:
        tier: What is looked at.
        level: Its place among the control plane's tiers. Nothing new is stored there until the first look is over, for
            nobody knows yet how full it is.
        control: Takes note.
        in_turn: Runs a call while no other call touches the control plane.
        carry_out: Takes the orders that follow, within the turn.
        every_seconds: Pause between two looks.
    """

    def __init__(self, tier: Tier, level: int, control: ControlPlane, *, in_turn: Callable[[Callable[[], Any]], Any],
                 carry_out: Callable[[Sequence[Order]], None], every_seconds: float):  # fmt: skip
        self.tier, self.level, self.control, self.every_seconds = tier, level, control, every_seconds
        self._in_turn, self._carry_out = in_turn, carry_out
        self._ready, self._stop = threading.Event(), threading.Event()
        control.begin_adoption(level)
        self._thread = threading.Thread(target=self._run, name=f"kv-survey-{tier.name}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the first look, at most so long; whether it is over."""
        return self._ready.wait(seconds)

    def close(self, seconds: float = 1.0) -> None:
        """Look no more. A look under way ends in its own time and changes nothing any more."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        start = time.monotonic()
        try:
            pieces = self.control.adopting(self.level, self.tier.scan())
            while not self._stop.is_set() and self._note(lambda: next(pieces, None)):
                pass
        except Exception:  # a tier breaks its promise: it is used as if it had been empty
            logger.exception("the %s tier could not be looked through", self.tier.name)
            self._note(lambda: self.control.end_adoption(self.level))
        self._ready.set()
        held, seconds = len(self.control.tiers[self.level]), time.monotonic() - start
        logger.info("the %s tier holds %d chunks from before; looked through in %.1f s", self.tier.name, held, seconds)
        while not self._stop.wait(self.every_seconds):
            try:
                changes = self.tier.changes(self.control.keys_at(self.level))
                self._note(lambda changes=changes: self.control.note_changes(self.level, changes))
            except Exception:
                logger.exception("the %s tier could not be looked at", self.tier.name)

    def _note(self, call: Callable[[], list[Order] | None]) -> bool:
        """Let the control plane take note in its turn; False when there is no more."""

        def noted() -> bool:
            orders = None if self._stop.is_set() else call()
            if orders:
                self._carry_out(orders)
            return orders is not None

        return self._in_turn(noted)
