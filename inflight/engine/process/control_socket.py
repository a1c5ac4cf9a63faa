"""The engine's end of the control socket. It bounds incoming messages, the time to answer them, and unread answers."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, ProtocolError, TooManyClientsError
from inflight.core.messages import (
    MAX_MESSAGE_BYTES,
    Done,
    Failed,
    FromEngine,
    ToEngine,
    decode_to_engine,
    encode,
    shorten,
)

logger = logging.getLogger("inflight.engine")

_MAX_WIRE_BYTES = 2 * MAX_MESSAGE_BYTES
"""ZeroMQ drops a larger message and disconnects its sender. The sender of a smaller one that is still too large gets an
error."""
_MAX_UNREAD = 16
"""Messages of one client that wait here. More wait in the client."""
_MAX_UNSENT = 10_000
"""Answers that a client can leave unread. More are dropped."""
_CHECK_EVERY_NS = 100_000_000
"""Interval of checks for clients that have ended. A check sends a message to each client."""
_MESSAGES_PER_STEP = 16

Handlers = Mapping[type, Callable[[bytes, Any], FromEngine | None]]
"""Maps a type of message to a function of the sender's address and the message. It returns the answer, if there is one
now, or raises InflightError to refuse the message."""


class ControlSocket:
    """Messages of any number of clients, each with the address of its sender. Only `wake` is safe in other threads."""

    def __init__(self, endpoint: str, *, max_clients: int = 1024):
        self._max_clients = max_clients
        self._clients: set[bytes] = set()
        """Addresses of clients, some of which might have ended."""
        self._checked_ns = 0
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.sndhwm, self._socket.rcvhwm, self._socket.maxmsgsize = _MAX_UNSENT, _MAX_UNREAD, _MAX_WIRE_BYTES
        self._socket.router_mandatory = True  # Sending to a client that has ended fails, so that its end is noticed.
        self._socket.linger = 2000
        self._socket.bind(endpoint)
        self._woken = os.eventfd(0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self.num_refused = 0

    def listen(self, bind: Callable[[zmq.Socket], str]) -> str:
        """Call `bind` to bind the socket to another endpoint, and return that endpoint."""
        return bind(self._socket)

    def wait(self, timeout_ms: int) -> None:
        """Wait for a message or for `wake`, with a bound."""
        if self._woken in dict(self._poller.poll(timeout_ms)):
            os.eventfd_read(self._woken)

    def wake(self) -> None:
        """End a wait. Can be called from any thread."""
        os.eventfd_write(self._woken, 1)

    def serve(
        self, handlers: Handlers, brings_work: Callable[[ToEngine], bool], *, limit_ns: float, wait_ms: int = 0
    ) -> None:
        """Answer waiting messages; wait for the first one if `wait_ms` is not 0.

        brings_work: returns whether a message gives the generator work. All other messages together, refused ones
        included, get `limit_ns` nanoseconds beyond the first, so that a flood of them does not stop the generator.
        """
        if wait_ms:
            self.wait(wait_ms)
        for _ in range(_MESSAGES_PER_STEP):
            received = self.receive()
            if received is None:
                break
            began_ns = now_ns()
            if not self._serve_one(*received, handlers, brings_work):
                limit_ns -= now_ns() - began_ns
            if limit_ns < 0 and not wait_ms:
                break

    def _serve_one(
        self, sender: bytes, parts: list[bytes], handlers: Handlers, brings_work: Callable[[ToEngine], bool]
    ) -> bool:
        """Answer one message. Return whether it was accepted and gives the generator work."""
        ticket, brought_work = 0, False
        try:
            if len(parts) != 1:
                raise ProtocolError(f"a control message has one part, got {len(parts)}")
            message = decode_to_engine(parts[0])
            ticket = message.ticket
            self._admit(sender)
            answer = handlers[type(message)](sender, message)
            brought_work = brings_work(message)
        except InflightError as error:
            answer = self.refusal(ticket, error)
        if answer is not None:
            self.send(sender, answer)
        return brought_work

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return the address of a sender and the parts of its message; None if no message waits."""
        if not self._socket.poll(0):
            return None
        sender, *parts = self._socket.recv_multipart()
        return sender, parts

    def _admit(self, sender: bytes) -> None:
        """Add a sender to the clients. Raises TooManyClientsError at the maximum."""
        if sender in self._clients:
            return
        if len(self._clients) >= self._max_clients and now_ns() - self._checked_ns > _CHECK_EVERY_NS:
            self._checked_ns = now_ns()
            self._clients = {client for client in self._clients if self.reaches(client)}
        if len(self._clients) >= self._max_clients:
            raise TooManyClientsError(
                f"the engine has {self._max_clients} clients, its maximum; close one of them, or launch with a larger "
                "max_clients"
            )
        self._clients.add(sender)

    def reaches(self, client: bytes) -> bool:
        """Return whether a client exists. This sends it a message that it ignores."""
        return self.send(client, Done())

    def send(self, to: bytes, message: FromEngine) -> bool:
        """Send a message. Return False if the receiver has ended. Messages beyond its queue are dropped."""
        try:
            self._socket.send_multipart([to, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("a client leaves its answers unread; %s was dropped", type(message).__name__)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def refusal(self, ticket: int, error: InflightError) -> Failed:
        """Count a refused message and return the answer with the error."""
        self.num_refused += 1
        text = shorten(str(error))
        logger.warning("refused a message: %s", text)
        return Failed(ticket=ticket, kind=type(error).__name__, message=text)

    def close(self) -> None:
        self._socket.close()
        os.close(self._woken)
