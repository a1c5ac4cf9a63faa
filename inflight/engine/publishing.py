"""The engine's side of its publisher: who may publish, which slots it has, and what became of what it sent."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from inflight.core.clock import now_ns
from inflight.core.errors import LayoutMismatchError, ProtocolError, PublisherConflictError
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
)
from inflight.engine.backend import Backend
from inflight.engine.control_socket import ControlSocket
from inflight.weights.link import TOKEN_BYTES, is_free
from inflight.weights.slot_filler import Job, Result, SlotFiller
from inflight.weights.slot_table import SlotTable
from inflight.weights.transports import AcceptedTransports

logger = logging.getLogger("inflight.engine")

FromPublisher = Attach | SlotRequest | Prepare | Fill | SlotReady | Detach


class PublisherService:
    """Answers the publisher of an engine. At most one is attached at a time."""

    def __init__(self, engine: Backend, control: ControlSocket, lock: Path, transports: AcceptedTransports):
        """lock: the file that a publisher locks before it attaches."""
        self._engine = engine
        self._control = control
        self._seat = PublisherSeat(lock, control.reaches)
        self._slot_table = engine.slot_table
        """The slots of what the publisher publishes: weights or adapters."""
        self._loading: set[tuple[SlotTable, int]] = set()
        """Slots that are being filled or compared."""
        self._results: SimpleQueue[Result] = SimpleQueue()
        self._transports = transports
        self._filler: SlotFiller | None = None
        """Works for the publisher that is attached."""

    def handle(self, sender: bytes, message: FromPublisher) -> Attached | None:
        """Returns the answer, unless it comes later or not at all. Raises InflightError to refuse the message."""
        if isinstance(message, Attach):
            return self._attach(sender, message)
        if isinstance(message, Detach):
            if sender == self._seat.holder:
                self._slot_table.withdraw(message.written)
            self._seat.leave(sender)
            return None
        self._seat.check(sender)
        began_ns = now_ns()
        if isinstance(message, SlotReady):
            self._slot_table.written()
        match message:
            case Prepare():
                self._submit(sender, message)
            case Fill():
                self._slot_table.check_lent(message.slot, message.fingerprint)
                self._load(sender, message)
                self._slot_table.written()
            case SlotRequest():
                self._slot_table.request()
            case SlotReady(checksum=None):
                self._slot_table.ready(message)
            case SlotReady():
                self._slot_table.check(message)
                self._load(sender, message)
        if isinstance(message, SlotReady | SlotRequest):
            self._engine.stall_clock.handled(self._slot_table, began_ns)
        return None

    def take_results(self) -> None:
        """Tell the publisher what its slot filler has done since the last pass."""
        while not self._results.empty():
            self._take_result(self._results.get())

    def lend_slots(self) -> None:
        """Hand idle slots to the publisher. No forward pass reads them any more, unless it is the one under way."""
        slot_table, holder = self._slot_table, self._seat.holder
        if holder is not None:
            for slot in slot_table.lend(in_use=self._engine.slot_in_use(slot_table)):
                began_ns = now_ns()
                if not self._control.send(holder, SlotFree(slot=slot)):  # it does not know that it was lent one
                    slot_table.withdraw()
                self._engine.stall_clock.handled(slot_table, began_ns)

    def _attach(self, sender: bytes, message: Attach) -> Attached:
        """A publisher comes, and any earlier one is gone: it gets all slots that are not in use."""
        transport = self._transports.find(message.transport)
        slot_table = self._engine.adapter_slots if message.adapters else self._engine.slot_table
        if slot_table is None:
            raise LayoutMismatchError("the engine has no adapters; launch it with lora_rank")
        difference = slot_table.layout.difference(message.layout, ours="the engine", theirs="the publisher")
        if difference is not None:
            raise LayoutMismatchError(f"the publisher's model is not the engine's: {difference}")
        slots = [slot.descriptor() for slot in slot_table.slots] if transport.writes_to_slots else []
        before = self._seat.take(sender, message.lock_token)
        if before is not None:
            error = PublisherConflictError("another publisher took this one's place at the engine")
            self._control.send(before, Failed(kind=type(error).__name__, message=str(error)))
        self._slot_table = slot_table
        if self._filler is not None:
            self._filler.retire()
        self._filler = SlotFiller(slot_table, transport, self._loaded)
        free = slot_table.attach(in_use=self._engine.slot_in_use(slot_table))
        return Attached(
            ticket=message.ticket,
            layout=slot_table.layout,
            slots=slots,
            free=[slot for slot in free if (slot_table, slot) not in self._loading],
            version=self._engine.newest_version,
            aliases=self._engine.aliases if message.aliases and not message.adapters else [],
        )

    # ---- what the slot filler does ------------------------------------------------------------------------------

    def _load(self, sender: bytes, job: Fill | SlotReady) -> None:
        if (self._slot_table, job.slot) in self._loading:
            raise ProtocolError(f"slot {job.slot} is being filled")
        self._loading.add((self._slot_table, job.slot))
        self._submit(sender, job)

    def _submit(self, sender: bytes, job: Job) -> None:
        assert self._filler is not None  # as the sender is attached
        self._filler.submit(sender, job)

    def _loaded(self, result: Result) -> None:
        """Note what became of a job. Called from a slot filler's thread."""
        self._results.put(result)
        self._control.wake()

    def _take_result(self, result: Result) -> None:
        job, error = result.job, result.error
        if not isinstance(job, Prepare):
            self._loading.remove((result.slot_table, job.slot))
        is_from_holder = result.sender == self._seat.holder
        if isinstance(job, SlotReady) and is_from_holder and error is None:
            try:
                self._slot_table.ready(job)
                return
            except ProtocolError as overtaken:  # a newer version was announced while its checksum was compared
                error = overtaken
        answer = Done(ticket=job.ticket) if error is None else self._control.refusal(job.ticket, error)
        if is_from_holder:
            self._control.send(result.sender, answer)
            if isinstance(job, SlotReady):
                self._control.send(result.sender, SlotFree(slot=job.slot))
        elif self._seat.holder is not None and result.slot_table is self._slot_table and not isinstance(job, Prepare):
            self._control.send(self._seat.holder, SlotFree(slot=job.slot))  # the next publisher may have the slot


class PublisherSeat:
    """A publisher on the engine's machine holds a lock on a file, which the kernel frees when it dies, and proves that
    by what it wrote there. One on another machine has no such file, and is there as long as messages reach it."""

    def __init__(self, lock: Path, is_reachable: Callable[[bytes], bool]):
        self.lock = lock
        self.holder: bytes | None = None
        """Address of its messages."""
        self._is_reachable = is_reachable
        self._by_lock = False
        self._file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(self._file, bytes(TOKEN_BYTES), 0)  # so that publishers can write there when the disk is full
        except OSError as error:
            logger.warning("no room for the publisher's token in %s: %s", lock, error)

    def take(self, sender: bytes, token: str) -> bytes | None:
        """Let a publisher have the seat; returns the one that had it and lost its lock, if any. Raises
        PublisherConflictError if another one lives."""
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
        """Raises ProtocolError for messages of somebody else."""
        if sender != self.holder:
            raise ProtocolError("this publisher is not attached to the engine, or another took its place")
