"""What the processes at one engine say to each other, and how they know of each other's end."""

import os
import platform
import select
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from inflight.core.options import EngineOptions

SOCKET = "server"
"""Name of the file in the server's directory."""
WAITS_FOR_ROLLOUTS = "waits for rollouts"
NOTHING_ASKED = "has not asked for a batch"


class RankAddress(msgspec.Struct, frozen=True):
    """What a process needs to know to attach to an engine that another one launched."""

    options: EngineOptions
    directory: str
    pid: int
    host: str
    endpoint: str = ""
    """Where rank 0 listens for ranks on other machines, if there are any."""
    key: bytes = b""
    """The public key of that."""


@dataclass(frozen=True)
class Outside:
    """Ranks on other machines, as rank 0 knows them."""

    address: str
    """That of rank 0's machine, as they reach it: a name or a number."""
    lets_in: Callable[[bytes], bool]
    """Whether one of them holds the secret of a public key."""


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
