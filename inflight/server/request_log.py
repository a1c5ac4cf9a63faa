"""Answers requests, and logs them: a refusal at once and with its reason, replies counted over some seconds."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from inflight.core.messages import shorten
from inflight.server.responses import ApiError, as_api_error

logger = logging.getLogger("inflight.server.requests")

EVERY_S = 10.0
"""Time between two lines of the same kind of requests: method, path and status."""
_QUIET = ("/health", "/ping", "/liveness", "/metrics", "/load")
"""Paths of probes. Their replies have lines at the level debug alone."""
_MOST_KINDS = 256
"""Kinds in one interval. Requests of others are counted together."""


class RequestLog:
    """Lines about requests. A status of 400 and more is a warning. The first warning of an interval is logged at once;
    all others are counted in a line at the end of the interval. At the level debug each request has a line, too. One
    event loop uses it."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
        """Maps kinds to the times of the requests in this interval."""
        self._timer: asyncio.TimerHandle | None = None

    async def answer(
        self,
        request: Request,
        path: str,
        response: Awaitable[Response],
        refuse: Callable[[ApiError], Response] = ApiError.response,
    ) -> Response:
        """Return a response, or the response to its error, and note the request. refuse: makes that response."""
        began_s, reason = time.monotonic(), ""
        try:
            answered = await response
        except ClientDisconnect:
            answered, reason = Response(status_code=499), "the client closed the connection"  # without a reader
        except Exception as error:
            told = as_api_error(error, f"a request for {path}")
            answered, reason = refuse(told), told.message
        self.note(request, path, answered.status_code, time.monotonic() - began_s, reason)
        return answered

    def note(self, request: Request, path: str, status: int, seconds: float, reason: str = "") -> None:
        """Count a request when it is answered or its stream begins. reason: of a refusal."""
        method, client = request.method[:20], request.client.host if request.client else "a local client"
        reason = shorten(reason.replace("\n", " "), 400)
        because = f": {reason}" if reason else ""
        logger.debug("%s %s %d in %.3f s for %s%s", method, path, status, seconds, client, because)
        if status < 400 and path in _QUIET:
            return
        kind = method, path, status
        if kind not in self._seconds and len(self._seconds) >= _MOST_KINDS:
            kind = "requests", "for other paths", status
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self.flush)
        of_kind = self._seconds[kind]
        of_kind.append(seconds)
        if status >= 400 and len(of_kind) == 1:
            logger.warning("%s %s %d for %s%s", method, path, status, client, because)

    def flush(self) -> None:
        """Write the lines of this interval, and begin another one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (method, path, status), seconds in self._seconds.items():
            level, more = (logging.WARNING, " more") if status >= 400 else (logging.INFO, "")
            if num := len(seconds) - bool(more):
                mean_s = sum(seconds) / len(seconds)
                logger.log(
                    level, "%s %s %d: %d%s in %.0f s, %.3f s each", method, path, status, num, more, EVERY_S, mean_s
                )
        self._seconds.clear()
