"""Slots in device memory, shared by CUDA IPC: a handle per slot is exported when a publisher attaches, none later."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from inflight.core.errors import DeviceMemoryError, ProtocolError
from inflight.core.messages import CudaIpcDescriptor

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with options of PyTorch's allocator (NAME:VALUE, …); the second is the older name."""
_EXPANDABLE = re.compile(r"\s*expandable_segments\s*:\s*True\s*", re.IGNORECASE)


class CudaSlot:
    """A slot of device memory, or a part of one: `buffer`, u8[n]."""

    def __init__(self, buffer: torch.Tensor):
        self.buffer = buffer

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> "CudaSlot":
        """Make a slot. Raises DeviceMemoryError if it does not fit or could not be shared."""
        if without_expandable_segments(os.environ) != dict(os.environ):
            raise DeviceMemoryError(
                "slots in expandable segments cannot be shared by CUDA IPC; "
                "remove expandable_segments:True from PYTORCH_ALLOC_CONF for the engine process"
            )
        with _memory_errors(nbytes, device):
            return cls(torch.zeros(nbytes, dtype=torch.uint8, device=device))

    @staticmethod
    def attach(descriptor: CudaIpcDescriptor) -> torch.Tensor:
        """Map a slot of another process, u8[nbytes], on any GPU of this machine. Raises ProtocolError if this process
        cannot see that GPU or map its memory."""
        uuid, nbytes, handle, storage_bytes, offset, *events = msgspec.structs.astuple(descriptor)
        view = torch.Tensor, (nbytes,), (1,), 0
        device = number_of(uuid)
        if device is None:
            raise ProtocolError(
                f"the engine's slots are on GPU {uuid}, which this process does not see; check CUDA_VISIBLE_DEVICES"
            )
        storage = torch.UntypedStorage, torch.uint8, device, handle, storage_bytes, offset, False
        try:
            return rebuild_cuda_tensor(*view, *storage, *events)
        except RuntimeError as error:
            raise ProtocolError(
                f"the engine's slot on GPU {uuid} cannot be mapped by CUDA IPC "
                f"({str(error).splitlines()[0]}). Trainer and engine must share a machine; in containers both need the "
                "same IPC and PID namespaces (docker run --ipc=host --pid=host), and must see the GPU. Where that "
                "cannot be, publish with transport=inflight.Broadcast()"
            ) from error

    def descriptor(self) -> CudaIpcDescriptor:
        """Export the slot for one `attach`. Raises ProtocolError if the driver forbids sharing."""
        try:
            args: Any = reduce_tensor(self.buffer)[1]
        except RuntimeError as error:
            raise ProtocolError(
                f"the engine's slot on {self.buffer.device} cannot be shared by CUDA IPC "
                f"({str(error).splitlines()[0]}), which some containers and virtual machines forbid. Publish with "
                "transport=inflight.Broadcast() there"
            ) from error
        *_, handle, _, offset, _, counter, counter_offset, event, sync = args
        offset += self.buffer.storage_offset()  # The storage is exported; a split slot is a part of it.
        uuid, nbytes = uuid_of(self.buffer.device), len(self.buffer)
        return CudaIpcDescriptor(uuid, nbytes, handle, nbytes, offset, counter, counter_offset, event, sync)

    def split(self, count: int) -> list["CudaSlot"]:
        return [CudaSlot(part) for part in self.buffer.split(len(self.buffer) // count)]

    def free(self) -> None:
        """Free the memory until `restore`. Views stay, and must not be read."""
        storage = self.buffer.untyped_storage()
        assert storage.nbytes() in (0, len(self.buffer)), "the slot is a part of another one"
        if storage.nbytes():
            storage.resize_(0)
            if self.buffer.is_cuda:
                torch.cuda.ipc_collect()  # memory that a closed publisher had mapped
                torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate the memory again. Raises DeviceMemoryError."""
        storage, nbytes = self.buffer.untyped_storage(), len(self.buffer)
        if not storage.nbytes():
            with _memory_errors(nbytes, self.buffer.device):
                storage.resize_(nbytes)
            self.buffer.zero_()
            if self.buffer.is_cuda:
                torch.cuda.synchronize(self.buffer.device)  # A publisher writes to it on another stream.

    def unlink(self) -> None:
        """Device memory has no name; it lives until the engine process ends."""


@contextmanager
def _memory_errors(nbytes: int, device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise DeviceMemoryError(
            f"a weight slot needs {nbytes / 2**20:,.1f} MiB and {device} has {free / 2**20:,.1f} MiB left; "
            "launch with slots=1 or a smaller dtype"
        ) from error


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without expandable_segments of PyTorch's allocator, whose memory CUDA IPC cannot share."""
    left = dict(environment)
    for name in ALLOCATOR_VARIABLES:
        if name in left:
            options = re.split(r",(?![^\[]*\])", left.pop(name))  # Commas between brackets belong to one option.
            kept = [option for option in options if not _EXPANDABLE.fullmatch(option)]
            if any(option.strip() for option in kept):
                left[name] = ",".join(kept)
    return left


def use_own_stream(device: torch.device) -> None:
    """On a GPU, give the calling thread its own stream. On the shared default stream a thread that waits for a result
    would also wait for all other queued work."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU, the same in every process; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def number_of(uuid: str) -> int | None:
    """Return the number of a GPU in this process; None if this process does not see it."""
    numbers = range(torch.cuda.device_count())
    return next((number for number in numbers if uuid_of(torch.device("cuda", number)) == uuid), None)
