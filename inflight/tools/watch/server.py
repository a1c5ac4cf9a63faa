"""Serves the page and its events in a thread."""

import asyncio
import ipaddress
import mimetypes
import socket
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from inflight.core.http_thread import HttpThread, listen
from inflight.tools.watch.sources import RunDirectory

PAGE = Path(__file__).parent / "page"
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
mimetypes.add_type("text/javascript", ".js")  # some machines have another type, which browsers do not run
_GRACE_S = 2
_MAX_CONNECTIONS = 256
_LONGEST_CURSOR = 200


def make_page_app(source: RunDirectory, *, hosts: list[str]) -> Starlette:
    """Return the application. hosts: names for which browsers get a response ("*": any name). Names of other sites are
    refused."""

    async def news(request: Request) -> Response:
        cursor = request.query_params.get("cursor", "")[:_LONGEST_CURSOR]
        found = await asyncio.to_thread(source.news, cursor)
        return Response(msgspec.json.encode(found), media_type="application/json", headers=_HEADERS)

    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts), Middleware(GZipMiddleware)]
    routes = [Route("/events", news), Mount("/", _Files(directory=PAGE, html=True))]
    return Starlette(routes=routes, middleware=middleware)


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


class PageServer(HttpThread):
    """Serves the page of a source until it is closed."""

    def __init__(self, source: RunDirectory, *, host: str = "127.0.0.1", port: int = 0):
        """port: 0 lets the system choose one. Raises ListenError if the address cannot be used."""
        listening = listen(host, port)
        super().__init__(
            listening,
            make_page_app(source, hosts=names_of(listening, host)),
            host=host,
            name="inflight-watch",
            grace_s=_GRACE_S,
            lifespan="off",
            log_level="warning",
            limit_concurrency=_MAX_CONNECTIONS,
        )

    def wait(self) -> None:
        """Return after the end of the server. Raises KeyboardInterrupt at Ctrl-C."""
        while self._thread.is_alive():
            self._thread.join(0.2)


def names_of(listening: socket.socket, host: str) -> list[str]:
    """Return the names for which browsers get a response: this machine's names and `host` if only this machine can
    connect, otherwise any."""
    bound = listening.getsockname()[0]
    if not ipaddress.ip_address(bound).is_loopback:
        return ["*"]
    # Older versions of starlette take the part up to the first colon for the name, here of an IPv6 address.
    return ["127.0.0.1", "localhost", host.lower(), *([f"[{bound}]", "["] if ":" in bound else [bound])]
