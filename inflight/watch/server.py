"""Serves the page, and the events that it asks for, in a thread of its own."""

import asyncio
import ipaddress
import logging
import socket
import threading
from pathlib import Path
from typing import Self

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from inflight.core.errors import InflightError, ListenError
from inflight.watch.sources import Source

logger = logging.getLogger("inflight.watch")

PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_START_S = 30.0
_GRACE_S = 2
_MAX_CONNECTIONS = 256
_LONGEST_CURSOR = 200


def make_page_app(source: Source, *, hosts: list[str]) -> Starlette:
    """The application. hosts: the names by which browsers may ask for it ("*": any), so that no other site's name leads
    to it."""

    async def news(request: Request) -> Response:
        cursor = request.query_params.get("cursor", "")[:_LONGEST_CURSOR]
        found = await asyncio.to_thread(source.news, cursor)
        return Response(msgspec.json.encode(found), media_type="application/json", headers=_HEADERS)

    def file(path: Path) -> Route:
        async def answer(request: Request) -> Response:
            return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)

        return Route("/" if path.name == "index.html" else f"/{path.name}", answer)

    files = [file(path) for path in sorted(PAGE.iterdir()) if path.suffix in _TYPES]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts), Middleware(GZipMiddleware)]
    return Starlette(routes=[Route("/events", news), *files], middleware=middleware)


class PageServer:
    """Serves the page of a source until it is closed."""

    def __init__(self, source: Source, *, host: str = "127.0.0.1", port: int = 0):
        """port: 0 lets the system choose one. Raises ListenError if it cannot listen there."""
        self._socket = _listen(host, port)
        self._host, self.port = host, int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            make_page_app(source, hosts=names_of(self._socket)),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="inflight-watch", daemon=True)
        self._thread.start()
        self._wait_until_started()

    @property
    def url(self) -> str:
        """Where a browser finds it: "http://HOST:PORT"."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def wait(self) -> None:
        """Return when it has ended. Raises KeyboardInterrupt at Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(0.2)

    def close(self) -> None:
        """End it; answers that are under way have some seconds. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join(2 * _GRACE_S)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(_GRACE_S)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            logger.exception("the page's server failed")

    def _wait_until_started(self) -> None:
        waited_s = 0.0
        while not self._server.started:
            self._thread.join(0.01)
            waited_s += 0.01
            if not self._thread.is_alive() or waited_s > _START_S:
                self.close()
                raise InflightError("the page's server did not start; the log says why")


def names_of(listening: socket.socket) -> list[str]:
    """The names by which browsers may ask: where only this machine gets an answer, those of this machine; else any."""
    bound = listening.getsockname()[0]
    if not ipaddress.ip_address(bound).is_loopback:
        return ["*"]
    # Older versions of starlette take the part up to the first colon for the name, here of an IPv6 address.
    return ["127.0.0.1", "localhost", *([f"[{bound}]", "["] if ":" in bound else [bound])]


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise ListenError(f"cannot listen on {host} port {port}: {error}; --port takes another one") from error
