"""Log lines of requests: a refusal at once and with its reason, replies counted over some seconds."""

import asyncio
import logging
from dataclasses import dataclass, field

logger = logging.getLogger("inflight.server.requests")

EVERY_S = 10.0
"""Time between two lines of the same kind of requests: method, path and status."""
_QUIET = ("/health", "/ping", "/liveness", "/metrics", "/load")
"""Paths of probes. Their replies have lines at the level debug alone."""
_MOST_KINDS = 256
"""Kinds in one interval. Requests of others are counted together."""


@dataclass(slots=True)
class _Count:
    """Requests of one kind that no line has counted yet."""

    num: int = 0
    seconds: float = 0.0
    clients: set[str] = field(default_factory=set)
    reason: str = ""
    is_logged: bool = False
    """The first of them has a line in this interval."""


class RequestLog:
    """Lines about requests. A status of 400 and more is a warning. The first warning of an interval is logged at once;
    all others are counted in a line at the end of the interval. At the level debug each request has a line, too. One
    event loop uses it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], _Count] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, method: str, path: str, status: int, seconds: float, client: str, reason: str = "") -> None:
        """Count a request when it is answered or its stream begins. reason: of a refusal."""
        because = f": {reason}" if reason else ""
        logger.debug("%s %s %d in %.3f s for %s%s", method, path, status, seconds, client, because)
        if status < 400 and path in _QUIET:
            return
        key = (method, path, status)
        if key not in self._counts and len(self._counts) >= _MOST_KINDS:
            key = ("requests", "for other paths", status)
        count = self._counts.setdefault(key, _Count())
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self.flush)
        if status >= 400 and not count.is_logged:
            count.is_logged = True
            logger.warning("%s %s %d for %s%s", method, path, status, client, because)
            return
        count.num += 1
        count.seconds += seconds
        count.reason = reason
        if len(count.clients) < 100:
            count.clients.add(client)

    def flush(self) -> None:
        """Write the lines of this interval, and begin another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (method, path, status), count in self._counts.items():
            if not count.num:
                continue
            more, because = (" more", f": {count.reason}") if count.is_logged else ("", "")
            who = f"{len(count.clients)} client{'s' if len(count.clients) > 1 else ''}"
            logger.log(
                logging.WARNING if status >= 400 else logging.INFO,
                "%s %s %d: %d%s in %.0f s, %.3f s each, of %s%s",
                method, path, status, count.num, more, EVERY_S, count.seconds / count.num, who, because,
            )  # fmt: skip
        self._counts.clear()
