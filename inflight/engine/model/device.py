"""The device that an engine computes on: its name, its free memory, and copies of values to it."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from inflight.core.errors import DeviceMemoryError, ModelLoadError

_CGROUPS = (
    ("/sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
    ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
)
"""Folders of control groups of version 2 and 1, and the names of limit, used memory and unused file pages."""


def resolve_device(name: str) -> torch.device:
    """Return the device: cpu, or a GPU with its index. "auto" prefers a GPU. Raises ModelLoadError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelLoadError(f"device {name!r} was asked for, but torch sees no GPU; use device='cpu'")
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise ModelLoadError(f"device {name!r} was asked for, but torch sees cuda:0 to cuda:{count - 1} alone")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ModelLoadError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def _left_in_cgroups() -> list[int]:
    """Return the bytes that the limits of this process's control groups leave, and a number above all limits. Unused
    pages of files are free memory, because the kernel reclaims them."""
    left = [sys.maxsize]
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        paths = {"", *(line.split(":", 2)[2] for line in lines)}
        for folder, (limit, used, cached) in ((Path(root + path), names) for path in paths for root, names in _CGROUPS):
            with suppress(OSError, ValueError, KeyError):  # the other version, or without a limit
                pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free = int((folder / limit).read_text()) - int((folder / used).read_text()) + int(pages[cached])
                left.append(max(0, free))
    return left


def memory_left(device: torch.device) -> int:
    """Return the number of unused bytes of the device's memory; on a CPU, within the limit of a container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, *_left_in_cgroups())
    raise DeviceMemoryError("cannot read the memory that is left from /proc/meminfo")


def reachable(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values of the host in memory from which a copy to `device` need not wait. A GPU reads them from pinned
    memory while the host continues. PyTorch reuses that memory only after the copy."""
    return values.pin_memory() if device.type == "cuda" else values


def to_device(
    values: torch.Tensor | Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy values of the host to a tensor on `device`, without waiting for the device."""
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def together_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return integer arrays as i64 tensors on `device`, in one copy. Each starts at a multiple of 16 bytes, because
    Triton compiles a kernel once more for other pointers."""
    starts = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)])
    flat = np.zeros(starts[-1], np.int64)
    for array, start in zip(arrays, starts, strict=False):
        flat[start : start + len(array)] = array
    on_device = to_device(torch.from_numpy(flat), device)
    return [on_device[start : start + len(array)] for array, start in zip(arrays, starts, strict=False)]
