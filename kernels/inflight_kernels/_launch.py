"""Starts Triton kernels on the device of their tensors. Triton itself takes the current device."""

from collections.abc import Callable
from typing import Any

import torch


def guarded(launch: Any) -> Callable[..., Any]:
    """Return `kernel[grid]` as a function that runs on the device of its first argument, a tensor. It changes nothing
    if that is the current device, or the CPU of Triton's interpreter, or without CUDA (tensors without memory)."""

    def run(first: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        has_device = first.is_cuda and torch.cuda.is_initialized()
        if not has_device or first.get_device() == torch.cuda.current_device():
            return launch(first, *arguments, **options)
        with torch.cuda.device_of(first):
            return launch(first, *arguments, **options)

    return run
