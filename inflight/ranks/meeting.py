"""What the processes at one engine say to each other, and how they know of each other's end."""

import os
import platform
import select
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from inflight.core.options import EngineOptions

SOCKET, CARD = "hub", "hub.json"
"""Names of the files in the hub's directory."""
WAITS_FOR_ROLLOUTS = "waits for rollouts"
NOTHING_ASKED = "has not asked for a batch"


class Card(msgspec.Struct, frozen=True):
    """What a process needs to know to attach to an engine that another one launched."""

    options: EngineOptions
    directory: str
    pid: int
    host: str


class Joined(msgspec.Struct, frozen=True):
    next: int
    """The batch that this client gets first."""


class Offer(msgspec.Struct, frozen=True):
    """A batch, or the end of them."""

    number: int
    kind: Literal["share", "end", "error", "nothing yet"]
    nbytes: int = 0
    state: str = ""
    """What rank 0 does, while there is nothing yet."""
    error: tuple[str, str] = ("", "")
    """Class and message of what kept rank 0 from making it."""


class Take(msgspec.Struct, frozen=True):
    """Asks for a batch. The answer is an Offer, which may take a second."""

    client: str
    number: int


class Process:
    """Another process of this machine, child or not, whose end the kernel tells at once."""

    def __init__(self, pid: int):
        self.pid = pid
        try:
            self._file: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._file = None
        self._poll = select.poll()
        if self._file is not None:
            self._poll.register(self._file, select.POLLIN)

    @property
    def ended(self) -> bool:
        return self._file is None or bool(self._poll.poll(0))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def this_host() -> str:
    """What tells this machine, as long as it runs, from others."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
