"""A client's end of an engine's control socket: it numbers what is asked, and hands each answer to whoever asked."""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count

import zmq

from inflight.core.errors import InflightError, ProtocolError, from_wire
from inflight.core.keys import ClientKeys, prepare_client
from inflight.core.messages import MAX_MESSAGE_BYTES, Failed, FromEngine, ToEngine, decode_from_engine, encode

Answer = Future[FromEngine]
"""What the engine answers, or the InflightError that keeps it from answering."""


class Connection:
    """Messages to one engine and its answers.

    One thread owns the socket: the one that calls `pump` and `close`. Messages may be handed over by any thread; the
    owner sends them with its next `pump`, which a message that is handed over wakes.
    """

    def __init__(
        self,
        endpoint: str,
        unasked: Callable[[FromEngine | InflightError], None],
        *,
        linger_ms: int = 0,
        keys: ClientKeys | None = None,
    ):
        """unasked: called by `pump` with what answers no ticket: news, and errors that are nobody's alone. linger_ms:
        how long what was sent may stay behind after `close` until the engine takes it. keys: for an endpoint of TCP.
        Raises KeysError if such an endpoint is given none."""
        self.endpoint = endpoint
        self._unasked = unasked
        self._lock = threading.Lock()
        self._closed = False
        self._tickets = count(1)
        self._asked: dict[int, Answer] = {}
        """Maps a ticket to the future of its answer."""
        self._outbox: deque[bytes] = deque()
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = linger_ms
        self._socket.sndhwm = 0  # a send never waits, however much a hung engine leaves unread
        self._socket.maxmsgsize = 2 * MAX_MESSAGE_BYTES
        prepare_client(self._socket, endpoint, keys)
        self._socket.connect(endpoint)
        self._woken = os.eventfd(0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    # ---- any thread ---------------------------------------------------------------------------------------------

    def ticket(self) -> int:
        """A number for a message that is to be answered."""
        return next(self._tickets)

    def send(self, message: ToEngine) -> Answer:
        """Hand over a message. The answer never comes if the message has no ticket. Raises InflightError if the
        connection is closed, and InvalidRequestError if the message is too large."""
        data, answer = encode(message), Future()
        answer.set_running_or_notify_cancel()  # a task that is cancelled leaves it alone
        with self._lock:
            if self._closed:
                raise InflightError("the connection to the engine is closed")
            if message.ticket:
                self._asked[message.ticket] = answer
            self._outbox.append(data)
        self.wake()
        return answer

    def wake(self) -> None:
        """End the wait of a `pump`."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    # ---- the thread that owns the socket ------------------------------------------------------------------------

    def pump(self, timeout_ms: int | None = None) -> bool:
        """Send what was handed over, wait so long (None: without end) for one message or for `wake`, and pass on the
        message. Returns whether one came. Raises what `unasked` raises."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._woken in ready:
            os.eventfd_read(self._woken)
        self.flush()
        if self._socket not in ready:
            return False
        try:
            answer = decode_from_engine(self._socket.recv())
        except ProtocolError as error:  # nobody knows whose answer it was
            self._unasked(error)
            return True
        result = from_wire(answer.kind, answer.message) if isinstance(answer, Failed) else answer
        if answer.ticket:
            with self._lock:
                asked = self._asked.pop(answer.ticket, None)
            if asked is not None:
                _settle(asked, result)
        else:
            self._unasked(result)
        return True

    def flush(self) -> None:
        """Send what was handed over, at once. Where nobody takes it, as where our keys were refused, it stays: a send
        that waited would have no end."""
        with suppress(zmq.Again):
            while self._outbox:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
                self._outbox.popleft()

    def fail_all(self, error: InflightError) -> None:
        """Give everybody who waits for an answer an error instead."""
        with self._lock:
            asked, self._asked = self._asked, {}
        for answer in asked.values():
            _settle(answer, error)

    def close(self) -> None:
        """Let the socket go. Whoever still waits for an answer gets an InflightError. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._woken)
        self._socket.close()
        self.fail_all(InflightError("the connection to the engine was closed before it answered"))


def _settle(answer: Answer, result: FromEngine | InflightError) -> None:
    if isinstance(result, InflightError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
