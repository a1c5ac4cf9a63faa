"""The engine's end of the token stream.

A frame is kept until the reader acknowledges it, and sent again if the connection was lost before that. The bytes in
transit are bounded; the other frames wait here, in memory and beyond a bound on disk. One reader subscribes; while it
is connected others are refused. After it disconnects, the next one begins with the oldest frame that was not
acknowledged.
"""

import logging
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import ProtocolError
from inflight.core.frames import TokenFrame
from inflight.stream.kept_frames import KeptFrames
from inflight.stream.wire import (
    MAX_WIRE_BYTES,
    Ack,
    Beat,
    Held,
    Leave,
    Refused,
    Subscribe,
    Subscribed,
    encode,
    to_writer,
)

logger = logging.getLogger(__name__)

MEMORY_BYTES = 1 << 30
_MESSAGES_PER_FLUSH = 16
_WINDOW_BYTES = 16 << 20
"""Bound for the unacknowledged bytes in transit to the reader."""
_BEAT_NS = 500_000_000
_FLUSH_SHARE = 0.005
_MOST_HELD_BACK_NS = 100_000_000
_MOST_FOLLOWED_NS = 25_000_000
_MOST_ENDED_NS = 5_000_000
"""Frames in quick succession are sent together, so that sending takes about this share of the generator's time. None
waits longer than _MOST_HELD_BACK_NS, or _MOST_FOLLOWED_NS if a caller follows the tokens. If a caller follows the
tokens or waits for certain groups, a frame with the end of a sample waits at most _MOST_ENDED_NS: that caller might
then submit more."""
_PASSES_PER_MESSAGE = 5
"""Minimum number of passes in a message if no caller follows the tokens and no sample ends: each message wakes the
reader."""


class StreamWriter:
    """Sends frames to the subscribed reader; never blocks the generator."""

    def __init__(self, endpoint: str, *, memory_bytes: int = MEMORY_BYTES, spill_directory: Path | None = None):
        """memory_bytes: waiting frames beyond this size are written to files in the spill directory (None: the
        temporary one)."""
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.sndhwm = 0
        self._socket.maxmsgsize = MAX_WIRE_BYTES
        self._socket.linger = 2000
        self._socket.router_mandatory = True  # a reader that is gone is an error, not a silent loss
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.kept = KeptFrames(memory_bytes, spill_directory or Path(tempfile.gettempdir()))
        self.state = ""
        """State of the engine, sent to the reader when no frame was sent for a while."""
        self.engine_id = ""
        """Sent to readers. A reader notices by it that another engine has taken the address of its engine."""
        self.trainer = Held()
        """The reader's last report of unconsumed output."""
        self._reader: str | None = None
        self._address = b""
        """The connection of the reader. It changes when the reader connects again."""
        self._next_to_send = 0
        self._bytes_on_way = 0
        self._sent_ns = 0
        self._held_back: deque[TokenFrame] = deque()
        self._due_ns = 0
        """Time at which the waiting frames are sent at the latest."""
        self._rested_ns = 0
        """Time from which sending again keeps to _FLUSH_SHARE."""
        self._frame_ns = self._pass_ns = 0
        """Time of the last frame, and the interval between it and the previous one."""

    def listen(self, bind: Callable[[zmq.Socket], str]) -> str:
        """Have `bind` bind the socket to another endpoint. Returns the endpoint."""
        return bind(self._socket)

    @property
    def num_unsent(self) -> int:
        return self.kept.next + len(self._held_back) - self._next_to_send

    def send(self, frame: TokenFrame, *, at_once: bool = True) -> None:
        """Send a frame after the waiting ones, as soon as there is a reader. Their numbers rise from 0 without gaps.
        at_once: no call follows soon, or the reader should have it now. Otherwise its tokens can wait a little for the
        next frames, if frames arrive so fast that sending each alone would slow the generator down. The frame after one
        that is sent at once does not wait either: it might contain the first token of a new request."""
        self._held_back.append(frame)
        came_ns = now_ns()
        self._pass_ns, self._frame_ns = came_ns - self._frame_ns, came_ns
        next_ns = came_ns + self._pass_ns  # if passes take as long as the last one
        if frame.header.finishes:
            asks_again = self.trainer.follows or self.trainer.awaits_ends
            self._due_ns = min(self._due_ns, came_ns + _MOST_ENDED_NS if asks_again else self._rested_ns)
        if at_once or not frame.header.num_tokens or next_ns >= self._due_ns:
            self.flush()
        if at_once:
            self._due_ns = 0

    def flush(self) -> None:
        """Process messages of readers, and send the frames that fit into the window; without frames, send a sign of
        life."""
        began_ns, num_tokens = now_ns(), 0
        while self._held_back:
            frame = self._held_back.popleft()
            num_tokens += frame.header.num_tokens
            self.kept.append(frame.encode(), frame.header.num_tokens, len(frame.header.finishes))
        self._exchange()
        if num_tokens:
            ended_ns, follows = now_ns(), self.trainer.follows
            rest_ns = int((ended_ns - began_ns) / _FLUSH_SHARE)
            most_ns = _MOST_FOLLOWED_NS if follows else _MOST_HELD_BACK_NS
            least_ns = 0 if follows else _PASSES_PER_MESSAGE * self._pass_ns
            self._rested_ns, self._due_ns = ended_ns + rest_ns, ended_ns + min(max(rest_ns, least_ns), most_ns)

    def wait(self, timeout_ms: int) -> None:
        """Return when a message of a reader arrives, or after the timeout."""
        self._socket.poll(timeout_ms)

    def close(self) -> None:
        """Close the socket. Frames in transit have two seconds to arrive. Safe to call twice."""
        if self._socket.closed:
            return
        self.flush()
        self._socket.close()
        self.kept.close()

    def _exchange(self) -> None:
        for _ in range(_MESSAGES_PER_FLUSH):  # a flood of messages must not stop the generator
            if not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                break
            self._hear(self._socket.recv_multipart())
        frames = []
        while self._reader and self.num_unsent > len(frames) and self._bytes_on_way < _WINDOW_BYTES:
            frames.append(self.kept[self._next_to_send + len(frames)])
            self._bytes_on_way += len(frames[-1])
        if frames and self._send(*frames):
            self._next_to_send += len(frames)
        if self._reader and now_ns() - self._sent_ns > _BEAT_NS:
            self._send(encode(Beat(self.state)))

    def _hear(self, parts: list[bytes]) -> None:
        address, *parts = parts
        try:
            if len(parts) != 1:
                raise ProtocolError(f"a message on the stream has one part, got {len(parts)}")
            message = to_writer(parts[0])
        except ProtocolError as error:
            logger.warning("ignored what came on the stream: %s", error)
            return
        if isinstance(message, Subscribe):
            self._subscribe(address, message)
        elif address == self._address and isinstance(message, Leave):
            self._reader = None
        elif address == self._address and isinstance(message, Ack):
            before = self.kept.bytes_in_memory + self.kept.bytes_in_files
            self.kept.forget(min(message.next, self._next_to_send))
            self._bytes_on_way -= before - self.kept.bytes_in_memory - self.kept.bytes_in_files
            self.trainer = message.held

    def _subscribe(self, address: bytes, message: Subscribe) -> None:
        # The engine of such a reader was replaced. The frames are for other readers.
        if message.engine_id not in ("", self.engine_id):
            self._send_to(address, encode(Subscribed(self._next_to_send, self.engine_id)))
            return
        if self._reader not in (None, message.reader) and self._send(encode(Beat(self.state))):
            logger.warning("refused a second reader of the stream")
            self._send_to(address, encode(Refused()))
            return
        self._reader, self._address = message.reader, address
        wanted = self.kept.oldest if message.next is None else message.next
        self._next_to_send = max(self.kept.oldest, min(wanted, self.kept.next))
        self._bytes_on_way = 0
        self.kept.forget(self._next_to_send)
        self._send(encode(Subscribed(self._next_to_send, self.engine_id)))

    def _send(self, *parts: bytes) -> bool:
        """Send to the reader. Returns False if it is gone."""
        self._sent_ns = now_ns()
        if not self._send_to(self._address, *parts):
            self._reader = None
        return self._reader is not None

    def _send_to(self, address: bytes, *parts: bytes) -> bool:
        try:
            self._socket.send_multipart([address, *parts])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True
