"""A publisher's conversation with one engine: who may publish, which slots it has, what became of a version."""

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import ProtocolError, PublisherConflictError, from_wire
from inflight.core.layout import WeightLayout
from inflight.core.messages import (
    Attach,
    Attached,
    Detach,
    Failed,
    Filled,
    FromEngine,
    Hello,
    Joined,
    SlotFree,
    SlotReady,
    SlotRequest,
    ToEngine,
    Welcome,
    decode_from_engine,
    encode,
)
from inflight.weights.sources import Source

_POLL_MS = 100
Answer = TypeVar("Answer", Welcome, Attached)


@dataclass(frozen=True, slots=True)
class Address:
    """An engine, as a publisher needs to know it."""

    endpoint: str
    check: Callable[[], None] = lambda: None
    """Raises if the engine is known to be dead; called while waiting for it."""
    on_publish: Callable[[int, int], None] = lambda version, called_ns: None
    """Told of every publish."""


@dataclass(frozen=True, slots=True)
class Published:
    """One call of `publish()`."""

    version: int
    called_ns: int


class EngineLink:
    """An engine that this process publishes to. Making one attaches to it.

    Raises LayoutMismatchError, naming what differs, PublisherConflictError if another publisher lives, TimeoutError, or
    what `address.check` raises. Not for use from several threads at once.
    """

    def __init__(self, address: Address, source: Source, *, map_slots: bool, timeout_s: float):
        """`timeout_s`: for the engine's answers to questions, of which a slot is none."""
        self.address = address
        self._timeout_s = timeout_s
        self._tickets = count(1)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.connect(address.endpoint)
        self._lock_file: int | None = None
        try:
            self.welcome = self._ask(Hello(), Welcome)
            self._lock_file = _lock(self.welcome.publisher_lock)
            offer = source.offer(self.welcome)
            attach = Attach(layout=offer.layout, map_slots=map_slots, adapters=offer.adapters, aliases=offer.aliases)
            self.attached = self._ask(attach, Attached)
        except BaseException:
            self.release()
            raise
        self.layout: WeightLayout = self.attached.layout
        """Of the engine's slots."""
        self.version = self.attached.version
        """The newest that the engine holds."""
        self.free = list(self.attached.free)
        """Slots that may be written to."""
        self.filled: int | None = None
        """The version that the engine was made to fill a slot with last, and so a base for what comes next."""

    def acquire(self, timeout_s: float = float("inf")) -> int:
        """A slot of ours, or the next that the engine frees, which it does at a forward boundary.

        Raises what the engine says that was wrong with a version before, or TimeoutError.
        """
        deadline = now_ns() + timeout_s * 1e9
        if not self.free and self.welcome.num_slots == 1:
            self.send(SlotRequest())
        while not self.free:
            self._take(self._receive(deadline, f"lent no slot within {timeout_s:g} s"))
        return self.free.pop()

    def announce(self, slot: int, record: Published, checksum: int | None = None) -> None:
        """Give the slot back with a whole version in it."""
        self.send(
            SlotReady(
                slot=slot,
                version=record.version,
                fingerprint=self.layout.fingerprint,
                published_ns=record.called_ns,
                checksum=checksum,
            )
        )
        self.version = record.version

    def ticket(self) -> int:
        return next(self._tickets)

    def wait_for(self, ticket: int, timeout_s: float) -> None:
        """Return when the engine has joined or filled. Raises what kept it from that, or TimeoutError."""
        deadline = now_ns() + timeout_s * 1e9
        while True:
            message = self._receive(deadline, f"did not answer within {timeout_s:g} s")
            if isinstance(message, (Joined, Filled)) and message.ticket == ticket:
                return
            if isinstance(message, Failed) and message.ticket not in (0, ticket):
                continue  # of an attempt that was given up
            self._take(message)

    def send(self, message: ToEngine) -> None:
        self._socket.send(encode(message))

    def detach(self) -> None:
        self.send(Detach())
        self.release()

    def release(self) -> None:
        """Let another publisher come."""
        self._socket.close()
        if self._lock_file is not None:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # also where a forked process holds the file open
            os.close(self._lock_file)
            self._lock_file = None

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, SlotFree):
            self.free.append(message.slot)
        elif isinstance(message, Failed):
            raise from_wire(message.kind, message.message)

    def _receive(self, deadline_ns: float, what: str) -> FromEngine:
        while not self._socket.poll(_POLL_MS):
            self.address.check()
            if now_ns() > deadline_ns:
                raise TimeoutError(f"the engine at {self.address.endpoint} {what}")
        return decode_from_engine(self._socket.recv())

    def _ask(self, message: ToEngine, expected: type[Answer]) -> Answer:
        self.send(message)
        answer = self._receive(now_ns() + self._timeout_s * 1e9, f"did not answer within {self._timeout_s:g} s")
        if isinstance(answer, Failed):
            raise from_wire(answer.kind, answer.message)
        if not isinstance(answer, expected):
            raise ProtocolError(f"expected {expected.__name__} from the engine, got {type(answer).__name__}")
        return answer


def _lock(path: str) -> int | None:
    """Take the publisher's lock, if the engine is on this machine; the kernel gives it back when this process ends,
    however it ends."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise PublisherConflictError(
            "another publisher is attached to this engine; close() it first (one engine follows one trainer)"
        ) from error
    return file
