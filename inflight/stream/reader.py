"""The trainer's end of the token stream."""

import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import sleep

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, FrameError, ProtocolError, StreamGapError
from inflight.core.frames import MAGIC, MAX_FRAME_BYTES, TokenFrame
from inflight.core.keys import ClientKeys, prepare_client
from inflight.stream.journal import JournalWriter
from inflight.stream.wire import Ack, Beat, Held, Leave, Refused, Subscribe, encode, to_reader

_FRAMES_PER_ACK = 32
_ACK_NS = 500_000_000
_ACK_PACE_NS = 40_000_000
"""Minimum interval between acknowledgements of a waiting reader. Each one costs an engine with a pass per millisecond
a part of that pass."""
_REFUSED_NS = 1_000_000_000
"""Time for which a new reader subscribes again if the engine refuses it."""
_MOST_LATE_NS = 50_000_000
"""Time beyond its timeout for which `receive` reads messages that contain no new frame."""
_SILENCE_NS = 2_000_000_000
"""Silence after which the reader subscribes again, in case the connection was lost."""


class StreamReader:
    """Receives the frames of one engine in order, each once, also after the connection was lost.

    The call for the next frame acknowledges the previous one; until then the engine keeps it. With a journal, a frame
    is written there before it is returned, and so before it is acknowledged.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        begin: int | None = None,
        engine_id: str = "",
        held: Callable[[], Held] = Held,
        journal: JournalWriter | None = None,
        keys: ClientKeys | None = None,
    ):
        """begin: number of the first frame; None: the oldest one that no reader has acknowledged. engine_id: the engine
        at the endpoint; "": the first one that answers. held: returns the report of unconsumed output for the engine.
        journal: its owner closes it. keys: for an endpoint of TCP."""
        self._journal = journal
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        """Socket for a caller that polls several readers at once."""
        self.socket.rcvhwm = 0  # the writer bounds the bytes in transit
        self.socket.maxmsgsize = MAX_FRAME_BYTES
        self.socket.linger = 0
        prepare_client(self.socket, endpoint, keys)
        self.socket.connect(endpoint)
        self._endpoint, self._engine_id = endpoint, engine_id
        self._held_by_trainer, self._told = held, Held()
        self._name = secrets.token_hex(8)
        self.next = begin
        """Number of the next frame, if the first one is known."""
        self._acknowledged = begin or 0
        self._acknowledged_ns = self._asked_ns = 0
        self._made_ns = self._heard_ns = now_ns()
        self._damaged = False
        """A frame could not be read; its number is unknown."""
        self._subscribed = False
        """The writer has sent the number of its next frame."""
        self._resent = False
        """No frame has arrived since then."""
        self._parts: deque[bytes] = deque()
        """Unprocessed parts of a message."""
        self._held: tuple[TokenFrame, bytes] | None = None
        """The first frame after a gap that `receive` has reported, and its encoded bytes."""
        self.state = ""
        """The last state that the engine has reported."""
        self.num_duplicates = 0
        """Number of frames that arrived again and were skipped."""
        self.num_bytes = 0
        """Bytes of all frames received."""
        self.num_tokens = 0
        """Tokens of the frames received, without duplicates."""
        self.num_rollouts = 0
        """Number of samples whose ends these frames report."""
        self._subscribe()

    is_urgent = False
    """Frames can wait until there is memory for them."""

    @property
    def silent_s(self) -> float:
        """Seconds since anything arrived from the engine."""
        return (now_ns() - self._heard_ns) / 1e9

    def receive(self, timeout_ms: int) -> TokenFrame | None:
        """Acknowledge the previous frame and return the next one, or None if none arrives in time.

        Raises FrameError for a frame that cannot be read and StreamGapError when frames were lost; after either,
        `receive` can be called again and continues right after the damage. Raises ProtocolError if the engine has
        another reader, EngineDiedError if another engine has taken its address, and JournalError if the journal cannot
        store the frame. That frame is not acknowledged.
        """
        if self._held is not None:
            frame, data = self._held
            if self._journal is not None:
                self._journal.append(data)
            self._held = None
            return frame
        if (self.next or 0) - self._acknowledged >= _FRAMES_PER_ACK or self._acknowledges_late:
            self._acknowledge()
        deadline_ns = now_ns() + timeout_ms * 1_000_000
        while (data := self._next_message(deadline_ns)) is not None:
            if data[: len(MAGIC)] != MAGIC:
                self._hear(data)
            elif self._subscribed and (frame := self._take(data)) is not None:
                return frame
            if not self._parts and now_ns() > deadline_ns + _MOST_LATE_NS:
                return None
        if now_ns() - max(self._heard_ns, self._asked_ns) > _SILENCE_NS:
            self._subscribe()
        return None

    def close(self) -> None:
        """Close the socket. The engine keeps frames that were not acknowledged, and a frame that `receive` has not
        returned. Safe to call twice."""
        if not self.socket.closed:
            if self._held is not None:
                self.next, self._held = self._held[0].header.sequence, None
            self._acknowledge()
            self._tell(Leave())
            self.socket.close(linger=100)

    def _take(self, data: bytes) -> TokenFrame | None:
        """Decode and count a frame. Returns None for a frame that has arrived before, or arrives too early."""
        self._heard_ns = now_ns()
        self.num_bytes += len(data)
        try:
            frame = TokenFrame.decode(data)
        except FrameError:
            self._damaged = True
            raise
        number = frame.header.sequence
        expected = number if self.next is None else self.next
        if number < expected:
            self.num_duplicates += 1
            return None
        if number > expected and not (self._resent or self._damaged):  # the frames in between are sent again
            self._subscribe()
            return None
        self.num_tokens += frame.header.num_tokens
        self.num_rollouts += len(frame.header.finishes)
        is_behind_gap = number > expected and not self._damaged
        if not is_behind_gap and self._journal is not None:
            self._journal.append(data)
        self._damaged, self._resent, self.next = False, False, number + 1
        if is_behind_gap:
            self._held = frame, data
            raise _gap(expected, number)
        return frame

    def _hear(self, data: bytes) -> None:
        message = to_reader(data)
        self._heard_ns = now_ns()
        if isinstance(message, Refused):
            if self._heard_ns - self._made_ns < _REFUSED_NS:  # the previous reader might be about to leave
                sleep(0.05)
                self._subscribe()
                return
            raise ProtocolError("this engine's stream has a reader already; it can have one at a time")
        if isinstance(message, Beat):
            self.state = message.state
            return
        if message.engine_id != (self._engine_id or message.engine_id):
            raise EngineDiedError(
                f"another engine answers at {self._endpoint}: engine {self._engine_id}, whose frames were read, was "
                f"replaced by engine {message.engine_id}. Attach again"
            )
        self._engine_id = message.engine_id
        self._subscribed = self._resent = True
        if self.next is None:
            self.next = message.next
        if message.next > self.next:
            expected, self.next = self.next, message.next
            raise _gap(expected, message.next)

    def _subscribe(self) -> None:
        self._asked_ns, self._subscribed = now_ns(), False
        self._tell(Subscribe(self._name, self.next, self._engine_id))

    def _acknowledge(self) -> None:
        """Send the acknowledgement and the report of unconsumed output if either has changed, or the last one is
        old."""
        held = self._held_by_trainer()
        if self._acknowledges_late or (self.next or 0) != self._acknowledged or held != self._told:
            self._told, self._acknowledged, self._acknowledged_ns = held, self.next or 0, now_ns()
            self._tell(Ack(self._acknowledged, held))

    @property
    def _acknowledges_late(self) -> bool:
        return now_ns() - self._acknowledged_ns > _ACK_NS

    def _tell(self, message: Ack | Leave | Subscribe) -> None:
        with suppress(zmq.Again):  # the peer is absent or does not read; important messages are sent again
            self.socket.send(encode(message), zmq.NOBLOCK)

    def _next_message(self, deadline_ns: int) -> bytes | None:
        """Return the next part of a message, or None if none arrives in time. Before a long wait, acknowledge all
        frames that have arrived."""
        if not self._parts and not self._take_message():
            due_ns = self._acknowledged_ns + _ACK_PACE_NS
            if not (now_ns() < due_ns < deadline_ns and _arrives(self.socket, due_ns)):
                self._acknowledge()
                if not _arrives(self.socket, deadline_ns):
                    return None
            self._take_message()
        return self._parts.popleft() if self._parts else None

    def _take_message(self) -> bool:
        """Read a message that has arrived, if one has, with all its parts: a connection that ends between two parts
        would leave ZeroMQ's socket useless. Returns True if there are parts to process."""
        with suppress(zmq.Again):
            self._parts.extend(self.socket.recv_multipart(zmq.NOBLOCK))
        return bool(self._parts)


def _arrives(socket: zmq.Socket, time_ns: int) -> bool:
    """Wait for a message until this time. Returns True if one arrives."""
    return bool(socket.poll(max(0, (time_ns - now_ns()) // 1_000_000)))


def _gap(expected: int, number: int) -> StreamGapError:
    return StreamGapError(f"frames {expected} to {number - 1} of the engine are lost")
