"""The trainer's end of the token stream."""

import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import sleep

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import FrameError, ProtocolError, StreamGapError
from inflight.core.frames import MAGIC, MAX_FRAME_BYTES, TokenFrame
from inflight.core.keys import ClientKeys, prepare_client
from inflight.stream.journal import JournalWriter
from inflight.stream.wire import Ack, Beat, Held, Leave, Refused, Subscribe, encode, to_reader

_FRAMES_PER_ACK = 32
_ACK_NS = 500_000_000
_ACK_PACE_NS = 40_000_000
"""A reader that waits acknowledges after so long at the earliest: an engine with a pass per millisecond would lose a
part of it to every acknowledgement."""
_REFUSED_NS = 1_000_000_000
"""For so long a new reader asks again when the engine has another one."""
_MOST_LATE_NS = 50_000_000
"""For so long beyond its time `receive` reads on through messages that are no new frames."""
_SILENCE_NS = 2_000_000_000
"""After so long without a sign of life the reader subscribes again, in case that its connection was lost."""


class StreamReader:
    """Receives the frames of one engine in order, each once, whatever happens to the connection.

    A frame is acknowledged when the next one is asked for; until then the engine keeps it. Where there is a journal, a
    frame is in it before it is returned, and so before it is acknowledged.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        begin: int | None = None,
        held: Callable[[int, int], Held] = lambda *_: Held(),
        journal: JournalWriter | None = None,
        keys: ClientKeys | None = None,
    ):
        """begin: number of the first frame; None: the oldest one that no reader has acknowledged. held: says what the
        engine is told of what the trainer holds; it is given the numbers of tokens and rollouts received here. journal:
        stays its owner's to close. keys: for an endpoint of TCP."""
        self._journal = journal
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        """Is for whoever waits for several readers at once."""
        self.socket.rcvhwm = 0  # the writer bounds what is on its way
        self.socket.maxmsgsize = MAX_FRAME_BYTES
        self.socket.linger = 0
        prepare_client(self.socket, endpoint, keys)
        self.socket.connect(endpoint)
        self._held_by_trainer, self._told = held, Held()
        self._name = secrets.token_hex(8)
        self.next = begin
        """Number of the frame that comes next, if the beginning is known."""
        self._acknowledged = begin or 0
        self._acknowledged_ns = self._asked_ns = 0
        self._made_ns = self._heard_ns = now_ns()
        self._damaged = False
        """A frame could not be read; nobody knows its number."""
        self._subscribed = False
        """The writer has told with which frame it goes on."""
        self._resent = False
        """No frame has come since then."""
        self._parts: deque[bytes] = deque()
        """What has come in one message, and was not looked at yet."""
        self._held: tuple[TokenFrame, bytes] | None = None
        """The first frame behind a gap of which `receive` has told, and what it was read from."""
        self.state = ""
        """What the engine said last of what it is doing."""
        self.num_duplicates = 0
        """Frames that came again, and were left out."""
        self.num_bytes = 0
        """Bytes of all frames received."""
        self.num_tokens = 0
        """Tokens of those that did not come again."""
        self.num_rollouts = 0
        """Samples of which these told that they ended."""
        self._subscribe()

    is_urgent = False
    """Frames can wait until there is memory for them."""

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from the engine."""
        return (now_ns() - self._heard_ns) / 1e9

    def receive(self, timeout_ms: int) -> TokenFrame | None:
        """The next frame, or None if none came in time; the one before is acknowledged now.

        Raises FrameError for a frame that cannot be read and StreamGapError when frames were lost; after either,
        `receive` may be called again and goes on right behind the damage. Raises ProtocolError if the engine has
        another reader, and JournalError if the journal does not take the frame, which is not acknowledged then.
        """
        if self._held is not None:
            frame, data = self._held
            self._write_down(data)
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
        """Let the socket go; the engine keeps what was not acknowledged, and a frame that `receive` has not returned.
        Safe to call twice."""
        if not self.socket.closed:
            if self._held is not None:
                self.next, self._held = self._held[0].header.sequence, None
            self._acknowledge()
            self._tell(Leave())
            self.socket.close(linger=100)

    def _take(self, data: bytes) -> TokenFrame | None:
        """None for a frame that came before, or comes too early."""
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
        if number > expected and not (self._resent or self._damaged):  # what lies between is sent again
            self._subscribe()
            return None
        self.num_tokens += frame.header.num_tokens
        self.num_rollouts += len(frame.header.finishes)
        is_behind_gap = number > expected and not self._damaged
        if not is_behind_gap:
            self._write_down(data)
        self._damaged, self._resent, self.next = False, False, number + 1
        if is_behind_gap:
            self._held = frame, data
            raise _gap(expected, number)
        return frame

    def _write_down(self, data: bytes) -> None:
        if self._journal is not None:
            self._journal.append(data)

    def _hear(self, data: bytes) -> None:
        message = to_reader(data)
        self._heard_ns = now_ns()
        if isinstance(message, Refused):
            if self._heard_ns - self._made_ns < _REFUSED_NS:  # the one before may be about to leave
                sleep(0.05)
                self._subscribe()
                return
            raise ProtocolError("this engine's stream has a reader already; it can have one at a time")
        if isinstance(message, Beat):
            self.state = message.state
            return
        self._subscribed = self._resent = True
        if self.next is None:
            self.next = message.next
        if message.next > self.next:
            expected, self.next = self.next, message.next
            raise _gap(expected, message.next)

    def _subscribe(self) -> None:
        self._asked_ns, self._subscribed = now_ns(), False
        self._tell(Subscribe(self._name, self.next))

    def _acknowledge(self) -> None:
        """Say what has come and what the trainer holds, if that is news or has not been said for long."""
        held = self._held_by_trainer(self.num_tokens, self.num_rollouts)
        if self._acknowledges_late or (self.next or 0) != self._acknowledged or held != self._told:
            self._told, self._acknowledged, self._acknowledged_ns = held, self.next or 0, now_ns()
            self._tell(Ack(self._acknowledged, held))

    @property
    def _acknowledges_late(self) -> bool:
        return now_ns() - self._acknowledged_ns > _ACK_NS

    def _tell(self, message: Ack | Leave | Subscribe) -> None:
        with suppress(zmq.Again):  # nobody is there, or reads; what matters of it is said again
            self.socket.send(encode(message), zmq.NOBLOCK)

    def _next_message(self, deadline_ns: int) -> bytes | None:
        """What comes next, or None if nothing comes in time. Before it waits for long, all that has come is
        acknowledged."""
        if not self._parts and not self._take_message():
            due_ns = self._acknowledged_ns + _ACK_PACE_NS
            if not (now_ns() < due_ns < deadline_ns and self._comes_by(due_ns)):
                self._acknowledge()
                if not self._comes_by(deadline_ns):
                    return None
            self._take_message()
        return self._parts.popleft() if self._parts else None

    def _take_message(self) -> bool:
        """Take a message that has come, if one has, with all its parts: a connection that ends between two of them
        would leave ZeroMQ's socket useless."""
        with suppress(zmq.Again):
            self._parts.extend(self.socket.recv_multipart(zmq.NOBLOCK))
        return bool(self._parts)

    def _comes_by(self, time_ns: int) -> bool:
        """Wait for a message, at the latest until then."""
        return bool(self.socket.poll(max(0, (time_ns - now_ns()) // 1_000_000)))


def _gap(expected: int, number: int) -> StreamGapError:
    return StreamGapError(f"frames {expected} to {number - 1} of the engine are lost")
