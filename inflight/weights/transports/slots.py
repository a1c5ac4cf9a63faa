"""The transport within one machine: the trainer writes to the slots of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from inflight_kernels import copy_all

from inflight.core.arguments import named
from inflight.core.layout import WeightLayout
from inflight.weights.trainer.engine_link import EngineLink
from inflight.weights.transports.base import Sender, StagedVersion, Transport


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class Slots(Transport):
    """The trainer writes to the engine's slots: shared memory, or device memory by CUDA IPC. On one machine."""

    checksum: bool = False
    """Compare a checksum of the slot before it goes live. If it differs, an engine with one slot waits for the next
    version."""
    timeout_s: float = 60.0
    """Time for which other engines wait for one that answers but keeps its slots. It gets the newest version when it
    lends one. The publisher's `slot_timeout_s` is the bound for all engines."""

    writes_to_slots: ClassVar[bool] = True

    def sender(self) -> "SlotSender":
        return SlotSender(self)

    @classmethod
    def receiver(cls, layout: WeightLayout, device: torch.device) -> None:
        return None


class SlotSender(Sender):
    """Copies staged versions to the slots of one engine."""

    refused_later = True

    def __init__(self, settings: Slots):
        super().__init__(timeout_s=settings.timeout_s)
        self._checksum = settings.checksum
        self._buffers: list[torch.Tensor] = []

    def add(self, engine: EngineLink) -> None:
        self._buffers = engine.map_slots()
        super().add(engine)

    def close(self) -> None:
        self._buffers = []
        super().close()

    def deliver(self, slots: Mapping[EngineLink, int], staged: StagedVersion, base: StagedVersion | None) -> None:
        for engine, slot in slots.items():
            buffer = self._buffers[slot]
            copy_all([buffer], [staged.data])
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()
            engine.announce(slot, staged, staged.checksum if self._checksum else None)
            self.sent_bytes += len(buffer)
