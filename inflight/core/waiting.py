"""How long another process is waited for: with a line in the log every ten seconds, and never for ever."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from inflight.core.clock import now_ns

logger = logging.getLogger("inflight.waiting")

LOG_EVERY_S = 10.0
_LONGEST_TICK_S = 1.0


class Wait:
    """One wait, which is told of the passing time again and again. Time in which this process was itself stopped does
    not count."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._last_ns = now_ns()
        self._next_log_s = LOG_EVERY_S

    def tick(self) -> float:
        """Count the time since the last tick, and return it in seconds."""
        now = now_ns()
        passed_s = min((now - self._last_ns) / 1e9, _LONGEST_TICK_S)
        self._last_ns = now
        self.waited_s += passed_s
        return passed_s

    def tell(self, what: str) -> None:
        """Log what is waited for, if the time for another line has come."""
        if self.waited_s >= self._next_log_s:
            self._next_log_s += LOG_EVERY_S
            logger.warning("waiting for %.0f s: %s", self.waited_s, what)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Log every ten seconds what is waited for, by calls that have a bound of their own and say nothing."""
    over = threading.Event()

    def tell() -> None:
        wait = Wait()
        while not over.wait(_LONGEST_TICK_S):
            wait.tick()
            wait.tell(what)

    threading.Thread(target=tell, name="inflight-telling", daemon=True).start()
    try:
        yield
    finally:
        over.set()
