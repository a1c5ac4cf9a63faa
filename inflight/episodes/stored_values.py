"""Results of calls as bytes. Decoded values have the types of the encoded ones."""

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

_TUPLE, _ARRAY, _ERROR = 1, 2, 3
"""Codes of the extension types of MessagePack."""
_PLAIN = (str, bytes, int, float, bool, type(None))
_NUMBERS_AND_TEXT = "biufcSU"
"""Kinds of the dtypes whose name describes them."""


def encode(value: Any) -> bytes:
    """Encode a JSON-like value that can also contain bytes, tuples, and arrays and numbers of NumPy. Raises TypeError
    for other values, subclasses of these types among them."""
    try:
        return msgspec.msgpack.encode(_plain(value))
    except (ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"the value cannot be stored: {error}") from error


def encode_error(error: Exception) -> bytes:
    """Encode an exception. Raises TypeError if its class and its arguments do not describe it."""
    kind = type(error)
    described = [kind.__module__, kind.__qualname__, list(error.args)]
    try:
        copied = _error(described)
        is_whole = type(copied) is kind and str(copied) == str(error) and vars(copied) == vars(error)
    except Exception as failure:  # Its class has no name, takes other arguments, or has fields that are arrays.
        raise TypeError(f"an exception {kind.__qualname__} is not described by its arguments") from failure
    if not is_whole:
        raise TypeError(f"an exception {kind.__qualname__} has fields besides its arguments")
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(_ERROR, encode(described)))


def decode(data: bytes) -> Any:
    """Return the value or the exception. Raises AttributeError or KeyError for an exception whose class was not
    imported."""
    return msgspec.msgpack.decode(data, ext_hook=_extension)


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_plain(item) for item in value]
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, encode(list(value)))
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _NUMBERS_AND_TEXT:
        return msgspec.msgpack.Ext(_ARRAY, encode([value.dtype.str, list(value.shape), value.tobytes()]))
    raise TypeError(f"a value of type {kind.__qualname__} cannot be stored")


def _extension(code: int, data: memoryview) -> Any:
    value = decode(bytes(data))
    if code == _TUPLE:
        return tuple(value)
    if code == _ERROR:
        return _error(value)
    dtype, shape, content = value
    array = np.frombuffer(content, dtype).reshape(shape).copy()
    return array if shape else array[()]


def _error(described: Sequence[Any]) -> Exception:
    """Return the exception of these names of a module and a class, and these arguments."""
    module, name, arguments = described
    return attrgetter(name)(sys.modules[module])(*arguments)
