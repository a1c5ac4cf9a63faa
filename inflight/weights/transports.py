"""How versions reach engines: what a user chooses, and the parts that bring versions from the stage to engines."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from inflight.core.errors import BroadcastError, EngineDiedError, InflightError, WeightFileError
from inflight.core.messages import BroadcastOrigin, CudaIpcDescriptor, FileOrigin, Fill, Join, SlotDescriptor
from inflight.core.waiting import telling
from inflight.weights import delta
from inflight.weights.cuda_ipc import CudaSlot, uuid_of
from inflight.weights.files import write_version
from inflight.weights.groups import Group, make_store
from inflight.weights.link import EngineLink, Published
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.slot_table import Slot

_ATTEMPTS = 3
"""Per engine and version; the next version is another chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The trainer writes to the engine's slots: shared memory, or device memory by CUDA IPC. On one machine."""

    checksum: bool = False
    """Whether the engine compares a checksum of the slot before it draws with it. If it differs, an engine with a
    single slot waits for the next version."""
    timeout_s: float = 60.0
    """For a slot, where there are several engines; one that takes longer is let go. For one engine alone the
    publisher's `slot_timeout_s` counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """One collective broadcast to all engines: NCCL where each process has a GPU of its own, else gloo."""

    host: str = "127.0.0.1"
    """Address of the trainer, as engines see it. The trainer listens on it alone, and gloo's ranks on the addresses by
    which they reach it; NCCL's on the interfaces that NCCL_SOCKET_IFNAME names."""
    bucket_bytes: int = 64 << 20
    delta: bool = False
    """Send what changed since the last version to those that have it."""
    timeout_s: float = 60.0
    """For each step of a broadcast; an engine that takes longer is let go."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Safetensors files in a directory that trainer and engines see."""

    directory: str | Path
    delta: bool = False
    """Write what changed since the last version, for those that have it."""
    keep: int = 2
    """Files of the newest versions that are left there."""
    timeout_s: float = 600.0
    """For reading a file; an engine that takes longer is let go."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")


Transport = Slots | Broadcast | Files


@dataclass(frozen=True, slots=True)
class Staged:
    """A whole version that waits to be sent."""

    slot: torch.Tensor
    """u8[total_bytes]"""
    record: Published
    checksum: int


class Feeder(ABC):
    """Brings versions from the stage to some engines. One that fails does not keep the others from theirs."""

    _hears_later = False
    """Whether an engine refuses a version after it was announced, so that it is heard with the attempts of the next."""

    def __init__(self, timeout_s: float, *, delta: bool = False):
        self.links: list[EngineLink] = []
        self._timeout_s, self._delta = timeout_s, delta
        self.lost: dict[EngineLink, Exception] = {}
        """Engines that ended or did not answer in time, for whoever made the links to take out."""
        self.refused: dict[EngineLink, Exception] = {}
        """Why an engine did not take the version that it was fed last."""
        self.sent_bytes = 0
        """For the version that was fed last, counted once for all engines that get the same."""

    def feed(self, staged: Staged, base: Staged | None) -> None:
        """Give every engine that lacks the version what it needs."""
        self.refused.clear()
        self.sent_bytes = 0
        for _ in range(_ATTEMPTS):
            late = [link for link in self.links if link not in self.lost and link.version < staged.record.version]
            if late:
                self._deliver(late, staged, base)
        self.refused = {
            link: error
            for link, error in self.refused.items()
            if self._hears_later or link.version < staged.record.version
        }

    def close(self) -> None:
        """Let the engines go."""
        for link in self.links:
            link.detach()

    @abstractmethod
    def _deliver(self, links: Sequence[EngineLink], staged: Staged, base: Staged | None) -> None:
        """One attempt. An engine whose `version` is older afterwards gets another."""

    def _try(self, link: EngineLink, action: Callable[[], None]) -> bool:
        """Whether it worked."""
        try:
            action()
        except (EngineDiedError, TimeoutError) as error:
            self.lost[link] = error
        except InflightError as error:
            self.refused[link] = error
        else:
            return True
        return False

    def _slots(self, links: Sequence[EngineLink]) -> dict[EngineLink, int]:
        """A slot of each engine that has one in time."""
        slots: dict[EngineLink, int] = {}

        def acquire(link: EngineLink) -> None:
            link.check()
            slots[link] = link.acquire(self._timeout_s, "timeout_s of the transport")

        for link in links:
            self._try(link, partial(acquire, link))
        return slots

    def _fill(self, fills: dict[EngineLink, Fill], send: Callable[[], None], staged: Staged) -> None:
        """Have slots filled; engines that did may draw with them, the others keep what they have."""
        for link, fill in fills.items():
            link.send(fill)
        send()

        def finish(link: EngineLink, fill: Fill) -> None:
            link.wait_for(fill.ticket, self._timeout_s)
            link.announce(fill.slot, staged.record)
            link.filled = fill.version

        for link, fill in fills.items():
            if not self._try(link, partial(finish, link, fill)):
                link.free.append(fill.slot)
                link.filled = None  # so that the next attempt sends the whole

    def _changes(self, links: Sequence[EngineLink], staged: Staged, base: Staged | None) -> torch.Tensor | None:
        """A delta, if one is wanted, all of these engines have its base, and it is smaller than the whole."""
        if not self._delta or base is None or any(link.filled != base.record.version for link in links):
            return None
        return delta.encode(base.slot, staged.slot)


class SlotFeeder(Feeder):
    """Copies to the slots of one engine on this machine."""

    _hears_later = True

    def __init__(self, settings: Slots, link: EngineLink):
        super().__init__(settings.timeout_s)
        self.links.append(link)
        self._checksum = settings.checksum
        self._mapped = [map_slot(descriptor) for descriptor in link.attached.slots]

    def _deliver(self, links: Sequence[EngineLink], staged: Staged, base: Staged | None) -> None:
        for link, slot in self._slots(links).items():
            buffer = self._mapped[slot].buffer
            buffer.copy_(staged.slot)
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()
            link.announce(slot, staged.record, staged.checksum if self._checksum else None)
            self.sent_bytes += len(buffer)


class BroadcastFeeder(Feeder):
    """Rank 0 of a process group; the engines that lack a version are the others."""

    def __init__(self, settings: Broadcast):
        super().__init__(settings.timeout_s, delta=settings.delta)
        self._settings = settings
        self._store = make_store(settings.host, settings.timeout_s)
        self._group: Group | None = None
        self._members: list[EngineLink] = []

    def close(self) -> None:
        self._drop_group()
        super().close()

    def _deliver(self, links: Sequence[EngineLink], staged: Staged, base: Staged | None) -> None:
        slots = self._slots(links)
        group = self._group_of(list(slots), staged.slot.device) if slots else None
        if group is None:
            for link, slot in slots.items():
                link.free.append(slot)
            return
        changes = self._changes(list(slots), staged, base)
        payload, since = (staged.slot, None) if changes is None else (changes, base)
        origin = BroadcastOrigin(group.name, len(payload), self._settings.bucket_bytes)

        def send() -> None:
            self.sent_bytes += len(payload)
            try:
                with telling(f"engines take a broadcast, each bucket within {self._settings.timeout_s:g} s"):
                    group.broadcast(payload, self._settings.bucket_bytes)
            except BroadcastError:  # whose fault it was, the engines' answers tell
                self._drop_group()

        self._fill({link: _fill(link, slot, staged, origin, since) for link, slot in slots.items()}, send, staged)

    def _group_of(self, links: list[EngineLink], device: torch.device) -> Group | None:
        """The group of these engines, made anew if it is not the last one; None if it could not be made."""
        if self._group is not None and links == self._members:
            return self._group
        self._drop_group()
        gpus = [uuid_of(device), *(link.welcome.device_uuid for link in links)]
        with_nccl = all(gpus) and len(set(gpus)) == len(gpus)  # NCCL wants a GPU for each rank
        join = Join(
            group=uuid.uuid4().hex,
            backend="nccl" if with_nccl else "gloo",
            host=self._settings.host,
            port=self._store.port,
            rank=0,
            size=len(links) + 1,
            timeout_s=self._settings.timeout_s,
        )
        joins = {
            link: msgspec.structs.replace(join, ticket=link.ticket(), rank=rank)
            for rank, link in enumerate(links, start=1)
        }
        for link, message in joins.items():
            link.send(message)
        try:
            with telling(f"engines come together for a broadcast, within {self._settings.timeout_s:g} s"):
                self._group, self._members = Group(join, device, self._store), links
        except BroadcastError as error:
            self.refused |= dict.fromkeys(links, error)
        joined = [self._try(link, partial(link.wait_for, joins[link].ticket, self._timeout_s)) for link in links]
        if not all(joined):
            self._drop_group()
        return self._group

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group, self._members = None, []


class FileFeeder(Feeder):
    """Writes a file per version, and tells the engines to read it."""

    def __init__(self, settings: Files):
        super().__init__(settings.timeout_s, delta=settings.delta)
        self._directory, self._keep = Path(settings.directory), settings.keep
        self._written: dict[tuple[int, int | None], Path] = {}
        """By version and base."""

    def _deliver(self, links: Sequence[EngineLink], staged: Staged, base: Staged | None) -> None:
        slots = self._slots(links)
        ahead = [link for link in slots if base is not None and link.filled == base.record.version]
        changes = self._changes(ahead, staged, base) if ahead else None
        fills: dict[EngineLink, Fill] = {}
        for link, slot in slots.items():
            payload, since = (changes, base) if changes is not None and link in ahead else (None, None)
            try:
                origin = FileOrigin(str(self._write(link, staged, payload, since)))
            except WeightFileError as error:
                self.refused[link] = error
                link.free.append(slot)
            else:
                fills[link] = _fill(link, slot, staged, origin, since)
        self._fill(fills, lambda: None, staged)
        self._prune(staged.record.version)

    def _write(self, link: EngineLink, staged: Staged, changes: torch.Tensor | None, base: Staged | None) -> Path:
        """The file for an engine, written once for all of them."""
        since = base.record.version if base else None
        key = staged.record.version, since
        if key not in self._written:
            self._written[key] = write_version(
                self._directory, link.layout, staged.record.version, staged.slot, delta=changes, base=since
            )
            self.sent_bytes += self._written[key].stat().st_size
        return self._written[key]

    def _prune(self, newest: int) -> None:
        versions = sorted({version for version, _ in self._written} | {newest})
        for key in [key for key in self._written if key[0] not in versions[-self._keep :]]:
            self._written.pop(key).unlink(missing_ok=True)


def _fill(
    link: EngineLink, slot: int, staged: Staged, origin: BroadcastOrigin | FileOrigin, base: Staged | None
) -> Fill:
    return Fill(
        ticket=link.ticket(),
        slot=slot,
        version=staged.record.version,
        fingerprint=link.layout.fingerprint,
        origin=origin,
        base=base.record.version if base else None,
        checksum=staged.checksum,
    )


def map_slot(descriptor: SlotDescriptor) -> Slot:
    """A slot of another process in this one's memory."""
    if isinstance(descriptor, CudaIpcDescriptor):
        return CudaSlot.attach(descriptor)
    return SharedMemorySlot.attach(descriptor)
