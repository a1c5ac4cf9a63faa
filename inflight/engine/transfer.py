"""From lists and arrays on the host to tensors on the device, without waiting for the device."""

from collections.abc import Sequence

import torch


def to_device(
    values: torch.Tensor | Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Values of the host as a tensor on `device`. A GPU reads them from pinned memory, which PyTorch hands out again
    only after that, while the host goes on."""
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
