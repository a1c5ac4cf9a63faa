"""Messages between the two ends of a stream other than frames: MessagePack, tagged by type."""

import msgspec

from inflight.core.decoders import msgpack_decoder
from inflight.core.frames import Count
from inflight.core.messages import read

MAX_WIRE_BYTES = 64 << 10
"""Maximum size of these messages. A peer that sends the engine a larger one is disconnected."""


class Subscribe(msgspec.Struct, frozen=True, tag=True):
    """Reader → writer: requests every frame from `next` on. Sent again after a silence, since the connection might have
    been replaced."""

    reader: str
    """Name that identifies this reader, also when it connects again."""
    next: Count | None = None
    """Number of the first frame. None: the oldest frame that the writer has."""
    engine_id: str = ""
    """The engine whose frames it reads. "": any."""


class Held(msgspec.Struct, frozen=True):
    """Flow-control report: counts of the received output that no caller has taken."""

    held_tokens: Count = 0
    """Tokens of unfinished requests, and of finished groups that no caller has taken."""
    held_rollouts: Count = 0
    """Rollouts of such groups."""
    oldest: Count | None = None
    """The oldest version of a token among them."""
    waits: bool = True
    """A caller waits for rollouts."""
    follows: bool = False
    """A caller takes tokens as they arrive, as a server does."""
    awaits_ends: bool = False
    """A caller waits until certain groups have ended, and might then ask for more."""


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Reader → writer: all frames below `next` are safe here. It is sent at least every second, as a sign of life."""

    next: Count
    held: Held = Held()


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Reader → writer: another reader can subscribe."""


class Subscribed(msgspec.Struct, frozen=True, tag=True):
    """Writer → reader: number of the frame that is sent next, and the engine that sends it."""

    next: Count
    engine_id: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Writer → reader: sign of life of an engine that has no frame to send."""

    state: str = ""
    """State of the engine."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Writer → reader: another reader is subscribed."""


ToWriter = Subscribe | Ack | Leave
ToReader = Subscribed | Beat | Refused

encode = msgspec.msgpack.Encoder().encode
_TO_WRITER = msgpack_decoder(ToWriter)
_TO_READER = msgpack_decoder(ToReader)


def to_writer(data: bytes) -> ToWriter:
    """Decode a message to the writer. Raises ProtocolError."""
    return read(_TO_WRITER, data, "a message on the stream")


def to_reader(data: bytes) -> ToReader:
    """Decode a message to the reader. Raises ProtocolError."""
    return read(_TO_READER, data, "a message on the stream")
