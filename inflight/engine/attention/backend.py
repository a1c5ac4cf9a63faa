"""The seam behind which attention is computed: what a forward pass looks like to it, and which backend runs where."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from inflight.core.errors import UnsupportedModelError
from inflight.engine.kv_cache import CacheAllocator, KVCache, LayerShape


@dataclass(slots=True)
class ForwardBatch:
    """Where the T tokens of one forward pass belong. S chunks of sequences lie one after another, those of a single
    token first; M rows are drawn from; per group of the KV cache there is a column of slots and one table."""

    token_ids: torch.Tensor
    """i64[T]"""
    positions: torch.Tensor
    """i64[T]"""
    slots: list[torch.Tensor]
    """Per group, i64[T]: block · block_size + index in the block, where the token's key and value go."""
    tables: list[np.ndarray]
    """Per group, i32[S, B] on the CPU: the blocks of each chunk's sequence."""
    starts: torch.Tensor
    """i32[S + 1] on the CPU: where the chunks begin."""
    contexts: torch.Tensor
    """i32[S] on the CPU: tokens of each sequence up to the end of its chunk."""
    rows: torch.Tensor
    """i64[M]: tokens after which a token is drawn."""
    num_single: int = 0
    """Leading chunks of one token."""


class AttentionBackend(CacheAllocator, Protocol):
    """Computes attention over the cache of the engine, for one batch after another."""

    name: str

    def begin(self, batch: ForwardBatch, cache: KVCache) -> None:
        """What a pass needs to know once, before its first layer."""
        ...

    def attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """query [T, Hq, D] → [T, Hq, Dv]; the batch's keys and values are in the cache already."""
        ...


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend that can be part of a CUDA graph: `begin_graph` does on the host what `begin` does, and leaves what the
    kernels read at the same addresses for every batch of as many sequences of one token."""

    def prepare_graphs(self, cache: KVCache, max_sequences: int) -> None:
        """Take memory at fixed addresses for passes of up to max_sequences single tokens."""
        ...

    def begin_graph(self, batch: ForwardBatch, cache: KVCache) -> None: ...

    def drop_graphs(self) -> None:
        """Give that memory back; no graph recorded since may be replayed any more."""
        ...


def choose_backend(name: str, layers: list[LayerShape], device: torch.device) -> AttentionBackend:
    """The backend of this name, or for "auto" the fastest that is there. Raises UnsupportedModelError, saying why, if
    the one that was asked for cannot run these layers on this device."""
    from inflight.engine.attention.flashinfer import FlashInferAttention, why_not_flashinfer
    from inflight.engine.attention.paged import CpuAttention, TorchAttention

    if name in ("auto", "flashinfer"):
        reason = why_not_flashinfer(layers, device)
        if reason is None:
            return FlashInferAttention(layers, device)
        if name == "flashinfer":
            raise UnsupportedModelError(f"attention='flashinfer' cannot be used: {reason}")
    if name == "cpu" and device.type != "cpu":
        raise UnsupportedModelError(f"attention='cpu' cannot be used on {device}")
    use_c = device.type == "cpu" and name != "torch"
    return (CpuAttention if use_c else TorchAttention)(layers, device)
