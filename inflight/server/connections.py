"""Bounds on the connections of a server. A reverse proxy bounds the time of a request's headers (docs/server.md)."""

import ipaddress
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

OTHER_FILES = 512
"""Open files of a process with a server, without its connections."""
_MOST_REFUSED = 64
"""Connections beyond the bound that receive a 503. More are closed at once."""
_FEWEST = 16


class Connections:
    """Counts the open connections of a server. Each needs an open file, and so do weights and sockets. uvicorn itself
    accepts any number of connections."""

    def __init__(self, most: int):
        """most: requests receive a 503 while more connections are open."""
        self.most, self.num_open = most, 0

    def protocol(self) -> type[HttpToolsProtocol]:
        """Return uvicorn's protocol, with the two callbacks of `asyncio.Protocol` that count."""
        connections = self

        class CountedProtocol(HttpToolsProtocol):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                connections.num_open += 1
                if connections.num_open > connections.most + _MOST_REFUSED:
                    transport.abort()

            def connection_lost(self, exc: Exception | None) -> None:
                connections.num_open -= 1
                super().connection_lost(exc)

        return CountedProtocol


def is_loopback(host: str) -> bool:
    """Return whether an address is on this machine's loopback."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def most_connections(wanted: int) -> int:
    """Return the number of connections that leaves the process files for other uses, at most `wanted`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(_FEWEST, soft - OTHER_FILES))
