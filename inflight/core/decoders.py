"""Decoders for msgspec types, each built once and by one thread at a time.

msgspec 0.22 analyses a type at its first use. If two threads first use a type at the same moment, one of them can read
a half-made analysis, and the process crashes. Code that decodes into a type therefore takes its decoder from here.
"""

from functools import cache
from threading import Lock
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

Value = TypeVar("Value")
_BUILDS = Lock()


@overload
def msgpack_decoder(kind: type[Value]) -> msgspec.msgpack.Decoder[Value]: ...
@overload
def msgpack_decoder(kind: UnionType) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> Any:
    """Return the MessagePack decoder for a type. It is built at the first call and shared by all threads."""
    return _build(msgspec.msgpack.Decoder, kind)


@overload
def json_decoder(kind: type[Value]) -> msgspec.json.Decoder[Value]: ...
@overload
def json_decoder(kind: UnionType) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> Any:
    """Return the JSON decoder for a type, as `msgpack_decoder` does."""
    return _build(msgspec.json.Decoder, kind)


def convert(value: Any, kind: type[Value], *, str_keys: bool = False) -> Value:
    """Convert plain values to a type by msgspec.convert. Raises msgspec.ValidationError."""
    json_decoder(kind)  # analyses the type
    return msgspec.convert(value, kind, str_keys=str_keys)


@cache
def _build(decoder: Any, kind: Any) -> Any:
    with _BUILDS:
        return decoder(kind)
