"""Calls that take turns in one thread of their own.

An interrupt (Ctrl-C in a notebook) strikes the thread that waits, never the one that counts: the call runs to its
end, and no hold or reservation is left half-made. Waiting is a C call on a plain lock: `Future.result` waits in Python
code, where an interrupt can leave its lock in disorder.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Turns"]


class Turns:
    """One thread that runs calls in the order in which they were asked for.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], Any]) -> Any:
        """Wait for the call's turn and its result; what it raises is raised here."""
        outcome: list[Any] = []
        done = threading.Lock()
        done.acquire()
        self._calls.put((call, outcome, done))
        while not done.acquire(timeout=1.0):
            if not self._thread.is_alive() and not outcome:  # closed by another thread just before this call came in
                return call()
        value, error = outcome
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread after the calls that wait already; one that comes later runs in its caller."""
        self._calls.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (turn := self._calls.get()) is not None:
            call, outcome, done = turn
            try:
                outcome += [call(), None]
            except BaseException as error:  # whatever it is, it belongs to the caller
                outcome += [None, error]
            done.release()
            del turn, call, outcome
