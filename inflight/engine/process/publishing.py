"""The engine's side of its publisher: the publisher's lease, its slots, and the results of its requests."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, LayoutMismatchError, ProtocolError, PublisherConflictError
from inflight.core.messages import (
    Attach,
    Attached,
    Detach,
    Done,
    Failed,
    Fill,
    Prepare,
    SlotFree,
    SlotReady,
    SlotRequest,
    SlotReturn,
)
from inflight.engine.backend import Backend
from inflight.engine.process.control_socket import ControlSocket
from inflight.weights.engine.slot_filler import SlotFiller, SlotJob, SlotJobResult
from inflight.weights.trainer.publisher_lock import TOKEN_BYTES, is_free
from inflight.weights.transports import AcceptedTransports

logger = logging.getLogger("inflight.engine")

FromPublisher = Attach | SlotRequest | SlotReturn | Prepare | Fill | SlotReady | Detach


class PublisherService:
    """Answers the publisher of an engine. One at a time can attach."""

    def __init__(self, engine: Backend, control: ControlSocket, lock: Path, transports: AcceptedTransports):
        """lock: the file that a publisher locks before it attaches."""
        self._engine, self._control, self._transports = engine, control, transports
        self._lease = PublisherLease(lock, control.reaches)
        self._slot_table = engine.slot_table
        """The slots that the publisher fills: of weights or of adapters."""
        self._results: SimpleQueue[SlotJobResult] = SimpleQueue()
        self._filler: SlotFiller | None = None
        """Works for the attached publisher."""

    def handle(self, sender: bytes, message: FromPublisher) -> Attached | None:
        """Return the answer, unless it follows later or never. Raises InflightError to refuse the message."""
        if isinstance(message, Attach):
            return self._attach(sender, message)
        if isinstance(message, Detach):
            if sender == self._lease.holder:
                self._slot_table.withdraw(message.written)
            self._lease.leave(sender)
            return None
        self._lease.check(sender)
        began_ns = now_ns()
        if isinstance(message, SlotReady):
            self._slot_table.written()
        match message:
            case Prepare():
                self._submit(sender, message)
            case Fill():
                self._slot_table.check(message)
                self._submit(sender, message)
                self._slot_table.written()
            case SlotRequest():
                self._slot_table.request()
            case SlotReturn():
                if not self._slot_table.take_back(message.slot):
                    self._control.send(sender, SlotFree(slot=message.slot))
            case SlotReady(checksum=None):
                self._slot_table.ready(message)
            case SlotReady():
                self._slot_table.check(message)
                self._submit(sender, message)
        if isinstance(message, SlotReady | SlotRequest):
            self._engine.headers.stall_clock.handled(self._slot_table, began_ns)
        return None

    def take_results(self) -> None:
        """Send the publisher the results of its slot filler since the last pass."""
        while not self._results.empty():
            self._take_result(self._results.get())

    def lend_slots(self) -> None:
        """Send idle slots to the publisher, except the slot that a pass in progress reads."""
        slot_table, holder = self._slot_table, self._lease.holder
        if holder is not None:
            for slot in slot_table.lend(in_use=self._engine.slots_in_use.get(slot_table)):
                began_ns = now_ns()
                if not self._control.send(holder, SlotFree(slot=slot)):  # The publisher never receives this slot.
                    slot_table.withdraw()
                self._engine.headers.stall_clock.handled(slot_table, began_ns)

    def _attach(self, sender: bytes, message: Attach) -> Attached:
        """Attach a publisher in place of any earlier one and send it all slots that are not in use."""
        transport = self._transports.find(message.transport)
        slot_table = self._engine.adapter_slots if message.adapters else self._engine.slot_table
        if slot_table is None:
            raise LayoutMismatchError("the engine has no adapters; launch it with lora_rank")
        difference = slot_table.layout.difference(message.layout, ours="the engine", theirs="the publisher")
        if difference is not None:
            raise LayoutMismatchError(f"the publisher's model is not the engine's: {difference}")
        if (wrong := slot_table.layout.not_cast_from(message.layout)) is not None:
            raise LayoutMismatchError(f"the publisher's tensors need more than a cast: {wrong}; dequantise them")
        before = self._lease.take(sender, message.lock_token)
        try:
            slot_table.restore()
            slots = [slot.descriptor() for slot in slot_table.slots] if transport.writes_to_slots else []
        except InflightError:
            self._lease.leave(sender)
            raise
        if before is not None:
            error = PublisherConflictError("another publisher took this one's place at the engine")
            self._control.send(before, Failed(kind=type(error).__name__, message=str(error)))
        if slot_table is not self._slot_table and self._slot_table.is_attached:  # Its publisher was killed.
            self._slot_table.withdraw(written=range(len(self._slot_table.slots)))
        self._slot_table = slot_table
        if self._filler is not None:
            self._filler.retire()
        self._filler = SlotFiller(slot_table, transport, self._loaded)
        free = slot_table.attach(in_use=self._engine.slots_in_use.get(slot_table))
        return Attached(
            ticket=message.ticket,
            layout=slot_table.layout,
            slots=slots,
            free=[slot for slot in free if slot not in slot_table.loading],
            version=max(table.newest_version for table in self._engine.slot_tables),
            aliases=self._engine.aliases if message.aliases and not message.adapters else [],
        )

    def _submit(self, sender: bytes, job: SlotJob) -> None:
        assert self._filler is not None  # The sender is attached.
        if not isinstance(job, Prepare):
            if job.slot in self._slot_table.loading:
                raise ProtocolError(f"slot {job.slot} is being filled")
            self._slot_table.loading.add(job.slot)
        self._filler.submit(sender, job)

    def _loaded(self, result: SlotJobResult) -> None:
        """Queue the result of a job. A slot filler's thread calls this."""
        self._results.put(result)
        self._control.wake()

    def _take_result(self, result: SlotJobResult) -> None:
        job, error = result.job, result.error
        if not isinstance(job, Prepare):
            result.slot_table.loading.remove(job.slot)
        is_from_holder = result.sender == self._lease.holder
        # A publisher can detach right after it announced a version. A newer publisher numbers its versions without it.
        if isinstance(job, SlotReady) and (is_from_holder or self._lease.holder is None) and error is None:
            try:
                result.slot_table.ready(job)
                return
            except ProtocolError as overtaken:  # A newer version was announced while this checksum was compared.
                error = overtaken
        answer = Done(ticket=job.ticket) if error is None else self._control.refusal(job.ticket, error)
        if is_from_holder:
            self._control.send(result.sender, answer)
            if isinstance(job, SlotReady):
                self._control.send(result.sender, SlotFree(slot=job.slot))
        elif self._lease.holder is not None and result.slot_table is self._slot_table and not isinstance(job, Prepare):
            self._control.send(self._lease.holder, SlotFree(slot=job.slot))  # The next publisher gets the slot.


class PublisherLease:
    """The right to publish to this engine, held by one publisher at a time.

    A publisher on the engine's machine holds a lock on a file and proves this by a token in the file. The kernel frees
    the lock when the publisher dies. A publisher on another machine has no file and holds the lease while messages
    reach it.
    """

    def __init__(self, lock: Path, is_reachable: Callable[[bytes], bool]):
        self.lock = lock
        self.holder: bytes | None = None
        """The holder's address for messages."""
        self._is_reachable = is_reachable
        self._by_lock = False
        self._file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # This reserves the block, so that a full disk is not an obstacle.
            os.pwrite(self._file, bytes(TOKEN_BYTES), 0)
        except OSError as error:
            logger.warning("no room for the publisher's token in %s: %s", lock, error)

    def take(self, sender: bytes, token: str) -> bytes | None:
        """Give a publisher the lease. Return the previous holder if it lost it. Raises PublisherConflictError if
        another publisher lives."""
        locked = not is_free(self._file)
        by_lock = locked and token != "" and token == os.pread(self._file, TOKEN_BYTES, 0).decode(errors="replace")
        if locked and not by_lock:
            raise PublisherConflictError(
                "another publisher is attached to this engine (it holds the lock); close() it first"
            )
        others = self.holder not in (None, sender) and not (by_lock and self._by_lock)
        if others and self._is_reachable(self.holder or b""):
            raise PublisherConflictError("another publisher is attached to this engine; close() it first")
        before, self.holder, self._by_lock = self.holder, sender, by_lock
        return before if before != sender else None

    def leave(self, sender: bytes) -> None:
        if sender == self.holder:
            self.holder = None

    def check(self, sender: bytes) -> None:
        """Raise ProtocolError unless the sender holds the lease."""
        if sender != self.holder:
            raise ProtocolError("this publisher is not attached to the engine, or another took its place")
