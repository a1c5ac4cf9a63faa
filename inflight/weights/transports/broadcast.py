"""The transport of process groups, apart from torch.distributed's default group. Each change of the set of engines
makes a new group under a new name."""

import ipaddress
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from inflight.core.arguments import named
from inflight.core.errors import BroadcastError, InflightError, ProtocolError
from inflight.core.layout import WeightLayout
from inflight.core.text import first_line
from inflight.core.waiting import telling
from inflight.weights import nccl
from inflight.weights.cuda_ipc import uuid_of
from inflight.weights.trainer.engine_link import EngineLink
from inflight.weights.transports.base import Receiver, Sender, StagedVersion, Transport

_NCCL_ID = "nccl id"
"""The key of the id in the store of a group."""


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(Transport):
    """One collective broadcast to all engines: NCCL if each process has a separate GPU, else gloo."""

    host: str = "127.0.0.1"
    """Address of the trainer, as engines see it. The trainer listens only there, gloo's ranks on their addresses
    towards it, and NCCL's ranks on the interfaces of NCCL_SOCKET_IFNAME."""
    allow_unencrypted: bool = False
    """Send weights over a network unencrypted and unauthenticated. If False, a host other than the loopback raises
    ValueError."""
    bucket_bytes: int = 64 << 20
    delta: bool = False
    """Send changes since the last version to engines that have it."""
    timeout_s: float = 60.0
    """Bound of each step of a broadcast. A slower engine is dropped. If it lends no slot, it gets the newest version
    later."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")
        try:
            is_loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # Names other than localhost can be redirected.
            is_loopback = self.host == "localhost"
        if not (self.allow_unencrypted or is_loopback):
            raise ValueError(
                f"host {self.host!r} is not this machine's loopback, and a broadcast is neither encrypted nor "
                "authenticated: pass allow_unencrypted=True within a network that you trust, or a tunnel; or take "
                "inflight.Files(directory=…), which opens no port"
            )

    def sender(self) -> "BroadcastSender":
        return BroadcastSender(self)

    @classmethod
    def receiver(cls, layout: WeightLayout, device: torch.device) -> "BroadcastReceiver":
        return BroadcastReceiver(layout, device)


class Join(msgspec.Struct, frozen=True):
    """Request to join a new process group in place of any earlier one."""

    group: str
    backend: str
    host: str
    """Host of the store where ranks find each other."""
    port: int
    rank: int
    size: int
    timeout_s: float


class BroadcastOrigin(msgspec.Struct, frozen=True):
    """Rank 0 of a group broadcasts `nbytes` bytes, in buckets."""

    group: str
    nbytes: int
    bucket_bytes: int


class BroadcastSender(Sender):
    """Rank 0 of a process group. Engines that lack a version are the other ranks."""

    def __init__(self, settings: Broadcast):
        super().__init__(timeout_s=settings.timeout_s, delta=settings.delta)
        self._settings = settings
        self._store = make_store(settings.host, settings.timeout_s)
        self._group: BroadcastGroup | None = None
        self._members: list[EngineLink] = []

    def close(self) -> None:
        self._drop_group()
        super().close()

    def deliver(self, slots: Mapping[EngineLink, int], staged: StagedVersion, base: StagedVersion | None) -> None:
        group = self._group_of(list(slots), staged.data.device)
        if group is None:
            return
        changes = self.changes(list(slots), staged, base)
        payload, since = (staged.data, None) if changes is None else (changes, base)
        for engine in slots:
            self.fill(engine, staged, BroadcastOrigin(group.name, len(payload), self._settings.bucket_bytes), since)
        self.sent_bytes += len(payload)
        try:
            with telling(f"engines take a broadcast, each bucket within {self.timeout_s:g} s"):
                group.broadcast(payload, self._settings.bucket_bytes)
        except BroadcastError:  # The engines' answers name the culprit.
            self._drop_group()

    def _group_of(self, engines: list[EngineLink], device: torch.device) -> "BroadcastGroup | None":
        """Return the group of these engines, a new one if they differ from the last; None if it could not be made."""
        if self._group is not None and engines == self._members:
            return self._group
        self._drop_group()
        gpus = [uuid_of(device), *(engine.welcome.device_uuid for engine in engines)]
        name, backend, host = uuid.uuid4().hex, backend_of(gpus), self._settings.host
        size = len(gpus)
        joins = [Join(name, backend, host, self._store.port, rank, size, self.timeout_s) for rank in range(size)]

        def join() -> None:
            with telling(f"engines come together for a broadcast, within {self.timeout_s:g} s"):
                self._group, self._members = BroadcastGroup(joins[0], device, self._store), engines

        if not self.prepare(dict(zip(engines, joins[1:], strict=True)), join):
            self._drop_group()
        return self._group

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class BroadcastReceiver(Receiver):
    """A rank of the latest process group."""

    origin, setup = BroadcastOrigin, Join

    def __init__(self, layout: WeightLayout, device: torch.device):
        super().__init__(layout, device)
        self._group: BroadcastGroup | None = None

    def prepare(self, setup: Join) -> None:
        self.close()
        self._group = BroadcastGroup(setup, self.device)

    def receive(self, origin: BroadcastOrigin, version: int, slot: torch.Tensor) -> None:
        group = self._group
        if group is None or group.name != origin.group:
            raise BroadcastError(f"the engine is not in group {origin.group}")
        try:
            group.broadcast(slot, origin.bucket_bytes)
        except BroadcastError:
            self.close()
            raise

    def receive_changes(self, origin: BroadcastOrigin, version: int, base: int) -> torch.Tensor:
        if not 0 <= origin.nbytes <= self.layout.total_bytes:
            raise ProtocolError(f"changes have at most {self.layout.total_bytes} bytes, got {origin.nbytes}")
        changes = torch.empty(origin.nbytes, dtype=torch.uint8, device=self.device)
        self.receive(origin, version, changes)
        return changes

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def make_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Make the trainer's store. It listens on this address alone, on a port that the system picks. Raises
    BroadcastError if the address is not one of this machine."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address, family=family, backlog=128) as listener:
            port = listener.getsockname()[1]
            file = listener.detach()  # The store closes it.
    except OSError as error:
        raise BroadcastError(
            f"cannot listen on {host!r} ({error}); the host of inflight.Broadcast is an address of the trainer's "
            "machine by which the engines reach it"
        ) from error
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=file)


def backend_of(gpus: Sequence[str]) -> Literal["nccl", "gloo"]:
    """Return the library for ranks on these GPUs, empty for a CPU. NCCL needs a separate GPU for each rank."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


class BroadcastGroup:
    """One rank of a process group whose rank 0 broadcasts. The constructor waits for the other ranks.

    Raises BroadcastError if they do not all join in time, or if one of them is lost during a broadcast.
    """

    def __init__(self, join: Join, device: torch.device, store: dist.TCPStore | None = None):
        self.name = join.group
        timeout, make = timedelta(seconds=join.timeout_s), _Gloo if join.backend == "gloo" else _join_nccl
        try:
            self._store = store or dist.TCPStore(join.host, join.port, is_master=False, timeout=timeout)
            self._ranks = make(join, dist.PrefixStore(join.group, self._store), timeout, device)
        except (RuntimeError, ValueError, OSError, InflightError) as error:
            raise BroadcastError(f"rank {join.rank} of {join.size} found no group: {first_line(error)}") from error

    def broadcast(self, buffer: torch.Tensor, bucket_bytes: int) -> None:
        """Copy u8[n] of rank 0 to every rank."""
        try:
            self._ranks.broadcast(buffer.split(bucket_bytes))
        except (RuntimeError, BroadcastError) as error:
            raise BroadcastError(f"the broadcast broke off: {first_line(error)}") from error

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one get an error."""
        self._ranks.close()


class _Gloo:
    """A rank of a process group of gloo. It listens only on this machine's address towards the host."""

    def __init__(self, join: Join, store: dist.Store, timeout: timedelta, device: torch.device):
        gloo: Any = dist.ProcessGroupGloo
        # Connecting UDP sends nothing.
        family, kind, *_, address = socket.getaddrinfo(join.host, join.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own_address = probe.getsockname()[0]
        choices = gloo._Options()
        choices._timeout = timeout
        choices._devices = [gloo.create_device(hostname=own_address)]
        self._ranks = gloo(store, join.rank, join.size, choices)

    def broadcast(self, buckets: Sequence[torch.Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for bucket in buckets:
            self._ranks.broadcast([bucket], options).wait()
        if buckets and buckets[0].is_cuda:
            torch.cuda.current_stream(buckets[0].device).synchronize()

    def close(self) -> None:
        self._ranks.abort()


def _join_nccl(join: Join, store: dist.Store, timeout: timedelta, device: torch.device) -> nccl.Communicator:
    """Join by the id that rank 0 leaves in the store."""
    library = nccl.load()
    if join.rank == 0:
        store.set(_NCCL_ID, library.new_id())  # pyright: ignore[reportArgumentType]
    store.wait([_NCCL_ID], timeout)
    communicator = nccl.Communicator(library, device, timeout_s=join.timeout_s)
    communicator.join(store.get(_NCCL_ID), join.rank, join.size)
    return communicator
