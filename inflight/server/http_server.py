"""HTTP server of an engine, in a separate thread."""

import asyncio
import logging
import signal
import socket
import threading
import time

from inflight.core.errors import InflightError
from inflight.core.http_thread import HttpThread, listen
from inflight.core.waiting import Wait
from inflight.server.app import make_app
from inflight.server.engine import ServedEngine
from inflight.server.options import ServerOptions
from inflight.server.served import Served

logger = logging.getLogger("inflight.server")

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
        connections = self._served.connections
        if connections.most < options.max_connections:
            logger.info("the server takes %d connections, because this process can open few files", connections.most)
        super().__init__(
            listening,
            make_app(self._served),
            host=options.host,
            name="inflight-server",
            grace_s=_GRACE_S,
            http=connections.protocol(),
            lifespan="on",
            log_level="error",  # Messages that are not HTTP could fill a log.
            proxy_headers=False,  # A header must not turn a client into a peer on the loopback.
            timeout_keep_alive=int(options.keep_alive_s),
            backlog=2048,
        )

    @property
    def running(self) -> bool:
        """True until it is closed."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the requests in progress and the server. Clients receive the tokens so far. Safe to call twice."""
        self._served.ending = True
        if self._served.num_open and self._thread.is_alive():
            self._abort()
        super().close()

    def drain(self, hurry: threading.Event | None = None) -> None:
        """Refuse new requests, and return when all others have ended, or after `drain_timeout_s`. hurry: is set to
        return earlier."""
        self._served.ending = True
        wait = Wait()
        while self._served.num_open and self._thread.is_alive():
            if wait.waited_s > self.options.drain_timeout_s or (hurry is not None and hurry.is_set()):
                logger.warning("%d requests are cancelled, as the server ends", self._served.num_open)
                return
            time.sleep(_DRAIN_CHECK_S)
            wait.tick()
            wait.tell(f"the server ends once {self._served.num_open} requests are answered")

    def _abort(self) -> None:
        """Cancel the requests in progress. Replies end with the tokens so far. The engine might have ended already."""
        try:
            asyncio.run_coroutine_threadsafe(self._served.abort(None), self._served.loop).result(_GRACE_S)
        except (InflightError, RuntimeError, TimeoutError) as error:
            logger.info("the requests in progress could not be cancelled: %s", error)
        wait = Wait()
        while self._served.num_open and self._thread.is_alive() and wait.waited_s < _GRACE_S:
            time.sleep(_DRAIN_CHECK_S)
            wait.tick()

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
