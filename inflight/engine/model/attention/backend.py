"""The attention interface: the description of a forward pass that a backend receives, and the memory that it reads.

Layers with the same window form a *group* and share block tables: one group for full attention, one for each sliding
window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch

from inflight.engine.cache.kinds import LayerShape


class Places(NamedTuple):
    """Positions and cache places of the T tokens of S chunks, on the host."""

    positions: np.ndarray
    """i64[T]"""
    cache_index: list[np.ndarray]
    """i64[T] for each group of the KV cache."""
    tables: list[np.ndarray]
    """i32[S, B] for each group: the blocks of each chunk's sequence."""
    contexts: np.ndarray
    """i64[S]: tokens of each sequence up to the end of its chunk."""

    @classmethod
    def of(
        cls,
        tables: Sequence[np.ndarray],
        block_size: int,
        batch_rows: np.ndarray,
        positions: np.ndarray,
        contexts: np.ndarray,
        counts: np.ndarray | None = None,
    ) -> Self:
        """Return the places of chunks of the sequences in these rows i64[S] of the tables. counts: the tokens of each
        chunk, i64[S], None for one each."""
        num_blocks = -(-int(np.maximum.reduce(contexts)) // block_size)
        own_tables = [table[:, :num_blocks].take(batch_rows, 0) for table in tables]
        owner = np.arange(len(batch_rows))
        owner = owner if counts is None else np.repeat(owner, counts)
        block, place = np.divmod(positions, block_size)
        cache_index = [table[owner, block].astype(np.int64) * block_size + place for table in own_tables]
        return cls(positions, cache_index, own_tables, contexts)


@dataclass(slots=True)
class ForwardBatch:
    """The T tokens of one forward pass, and their places in the cache. The chunks of S sequences follow one another,
    single tokens first. M rows are drawn from. Each group of the KV cache has one cache index and one table."""

    token_ids: torch.Tensor
    """i64[T]"""
    positions: torch.Tensor
    """i64[T]"""
    cache_index: list[torch.Tensor]
    """Cache places of tokens, i64[T] for each group: block · block_size + index in the block."""
    tables: list[np.ndarray]
    """The blocks of each chunk's sequence, i32[S, B] on the host for each group."""
    starts: np.ndarray
    """i32[S + 1] on the host: the first token of each chunk, and the number of tokens."""
    contexts: np.ndarray
    """i32[S] on the host: tokens of each sequence up to the end of its chunk."""
    rows: torch.Tensor
    """i64[M], distinct and rising: tokens after which a token is drawn."""
    num_single: int = 0
    """Leading chunks of one token."""
    states: torch.Tensor | None = None
    """i64[S]: the state of each chunk's sequence, in models with layers that keep one per sequence."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one window, and the number of blocks that they share."""

    window: int | None
    layers: list[int]
    num_blocks: int


class CacheMemory(Protocol):
    """Keys and values of all layers, in blocks, as a backend reads them (`KVMemory`)."""

    block_size: int
    max_blocks: int
    """Largest number of blocks of one sequence."""
    groups: list[LayerGroup]
    group_of: list[int]
    """The group of each layer."""
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    """One tensor for each layer, as `allocate` made it."""


class AttentionBackend(Protocol):
    """Computes attention over the cache of the engine, for one batch after another."""

    name: str
    block_size: int
    """Tokens in a block of the cache."""

    def allocate(self, layer: LayerShape, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys [blocks, block_size, Hk, D], values [blocks, block_size, Hk, Dv]), with any strides. The values
        of a latent layer are keys[..., :Dv], whatever is returned."""
        ...

    def begin(self, batch: ForwardBatch, memory: CacheMemory) -> None:
        """Prepare a pass before its first layer."""

    def attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Map query [T, Hq, D] to [T, Hq, Dv]. The batch's keys and values are already in the cache."""
        ...


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend that can be part of a CUDA graph. `begin_graph` does on the host what `begin` does. The kernels' inputs
    keep their addresses for every batch of the same number of single tokens."""

    def prepare_graphs(self, memory: CacheMemory, max_rows: int) -> None:
        """Take memory at fixed addresses for passes of up to max_rows single tokens."""

    def begin_graph(self, batch: ForwardBatch, memory: CacheMemory) -> None: ...

    def drop_graphs(self) -> None:
        """Free that memory. Graphs that were recorded with it must not be replayed."""
