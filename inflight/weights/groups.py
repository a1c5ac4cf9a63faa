"""Process groups between one trainer and its engines: gloo, or NCCL where the slots lie on GPUs.

They are made without the default group of torch.distributed, which the trainer may have for itself, and made anew
whenever an engine comes or goes: a group is short-lived and its name is never used twice.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from inflight.core.errors import BroadcastError
from inflight.core.messages import Join


def make_store(host: str, timeout_s: float) -> dist.TCPStore:
    """The trainer's, on a port that the system picks."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


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
        except (RuntimeError, ValueError) as error:
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
        return dist.ProcessGroupGloo(store, join.rank, join.size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(store, join.rank, join.size, options)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
