"""Ways in which versions reach engines, one file each; `base.py` says what a transport consists of."""

from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter

from inflight.core.errors import InflightError, ProtocolError
from inflight.core.messages import shorten
from inflight.weights.transports.base import Receiver, Sender, StagedVersion, Transport
from inflight.weights.transports.broadcast import Broadcast
from inflight.weights.transports.files import Files
from inflight.weights.transports.slots import Slots

__all__ = ["AcceptedTransports", "Receiver", "Sender", "StagedVersion", "Transport"]


class AcceptedTransports:
    """The transports that an engine accepts: the built-in ones, and those that its launcher named. Code is imported
    when the engine starts, and a publisher only picks one of what is there."""

    def __init__(self, names: Sequence[str] = ()):
        """Import transports by name ("module:Class"). Raises InflightError for one that cannot be imported."""
        self._by_name: dict[str, type[Transport]] = {}
        for transport in (Slots, Broadcast, Files, *map(_load, names)):
            self._by_name[transport.name()] = transport

    def find(self, name: str) -> type[Transport]:
        """Raises ProtocolError, saying what to do, for a transport that is not accepted."""
        if name not in self._by_name:
            name = shorten(name, 200)
            raise ProtocolError(
                f"the engine does not accept the transport {name!r}; launch it with transports=({name!r},), "
                "where trainer and engine both can import it"
            )
        return self._by_name[name]


def _load(name: str) -> type[Transport]:
    module, _, attribute = name.partition(":")
    try:
        found = attrgetter(attribute)(import_module(module))
    except Exception as error:
        raise InflightError(
            f"the transport {name!r} cannot be imported: {error!r}; it is the class of a module that is installed or "
            "lies on PYTHONPATH (the engine imports nothing from the working directory)"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise InflightError(f"{name!r} is {found!r}, which is no subclass of inflight.weights.transports.Transport")
    return found
