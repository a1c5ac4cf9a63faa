"""An HTTP server in front of an engine, in a thread of its own."""

import logging
import signal
import socket
import threading
from types import TracebackType

import uvicorn

from inflight.core.errors import InflightError, ListenError
from inflight.core.waiting import Wait
from inflight.server.app import make_app
from inflight.server.connections import bounded, most_connections
from inflight.server.engine import ServedEngine
from inflight.server.options import ServerOptions
from inflight.server.served import Served

logger = logging.getLogger("inflight.server")

_START_S = 30.0
_CHECK_S = 0.2
_GRACE_S = 5
"""How long answers that are under way may take when the server ends."""


class HttpServer:
    """Serves an engine until it is closed. What it is asked for runs in its thread; the engine goes on meanwhile."""

    def __init__(self, engine: ServedEngine, options: ServerOptions | None = None):
        """Raises ListenError if it cannot listen there."""
        self.options = options = options or ServerOptions()
        self._engine = engine
        if not options.token and options.control == "anyone":
            logger.warning("whoever reaches port %d may change the weights: there is no token", options.port)
        self._socket = _listen(options.host, options.port)
        self.host, self.port = options.host, int(self._socket.getsockname()[1])
        most = most_connections(options.max_connections)
        if most < options.max_connections:
            logger.info("there may be %d connections at a time, as this process may have few files open", most)
        config = uvicorn.Config(
            make_app(Served(engine, options)),
            http=bounded(most, options.receive_timeout_s),
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # what is no HTTP is told to its client, and could fill a log
            access_log=False,
            proxy_headers=False,  # a header must not make anybody a peer on the loopback
            server_header=False,
            timeout_keep_alive=int(options.keep_alive_s),
            timeout_graceful_shutdown=_GRACE_S,
            backlog=2048,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="inflight-server", daemon=True)
        self._thread.start()
        self._wait_until_started()

    @property
    def url(self) -> str:
        """Where clients find it: "http://HOST:PORT"."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

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

    def close(self) -> None:
        """End it: requests that are under way have some seconds, then they are cancelled. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(2 * _GRACE_S)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(_GRACE_S)
        if self._thread.is_alive():
            logger.error("the server does not end; its thread ends with this process")
        self._socket.close()

    def __enter__(self) -> "HttpServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            logger.exception("the server failed")

    def _wait_until_started(self) -> None:
        wait = Wait()
        while not self._server.started:
            self._thread.join(0.01)
            if not self._thread.is_alive() or wait.waited_s > _START_S:
                self.close()
                raise InflightError("the server did not start; the log says why")
            wait.tick()
            wait.tell("the server has not started")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except BaseException:
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        raise ListenError(f"cannot listen on {host} port {port}: {error}") from error
    return listening
