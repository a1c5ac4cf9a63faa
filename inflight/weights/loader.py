"""Fills slots inside the engine's process: a thread that takes versions from a broadcast or a file while decoding goes
on, and compares checksums. The engine's loop gives it jobs and collects results; it never waits for it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from inflight.core.errors import BroadcastError, ChecksumError, InflightError, ProtocolError
from inflight.core.messages import BroadcastOrigin, Fill, Join, SlotReady
from inflight.weights import delta
from inflight.weights.checksum import checksum
from inflight.weights.files import read_version
from inflight.weights.groups import Group
from inflight.weights.slot_table import SlotTable
from inflight.weights.streams import use_own_stream

Job = Join | Fill | SlotReady


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a job."""

    slot_table: SlotTable
    sender: bytes
    job: Job
    error: InflightError | None


class Loader:
    """The jobs of one publisher, one after another. `done` is called from the thread with what became of each."""

    def __init__(self, slot_table: SlotTable, done: Callable[[Result], None]):
        """`slot_table` is only looked at for its slots."""
        self._receiver, self._done = slot_table, done
        self._layout, self._slots = slot_table.layout, slot_table.slots
        self._retired = False
        self._jobs: SimpleQueue[tuple[bytes, Job] | None] = SimpleQueue()
        self._device = self._slots[0].buffer.device
        self._group: Group | None = None
        self._holds: dict[int, int] = {}
        """Slot → the version that it was filled with here, as a base for deltas."""
        self._thread: threading.Thread | None = None

    def submit(self, sender: bytes, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="inflight-loader", daemon=True)
            self._thread.start()
        self._jobs.put((sender, job))

    def retire(self) -> None:
        """The publisher is gone. Jobs that have not begun end with an error; one that waits for the publisher goes on
        until it notices, which another publisher's jobs need not wait for."""
        self._retired = True
        if self._thread is not None:
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
            except Exception as caught:  # reported to the publisher
                error = InflightError(f"{type(job).__name__} failed: {caught!r}")
            self._done(Result(self._receiver, sender, job, error))
        if self._group is not None:
            self._group.close()

    def _do(self, job: Job) -> None:
        if self._retired:
            raise ProtocolError("its publisher is gone")
        match job:
            case Join():
                self._join(job)
            case Fill():
                self._fill(job)
            case SlotReady():
                self._compare(job.slot, job.version, job.checksum)

    def _join(self, job: Join) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._group = Group(job, self._device)

    def _fill(self, job: Fill) -> None:
        slot = self._slots[job.slot].buffer
        if job.base is None:
            self._holds.pop(job.slot, None)
            self._take(job, slot)
        else:
            base = next((held for held, version in self._holds.items() if version == job.base), None)
            if base is None:
                raise ProtocolError(f"no slot holds version {job.base}, the base of the difference")
            changes = self._take(job, slot)
            self._holds.pop(job.slot, None)
            if base != job.slot:
                slot.copy_(self._slots[base].buffer)
            delta.apply(slot, changes)
        self._compare(job.slot, job.version, job.checksum)
        self._holds[job.slot] = job.version

    def _take(self, job: Fill, slot: torch.Tensor) -> torch.Tensor:
        """What the origin brings: into the slot if it is whole, else as a delta of its own."""
        if isinstance(job.origin, BroadcastOrigin):
            group = self._group
            if group is None or group.name != job.origin.group:
                raise BroadcastError(f"the engine is not in group {job.origin.group}")
            taken = slot if job.base is None else torch.empty(job.origin.nbytes, dtype=torch.uint8, device=slot.device)
            try:
                group.broadcast(taken, job.origin.bucket_bytes)
            except BroadcastError:
                self._group = None
                group.close()
                raise
            return taken
        changes = read_version(job.origin.path, self._layout, job.version, slot, base=job.base)
        return slot if changes is None else changes.to(slot.device)

    def _compare(self, slot: int, version: int, expected: int | None) -> None:
        found = checksum(self._slots[slot].buffer)
        if found != expected:
            raise ChecksumError(
                f"slot {slot} does not hold version {version}: its checksum is {found:016x}, expected {expected:016x}"
            )
