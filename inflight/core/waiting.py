"""Bounded waits for other processes, with a log line every ten seconds."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from inflight.core.clock import now_ns

logger = logging.getLogger("inflight.waiting")

LOG_EVERY_S = 10.0
_LONGEST_TICK_S = 1.0
SOCKET_S = 2e6
"""Time limit of a socket in place of longer ones, and of infinity, which sockets refuse: 23 days."""


class Wait:
    """Measures one wait by repeated ticks. Time in which this process was itself stopped does not count."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._last_ns = now_ns()
        self._next_log_s = LOG_EVERY_S

    def tick(self, what: str = "") -> float:
        """Count the time since the last tick, and return it in seconds. what: the awaited event, for `tell`."""
        now = now_ns()
        passed_s = min((now - self._last_ns) / 1e9, _LONGEST_TICK_S)
        self._last_ns = now
        self.waited_s += passed_s
        if what:
            self.tell(what)
        return passed_s

    def tell(self, what: str) -> None:
        """Log the awaited event if the next log line is due."""
        if self.waited_s >= self._next_log_s:
            self._next_log_s += LOG_EVERY_S
            logger.warning("waiting for %.0f s: %s", self.waited_s, what)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Log the awaited event every ten seconds during a block that waits without logging. The block needs its own
    bound."""
    over = threading.Event()

    def tell() -> None:
        wait = Wait()
        while not over.wait(_LONGEST_TICK_S):
            wait.tick(what)

    threading.Thread(target=tell, name="inflight-telling", daemon=True).start()
    try:
        yield
    finally:
        over.set()
