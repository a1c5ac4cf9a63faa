"""Transports that send versions to engines. Each is one file; `base.py` has the base classes."""

from collections.abc import Sequence

from inflight.core.by_name import resolve_by_name
from inflight.core.errors import InflightError, ProtocolError
from inflight.core.messages import shorten
from inflight.weights.transports.base import Receiver, Sender, StagedVersion, Transport
from inflight.weights.transports.broadcast import Broadcast
from inflight.weights.transports.files import Files
from inflight.weights.transports.slots import Slots

__all__ = ["AcceptedTransports", "Receiver", "Sender", "StagedVersion", "Transport"]


class AcceptedTransports:
    """Transports that an engine accepts: the built-in ones and the ones that its launcher names.

    The engine imports them when it starts; a publisher can only choose among them.
    """

    def __init__(self, names: Sequence[str] = ()):
        """names: "module:Class" each. Raises InflightError for one that cannot be imported."""
        self._by_name = {kind.name(): kind for kind in (Slots, Broadcast, Files, *map(_load, names))}

    def find(self, name: str) -> type[Transport]:
        """Return the transport of this name. Raises ProtocolError if the engine does not accept it."""
        if name not in self._by_name:
            name = shorten(name, 200)
            raise ProtocolError(
                f"the engine does not accept the transport {name!r}; launch it with transports=({name!r},), "
                "where trainer and engine both can import it"
            )
        return self._by_name[name]


def _load(name: str) -> type[Transport]:
    try:
        found = resolve_by_name(name, {}, "transport")
    except ValueError as error:
        raise InflightError(
            f"{error}; it must be a class of a module that is installed or on PYTHONPATH (the engine imports nothing "
            "from the working directory)"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise InflightError(f"{name!r} is {found!r}, which is no subclass of inflight.weights.transports.Transport")
    return found
