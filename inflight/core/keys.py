"""CURVE key pairs by which engines and clients authenticate each other over TCP, as files in one directory.

`engine.key_secret` must be only on the engine's machine, and `client.key_secret` only on the client's. The other files
are public. An engine accepts the clients whose `*.key` files are in its directory. A client accepts only the engine of
its `engine.key`.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from inflight.core.errors import KeysError
from inflight.core.files import reason_of

_HEARTBEAT_MS = 5_000
_GONE_MS = 30_000
"""A TCP connection without a message or heartbeat for this long is closed."""
_RECONNECT_MS = 2_000
"""Longest delay between two attempts of a client to connect; delays grow up to it."""


@dataclass(frozen=True, slots=True)
class EngineKeys:
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]
    """Public keys of the accepted clients."""


@dataclass(frozen=True, slots=True)
class ClientKeys:
    public: bytes
    secret: bytes = field(repr=False)
    engine: bytes
    """The engine's public key."""


def make_keys(directory: Path) -> None:
    """Make a key pair for an engine and one for its clients in a new directory that only this user can read. Raises
    KeysError if the path exists: keys are never overwritten."""
    try:
        directory.mkdir(mode=0o700)
        for name in ("engine", "client"):
            for path in zmq.auth.create_certificates(directory, name):
                os.chmod(path, 0o600)
    except FileExistsError as error:
        raise KeysError(f"{directory} exists, and keys are never overwritten; name a new directory") from error
    except OSError as error:
        raise KeysError(f"keys cannot be written to {directory}: {reason_of(error)}") from error


def make_engine_keys(directory: Path, client: bytes) -> bytes:
    """Make a key pair for an engine in a new directory that only this user can read, and accept one client. client:
    its public key. Returns the engine's public key in the format of key files. Raises OSError."""
    directory.mkdir(mode=0o700)
    _, secret = zmq.auth.create_certificates(directory, "engine")
    (directory / "client.key").write_text(f'curve\n    public-key = "{client.decode()}"\n')
    for path in directory.iterdir():
        path.chmod(0o600)
    return zmq.auth.load_certificate(secret)[0]


def engine_keys(directory: str) -> EngineKeys:
    """Read an engine's keys. Raises KeysError, also if other users could read its secret or add clients."""
    _, secret = _read(Path(directory) / "engine.key_secret")
    clients = {_read(path)[0] for path in Path(directory).glob("*.key") if path.name != "engine.key"}
    if not clients:
        raise KeysError(f"{directory} has no key of a client (*.key), so no client could connect; copy one there")
    return EngineKeys(secret, frozenset(clients))


def client_keys(directory: str) -> ClientKeys:
    """Read a client's keys. Raises KeysError, also if other users could read its secret or replace the engine's key."""
    public, secret = _read(Path(directory) / "client.key_secret")
    return ClientKeys(public, secret, _read(Path(directory) / "engine.key")[0])


def is_tcp(endpoint: str) -> bool:
    """Return whether an endpoint is reached over a network and so needs keys."""
    return not endpoint.startswith(("ipc://", "inproc://"))


def prepare_client(socket: zmq.Socket, endpoint: str, keys: ClientKeys | None) -> None:
    """Set a client's keys on a socket before it connects. Raises KeysError if the endpoint needs keys and has none."""
    if not is_tcp(endpoint):
        return
    if keys is None:
        raise KeysError(f"{endpoint} needs keys; give their directory (`inflight keys` makes some)")
    prepare_tcp(socket, endpoint)
    socket.reconnect_ivl_max = _RECONNECT_MS
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys.engine, keys.public, keys.secret


def prepare_tcp(socket: zmq.Socket, endpoint: str) -> None:
    """Enable heartbeats, so that each end of a connection detects the loss of the other."""
    socket.ipv6 = "[" in endpoint
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _GONE_MS


def _read(path: Path) -> tuple[bytes, bytes]:
    """Return the public and the secret key of a file; "" for the secret key of a public file."""
    is_secret = path.suffix == ".key_secret"
    try:
        for place, forbidden in ((path.parent, 0o022), (path, 0o077 if is_secret else 0o022)):
            info = place.stat()
            if info.st_uid not in (0, os.geteuid()) or info.st_mode & forbidden:
                what = "read or change" if forbidden == 0o077 else "change"
                raise KeysError(
                    f"others than this user can {what} {place} (owner {info.st_uid}, mode {info.st_mode & 0o777:o}); "
                    f"keys are for their owner alone: chmod {'700' if place.is_dir() else '600'} {place}, and chown it"
                )
        public, secret = zmq.auth.load_certificate(path)
    except KeysError:
        raise
    except (OSError, ValueError) as error:
        raise KeysError(f"there is no key in {path} ({error}); `inflight keys DIRECTORY` makes keys") from error
    if len(public) != 40 or (is_secret and len(secret or b"") != 40):
        raise KeysError(f"{path} holds no whole key; `inflight keys DIRECTORY` makes keys")
    return public, secret or b""
