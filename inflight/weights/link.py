"""A publisher's conversation with one engine: who may publish, which slots it has, what became of a version."""

import fcntl
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import zmq

from inflight.core.errors import (
    EngineDiedError,
    InflightError,
    ProtocolError,
    PublisherConflictError,
    from_wire,
)
from inflight.core.layout import WeightLayout
from inflight.core.messages import (
    Attach,
    Attached,
    Detach,
    Failed,
    Filled,
    FromEngine,
    GetStatus,
    Hello,
    Prepared,
    SlotFree,
    SlotReady,
    SlotRequest,
    Status,
    ToEngine,
    Welcome,
    check_same_version,
    decode_from_engine,
    encode,
)
from inflight.weights.sources import Source
from inflight.weights.waiting import Wait

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

    Raises LayoutMismatchError, naming what differs, PublisherConflictError if another publisher lives, EngineHungError,
    VersionMismatchError, EngineDiedError, or what `address.check` raises. Not for use from several threads at once, but
    for `check`, `give_up` and `unlock`.
    """

    def __init__(self, address: Address, source: Source, *, transport: str, timeout_s: float):
        """transport: its name, as the engine knows it. timeout_s: for how long the engine may be silent while something
        is waited for. A slot may take longer."""
        self.address = address
        self._timeout_s = timeout_s
        self._tickets = count(1)
        self._given_up = False
        self._known = ""
        """What the engine's last status says about its slots."""
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 1000
        self._socket.connect(address.endpoint)
        self._lock_file: int | None = None
        self._alive_file: int | None = None
        self._files = threading.Lock()
        """Held while these are looked at."""
        try:
            self.welcome = self._ask(Hello(), Welcome)
            check_same_version(self.welcome.version, self.welcome.protocol, self.welcome.package, who="the engine")
            self._alive_file = _open(self.welcome.alive_lock)
            self._lock_file, token = _lock(self.welcome.publisher_lock)
            offer = source.offer(self.welcome)
            attach = Attach(
                layout=offer.layout,
                transport=transport,
                adapters=offer.adapters,
                aliases=offer.aliases,
                lock_token=token,
            )
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
        self._untouched: set[int] = set()
        """Those of them that were lent since and not used."""

    def acquire(self, timeout_s: float, setting: str = "timeout_s") -> int:
        """A slot of ours, or the next that the engine frees, which it does at a forward boundary.

        timeout_s: how long an engine that answers may keep it (while requests are pinned to versions, for example);
        `setting` is how a user calls this bound. Raises what the engine says that was wrong with a version before,
        EngineHungError or EngineBusyError.
        """
        if not self.free and self.welcome.num_slots == 1:
            self.send(SlotRequest())
        wait = self._wait("lent no slot", timeout_s, setting)
        while not self.free:
            self._take(self._receive(wait))
        slot = self.free.pop()
        self._untouched.discard(slot)
        return slot

    def listen(self) -> None:
        """Take what the engine has said, without waiting. Raises as `acquire` does."""
        while self._socket.poll(0):
            self._take(decode_from_engine(self._socket.recv()))
        self.check()

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

    def put_back(self, slot: int) -> None:
        """Keep a slot for another version, as this one is not announced."""
        self.free.append(slot)

    def ticket(self) -> int:
        return next(self._tickets)

    def wait_for(self, ticket: int, timeout_s: float) -> None:
        """Return when the engine has prepared or filled. Raises what kept it from that, EngineHungError or
        EngineBusyError."""
        wait = self._wait("has not taken the version", timeout_s, "timeout_s of the transport")
        while True:
            message = self._receive(wait)
            if isinstance(message, (Prepared, Filled)) and message.ticket == ticket:
                return
            if isinstance(message, Failed) and message.ticket not in (0, ticket):
                continue  # of an attempt that was given up
            self._take(message)

    def send(self, message: ToEngine) -> None:
        self._socket.send(encode(message))

    def check(self) -> None:
        """Raise what `address.check` does, or EngineDiedError if the engine runs on this machine and does not live."""
        self.address.check()
        with self._files:
            dead = self._alive_file is not None and _is_free(self._alive_file)
        if dead:
            raise EngineDiedError(f"the engine at {self.address.endpoint} has ended")

    def give_up(self) -> None:
        """Whoever waits for the engine gets an error soon. From any thread."""
        self._given_up = True

    def unlock(self) -> None:
        """Let another publisher come. From any thread."""
        with self._files:
            if self._lock_file is not None:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # also where a forked process holds the file open

    def detach(self) -> None:
        """Give back what the engine has lent, and end the conversation."""
        try:
            while self._socket.poll(0):
                message = decode_from_engine(self._socket.recv())
                if isinstance(message, SlotFree):
                    self._untouched.add(message.slot)
            self.send(Detach(untouched=sorted(self._untouched)))
        finally:
            self.release()

    def release(self) -> None:
        """End the conversation, and let another publisher come."""
        self._socket.close()
        self.unlock()
        with self._files:
            for file in filter(None, (self._lock_file, self._alive_file)):
                os.close(file)
            self._lock_file = self._alive_file = None

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, SlotFree):
            self.free.append(message.slot)
            self._untouched.add(message.slot)
        elif isinstance(message, Status):
            pinned = len(message.versions) > 1 and f"; requests are pinned to versions among {message.versions}"
            self._known = pinned or ("; it is paused" if message.paused else "")
        elif isinstance(message, Failed):
            raise from_wire(message.kind, message.message)

    def _wait(self, what: str, timeout_s: float, setting: str) -> Wait:
        silence_s = min(self._timeout_s, timeout_s)
        return Wait(self.address.endpoint, what, silence_s=silence_s, total_s=timeout_s, setting=setting)

    def _receive(self, wait: Wait, *, signs: bool = True) -> FromEngine:
        """signs: whether to ask for signs of life meanwhile; `Status` is the answer to that."""
        while not self._socket.poll(_POLL_MS):
            if self._given_up:
                raise InflightError(f"the publisher was closed while the engine at {self.address.endpoint} was silent")
            self.check()
            wait.tick(self._known)
            if signs and wait.wants_sign():
                self.send(GetStatus())
        wait.heard()
        return decode_from_engine(self._socket.recv())

    def _ask(self, message: ToEngine, expected: type[Answer]) -> Answer:
        self.send(message)
        what = f"did not answer {type(message).__name__}"
        answer = self._receive(self._wait(what, self._timeout_s, "timeout_s of the publisher"), signs=False)
        if isinstance(answer, Failed):
            raise from_wire(answer.kind, answer.message)
        if not isinstance(answer, expected):
            raise ProtocolError(f"expected {expected.__name__} from the engine, got {type(answer).__name__}")
        return answer


def _open(path: str) -> int | None:
    """None if the engine is on another machine."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _is_free(file: int) -> bool:
    """Whether nobody holds the lock on a file, which then has ended: the kernel frees it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _lock(path: str) -> tuple[int | None, str]:
    """Take the publisher's lock, if the engine is on this machine, and write into it what proves to the engine that we
    have it. The kernel gives the lock back when this process ends, however it ends."""
    file = _open(path)
    if file is None:
        return None, ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise PublisherConflictError(
            "another publisher is attached to this engine; close() it first (one engine follows one trainer)"
        ) from error
    token = secrets.token_hex(16)
    os.pwrite(file, token.encode(), 0)
    return file, token
