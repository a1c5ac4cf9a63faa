"""The transport of a shared directory: safetensors files, and messages with their paths."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from inflight.core.arguments import named
from inflight.core.layout import WeightLayout
from inflight.weights.trainer.engine_link import EngineLink
from inflight.weights.transports.base import Receiver, Sender, StagedVersion, Transport
from inflight.weights.transports.version_file import read_changes, read_version, remove_partial, write_version


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class Files(Transport):
    """Safetensors files in a directory that trainer and engines share."""

    directory: str | Path
    delta: bool = False
    """Write changes since the last version for engines that have it."""
    keep: int = 2
    """Number of newest versions whose files are kept."""
    timeout_s: float = 600.0
    """Bound for reading a file. A slower engine is dropped."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def sender(self) -> "FileSender":
        return FileSender(self)

    @classmethod
    def receiver(cls, layout: WeightLayout, device: torch.device) -> "FileReceiver":
        return FileReceiver(layout, device)


class FileOrigin(msgspec.Struct, frozen=True):
    """Path of a safetensors file on both sides."""

    path: str


class FileSender(Sender):
    """Writes a file per version and sends its path to the engines."""

    def __init__(self, settings: Files):
        super().__init__(timeout_s=settings.timeout_s, delta=settings.delta)
        self._directory, self._keep = Path(settings.directory), settings.keep
        remove_partial(self._directory)
        self._written: dict[tuple[int, int | None], Path] = {}
        """Maps a version, and the base of its delta, to the file."""

    def deliver(self, slots: Mapping[EngineLink, int], staged: StagedVersion, base: StagedVersion | None) -> None:
        ahead = [engine for engine in slots if self.holds(engine, base)]
        changes = self.changes(ahead, staged, base) if ahead else None
        for engine in slots:
            since = base if changes is not None and engine in ahead else None
            key = staged.version, since.version if since else None
            if key not in self._written:  # Once for all engines that need the same file.
                delta = changes if since else None
                self._written[key] = write_version(
                    self._directory, engine.layout, staged.version, staged.data, delta=delta, base=key[1]
                )
                self.sent_bytes += self._written[key].stat().st_size
            self.fill(engine, staged, FileOrigin(str(self._written[key])), since)
        versions = sorted({version for version, _ in self._written} | {staged.version})
        for key in [key for key in self._written if key[0] not in versions[-self._keep :]]:
            self._written.pop(key).unlink(missing_ok=True)


class FileReceiver(Receiver):
    """Reads files by path."""

    origin = FileOrigin

    def receive(self, origin: FileOrigin, version: int, slot: torch.Tensor) -> None:
        read_version(origin.path, self.layout, version, slot)

    def receive_changes(self, origin: FileOrigin, version: int, base: int) -> torch.Tensor:
        return read_changes(origin.path, self.layout, version, base).to(self.device)
