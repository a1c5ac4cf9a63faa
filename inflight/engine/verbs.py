"""Verbs: methods of the engine, or of its process, that a client may call by name.

`@verb()` makes a method one. Its annotations say what may come over the wire: a caller's arguments are read as these
types, and refused before the method is called if they are anything else. What it returns is the answer.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import msgspec

from inflight.core.errors import ProtocolError
from inflight.core.messages import Call, Result, read, shorten, to_raw

Method = TypeVar("Method", bound=Callable[..., Any])

_BRINGS_WORK: dict[Callable[..., Any], bool] = {}
"""Every method that is a verb → whether it gives the generator something to do."""


def verb(*, brings_work: bool = False) -> Callable[[Method], Method]:
    """Let clients call the method that this decorates. It takes none but annotated parameters, of types that msgspec
    can read, and returns what msgspec can write.

    brings_work: it gives the generator something to do, so that it is called at once, however many calls wait. Other
    calls share a tenth of the time of a forward pass.
    """

    def mark(method: Method) -> Method:
        _BRINGS_WORK[method] = brings_work
        return method

    return mark


class Verbs:
    """The verbs of some objects."""

    def __init__(self, *owners: object):
        self._verbs = {name: _Verb(method) for owner in owners for name, method in _marked_methods(owner)}

    def brings_work(self, call: Call) -> bool:
        return self._find(call).brings_work

    def answer(self, call: Call) -> Result:
        """Call a verb. Raises ProtocolError for an unknown verb or arguments that do not fit it, and what the method
        itself raises."""
        found = self._find(call)
        returned = found.method(**found.read_arguments(call.arguments))
        return Result(ticket=call.ticket, value=to_raw(returned, f"what {call.verb} returned"))

    def _find(self, call: Call) -> "_Verb":
        if call.verb not in self._verbs:
            raise ProtocolError(
                f"the engine has no verb {shorten(call.verb, 100)!r}; it has {', '.join(sorted(self._verbs))}"
            )
        return self._verbs[call.verb]


class _Verb:
    """A method and how its arguments are read."""

    def __init__(self, method: Callable[..., Any]):
        self.method = method
        self.brings_work = _BRINGS_WORK[method.__func__]
        types = get_type_hints(method)
        fields = [
            (name, types[name]) if parameter.default is parameter.empty else (name, types[name], parameter.default)
            for name, parameter in inspect.signature(method).parameters.items()
        ]
        arguments = msgspec.defstruct(method.__name__, fields, kw_only=True, forbid_unknown_fields=True)
        self._decoder = msgspec.msgpack.Decoder(arguments)

    def read_arguments(self, arguments: msgspec.Raw) -> dict[str, Any]:
        read_as = read(self._decoder, arguments)
        return {name: getattr(read_as, name) for name in read_as.__struct_fields__}


def _marked_methods(owner: object) -> list[tuple[str, Callable[..., Any]]]:
    marked = inspect.getmembers(type(owner), lambda member: inspect.isfunction(member) and member in _BRINGS_WORK)
    return [(name, getattr(owner, name)) for name, _ in marked]
