"""Work beside the notebook: one thread at a time that can be stopped and waited for, and never prints."""

import threading
import traceback
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """Runs a function in a thread of its own; its end and its errors are reported through callbacks.

    Args:
        on_error: Called in the thread with a traceback when the function raises.
        on_end: Called in the thread when the function is over, however it ended.
    """

    def __init__(self, *, on_error: Callable[[str], None], on_end: Callable[[], None]):
        self.on_error, self.on_end = on_error, on_end
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called; the function looks at it between two steps."""
        return self._stop.is_set()

    def start(self, work: Callable[[], None]) -> bool:
        """Start, unless something is still running; returns whether it did."""
        if self.running:
            return False
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(work,), name="kvworkbench-panel", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        """Ask the function to end after its current step."""
        self._stop.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when the time ran out first. An interrupt stops the work as well."""
        if self._thread is None:
            return True
        try:
            self._thread.join(timeout)
        except KeyboardInterrupt:
            self.stop()
            raise
        return not self.running

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # of a thread: nobody above could catch it, so the panel shows it
            self.on_error(traceback.format_exc(limit=-6))
        finally:
            self.on_end()
