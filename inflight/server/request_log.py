"""Log lines of requests: a refusal at once and with its reason, answers counted over some seconds."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger("inflight.server.requests")

EVERY_S = 10.0
"""Time between two lines of the same class of requests: method, path and status."""
_QUIET = ("/health", "/ping", "/liveness", "/metrics", "/load")
"""Paths that probes ask all the time; their answers are lines at the level debug alone."""
_MOST_CLASSES = 256
"""Classes in one interval; requests of others are counted together."""


@dataclass(slots=True)
class _Class:
    """Requests of one class that no line has counted yet."""

    num: int = 0
    seconds: float = 0.0
    clients: set[str] = field(default_factory=set)
    reason: str = ""
    is_told: bool = False
    """A line of this interval had the first of them."""


class RequestLog:
    """Lines about requests. A status of 400 and more is a warning. The first one of an interval is logged at once;
    all others are counted in a line at the end of the interval. At the level debug each request has a line, too. It is
    used by one event loop."""

    def __init__(self, every_s: float = EVERY_S):
        self._every_s = every_s
        self._classes: dict[tuple[str, str, int], _Class] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, method: str, path: str, status: int, seconds: float, client: str, reason: str = "") -> None:
        """Count a request that was answered, or whose stream begins. reason: why it was refused."""
        because = f": {reason}" if reason else ""
        logger.debug("%s %s %d in %.3f s for %s%s", method, path, status, seconds, client, because)
        if status < 400 and path in _QUIET:
            return
        key = (method, path, status)
        if key not in self._classes and len(self._classes) >= _MOST_CLASSES:
            key = ("requests", "for other paths", status)
        counted = self._classes.setdefault(key, _Class())
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self.flush)
        if status >= 400 and not counted.is_told:
            counted.is_told = True
            logger.warning("%s %s %d for %s%s", method, path, status, client, because)
            return
        counted.num += 1
        counted.seconds += seconds
        counted.reason = reason
        if len(counted.clients) < 100:
            counted.clients.add(client)

    def flush(self) -> None:
        """Write the lines of this interval, and begin another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (method, path, status), counted in self._classes.items():
            if not counted.num:
                continue
            say: Callable[..., None] = logger.warning if status >= 400 else logger.info
            more, because = (" more", f": {counted.reason}") if counted.is_told else ("", "")
            who = f"{len(counted.clients)} client{'s' if len(counted.clients) > 1 else ''}"
            say(
                "%s %s %d: %d%s in %.0f s, %.3f s each, of %s%s",
                method, path, status, counted.num, more, self._every_s, counted.seconds / counted.num, who, because,
            )  # fmt: skip
        self._classes.clear()
