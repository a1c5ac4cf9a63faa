"""Connections with a bound on the time that a client may take to send a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def bounded(receive_timeout_s: float) -> type[HttpToolsProtocol]:
    """The protocol of a server that closes a connection on which a request is not whole after so long, from its first
    byte or from when the connection was made. (uvicorn bounds only the time between requests.)"""

    class BoundedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
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
