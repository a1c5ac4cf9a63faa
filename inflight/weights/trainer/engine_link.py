"""A publisher's link to one engine: attaching, borrowing slots, and announcing versions in them."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from inflight.core import waiting
from inflight.core.connection import Answer, Connection
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import ChecksumError, EngineBusyError, EngineDiedError, EngineHungError, InflightError
from inflight.core.keys import ClientKeys, is_tcp
from inflight.core.layout import WeightLayout
from inflight.core.messages import (
    Attach,
    Attached,
    Call,
    CudaIpcDescriptor,
    Detach,
    Digests,
    FromEngine,
    Hello,
    Result,
    SlotFree,
    SlotReady,
    SlotRequest,
    SlotReturn,
    Status,
    ToEngine,
    Welcome,
    check_same_version,
    expect,
    read,
    to_raw,
)
from inflight.weights.comparison import ChecksumRequest, EngineWeights, checksum
from inflight.weights.cuda_ipc import CudaSlot
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.tensors import slot_views
from inflight.weights.trainer.publisher_lock import PublisherLock
from inflight.weights.trainer.sources import WeightSource

logger = logging.getLogger("inflight.weights")

_POLL_MS = 100
_LINGER_MS = 1000
_STATUS = msgpack_decoder(Status)
_DIGESTS = msgpack_decoder(list[Digests])
_CHECKSUMS_S = 600.0
"""Time limit for an engine to compute the checksums of its weights."""


class PublishedEngine:
    """An engine of one member or several, as its publishers use it."""

    changing: AbstractContextManager[Any] = nullcontext()
    """Lock that is held while members join and leave, and while a publisher attaches."""
    comes_back = False
    """True if another process takes the place of one that ends, until `check` raises."""

    def check(self) -> None:
        """Raise if no member is left."""

    def serving(self) -> "list[EngineAddress]":
        """Return the processes that serve. While all are being restarted, wait for one. Raises what `check` does."""
        raise NotImplementedError

    def follow(self, publisher: Any) -> None:
        """Call `publisher.add` with each process that joins, and `publisher.remove` when it has ended. Called with
        `changing` held."""

    def unfollow(self, kind: str, sent_version: int) -> None:
        """Note that a publisher of weights or adapters was closed, and the last version that it has sent (0: none)."""

    def published(self, version: int, called_ns: int, adapters: Collection[str] = ()) -> None:
        """Note a publish. adapters: the adapters that the version changes; empty: it changes everything."""

    def stepped(self, unpublished_steps: int, adapters: Collection[str] = ()) -> None:
        """Note the number of optimizer steps since the last publish. adapters: the adapters that they changed; empty:
        they changed everything."""

    def kill(self, endpoint: str) -> None:
        """End a process that did not answer and that another process replaces."""


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


class LoneEngine(PublishedEngine):
    """An engine of which only the endpoint of its process is known."""

    def __init__(self, endpoint: str, check: Callable[[], None] = lambda: None):
        """check: raises if the process is known to have ended."""
        self._endpoint, self.check = endpoint, check

    def serving(self) -> list[EngineAddress]:
        return [EngineAddress(self._endpoint, self)]


@dataclass(frozen=True)
class PublishedVersion:
    """One call of `publish()`."""

    version: int
    published_ns: int
    adapters: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The adapters that this version changes; empty: it changes everything that is published."""
    changed_at: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    """Maps adapters to the last version that changed them. Empty for weights."""


class EngineLink:
    """An engine that this process publishes to. The constructor attaches to it.

    Raises LayoutMismatchError, naming the difference, PublisherConflictError if another publisher lives,
    EngineHungError, VersionMismatchError, EngineDiedError, or the error of `PublishedEngine.check`. Only `check`,
    `messages.give_up` and `lock.unlock` are safe in other threads.
    """

    def __init__(self, address: EngineAddress, source: WeightSource, *, transport: str, timeout_s: float):
        """transport: its name at the engine. timeout_s: maximum silence of the engine during a wait. A slot can take
        longer."""
        self.address = address
        self._from_gpu = source.device.type == "cuda"
        self.lock = PublisherLock()
        self.messages = EngineMessages(address, self.check, self._take, timeout_s=timeout_s)
        try:
            self.welcome = expect(self.messages.ask(Hello(ticket=self.messages.ticket())), Welcome)
            check_same_version(self.welcome.version, self.welcome.protocol, self.welcome.package, who="the engine")
            token = ""
            if not is_tcp(address.endpoint):  # Files of an engine on another machine are not here.
                token = self.lock.take(self.welcome.publisher_lock, self.welcome.alive_lock)
            offer = source.offer(self.welcome)
            self.matches = source.compare(EngineWeights(self.welcome.layout, self.messages.checksums))
            """True if the engine already computed with these weights, False if not; None if unknown."""
            attach = Attach(
                ticket=self.messages.ticket(),
                layout=offer,
                transport=transport,
                adapters=source.adapters,
                aliases=source.aliases,
                lock_token=token,
            )
            self.attached = expect(self.messages.ask(attach), Attached)
        except BaseException:
            self.release()
            raise
        self.layout: WeightLayout = self.attached.layout
        self.version = self.attached.version
        """The newest version of the engine."""
        self.free = list(self.attached.free)
        """Slots that this process can write to."""
        self._written = set(self.free)
        """Slots that might hold unannounced data instead of weights that the engine used."""

    def map_slots(self) -> list[torch.Tensor]:
        """Map the engine's slots into this process's memory, u8[total_bytes] each. Raises ProtocolError."""
        return [
            CudaSlot.attach(slot)
            if isinstance(slot, CudaIpcDescriptor)
            else SharedMemorySlot.attach(slot, pinned=self._from_gpu)
            for slot in self.attached.slots
        ]

    def acquire(self, timeout_s: float, setting: str = "timeout_s") -> int:
        """Take a free slot, or wait for the next one. The engine frees slots at forward boundaries.

        timeout_s: bound for an engine that answers but keeps its slots (for requests pinned to versions, for example);
        `setting` is the option that sets it. Raises the error of an earlier version, EngineHungError or
        EngineBusyError.
        """
        if not self.free and self.welcome.num_slots == 1:
            self.messages.send(SlotRequest())
        self.messages.wait_until(lambda: bool(self.free), "lent no slot", timeout_s, setting)
        slot = self.free.pop()
        self._written.add(slot)
        return slot

    def lends(self) -> bool:
        """Return whether a slot is free, without waiting. Raises as `acquire` does."""
        self.listen()
        return bool(self.free)

    def give_back(self, slot: int) -> None:
        """Return an acquired slot without an announcement. It can be acquired again. An engine with one slot continues
        with it, if this process could not write to it."""
        if self.welcome.num_slots == 1 and not self.attached.slots:
            self.messages.send(SlotReturn(slot=slot))
        else:
            self.free.append(slot)

    def listen(self) -> None:
        """Process messages that have arrived. Raises as `acquire` does."""
        while self.messages.pump(0):
            pass
        self.check()

    def announce(self, slot: int, published: PublishedVersion, checksum: int | None = None) -> None:
        """Return the slot with a whole version in it."""
        self.messages.send(
            SlotReady(
                slot=slot,
                version=published.version,
                fingerprint=self.layout.fingerprint,
                published_ns=published.published_ns,
                checksum=checksum,
                changed_at=dict(published.changed_at),
            )
        )
        self._written.discard(slot)  # From now on the engine tracks its content.
        self.version = published.version

    def check(self) -> None:
        """Raise EngineDiedError if the engine, or this process of it, has ended."""
        self.address.engine.check()
        self.address.check_process()
        if self.lock.engine_has_ended():
            raise EngineDiedError(f"the engine at {self.address.endpoint} has ended")

    def detach(self) -> None:
        """Return all slots and close the connection."""
        try:
            while self._take_one():
                pass
            # Where the trainer writes to no slot, the engine tracks which slots were written.
            self.messages.send(Detach(written=sorted(self._written) if self.attached.slots else []))
        finally:
            self.release()

    def release(self) -> None:
        """Close the connection and let another publisher attach."""
        self.messages.close()
        self.lock.close()

    def _take_one(self) -> bool:
        """Process a message, or skip an error. Return whether one had arrived."""
        try:
            return self.messages.pump(0)
        except InflightError as error:
            logger.info("a publisher that detaches leaves this to its successor: %s", error)
            return True

    def _take(self, message: FromEngine | InflightError) -> None:
        if isinstance(message, InflightError):
            raise message
        if isinstance(message, SlotFree):
            self.free.append(message.slot)


class EngineMessages:
    """Requests to one engine, and bounded waits for it."""

    def __init__(
        self,
        address: EngineAddress,
        check: Callable[[], None],
        unasked: Callable[[FromEngine | InflightError], None],
        *,
        timeout_s: float,
    ):
        """check: raises if the engine has ended. unasked: receives messages that answer no request."""
        self._engine = f"the engine at {address.endpoint}"
        self._check, self._timeout_s = check, timeout_s
        self._given_up = False
        self._keeps_slots_because = ""
        self._connection = Connection(address.endpoint, unasked, linger_ms=_LINGER_MS, keys=address.keys)
        self.ticket, self.pump, self.close = self._connection.ticket, self._connection.pump, self._connection.close

    def send(self, message: ToEngine) -> Answer:
        """Send a message in this thread, at once."""
        answer = self._connection.send(message)
        self._connection.flush()
        return answer

    def ask(self, message: ToEngine) -> FromEngine:
        """Send a message and wait for its answer. Raises as `wait_for` does."""
        answer, action = self.send(message), f"did not answer {type(message).__name__}"
        self.wait_until(answer.done, action, self._timeout_s, "timeout_s of the publisher", asks_for_signs=False)
        return answer.result()

    def wait_for(self, answer: Answer, timeout_s: float) -> None:
        """Wait for the answer to a Prepare or Fill. Raises its error, EngineHungError or EngineBusyError."""
        self.wait_until(answer.done, "has not taken the version", timeout_s, "timeout_s of the transport")
        answer.result()

    def give_up(self) -> None:
        """End waits for the engine with an error. From any thread."""
        self._given_up = True
        self._connection.wake()

    def wait_until(
        self, is_over: Callable[[], bool], action: str, total_s: float, setting: str, *, asks_for_signs: bool = True
    ) -> None:
        """Process messages until the wait is over.

        action: completes "the engine … ", as in "sent no slot". asks_for_signs: request signs of life during the wait.
        Raises EngineHungError once the engine has sent nothing for `timeout_s` of this link, EngineBusyError after
        `total_s`, whatever the engine sends, and errors that answer no request. The option `setting` sets `total_s`.
        """
        silence_s = min(self._timeout_s, total_s)
        wait, silent_s, since_sign_s = waiting.Wait(), 0.0, 0.0
        while not is_over():
            if self.pump(_POLL_MS):
                silent_s = since_sign_s = 0.0
                continue
            if self._given_up:
                raise InflightError(f"the publisher was closed while {self._engine} was silent")
            self._check()
            passed_s = wait.tick()
            silent_s += passed_s
            since_sign_s += passed_s
            if silent_s > silence_s:
                raise EngineHungError(
                    f"{self._engine} {action}, and has said nothing at all for {silence_s:g} s: it lives but hangs (it "
                    "was stopped, or a forward pass does not end). If that is expected, set a longer timeout_s for the "
                    "publisher (and for its transport, if there is one)"
                )
            if wait.waited_s > total_s:
                raise EngineBusyError(
                    f"{self._engine} answers, but {action} within {total_s:g} s{self._keeps_slots_because}; "
                    f"{setting} sets this bound"
                )
            is_silent = silent_s > waiting.LOG_EVERY_S / 2
            known = f", and has been silent for {silent_s:.0f} s" if is_silent else self._keeps_slots_because
            wait.tell(f"{self._engine} {action}{known}")
            if asks_for_signs and since_sign_s >= min(5.0, silence_s / 4):  # Several requests fit into the bound.
                since_sign_s = 0.0
                self.send(self._call("status", {})).add_done_callback(self._take_status)

    def checksums(self, request: ChecksumRequest) -> dict[str, str]:
        """Wait for checksums of the engine's weights. Raises BackendError if it has none."""

        def ask() -> list[Digests]:
            return read(_DIGESTS, expect(self.ask(self._call("checksums", {"asked": request})), Result).value)

        return wait_for_checksums(ask, self._engine).tensors

    def _call(self, verb: str, arguments: dict[str, object]) -> Call:
        return Call(ticket=self.ticket(), verb=verb, arguments=to_raw(arguments, "nothing"))

    def _take_status(self, answer: Answer) -> None:
        """Note why the engine keeps its slots."""
        if answer.exception() is None and isinstance(result := answer.result(), Result):
            status = read(_STATUS, result.value)
            pinned = len(status.versions) > 1 and f"; requests are pinned to versions among {status.versions}"
            self._keeps_slots_because = pinned or ("; it is paused" if status.paused else "")


def wait_for_checksums(ask: Callable[[], list[Digests]], engine: str) -> Digests:
    """Ask for checksums of an engine's weights until it has computed them. Raises EngineBusyError after ten minutes."""
    wait = waiting.Wait()
    while not (found := ask()):
        wait.tick(f"{engine} computes checksums of its weights")
        if wait.waited_s > _CHECKSUMS_S:
            raise EngineBusyError(f"{engine} has no checksums of its weights after {_CHECKSUMS_S:.0f} s")
        time.sleep(_POLL_MS / 1e4)
    return found[0]


class DirectSlots:
    """Target of a publisher that writes to the slots of its only engine itself, without a staging buffer."""

    lost: Mapping[str, Exception] = {}
    is_sending = False

    def __init__(
        self, engine: EngineLink, refuse: Callable[[Exception], None], *, slot_timeout_s: float, with_checksum: bool
    ):
        """refuse: receives the error of a version that the engine did not take. with_checksum: the engine compares a
        checksum before a version goes live."""
        self.engines = [engine]
        self._engine, self._refuse = engine, refuse
        self._slot_timeout_s, self._with_checksum = slot_timeout_s, with_checksum
        self.sent_bytes, self.sent_version = engine.layout.total_bytes, 0
        self._buffers = engine.map_slots()
        self.views = [slot_views(buffer, engine.layout) for buffer in self._buffers]
        self.release, self.check = engine.give_back, engine.check

    def add(self, attach: Callable[[], EngineLink], transport: object) -> EngineLink:
        raise InflightError(
            "this publisher writes straight to the slots of its engine; to add engines later, make it with a list "
            "of at least two, or with another transport than Slots"
        )

    def let_go(self, endpoint: str) -> None:
        """Keep the engine: no other process takes its place."""

    def acquire(self) -> int:
        """Wait for a slot to write to. Raises as `EngineLink.acquire` does."""
        while True:
            try:
                return self._engine.acquire(self._slot_timeout_s, "slot_timeout_s of the publisher")
            except ChecksumError as error:
                self._refuse(error)

    def listen(self) -> None:
        """Process messages: a slot is free, or the engine refused a version."""
        try:
            self._engine.listen()
        except ChecksumError as error:
            self._refuse(error)

    def announce(self, slot: int, published: PublishedVersion) -> None:
        self.sent_version = published.version
        self._engine.announce(slot, published, checksum(self._buffers[slot]) if self._with_checksum else None)

    def close(self) -> None:
        """Unmap the engine's slots and detach. In this order, because a sleeping engine then frees their memory."""
        self.views.clear()
        self._buffers.clear()
        self._engine.detach()
