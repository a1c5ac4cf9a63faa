"""Connections of a server: how many there may be, and how long a client may take to send a request."""

import asyncio
import ipaddress
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inflight.server.errors import ApiError

OTHER_FILES = 512
"""Files that a process with a server has open beside its connections."""
_MOST_TOLD = 64
"""Connections beyond the bound that are told of it; those beyond them are closed at once."""
_MOST_RESERVED, _PARTS = 16, 8
"""Connections that are for peers on the loopback alone: an eighth of all, and at most 16."""
_FEWEST = 16


def bounded(most: int, receive_timeout_s: float) -> type[HttpToolsProtocol]:
    """The protocol of a server that has so many connections and answers on more with 503, and that closes one on which
    a request is not whole after so long, from its first byte or from when the connection was made. Some of them are for
    peers on the loopback, so that whoever runs the server reaches it whatever others do. (uvicorn bounds requests, not
    connections, and only the time between requests.)"""
    placed: set[HttpToolsProtocol] = set()
    reserved = min(_MOST_RESERVED, most // _PARTS)

    class BoundedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _is_receiving = False
        """A request has begun and is not whole."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            is_own = self.client is not None and is_loopback(self.client[0])
            places = most if is_own else most - reserved
            if len(self.connections) > places + _MOST_TOLD:
                transport.abort()
                return
            if len(placed) < places:
                placed.add(self)
            else:
                self.app = _full(places)
            self._start()

        def connection_lost(self, exc: Exception | None) -> None:
            placed.discard(self)
            self._stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self._start()
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._is_receiving = True
            super().on_message_begin()

        def on_message_complete(self) -> None:
            self._is_receiving = False
            self._stop()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_receiving and not self.transport.is_closing():  # it came while the one before was answered
                self._start()

        def _start(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(receive_timeout_s, self._give_up)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            if self.transport is not None and not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol


def is_loopback(host: str) -> bool:
    """Whether an address of a peer is one of this machine's loopback."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def most_connections(wanted: int) -> int:
    """So many, or fewer where the process may not have as many files open: its other files must find a place, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(_FEWEST, soft - OTHER_FILES))


def _full(most: int) -> Any:
    """What answers on a connection that is one too many."""
    response = ApiError(503, f"the server has {most} connections, as many as it takes; come back later").response()
    response.headers["Connection"] = "close"
    return response
