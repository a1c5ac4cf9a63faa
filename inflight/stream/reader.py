"""The trainer's end of the token stream."""

from collections.abc import Callable

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import StreamGapError
from inflight.core.frames import TokenFrame
from inflight.stream.writer import SUBSCRIBE


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

    def receive(self, timeout_ms: int) -> TokenFrame | None:
        """The next frame, or None if none came in time.

        Raises FrameError for a frame that cannot be read and StreamGapError when frames were lost; after either,
        `receive` may be called again and goes on behind the damage.
        """
        if not self._socket.poll(timeout_ms):
            return None
        frame = TokenFrame.decode(self._socket.recv_multipart())
        sequence, expected = frame.header.sequence, self._expected
        self._expected = sequence + 1
        if sequence != expected:
            raise StreamGapError(f"frames {expected} to {sequence - 1} of engine {frame.header.engine_id} are lost")
        return frame

    def wait(self, timeout_s: float, until: Callable[[TokenFrame], bool]) -> TokenFrame | None:
        """Read on until a frame satisfies `until`; None if none does in time."""
        deadline = now_ns() + int(timeout_s * 1e9)
        while (left_ns := deadline - now_ns()) > 0:
            frame = self.receive(max(1, left_ns // 1_000_000))
            if frame is not None and until(frame):
                return frame
        return None

    def close(self) -> None:
        self._socket.close()
