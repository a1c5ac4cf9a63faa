"""HTTP server of an engine, in a separate thread."""

import asyncio
import logging
import resource
import signal
import socket
import threading
import time
from typing import Any

from inflight.core.errors import InflightError
from inflight.core.http_thread import HttpThread, listen
from inflight.core.waiting import Wait
from inflight.server.app import make_app
from inflight.server.engine import ServedEngine
from inflight.server.options import ServerOptions
from inflight.server.served import Served

logger = logging.getLogger("inflight.server")

OTHER_FILES = 512
"""Open files of a process with a server, without its connections."""
_FEWEST = 16
_CHECK_S = 0.2
_DRAIN_CHECK_S = 0.02
_GRACE_S = 5
"""Maximum time of requests in progress when the server ends."""


class HttpServer(HttpThread):
    """Serves an engine until it is closed. A separate thread handles the requests."""

    def __init__(
        self, engine: ServedEngine, options: ServerOptions | None = None, listening: socket.socket | None = None
    ):
        """listening: a socket that listens at host and port already. Raises ListenError if neither is possible."""
        self.options = options = options or ServerOptions()
        self._engine = engine
        if not options.token and options.control == "anyone":
            logger.warning("whoever reaches port %d may change the weights: there is no token", options.port)
        listening = listening or listen(options.host, options.port)
        self._served = Served(engine, options)
        app, name = make_app(self._served), "inflight-server"
        limits = uvicorn_options(options)
        super().__init__(listening, app, host=options.host, name=name, grace_s=_GRACE_S, lifespan="on", **limits)

    def close(self) -> None:
        """End the requests in progress and the server. Clients receive the tokens so far. Safe to call twice."""
        self._served.ending = True
        if self._is_busy:
            try:
                asyncio.run_coroutine_threadsafe(self._served.abort(None), self._served.loop).result(_GRACE_S)
            except (InflightError, RuntimeError, TimeoutError) as error:
                logger.info("the requests in progress could not be cancelled: %s", error)
            self._wait_until_answered(_GRACE_S)
        super().close()

    def drain(self, hurry: threading.Event | None = None) -> None:
        """Refuse new requests, and return when all others have ended, or after `drain_timeout_s`. hurry: is set to
        return earlier."""
        self._served.ending = True
        self._wait_until_answered(self.options.drain_timeout_s, hurry)
        if self._is_busy:
            logger.warning("%d requests are cancelled, as the server ends", self._served.num_open)

    @property
    def _is_busy(self) -> bool:
        return self._served.num_open > 0 and self._thread.is_alive()

    def _wait_until_answered(self, most_s: float, hurry: threading.Event | None = None) -> None:
        wait = Wait()
        while self._is_busy and wait.waited_s <= most_s and not (hurry is not None and hurry.is_set()):
            time.sleep(_DRAIN_CHECK_S)
            wait.tick()
            wait.tell(f"the server ends once {self._served.num_open} requests are answered")

    def wait(self) -> None:
        """Return when it is closed, or after SIGTERM when the requests in progress have ended (`drain`). A second
        SIGTERM ends it at once. Raises KeyboardInterrupt at Ctrl-C, and EngineDiedError if its engine has ended."""
        first, second = threading.Event(), threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: (second if first.is_set() else first).set())
        try:
            while self._thread.is_alive() and not first.wait(_CHECK_S):
                self._engine.check()
            if first.is_set():
                logger.info("SIGTERM: the server ends once the requests in progress are answered")
                self.drain(second)
        finally:
            signal.signal(signal.SIGTERM, before)


def uvicorn_options(options: ServerOptions) -> dict[str, Any]:
    """Return the limits of a server as options of uvicorn. Connections leave the process files for other uses."""
    most, (soft, _) = options.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and max(_FEWEST, soft - OTHER_FILES) < most:
        most = max(_FEWEST, soft - OTHER_FILES)
        logger.info("the server takes %d connections, because this process can open few files", most)
    return {
        "limit_concurrency": most + 1,  # It counts the connection of the request.
        "log_level": "error",  # Messages that are not HTTP could fill a log.
        "proxy_headers": False,  # A header must not turn a client into a peer on the loopback.
        "timeout_keep_alive": int(options.keep_alive_s),
        "backlog": 2048,
    }
