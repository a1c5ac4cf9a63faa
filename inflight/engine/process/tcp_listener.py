"""The engine's TCP listener, in addition to the local sockets. Only clients with known keys can connect."""

import contextlib
import logging
import resource
from collections.abc import Callable, Iterator

import zmq
from zmq.auth.thread import ThreadAuthenticator

from inflight.core.errors import ListenError
from inflight.core.keys import engine_keys, prepare_tcp
from inflight.core.messages import MAX_MESSAGE_BYTES
from inflight.engine.process.control_socket import ControlSocket
from inflight.stream.writer import StreamWriter

logger = logging.getLogger("inflight.engine")

_DOMAIN = "inflight"
_MAX_WIRE_BYTES = MAX_MESSAGE_BYTES + 1024
"""Size of a message and its encryption overhead. Clients do not send larger messages. Unknown senders cannot, although
their messages are read before they are refused."""
_HANDSHAKE_MS = 5_000
"""A client that has not proved its identity within this time is disconnected."""


class TcpListener:
    """Admits clients by their public keys, after CURVE has verified that they hold the secret keys. ZeroMQ asks a
    thread of its authenticator during the handshake, before any client data reaches this process. If that thread does
    not answer, no client is admitted."""

    def __init__(self, secret: bytes, lets_in: Callable[[bytes], bool]):
        """secret: the key of this end. lets_in: returns True for admitted public keys, in a separate thread."""
        self._secret, self._lets_in = secret, lets_in
        self._authenticator = ThreadAuthenticator()
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def open(self, socket: zmq.Socket, endpoint: str) -> str:
        """Make a locally bound socket listen on TCP too. The settings made here apply only to later binds. Return the
        endpoint with its port. Raises ListenError."""
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
        """Return True if the holder of a public key is allowed to connect. The authenticator calls this."""
        known = self._lets_in(key)
        if not known:
            logger.warning("refused a client whose key is not known: %s", key.decode())
        return known

    def close(self) -> None:
        self._authenticator.stop()


@contextlib.contextmanager
def opened(listen: str, keys: str, control: ControlSocket, stream: StreamWriter) -> Iterator[tuple[str, int]]:
    """Admit clients from the network, if requested. Yields the endpoint of the control socket and the port of the
    stream. The latter is the next port unless the system chooses both. Raises KeysError or ListenError."""
    if not listen:
        yield "", 0
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A connection of an unknown client uses a file descriptor for a few seconds.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, _, port = listen.rpartition(":")
    known = engine_keys(keys)
    with contextlib.closing(TcpListener(known.secret, known.clients.__contains__)) as listener:
        control_endpoint = control.listen(lambda socket: listener.open(socket, listen))
        next_port = port if port == "*" else str(int(port) + 1)
        stream_endpoint = stream.listen(lambda socket: listener.open(socket, f"{host}:{next_port}"))
        yield control_endpoint, int(stream_endpoint.rpartition(":")[2])
