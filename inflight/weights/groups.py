"""Process groups between one trainer and its engines: gloo, or NCCL where the slots lie on GPUs.

They are made without the default group of torch.distributed, which the trainer may have for itself, and made anew
whenever an engine comes or goes: a group is short-lived and its name is never used twice.
"""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inflight.core.errors import BroadcastError
from inflight.core.messages import Join


def make_store(host: str, timeout_s: float) -> dist.TCPStore:
    """The trainer's, which listens on this address alone, on a port that the system picks. Raises BroadcastError if the
    address is not one of this machine."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen(128)
            port = listener.getsockname()[1]
            file = listener.detach()  # the store closes it
    except OSError as error:
        raise BroadcastError(
            f"cannot listen on {host!r} ({error}); the host of inflight.Broadcast is an address of the trainer's "
            "machine by which the engines reach it"
        ) from error
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=file)


class Group:
    """One rank of a process group; rank 0 broadcasts. Making one waits for the other ranks.

    Raises BroadcastError if they do not all come in time, or if one of them is lost in the middle of a broadcast.
    """

    def __init__(self, join: Join, device: torch.device, store: dist.TCPStore | None = None):
        self.name = join.group
        timeout = timedelta(seconds=join.timeout_s)
        try:
            self._store = store or dist.TCPStore(join.host, join.port, is_master=False, timeout=timeout)
            self._ranks = _make(join, dist.PrefixStore(join.group, self._store), timeout, device)
        except (RuntimeError, ValueError, OSError) as error:
            raise BroadcastError(f"rank {join.rank} of {join.size} found no group: {_first_line(error)}") from error

    def broadcast(self, buffer: torch.Tensor, bucket_bytes: int) -> None:
        """u8[n] of rank 0 → every rank."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            for bucket in buffer.split(bucket_bytes):
                self._ranks.broadcast([bucket], options).wait()
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()
        except RuntimeError as error:
            raise BroadcastError(f"the broadcast broke off: {_first_line(error)}") from error

    def close(self) -> None:
        """Whoever still waits for this rank learns that it is gone."""
        self._ranks.abort()


def _make(join: Join, store: dist.Store, timeout: timedelta, device: torch.device) -> Any:
    if join.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        choices = gloo._Options()
        choices._timeout = timeout
        choices._devices = [gloo.create_device(hostname=_own_address(join.host, join.port))]
        return gloo(store, join.rank, join.size, choices)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(store, join.rank, join.size, options)


def _own_address(host: str, port: int) -> str:
    """The address of this machine by which it reaches a host, and on which alone a rank listens for the others."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # nothing is sent
        probe.connect(address)
        return probe.getsockname()[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
