"""Chooses the attention backend for a model and a device."""

import torch

from inflight.core.errors import UnsupportedModelError
from inflight.engine.attention.backend import AttentionBackend, LayerShape
from inflight.engine.attention.flashinfer import FlashInferAttention, why_not_flashinfer
from inflight.engine.attention.paged import PagedAttention


def choose_backend(name: str, layers: list[LayerShape], device: torch.device) -> AttentionBackend:
    """The backend of this name, or for "auto" the fastest that is there. Raises UnsupportedModelError, saying why, if
    the one that was asked for cannot run these layers on this device."""
    if name in ("auto", "flashinfer"):
        reason = why_not_flashinfer(layers, device)
        if reason is None:
            return FlashInferAttention(layers, device)
        if name == "flashinfer":
            raise UnsupportedModelError(f"attention='flashinfer' cannot be used: {reason}")
    if name == "cpu" and device.type != "cpu":
        raise UnsupportedModelError(f"attention='cpu' cannot be used on {device}")
    return PagedAttention(layers, device, use_c=device.type == "cpu" and name != "torch")
