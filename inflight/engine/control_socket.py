"""The engine's end of the control socket: what comes is bounded, and so is what a client may leave unread."""

import logging
import os
from collections.abc import Callable

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, TooManyClientsError
from inflight.core.messages import MAX_MESSAGE_BYTES, Done, Failed, FromEngine, encode, shorten

logger = logging.getLogger("inflight.engine")

_MAX_WIRE_BYTES = 2 * MAX_MESSAGE_BYTES
"""ZeroMQ receives nothing of a larger message and disconnects its sender. Up to here the sender is told why its message
is refused."""
_MAX_UNREAD = 16
"""Messages of one client that wait here to be read; more wait in the client."""
_MAX_UNSENT = 10_000
"""Answers that a client may leave unread; more are dropped."""
_LOOK_EVERY_NS = 100_000_000
"""How often clients are looked for that are gone, which takes a message to each."""


class ControlSocket:
    """Messages of any number of clients, each with the address of its sender. Only `wake` may be called from another
    thread than the one that reads."""

    def __init__(self, endpoint: str, *, max_clients: int = 1024, context: zmq.Context | None = None):
        """context: another one than that of the process."""
        self._max_clients = max_clients
        self._clients: set[bytes] = set()
        """Addresses of clients, of which some may be gone."""
        self._looked_ns = 0
        self._socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        self._socket.sndhwm, self._socket.rcvhwm, self._socket.maxmsgsize = _MAX_UNSENT, _MAX_UNREAD, _MAX_WIRE_BYTES
        self._socket.router_mandatory = True  # a client that is gone is an error, so that a publisher's end is seen
        self._socket.linger = 2000
        self._socket.bind(endpoint)
        self._woken = os.eventfd(0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self.num_refused = 0

    def listen(self, bind: Callable[[zmq.Socket], str]) -> str:
        """Have `bind` bind the socket to another endpoint, which is returned."""
        return bind(self._socket)

    def wait(self, timeout_ms: int) -> None:
        """Return when a message is there or `wake` was called, at the latest after so long."""
        if self._woken in dict(self._poller.poll(timeout_ms)):
            os.eventfd_read(self._woken)

    def wake(self) -> None:
        """End a wait. From any thread."""
        os.eventfd_write(self._woken, 1)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The address of a sender and the parts of its message; None if no message is there."""
        if not self._socket.poll(0):
            return None
        sender, *parts = self._socket.recv_multipart()
        return sender, parts

    def admit(self, sender: bytes) -> None:
        """Count a sender among the clients. Raises TooManyClientsError if there are as many as there may be already."""
        if sender in self._clients:
            return
        if len(self._clients) >= self._max_clients and now_ns() - self._looked_ns > _LOOK_EVERY_NS:
            self._looked_ns = now_ns()
            self._clients = {client for client in self._clients if self.reaches(client)}
        if len(self._clients) >= self._max_clients:
            raise TooManyClientsError(
                f"the engine has {self._max_clients} clients, as many as it may have; close one of them, or launch "
                "with a larger max_clients"
            )
        self._clients.add(sender)

    def reaches(self, client: bytes) -> bool:
        """Whether a client is there. It is sent a message for that which it ignores."""
        return self.send(client, Done())

    def send(self, to: bytes, message: FromEngine) -> bool:
        """Returns False if the receiver is gone. One that reads nothing misses what is beyond some thousands of
        messages."""
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
        """Count a message that is refused, and return the answer that tells why."""
        self.num_refused += 1
        text = shorten(str(error))
        logger.warning("refused a message: %s", text)
        return Failed(ticket=ticket, kind=type(error).__name__, message=text)

    def close(self) -> None:
        self._socket.close()
        os.close(self._woken)
