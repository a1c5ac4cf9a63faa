"""An HTTP server in front of an engine, in a thread of its own."""

import logging
import signal
import threading

from inflight.core.http_thread import HttpThread, listen
from inflight.server.app import make_app
from inflight.server.connections import bounded, most_connections
from inflight.server.engine import ServedEngine
from inflight.server.options import ServerOptions
from inflight.server.served import Served

logger = logging.getLogger("inflight.server")

_CHECK_S = 0.2
_GRACE_S = 5
"""How long answers that are under way may take when the server ends."""


class HttpServer(HttpThread):
    """Serves an engine until it is closed. What it is asked for runs in its thread; the engine goes on meanwhile."""

    def __init__(self, engine: ServedEngine, options: ServerOptions | None = None):
        """Raises ListenError if it cannot listen there."""
        self.options = options = options or ServerOptions()
        self._engine = engine
        if not options.token and options.control == "anyone":
            logger.warning("whoever reaches port %d may change the weights: there is no token", options.port)
        listening = listen(options.host, options.port)
        most = most_connections(options.max_connections)
        if most < options.max_connections:
            logger.info("there may be %d connections at a time, as this process may have few files open", most)
        super().__init__(
            listening,
            make_app(Served(engine, options)),
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

    def wait(self) -> None:
        """Return when it was closed, or told to end by SIGTERM. Raises KeyboardInterrupt at Ctrl-C, and EngineDiedError
        when its engine has ended."""
        told = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: told.set())
        try:
            while self._thread.is_alive() and not told.wait(_CHECK_S):
                self._engine.check()
        finally:
            signal.signal(signal.SIGTERM, before)
