"""The seam behind which attention is computed: what a forward pass looks like to a backend, and the memory of the KV
cache, where the keys and values of every layer lie in blocks.

Layers that look equally far back form a *group* and share block tables: one group for full attention, one for each
sliding window.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from inflight_kernels import BlockCopies

from inflight.core.errors import DeviceMemoryError
from inflight.core.options import EngineOptions
from inflight.engine.device import memory_left


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


class Places(NamedTuple):
    """Where the T tokens of S chunks belong, on the host."""

    positions: np.ndarray
    """i64[T]"""
    cache_index: list[np.ndarray]
    """i64[T] for each group of the KV cache."""
    tables: list[np.ndarray]
    """i32[S, B] for each group: the blocks of each chunk's sequence."""
    contexts: np.ndarray
    """i64[S]: tokens of each sequence up to the end of its chunk."""


@dataclass(slots=True)
class ForwardBatch:
    """Where the T tokens of one forward pass belong. S chunks of sequences lie one after another, those of a single
    token first; M rows are drawn from; per group of the KV cache there is one cache index and one table."""

    token_ids: torch.Tensor
    """i64[T]"""
    positions: torch.Tensor
    """i64[T]"""
    cache_index: list[torch.Tensor]
    """Where the key and value of each token go, i64[T] for each group: block · block_size + index in the block."""
    tables: list[np.ndarray]
    """The blocks of each chunk's sequence, i32[S, B] on the host for each group."""
    starts: np.ndarray
    """i32[S + 1] on the host: where the chunks begin."""
    contexts: np.ndarray
    """i32[S] on the host: tokens of each sequence up to the end of its chunk."""
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
        ...

    def begin(self, batch: ForwardBatch, memory: "KVMemory") -> None:
        """What a pass needs to know once, before its first layer."""

    def attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """query [T, Hq, D] → [T, Hq, Dv]; the batch's keys and values are in the cache already."""
        ...


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend that can be part of a CUDA graph: `begin_graph` does on the host what `begin` does, and leaves what the
    kernels read at the same addresses for every batch of as many sequences of one token."""

    def prepare_graphs(self, memory: "KVMemory", max_sequences: int) -> None:
        """Take memory at fixed addresses for passes of up to max_sequences single tokens."""

    def begin_graph(self, batch: ForwardBatch, memory: "KVMemory") -> None: ...

    def drop_graphs(self) -> None:
        """Give that memory back; no graph recorded since may be replayed any more."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one window, and the number of blocks that they share."""

    window: int | None
    layers: list[int]
    num_blocks: int


class KVMemory:
    """Keys and values of all layers, in blocks. Who holds which block is for `KVCache` to say."""

    def __init__(
        self, layers: list[LayerShape], backend: AttentionBackend, options: EngineOptions, device: torch.device
    ):
        """Takes room for max_sequences · max_context tokens (or kv_cache_tokens, if set), within kv_cache_fraction of
        the memory that is left. max_context and max_prefill_tokens of the options are numbers of tokens, not 0. Raises
        DeviceMemoryError, with the size needed and the size left, if not even one sequence fits."""
        self.backend = backend
        """Says how large a block is and how its memory lies, and computes attention over it."""
        self.block_size = backend.block_size
        self.max_blocks = math.ceil(options.max_context / self.block_size)
        """Blocks that one sequence needs at most."""
        self._layers, self.device = layers, device
        windows = [w if w is not None and w < options.max_context else None for w in (s.window for s in layers)]
        distinct = list(dict.fromkeys(windows))
        self.group_of = [distinct.index(window) for window in windows]
        """The group of each layer."""
        members = {window: [i for i, other in enumerate(windows) if other == window] for window in distinct}
        sizes = self._sizes(members, options)
        self.groups = [LayerGroup(*group, size) for group, size in zip(members.items(), sizes, strict=True)]
        self.nbytes = sum(self._block_bytes(group.layers) * group.num_blocks for group in self.groups)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.allocate()

    @property
    def capacity_tokens(self) -> int:
        """Tokens of full attention that fit."""
        return (max(group.num_blocks for group in self.groups) - 1) * self.block_size

    def allocate(self) -> None:
        """Take the memory (again). Raises DeviceMemoryError if it is not there; then nothing is held."""
        try:
            for layer, group in zip(self._layers, self.group_of, strict=True):
                keys, values = self.backend.allocate(layer, self.groups[group].num_blocks)
                self.keys.append(keys)
                self.values.append(values)
        except torch.OutOfMemoryError as error:
            self.free()
            raise DeviceMemoryError(
                f"the KV cache needs {self.nbytes / 2**20:,.0f} MiB, and that much is not free on {self.device} now"
            ) from error
        tensors = [[pages[layer] for pages in (self.keys, self.values) for layer in g.layers] for g in self.groups]
        self._copies = BlockCopies(tensors)

    def free(self) -> None:
        """Give the memory back."""
        self.keys.clear()
        self.values.clear()
        self._copies = BlockCopies([])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, copies: Sequence[Mapping[int, int]]) -> None:
        """Copy blocks, all as they were before: for each group, to block → from block."""
        self._copies.run(copies)

    def _block_bytes(self, layers: list[int]) -> int:
        shapes = [self._layers[layer] for layer in layers]
        return sum(s.kv_heads * (s.key_dim + s.value_dim) * s.dtype.itemsize for s in shapes) * self.block_size

    def _sizes(self, members: dict[int | None, list[int]], options: EngineOptions) -> list[int]:
        """The number of blocks of each group, given as window → layers."""
        max_context, fraction = options.max_context, options.kv_cache_fraction
        # A prompt is admitted only when all of it fits, so a group needs that much for one sequence at least.
        least, wanted = self.max_blocks + 1, []
        for window in members:
            reach = max_context if window is None else min(max_context, window + options.max_prefill_tokens)
            per_sequence = min(math.ceil(reach / self.block_size) + (window is not None), self.max_blocks)
            in_all = math.ceil(options.kv_cache_tokens / self.block_size) or per_sequence * options.max_sequences
            wanted.append(max(in_all + 1, least))
        left = memory_left(self.device)
        block_bytes = [self._block_bytes(layers) for layers in members.values()]
        needed = sum(block_bytes) * least
        if needed > left * fraction:
            raise DeviceMemoryError(
                f"the KV cache of a single sequence of {max_context} tokens needs {needed / 2**20:,.0f} MiB and "
                f"{self.device} has {left / 2**20:,.0f} MiB left, of which the engine may use {fraction:.0%}; "
                "lower max_context or raise kv_cache_fraction"
            )
        scale = min(1.0, left * fraction / sum(size * n for size, n in zip(block_bytes, wanted, strict=True)))
        return [max(least, int(n * scale)) for n in wanted]
