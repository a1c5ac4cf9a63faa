"""The trainer's end of the token stream."""

import zmq

from inflight.core.errors import ProtocolError, StreamGapError
from inflight.core.frames import TokenFrame
from inflight.stream.writer import PROBE, REFUSED, SUBSCRIBE


class StreamReader:
    """Receives the frames of one engine in order.

    ZeroMQ's own thread buffers what has not been read yet, without bound, so the generator never waits for the reader.
    """

    def __init__(self, endpoint: str):
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.rcvhwm = 0
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._socket.send(SUBSCRIBE)
        self._expected = 0
        self._held: TokenFrame | None = None

    def receive(self, timeout_ms: int) -> TokenFrame | None:
        """The next frame, or None if none came in time.

        Raises FrameError for a frame that cannot be read and StreamGapError when frames were lost; after either,
        `receive` may be called again and goes on right behind the damage. Raises ProtocolError if the engine has
        another reader.
        """
        if self._held is not None:
            frame, self._held = self._held, None
            return frame
        parts = [PROBE]
        while parts == [PROBE]:
            if not self._socket.poll(timeout_ms):
                return None
            parts = self._socket.recv_multipart()
        if parts == [REFUSED]:
            raise ProtocolError("this engine's stream has a reader already; it can have one at a time")
        frame = TokenFrame.decode(parts)
        sequence, expected = frame.header.sequence, self._expected
        self._expected = sequence + 1
        if sequence != expected:
            self._held = frame
            raise StreamGapError(f"frames {expected} to {sequence - 1} of engine {frame.header.engine_id} are lost")
        return frame

    def close(self) -> None:
        self._socket.close()
