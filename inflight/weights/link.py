"""A publisher's conversation with one engine: who may publish, which slots it has, what became of a version."""

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from inflight.core import waiting
from inflight.core.connection import Answer, Connection
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import (
    EngineBusyError,
    EngineDiedError,
    EngineHungError,
    InflightError,
    PublisherConflictError,
)
from inflight.core.keys import ClientKeys, is_tcp
from inflight.core.layout import WeightLayout
from inflight.core.messages import (
    Attach,
    Attached,
    Call,
    Detach,
    Digests,
    FromEngine,
    Hello,
    Result,
    SlotFree,
    SlotReady,
    SlotRequest,
    Status,
    ToEngine,
    Welcome,
    check_same_version,
    expect,
    read,
    to_raw,
)
from inflight.weights.comparison import Asked, EngineWeights
from inflight.weights.sources import Source

logger = logging.getLogger("inflight.weights")

_POLL_MS = 100
_LINGER_MS = 1000
TOKEN_BYTES = 32
"""Length of what a publisher writes into the file that it locks."""
_STATUS = msgpack_decoder(Status)
_DIGESTS = msgpack_decoder(list[Digests])
_CHECKSUMS_S = 600.0
"""Time limit for an engine to compute the checksums of its weights."""


class PublishedEngine(Protocol):
    """An engine of one member or several, as its publishers need to know it."""

    @property
    def changing(self) -> Any:
        """Lock that is held while members join and leave, and while a publisher attaches."""
        ...

    @property
    def comes_back(self) -> bool:
        """True if another process takes the place of one that ends, until `check` raises."""
        ...

    def check(self) -> None:
        """Raise if no member is left."""

    def serving(self) -> "list[EngineAddress]":
        """Return the processes that serve. While all are being restarted, wait for one. Raises what `check` does."""
        ...

    def follow(self, publisher: Any) -> None:
        """Call `publisher.add` with each process that joins, and `publisher.remove` when it has ended. Called with
        `changing` held."""

    def published(self, version: int, called_ns: int) -> None:
        """Note a call of `publish()`."""

    def stepped(self, unpublished_steps: int) -> None:
        """Note the number of optimizer steps since the last publish."""

    def kill(self, endpoint: str) -> None:
        """End a process that gets no more versions, since it did not answer. Called if it comes back."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A process of an engine."""

    endpoint: str
    """Its control socket."""
    engine: PublishedEngine
    keys: ClientKeys | None = None
    """The keys for an endpoint of TCP."""
    check_process: Callable[[], None] = lambda: None
    """Raises EngineDiedError if the process is known to have ended."""


class LoneEngine:
    """An engine of which only the endpoint of its process is known."""

    comes_back = False

    def __init__(self, endpoint: str, check: Callable[[], None] = lambda: None):
        """check: raises if the process is known to have ended."""
        self.changing: AbstractContextManager[Any] = nullcontext()
        self._endpoint, self._check = endpoint, check

    def check(self) -> None:
        self._check()

    def serving(self) -> list[EngineAddress]:
        return [EngineAddress(self._endpoint, self)]

    def follow(self, publisher: Any) -> None: ...
    def published(self, version: int, called_ns: int) -> None: ...
    def stepped(self, unpublished_steps: int) -> None: ...
    def kill(self, endpoint: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Published:
    """One call of `publish()`."""

    version: int
    published_ns: int


class EngineLink:
    """An engine that this process publishes to. Making one attaches to it.

    Raises LayoutMismatchError, naming what differs, PublisherConflictError if another publisher lives, EngineHungError,
    VersionMismatchError, EngineDiedError, or what `PublishedEngine.check` raises. Not for use from several threads at
    once, but for `check`, `give_up` and `unlock`.
    """

    def __init__(self, address: EngineAddress, source: Source, *, transport: str, timeout_s: float):
        """transport: its name, as the engine knows it. timeout_s: for how long the engine may be silent while something
        is waited for. A slot may take longer."""
        self.address = address
        self._timeout_s = timeout_s
        self._given_up = False
        self._keeps_slots_because = ""
        """What the engine's last status says about its slots."""
        self._connection = Connection(address.endpoint, self._take, linger_ms=_LINGER_MS, keys=address.keys)
        self._lock_file: int | None = None
        self._alive_file: int | None = None
        self._files = threading.Lock()
        """Held while one of the two files is used."""
        try:
            self.welcome = expect(self._ask(Hello(ticket=self.ticket())), Welcome)
            check_same_version(self.welcome.version, self.welcome.protocol, self.welcome.package, who="the engine")
            token = ""
            if not is_tcp(address.endpoint):  # else what it names lies on its own machine
                self._alive_file = _open(self.welcome.alive_lock)
                self._lock_file, token = _lock(self.welcome.publisher_lock)
            offer = source.offer(self.welcome)
            self.matches = source.compare(EngineWeights(self.welcome.layout, self._checksums))
            """True if the engine computed with these weights before, False if not; None if that is not known."""
            attach = Attach(ticket=self.ticket(), transport=transport, lock_token=token, **offer._asdict())
            self.attached = expect(self._ask(attach), Attached)
        except BaseException:
            self.release()
            raise
        self.layout: WeightLayout = self.attached.layout
        """The layout of the engine's slots."""
        self.version = self.attached.version
        """The newest version that the engine holds."""
        self.free = list(self.attached.free)
        """Slots that may be written to."""
        self._written = set(self.free)
        """Slots that may hold something else than what the engine computed with, and were not announced."""

    def acquire(self, timeout_s: float, setting: str = "timeout_s") -> int:
        """Take a free slot, or wait for the next that the engine frees, which it does at a forward boundary.

        timeout_s: how long an engine that answers may keep it (while requests are pinned to versions, for example);
        `setting` is how a user calls this bound. Raises what the engine says that was wrong with a version before,
        EngineHungError or EngineBusyError.
        """
        if not self.free and self.welcome.num_slots == 1:
            self.send(SlotRequest())
        self._wait_until(lambda: bool(self.free), "lent no slot", timeout_s, setting)
        slot = self.free.pop()
        self._written.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """What is in an acquired slot is not announced; the slot may be acquired again."""
        self.free.append(slot)

    def listen(self) -> None:
        """Take what the engine has said, without waiting. Raises as `acquire` does."""
        while self._connection.pump(0):
            pass
        self.check()

    def announce(self, slot: int, record: Published, checksum: int | None = None) -> None:
        """Give the slot back with a whole version in it."""
        self.send(SlotReady(slot=slot, fingerprint=self.layout.fingerprint, checksum=checksum, **asdict(record)))
        self._written.discard(slot)  # which the engine knows better now
        self.version = record.version

    def ticket(self) -> int:
        """A number for a message that is to be answered."""
        return self._connection.ticket()

    def send(self, message: ToEngine) -> Answer:
        """Send a message in this thread, at once."""
        answer = self._connection.send(message)
        self._connection.flush()
        return answer

    def wait_for(self, answer: Answer, timeout_s: float) -> None:
        """Wait until the engine has prepared or filled. Raises what kept it, EngineHungError or EngineBusyError."""
        self._wait_until(answer.done, "has not taken the version", timeout_s, "timeout_s of the transport")
        answer.result()

    def check(self) -> None:
        """Raise EngineDiedError if no member of the engine is left, or this process is known to have ended."""
        self.address.engine.check()
        self.address.check_process()
        with self._files:
            dead = self._alive_file is not None and is_free(self._alive_file)
        if dead:
            raise EngineDiedError(f"the engine at {self.address.endpoint} has ended")

    def give_up(self) -> None:
        """Whoever waits for the engine gets an error soon. From any thread."""
        self._given_up = True
        self._connection.wake()

    def unlock(self) -> None:
        """Let another publisher come. From any thread."""
        with self._files:
            if self._lock_file is not None:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)  # also where a forked process holds the file open

    def detach(self) -> None:
        """Give back what the engine has lent, and end the conversation."""
        try:
            self._hear_all()
            # Where it writes to no slot, the engine knows what was written.
            self.send(Detach(written=sorted(self._written) if self.attached.slots else []))
        finally:
            self.release()

    def release(self) -> None:
        """End the conversation, and let another publisher come."""
        self._connection.close()
        self.unlock()
        with self._files:
            for file in filter(None, (self._lock_file, self._alive_file)):
                os.close(file)
            self._lock_file = self._alive_file = None

    def _hear_all(self) -> None:
        """Take what slots the engine has lent, whatever else it says."""
        while True:
            try:
                if not self._connection.pump(0):
                    return
            except InflightError as error:
                logger.info("a publisher that detaches leaves this to its successor: %s", error)

    def _take(self, message: FromEngine | InflightError) -> None:
        """What the engine says without being asked."""
        if isinstance(message, InflightError):
            raise message
        if isinstance(message, SlotFree):
            self.free.append(message.slot)

    def _wait_until(
        self, is_over: Callable[[], bool], what: str, total_s: float, setting: str, *, asks_for_signs: bool = True
    ) -> None:
        """Take what the engine says until the wait is over.

        what: completes "the engine … ", as in "lent no slot". asks_for_signs: ask for signs of life meanwhile.
        Raises EngineHungError once the engine has said nothing for `timeout_s` of this link, EngineBusyError after
        `total_s`, which the option `setting` sets, whatever it says, and errors that answer nothing.
        """
        engine, silence_s = f"the engine at {self.address.endpoint}", min(self._timeout_s, total_s)
        wait, silent_s, since_sign_s = waiting.Wait(), 0.0, 0.0
        while not is_over():
            if self._connection.pump(_POLL_MS):
                silent_s = since_sign_s = 0.0
                continue
            if self._given_up:
                raise InflightError(f"the publisher was closed while {engine} was silent")
            self.check()
            passed_s = wait.tick()
            silent_s += passed_s
            since_sign_s += passed_s
            if silent_s > silence_s:
                raise EngineHungError(
                    f"{engine} {what}, and has said nothing at all for {silence_s:g} s: it lives but hangs (it was "
                    "stopped, or a forward pass does not end). Where that is to be expected, set a longer timeout_s "
                    "for the publisher (and for its transport, where there is one)"
                )
            if wait.waited_s > total_s:
                raise EngineBusyError(
                    f"{engine} answers, but {what} within {total_s:g} s{self._keeps_slots_because}; "
                    f"{setting} sets this bound"
                )
            is_silent = silent_s > waiting.LOG_EVERY_S / 2
            known = f", and has been silent for {silent_s:.0f} s" if is_silent else self._keeps_slots_because
            wait.tell(f"{engine} {what}{known}")
            if asks_for_signs and since_sign_s >= min(5.0, silence_s / 4):  # several fit into the bound
                since_sign_s = 0.0
                self._ask_for_sign()

    def _ask_for_sign(self) -> None:
        """Ask the engine how it is, which says both that it answers and why it keeps its slots."""
        status = Call(ticket=self._connection.ticket(), verb="status", arguments=to_raw({}, "nothing"))
        self.send(status).add_done_callback(self._take_status)

    def _take_status(self, answer: Answer) -> None:
        if answer.exception() is None and isinstance(result := answer.result(), Result):
            status = read(_STATUS, result.value)
            pinned = len(status.versions) > 1 and f"; requests are pinned to versions among {status.versions}"
            self._keeps_slots_because = pinned or ("; it is paused" if status.paused else "")

    def _checksums(self, asked: Asked) -> dict[str, str]:
        """Ask for checksums of the engine's weights until it has read them. Raises BackendError if it has none."""
        wait, found = waiting.Wait(), list[Digests]()
        while not found:
            verb = Call(ticket=self.ticket(), verb="checksums", arguments=to_raw({"asked": asked}, "nothing"))
            found = read(_DIGESTS, expect(self._ask(verb), Result).value)
            wait.tick()
            wait.tell(f"the engine at {self.address.endpoint} computes checksums of its weights")
            if wait.waited_s > _CHECKSUMS_S:
                raise EngineBusyError(f"the engine has no checksums of its weights after {_CHECKSUMS_S:.0f} s")
            if not found:
                time.sleep(_POLL_MS / 1e4)
        return found[0].tensors

    def _ask(self, message: ToEngine) -> FromEngine:
        answer, what = self.send(message), f"did not answer {type(message).__name__}"
        self._wait_until(answer.done, what, self._timeout_s, "timeout_s of the publisher", asks_for_signs=False)
        return answer.result()


def _open(path: str) -> int | None:
    """None if the engine is on another machine."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def is_free(file: int) -> bool:
    """Returns whether nobody holds the lock on a file; the kernel frees it when its holder ends."""
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
    token = secrets.token_hex(TOKEN_BYTES // 2)
    try:
        os.pwrite(file, token.encode(), 0)
    except OSError as error:
        os.close(file)
        raise InflightError(f"the publisher's token cannot be written into {path}: {error}") from error
    return file, token
