"""The device that an engine computes on: its name, its free memory, and copies of values to it."""

from collections.abc import Sequence

import torch

from inflight.core.errors import DeviceMemoryError, ModelLoadError


def resolve_device(name: str) -> torch.device:
    """Return the device: cpu, or a GPU with its index. "auto" is the first GPU if there is one. Raises
    ModelLoadError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelLoadError(f"device {name!r} was asked for, but torch sees no GPU; use device='cpu'")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ModelLoadError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def memory_left(device: torch.device) -> int:
    """Return the number of unused bytes of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
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
