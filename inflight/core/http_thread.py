"""An HTTP server in a separate thread, for `inflight serve` and the live page. It needs uvicorn."""

import errno
import logging
import socket
import threading
from typing import Any

import uvicorn

from inflight.core.closing import ClosedAtEnd
from inflight.core.errors import InflightError, ListenError
from inflight.core.waiting import Wait

logger = logging.getLogger("inflight.http")

_START_S = 30.0


class HttpThread(ClosedAtEnd):
    """Serves an ASGI application until it is closed."""

    def __init__(self, listening: socket.socket, app: Any, *, host: str, name: str, grace_s: int, **options: Any):
        """listening: the socket; the server closes it. host: the machine's name in `url`. name: the thread's name.
        grace_s: time for running answers at the end, in seconds. options: further options of uvicorn. Raises
        InflightError if the server does not start."""
        self.host, self.port = host, int(listening.getsockname()[1])
        self._socket, self._grace_s = listening, grace_s
        config = uvicorn.Config(
            app,
            loop="asyncio",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=grace_s,
            **options,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._wait_until_started()

    @property
    def url(self) -> str:
        """The address for clients: "http://HOST:PORT"."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """End the server. Running answers get `grace_s` to finish, then they are cancelled. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(2 * self._grace_s)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(self._grace_s)
        if self._thread.is_alive():
            logger.error("the server does not end; its thread ends with this process")
        self._socket.close()

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
            wait.tick("the server has not started")


def listen(
    host: str,
    port: int,
    *,
    host_advice: str = "choose an address of this machine",
) -> socket.socket:
    """Return a socket that listens on this address; port 0 lets the system choose. Raises ListenError with advice."""
    try:
        family, *_, (address, _, *scope) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        raise ListenError(f"cannot listen on host {host!r}: {error}; {host_advice}") from error
    try:
        return socket.create_server((address, port, *scope), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except (OSError, OverflowError, ValueError) as error:
        is_host = isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
        advice = host_advice if is_host else "choose another port, or 0 for a free one"
        raise ListenError(f"cannot listen on {host} port {port}: {error}; {advice}") from error
