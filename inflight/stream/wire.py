"""What the two ends of a stream say to each other besides frames: MessagePack, tagged by type."""

from typing import Any

import msgspec

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import ProtocolError
from inflight.core.frames import Count

MAX_WIRE_BYTES = 64 << 10
"""The largest of these messages; who sends the engine a larger one is disconnected."""


class Subscribe(msgspec.Struct, frozen=True, tag=True):
    """Reader → writer: send me every frame from `next` on. Said again after a silence, since the connection may be
    another one by now."""

    reader: str
    """What tells this reader from others, also when it connects again."""
    next: Count | None = None
    """None: begin with the oldest frame that is there."""


class Held(msgspec.Struct, frozen=True):
    """What the trainer has received and not consumed, that is, handed out."""

    num_tokens: Count = 0
    """Tokens received from this engine, whatever became of them."""
    num_rollouts: Count = 0
    """Rollouts of which it has said that they ended."""
    held_tokens: Count = 0
    """Tokens of unfinished requests, and of finished groups that nobody has taken."""
    held_rollouts: Count = 0
    """Rollouts of such groups."""
    oldest: Count | None = None
    """The oldest version of a token among them."""
    waits: bool = True
    """Somebody waits for rollouts."""
    follows: bool = False
    """Somebody takes tokens as they come, as a server does."""
    awaits_ends: bool = False
    """Somebody waits until certain groups have ended, and may then ask for more."""


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Reader → writer: all frames below `next` are safe here. It comes at least every second, as a sign of life."""

    next: Count
    held: Held = Held()


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Reader → writer: another reader may come."""


class Subscribed(msgspec.Struct, frozen=True, tag=True):
    """Writer → reader: the next frame that comes is this one."""

    next: Count


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Writer → reader: there is no frame to send, but the engine is there."""

    state: str = ""
    """What the engine is doing."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Writer → reader: another one is subscribed."""


ToWriter = Subscribe | Ack | Leave
ToReader = Subscribed | Beat | Refused

encode = msgspec.msgpack.Encoder().encode
_TO_WRITER = msgpack_decoder(ToWriter)
_TO_READER = msgpack_decoder(ToReader)


def to_writer(data: bytes) -> ToWriter:
    """Raises ProtocolError."""
    return _read(_TO_WRITER, data)


def to_reader(data: bytes) -> ToReader:
    """Raises ProtocolError."""
    return _read(_TO_READER, data)


def _read(decoder: msgspec.msgpack.Decoder, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message on the stream cannot be read: {error}") from error
