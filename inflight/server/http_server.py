"""An HTTP server in front of an engine, in a thread of its own."""

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
from inflight.server.connections import bounded, most_connections
from inflight.server.engine import ServedEngine
from inflight.server.options import ServerOptions
from inflight.server.served import Served

logger = logging.getLogger("inflight.server")

_CHECK_S = 0.2
_DRAIN_CHECK_S = 0.02
_GRACE_S = 5
"""How long answers that are under way may take when the server ends."""


class HttpServer(HttpThread):
    """Serves an engine until it is closed. What it is asked for runs in its thread; the engine goes on meanwhile."""

    def __init__(
        self, engine: ServedEngine, options: ServerOptions | None = None, listening: socket.socket | None = None
    ):
        """listening: a socket that listens there already. Raises ListenError if it cannot listen there."""
        self.options = options = options or ServerOptions()
        self._engine = engine
        if not options.token and options.control == "anyone":
            logger.warning("whoever reaches port %d may change the weights: there is no token", options.port)
        listening = listening or listen(options.host, options.port)
        self._served = Served(engine, options)
        most = most_connections(options.max_connections)
        if most < options.max_connections:
            logger.info("there may be %d connections at a time, as this process may have few files open", most)
        super().__init__(
            listening,
            make_app(self._served),
            host=options.host,
            name="inflight-server",
            grace_s=_GRACE_S,
            http=bounded(most, options.receive_timeout_s),
            lifespan="on",
            log_level="error",  # what is no HTTP is told to its client, and could fill a log
            proxy_headers=False,  # a header must not make anybody a peer on the loopback
            timeout_keep_alive=int(options.keep_alive_s),
            backlog=2048,
        )

    @property
    def running(self) -> bool:
        """Whether it still answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the requests in progress and the server. Clients receive the tokens so far. Safe to call twice."""
        self._served.ending = True
        if self._served.num_open and self._thread.is_alive():
            self._abort()
        super().close()

    def drain(self, told: threading.Event | None = None) -> None:
        """Accept no new request, and return when all others were answered, or after `drain_timeout_s`. told: is set to
        return earlier."""
        self._served.ending = True
        wait = Wait()
        while self._served.num_open and self._thread.is_alive():
            if wait.waited_s > self.options.drain_timeout_s or (told is not None and told.is_set()):
                logger.warning("%d requests are cancelled, as the server ends", self._served.num_open)
                return
            time.sleep(_DRAIN_CHECK_S)
            wait.tick()
            wait.tell(f"the server ends once {self._served.num_open} requests are answered")

    def _abort(self) -> None:
        """Cancel the requests in progress; answers end with the tokens so far. The engine might have ended already."""
        try:
            asyncio.run_coroutine_threadsafe(self._served.abort(None), self._served.loop).result(_GRACE_S)
        except (InflightError, RuntimeError, TimeoutError) as error:
            logger.info("the requests in progress could not be cancelled: %s", error)
        wait = Wait()
        while self._served.num_open and self._thread.is_alive() and wait.waited_s < _GRACE_S:
            time.sleep(_DRAIN_CHECK_S)
            wait.tick()

    def wait(self) -> None:
        """Return when it was closed, or when SIGTERM arrived and the requests in progress were answered (`drain`); a
        second SIGTERM ends it at once. Raises KeyboardInterrupt at Ctrl-C, and EngineDiedError
        when its engine has ended."""
        told, again = threading.Event(), threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: (again if told.is_set() else told).set())
        try:
            while self._thread.is_alive() and not told.wait(_CHECK_S):
                self._engine.check()
            if told.is_set():
                logger.info("SIGTERM: the server ends once the requests in progress are answered")
                self.drain(again)
        finally:
            signal.signal(signal.SIGTERM, before)
