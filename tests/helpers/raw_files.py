"""The transport of docs/transports.md: versions as plain bytes in a directory that trainer and engines see."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from inflight.core.errors import WeightFileError
from inflight.weights.transports import Receiver, Sender, Transport


@dataclass(frozen=True, kw_only=True)
class RawFiles(Transport):
    directory: str
    timeout_s: float = 60.0

    def sender(self):
        return RawSender(self)

    @classmethod
    def receiver(cls, layout, device):
        return RawReceiver(layout, device)


class Origin(msgspec.Struct, frozen=True):
    path: str


class RawSender(Sender):
    def __init__(self, settings):
        super().__init__(timeout_s=settings.timeout_s)
        self.directory = Path(settings.directory)

    def deliver(self, slots, staged, base):
        path = self.directory / f"version-{staged.version}.raw"
        staged.data.cpu().numpy().tofile(path)
        self.sent_bytes += len(staged.data)
        for engine in slots:
            self.fill(engine, staged, Origin(str(path)))


class RawReceiver(Receiver):
    origin = Origin

    def receive(self, origin, version, slot):
        size = Path(origin.path).stat().st_size
        if size != len(slot):
            raise WeightFileError(f"{origin.path} has {size} bytes, expected {len(slot)}")
        slot.copy_(torch.from_file(origin.path, size=size, dtype=torch.uint8))
