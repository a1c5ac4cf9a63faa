"""The client's end of an engine's control socket. It numbers requests and passes each answer to its caller."""

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
"""The engine's answer, or an InflightError."""


class Connection:
    """Messages to one engine and its answers.

    One thread owns the socket and calls `pump` and `close`. Any thread can call `send`, which queues the message and
    wakes the owner; the owner's next `pump` sends it.
    """

    def __init__(
        self,
        endpoint: str,
        unasked: Callable[[FromEngine | InflightError], None],
        *,
        linger_ms: int = 0,
        keys: ClientKeys | None = None,
    ):
        """unasked: called by `pump` with each message without a ticket, and with errors that belong to no request.
        linger_ms: time for which ZeroMQ tries to deliver sent messages after `close`. keys: required for a TCP
        endpoint; without them KeysError is raised."""
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
        self._socket.sndhwm = 0  # unbounded: a send never waits for a hung engine
        self._socket.maxmsgsize = 2 * MAX_MESSAGE_BYTES
        prepare_client(self._socket, endpoint, keys)
        self._socket.connect(endpoint)
        self._woken = os.eventfd(0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    # ---- any thread ---------------------------------------------------------------------------------------------

    def ticket(self) -> int:
        """Return a new number for a message that needs an answer."""
        return next(self._tickets)

    def send(self, message: ToEngine) -> Answer:
        """Queue a message and return the future of its answer. A message without a ticket is not answered. Raises
        InflightError if the connection is closed, and InvalidRequestError if the message is too large."""
        data, answer = encode(message), Future()
        answer.set_running_or_notify_cancel()  # so that a cancelled asyncio task cannot cancel it
        with self._lock:
            if self._closed:
                raise InflightError("this connection to the engine was closed, by close()")
            if message.ticket:
                self._asked[message.ticket] = answer
            self._outbox.append(data)
        self.wake()
        return answer

    def wake(self) -> None:
        """Interrupt a waiting `pump`."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    # ---- the thread that owns the socket ------------------------------------------------------------------------

    def pump(self, timeout_ms: int | None = None) -> bool:
        """Send queued messages, then wait for one message or for `wake`, and pass the message on. Returns whether a
        message arrived. timeout_ms: None waits without a bound. Raises the errors of `unasked`."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._woken in ready:
            os.eventfd_read(self._woken)
        self.flush()
        if self._socket not in ready:
            return False
        try:
            answer = decode_from_engine(self._socket.recv())
        except ProtocolError as error:  # it cannot be matched with a request
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
        """Send queued messages without waiting. They stay queued if no peer accepts them, for example because it
        refused our keys: a blocking send would never return."""
        with suppress(zmq.Again):
            while self._outbox:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
                self._outbox.popleft()

    def fail_all(self, error: InflightError) -> None:
        """Raise an error in place of every pending answer."""
        with self._lock:
            asked, self._asked = self._asked, {}
        for answer in asked.values():
            _settle(answer, error)

    def close(self) -> None:
        """Close the socket. Pending answers raise InflightError. Safe to call twice."""
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
