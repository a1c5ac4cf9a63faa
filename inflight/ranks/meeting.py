"""Messages between the ranks that share one engine, and a process handle that notices the end of another rank."""

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
    """Address at which a process attaches to an engine that another one launched."""

    options: EngineOptions
    directory: str
    pid: int
    host: str
    endpoint: str = ""
    """Endpoint of rank 0 for ranks on other machines, if there are any."""
    key: bytes = b""
    """The public key of that endpoint."""


@dataclass(frozen=True)
class Outside:
    """Ranks on other machines, and the address at which they reach rank 0."""

    address: str
    """Address of rank 0's machine, as they reach it: a name or a number."""
    lets_in: Callable[[bytes], bool]
    """Returns True if one of them has this public key."""


class Joined(msgspec.Struct, frozen=True):
    next: int
    """Number of the first batch that this client gets."""


class Offer(msgspec.Struct, frozen=True):
    """A batch, or the end of them."""

    number: int
    kind: Literal["share", "end", "error", "nothing yet"]
    nbytes: int = 0
    state: str = ""
    """State of rank 0, while there is nothing yet."""
    error: tuple[str, str] = ("", "")
    """Class and message of the error that kept rank 0 from making it."""


class Take(msgspec.Struct, frozen=True):
    """Asks for a batch. The answer is an Offer, and can take a second."""

    client: str
    number: int


class Process:
    """Another process of this machine, child or not. The kernel reports its end at once."""

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
    """Return a name that identifies this machine for as long as it runs."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
