"""Connections of a server: how many there may be, and how long a client may take to send a request."""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inflight.server.errors import ApiError

OTHER_FILES = 512
"""Files that a process with a server has open beside its connections."""
_MOST_TOLD = 64
"""Connections beyond the bound that are told of it; those beyond them are closed at once."""
_FEWEST = 16


def bounded(most: int, receive_timeout_s: float) -> type[HttpToolsProtocol]:
    """The protocol of a server that has so many connections and answers on more with 503, and that closes one on which
    a request is not whole after so long, from its first byte or from when the connection was made. (uvicorn bounds
    requests rather than connections, and only the time between requests.)"""

    class BoundedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            num_connections = len(self.connections)
            if num_connections > most + _MOST_TOLD:
                transport.abort()
                return
            if num_connections > most:
                self.app = _full(most)
            self._deadline = self.loop.call_later(receive_timeout_s, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._deadline = self.loop.call_later(receive_timeout_s, self._give_up)
            super().data_received(data)

        def on_message_complete(self) -> None:
            self._stop()
            super().on_message_complete()

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            self._deadline = None
            if self.transport is not None and not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol


def most_connections(wanted: int) -> int:
    """So many, or fewer where the process may not have as many files open: its other files must find a place, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(_FEWEST, soft - OTHER_FILES))


def _full(most: int) -> Any:
    """What answers on a connection that is one too many."""
    response = ApiError(503, f"the server has {most} connections, as many as it takes; come back later").response()
    response.headers["Connection"] = "close"
    return response
