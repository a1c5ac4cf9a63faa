"""The transport of one machine: the trainer writes to the slots of an engine itself."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from inflight.core.arguments import named
from inflight.core.errors import ChecksumError, InflightError
from inflight.core.layout import WeightLayout
from inflight.core.messages import CudaIpcDescriptor
from inflight.weights.checksum import checksum
from inflight.weights.cuda_ipc import CudaSlot
from inflight.weights.link import EngineLink, Published
from inflight.weights.pace import Pace
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.tensors import slot_views
from inflight.weights.transports.base import Sender, StagedVersion, Target, Transport


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class Slots(Transport):
    """The trainer writes to the engine's slots: shared memory, or device memory by CUDA IPC. On one machine."""

    checksum: bool = False
    """Have the engine compare a checksum of the slot before it draws with it. If it differs, an engine with a single
    slot waits for the next version."""
    timeout_s: float = 60.0
    """How long one of several engines may take to lend a slot; one that takes longer is let go. For one engine alone
    the publisher's `slot_timeout_s` counts."""

    piece_ms: float = 0.0
    """On a GPU that trainer and engine share: copy a model in pieces of so many milliseconds, between which passes of
    the engine may go on. A publish takes longer then, and an optimizer step waits for it. 0: in one piece."""

    writes_to_slots: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.piece_ms < math.inf:
            raise ValueError(f"piece_ms is a number of milliseconds, or 0 for one piece, got {self.piece_ms}")

    def sender(self) -> "SlotSender":
        return SlotSender(self)

    @classmethod
    def receiver(cls, layout: WeightLayout, device: torch.device) -> None:
        return None

    def for_one_engine(self, slot_timeout_s: float) -> "Slots":
        return replace(self, timeout_s=slot_timeout_s)

    def pace(self) -> Pace | None:
        return Pace(self.piece_ms) if self.piece_ms else None

    def target(self, engine: EngineLink, refuse: Callable[[Exception], None]) -> "DirectTarget":
        return DirectTarget(self, engine, refuse)


class DirectTarget(Target):
    """The slots of one engine, which the publisher writes to without a staging buffer."""

    def __init__(self, settings: Slots, engine: EngineLink, refuse: Callable[[Exception], None]):
        self._settings, self._engine, self._refuse = settings, engine, refuse
        self.sent_bytes = engine.layout.total_bytes
        self._buffers = map_slots(engine)
        self.views = [slot_views(buffer, engine.layout) for buffer in self._buffers]

    @property
    def engines(self) -> list[EngineLink]:
        return [self._engine]

    def add(self, attach: Callable[[], EngineLink], transport: Transport) -> EngineLink:
        raise InflightError(
            "this publisher writes straight to the slots of its engine; to add engines later, make it with a list "
            "of at least two, or with another transport than Slots"
        )

    def acquire(self) -> int:
        while True:
            try:
                return self._engine.acquire(self._settings.timeout_s, "slot_timeout_s of the publisher")
            except ChecksumError as error:
                self._refuse(error)

    def listen(self) -> None:
        """Hear that a slot is free, or that the engine took no version."""
        try:
            self._engine.listen()
        except ChecksumError as error:
            self._refuse(error)

    def announce(self, slot: int, record: Published) -> None:
        self.sent_version = record.version
        self._engine.announce(slot, record, checksum(self._buffers[slot]) if self._settings.checksum else None)

    def release(self, slot: int) -> None:
        self._engine.give_back(slot)

    def check(self) -> None:
        self._engine.check()

    def close(self) -> None:
        self._engine.detach()
        self.views.clear()
        self._buffers.clear()


class SlotSender(Sender):
    """Copies staged versions to the slots of one engine."""

    refused_later = True

    def __init__(self, settings: Slots):
        super().__init__(timeout_s=settings.timeout_s)
        self._checksum, self._pace = settings.checksum, settings.pace()
        self._buffers: list[torch.Tensor] = []

    def add(self, engine: EngineLink) -> None:
        self._buffers = map_slots(engine)
        super().add(engine)

    def deliver(self, slots: Mapping[EngineLink, int], staged: StagedVersion, base: StagedVersion | None) -> None:
        for engine, slot in slots.items():
            buffer = self._buffers[slot]
            if self._pace is not None:
                self._pace.copy([buffer], [staged.data])
            else:
                buffer.copy_(staged.data)
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()
            engine.announce(slot, staged.record, staged.checksum if self._checksum else None)
            self.sent_bytes += len(buffer)


def map_slots(engine: EngineLink) -> list[torch.Tensor]:
    """Map an engine's slots into this process's memory, u8[total_bytes] each. Raises ProtocolError."""
    return [
        (CudaSlot if isinstance(slot, CudaIpcDescriptor) else SharedMemorySlot).attach(slot)  # pyright: ignore
        for slot in engine.attached.slots
    ]
