"""The engine's door to the network: TCP beside the local sockets, for those alone whose keys are known."""

import contextlib
import logging
import resource
from collections.abc import Callable, Iterator

import zmq
from zmq.auth.thread import ThreadAuthenticator

from inflight.core.errors import ListenError
from inflight.core.keys import engine_keys, prepare_tcp
from inflight.core.messages import MAX_MESSAGE_BYTES
from inflight.engine.control_socket import ControlSocket
from inflight.stream.writer import StreamWriter

logger = logging.getLogger("inflight.engine")

_DOMAIN = "inflight"
_MAX_WIRE_BYTES = MAX_MESSAGE_BYTES + 1024
"""A message and what encryption adds to it. A client does not send a larger one, and a stranger, whose messages are
read before they are refused, cannot."""
_HANDSHAKE_MS = 5_000
"""Who has not proved by then who it is, is disconnected."""


class Door:
    """Lets clients in by their public keys, of which CURVE has made sure that they hold the secret ones. ZeroMQ asks a
    thread of its authenticator during the handshake, before anything that a client says reaches this process; where
    that thread does not answer, nobody comes in."""

    def __init__(self, secret: bytes, lets_in: Callable[[bytes], bool], context: zmq.Context | None = None):
        """secret: the key of this end. lets_in: whether the holder of a public key may connect, asked in a thread of
        its own. context: that of the sockets, which has one door; None: that of the process."""
        self._secret, self._lets_in = secret, lets_in
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def open(self, socket: zmq.Socket, endpoint: str) -> str:
        """Have a socket, which is bound locally, listen on TCP too. What is set here holds for what it binds from now
        on alone. Returns the endpoint with its port. Raises ListenError."""
        prepare_tcp(socket, endpoint)
        socket.curve_server, socket.curve_secretkey = True, self._secret
        socket.zap_domain, socket.handshake_ivl = _DOMAIN.encode(), _HANDSHAKE_MS
        socket.maxmsgsize = min(socket.maxmsgsize, _MAX_WIRE_BYTES)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ListenError(f"the engine cannot listen on {endpoint}: {error.strerror}") from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator: whether the holder of a public key may connect."""
        known = self._lets_in(key)
        if not known:
            logger.warning("refused a client whose key is not known: %s", key.decode())
        return known

    def close(self) -> None:
        self._authenticator.stop()


@contextlib.contextmanager
def opened(listen: str, keys: str, control: ControlSocket, stream: StreamWriter) -> Iterator[tuple[str, int]]:
    """Let clients in from the network, if that is asked for: yields the endpoint of the control socket and the port of
    the stream, which is the next one unless the system chooses both. Raises KeysError or ListenError."""
    if not listen:
        yield "", 0
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a stranger's connection takes one for a few seconds
    host, _, port = listen.rpartition(":")
    known = engine_keys(keys)
    with contextlib.closing(Door(known.secret, known.clients.__contains__)) as door:
        control_endpoint = control.listen(lambda socket: door.open(socket, listen))
        next_port = port if port == "*" else str(int(port) + 1)
        stream_endpoint = stream.listen(lambda socket: door.open(socket, f"{host}:{next_port}"))
        yield control_endpoint, int(stream_endpoint.rpartition(":")[2])
