"""Fills slots in the engine's process: a thread in which a transport's receiver takes versions and checksums are
compared while decoding continues. The engine's loop submits jobs and collects results; it never waits for the thread.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import ChecksumError, InflightError, ProtocolError
from inflight.core.messages import Fill, Prepare, SlotReady, read
from inflight.weights import delta
from inflight.weights.comparison import checksum
from inflight.weights.cuda_ipc import use_own_stream
from inflight.weights.engine.slot_table import SlotTable
from inflight.weights.transports.base import Receiver, Transport

SlotJob = Prepare | Fill | SlotReady


@dataclass(frozen=True, slots=True)
class SlotJobResult:
    """A job that is done. `error` is None if it succeeded."""

    slot_table: SlotTable
    sender: bytes
    job: SlotJob
    error: InflightError | None


class SlotFiller:
    """Does the jobs of one publisher, one after another, in a thread. The thread passes each result to `done`."""

    def __init__(self, slot_table: SlotTable, transport: type[Transport], done: Callable[[SlotJobResult], None]):
        """slot_table: only its slots are used."""
        self._slot_table, self._transport, self._done = slot_table, transport, done
        self._slots = slot_table.slots
        self._retired = False
        self._jobs: SimpleQueue[tuple[bytes, SlotJob] | None] = SimpleQueue()
        self._device = self._slots[0].buffer.device
        self._receiver: Receiver | None = None
        self._holds: dict[int, int] = {}
        """Maps a slot to the version that filled it here. This can be the base of a delta."""
        self._thread = threading.Thread(target=self._run, name="inflight-slot-filler", daemon=True)

    def submit(self, sender: bytes, job: SlotJob) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put((sender, job))

    def retire(self) -> None:
        """Stop after the publisher has detached. Waiting jobs end with an error. A job that waits for the publisher
        continues until it notices; jobs of another publisher do not wait for it."""
        self._retired = True
        self._jobs.put(None)

    def _run(self) -> None:
        use_own_stream(self._device)
        while (work := self._jobs.get()) is not None:
            sender, job = work
            error = None
            try:
                self._do(job)
            except InflightError as caught:
                error = caught
            except Exception as caught:  # The publisher raises it.
                error = InflightError(f"{type(job).__name__} failed: {caught!r}")
            self._done(SlotJobResult(self._slot_table, sender, job, error))
        if self._receiver is not None:
            self._receiver.close()

    def _do(self, job: SlotJob) -> None:
        if self._retired:
            raise ProtocolError("its publisher is gone")
        match job:
            case Prepare():
                receiver = self._get_receiver()
                if receiver.setup is None:
                    raise ProtocolError("the transport does not prepare")
                receiver.prepare(read(msgpack_decoder(receiver.setup), job.setup))
            case Fill():
                self._fill(job)
            case SlotReady():
                self._compare(job)

    def _get_receiver(self) -> Receiver:
        if self._receiver is None:
            self._receiver = self._transport.receiver(self._slot_table.layout, self._device)
        if self._receiver is None:
            raise ProtocolError(f"{self._transport.__name__} fills slots itself, and has the engine fill none")
        return self._receiver

    def _fill(self, job: Fill) -> None:
        slot, receiver = self._slots[job.slot].buffer, self._get_receiver()
        origin = read(msgpack_decoder(receiver.origin), job.origin)
        if job.base is None:
            self._holds.pop(job.slot, None)
            receiver.receive(origin, job.version, slot)
        else:
            base = next((held for held, version in self._holds.items() if version == job.base), None)
            if base is None:
                raise ProtocolError(f"no slot holds version {job.base}, the base of the difference")
            changes = receiver.receive_changes(origin, job.version, job.base)
            self._holds.pop(job.slot, None)
            if base != job.slot:
                slot.copy_(self._slots[base].buffer)
            delta.apply(slot, changes)
        self._compare(job)
        self._holds[job.slot] = job.version

    def _compare(self, job: Fill | SlotReady) -> None:
        found = checksum(self._slots[job.slot].buffer)
        if found != job.checksum:
            raise ChecksumError(
                f"slot {job.slot} does not hold version {job.version}: its checksum is {found:016x}, "
                f"expected {job.checksum:016x}"
            )
