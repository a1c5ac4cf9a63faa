"""Verbs: methods of the engine, or of its process, that a client is allowed to call by name.

`@verb()` makes a method a verb. Its annotations define the allowed arguments: a caller's arguments are decoded as these
types, and anything else is refused before the method is called. The return value is the answer.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import msgspec

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import ProtocolError
from inflight.core.messages import Call, Result, read, shorten, to_raw

Method = TypeVar("Method", bound=Callable[..., Any])

_BRINGS_WORK: dict[Callable[..., Any], bool] = {}
"""Maps each method that is a verb to True if it gives the generator work."""


def verb(*, brings_work: bool = False) -> Callable[[Method], Method]:
    """Make the decorated method callable by clients. msgspec can read the types of its parameters, and write its value.
    brings_work: the method gives the generator work, so its calls are handled at once. All other calls together get a
    tenth of the time of a forward pass."""

    def mark(method: Method) -> Method:
        _BRINGS_WORK[method] = brings_work
        return method

    return mark


class Verbs:
    """Calls the verbs of some objects."""

    def __init__(self, *owners: object):
        self._methods: dict[str, Callable[..., Any]] = {
            name: getattr(owner, name)
            for owner in owners
            for name, function in inspect.getmembers(type(owner), inspect.isfunction)
            if function in _BRINGS_WORK
        }
        self._decoders = {name: _arguments_decoder(method) for name, method in self._methods.items()}

    def brings_work(self, call: Call) -> bool:
        return _BRINGS_WORK[self._methods[call.verb].__func__]

    def answer(self, call: Call) -> Result:
        """Call a verb. Raises ProtocolError for an unknown verb or wrong arguments, and the method's exceptions."""
        if call.verb not in self._methods:
            names = ", ".join(sorted(self._methods))
            raise ProtocolError(f"the engine has no verb {shorten(call.verb, 100)!r}; it has {names}")
        arguments = read(self._decoders[call.verb], call.arguments)
        returned = self._methods[call.verb](**{name: getattr(arguments, name) for name in arguments.__struct_fields__})
        return Result(ticket=call.ticket, value=to_raw(returned, f"what {call.verb} returned"))


def _arguments_decoder(method: Callable[..., Any]) -> msgspec.msgpack.Decoder:
    """Return a decoder from a map of arguments to a struct whose fields are the method's parameters."""
    types, fields = get_type_hints(method), []
    for name, parameter in inspect.signature(method).parameters.items():
        if name not in types:
            raise TypeError(f"parameter {name!r} of the verb {method.__name__} needs an annotation")
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, types[name], *default))
    kind = msgspec.defstruct(method.__name__, fields, kw_only=True, forbid_unknown_fields=True)
    return msgpack_decoder(kind)
