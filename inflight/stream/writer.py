"""The engine's end of the token stream.

One reader subscribes; while it is connected others are refused. Frames drawn while there is none wait, without bound.
Frames are not acknowledged, and a lost connection is not resumed: a reader tells what it missed by the gaps in the
sequence numbers.
"""

import logging
from collections import deque

import msgspec
import zmq

from inflight.core.frames import TokenFrame

logger = logging.getLogger(__name__)


SUBSCRIBE = msgspec.msgpack.encode({"type": "Subscribe"})
"""Reader → writer: send every frame from now on to me."""
PROBE = b""
"""Writer → reader: a message without a meaning, which can only be sent if the reader is there."""
REFUSED = msgspec.msgpack.encode({"type": "Refused"})
"""Writer → reader: another one is subscribed."""
_MAX_WIRE_BYTES = 64 << 10
"""The largest message to the writer; who sends a larger one is disconnected."""
_MESSAGES_PER_FLUSH = 16


class StreamWriter:
    """Sends frames to the subscribed reader; never blocks the generator."""

    def __init__(self, endpoint: str):
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.sndhwm = 0
        self._socket.maxmsgsize = _MAX_WIRE_BYTES
        self._socket.linger = 2000
        self._socket.router_mandatory = True  # a reader that is gone is an error, not a silent loss
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._reader: bytes | None = None
        self._waiting: deque[list[bytes]] = deque()

    def send(self, frame: TokenFrame) -> None:
        """Send a frame behind those that wait, as soon as there is a reader."""
        self._waiting.append(frame.encode())
        self.flush()

    def flush(self) -> None:
        """Let a new reader subscribe, and send the frames that wait."""
        for _ in range(_MESSAGES_PER_FLUSH):  # a flood of them does not stop the generator
            if not self._socket.poll(0):
                break
            self._answer(self._socket.recv_multipart())
        while self._reader is not None and self._waiting:
            if not self._send_to(self._reader, self._waiting[0]):
                self._reader = None
                return
            self._waiting.popleft()

    def close(self) -> None:
        self._socket.close()

    def _answer(self, parts: list[bytes]) -> None:
        if parts[-1] != SUBSCRIBE:
            logger.warning("ignored a message on the stream socket that is not a subscription (%d parts)", len(parts))
            return
        if self._reader not in (None, parts[0]) and self._send_to(self._reader, [PROBE]):
            logger.warning("refused a second reader of the stream")
            self._send_to(parts[0], [REFUSED])
            return
        self._reader = parts[0]

    def _send_to(self, reader: bytes | None, parts: list[bytes]) -> bool:
        """Send a message. Returns False if the reader is gone."""
        try:
            self._socket.send_multipart([reader or b"", *parts])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True
