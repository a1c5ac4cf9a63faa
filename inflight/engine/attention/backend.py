"""The seam behind which attention is computed: what a forward pass looks like to a backend."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch

if TYPE_CHECKING:
    from inflight.engine.kv_memory import KVMemory


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token, and how it attends."""

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """The sliding window in tokens, None for full attention."""
    dtype: torch.dtype
    scale: float
    softcap: float | None = None
    sinks: bool = False
    """Each head has an additional logit."""

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(slots=True)
class ForwardBatch:
    """Where the T tokens of one forward pass belong. S chunks of sequences lie one after another, those of a single
    token first; M rows are drawn from; per group of the KV cache there is one cache index and one table."""

    token_ids: torch.Tensor
    """i64[T]"""
    positions: torch.Tensor
    """i64[T]"""
    cache_index: list[torch.Tensor]
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


class AttentionBackend(Protocol):
    """Computes attention over the cache of the engine, for one batch after another."""

    name: str
    block_size: int
    """Tokens in a block of the cache."""

    def allocate(self, layer: LayerShape, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys [blocks, block_size, Hk, D], values [blocks, block_size, Hk, Dv]), strides as the backend likes."""

    def begin(self, batch: ForwardBatch, memory: "KVMemory") -> None:
        """What a pass needs to know once, before its first layer."""

    def attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """query [T, Hq, D] → [T, Hq, Dv]; the batch's keys and values are in the cache already."""


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend that can be part of a CUDA graph: `begin_graph` does on the host what `begin` does, and leaves what the
    kernels read at the same addresses for every batch of as many sequences of one token."""

    def prepare_graphs(self, memory: "KVMemory", max_sequences: int) -> None:
        """Take memory at fixed addresses for passes of up to max_sequences single tokens."""

    def begin_graph(self, batch: ForwardBatch, memory: "KVMemory") -> None: ...

    def drop_graphs(self) -> None:
        """Give that memory back; no graph recorded since may be replayed any more."""
