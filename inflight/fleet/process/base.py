"""The process of an engine, as its trainer sees it, and the placements that start such processes."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from inflight.core.errors import EngineDiedError
from inflight.core.messages import Welcome
from inflight.core.options import EngineOptions
from inflight.engine.process.client import EngineClient

if TYPE_CHECKING:
    from inflight.weights.transports.base import Transport


class Process:
    """The process of an engine, on any machine. This class is for a process that another one launched: only answers
    show that it lives, and it cannot be ended from here. Placements override these methods."""

    client: EngineClient
    welcome: Welcome
    """Description of the engine, with endpoints as they are reached from here."""
    shares_memory = False
    """True if this process can write to the slots of the engine."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.client.endpoint

    def check(self) -> None:
        """Raise EngineDiedError, with the reason, if the process is known to have ended."""

    def kill(self) -> None:
        """End the process at once, if it was launched from here."""

    def remove(self) -> None:
        """Free the memory and remove the files of a process that was launched from here and has ended."""

    def close(self) -> None:
        """Close the connection, and end a process that was launched from here. Safe to call twice."""
        self.client.close()


def lives(process: Process) -> bool:
    """Return False if a process is known to have ended."""
    try:
        process.check()
    except EngineDiedError:
        return False
    return True


class Placement(ABC):
    """A place where the processes of an engine run."""

    first_frame: ClassVar[int | None] = 0
    """The first frame that is read; None: the oldest one that was not read."""

    @abstractmethod
    def start(self, options: EngineOptions, closing: threading.Event) -> Process:
        """Start a process and return it when it serves, or give up soon after the event is set. Raises InflightError or
        OSError."""

    def check(self, options: EngineOptions) -> None:  # noqa: B027
        """Raise ValueError for options that cannot be chosen in this place."""

    def connect(self) -> Callable[[], None]:
        """Prepare for starts. Returns a function that undoes this when all processes have ended."""
        return lambda: None

    @property
    def transport(self) -> "Transport | None":
        """The transport of publishers that name none. None: the memory of the engine."""
        return None
