"""The memory of the KV cache: tensors in which the state of every layer is stored in blocks."""

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from inflight_kernels import BlockCopies

from inflight.core.errors import DeviceMemoryError
from inflight.core.options import EngineOptions
from inflight.engine.cache.kinds import ChunkStates, LayerShape, Paged, PerRow, StateKind, StateTensor
from inflight.engine.model.attention.backend import AttentionBackend, ForwardBatch, LayerGroup
from inflight.engine.model.device import memory_left, to_device

logger = logging.getLogger("inflight.engine")


class KVMemory:
    """The tensors of all layers. `KVCache` decides which sequence holds which block of them."""

    def __init__(
        self,
        layers: list[LayerShape],
        backend: AttentionBackend,
        options: EngineOptions,
        device: torch.device,
        states: Sequence[Sequence[StateTensor]] = (),
    ):
        """Take room for max_sequences · max_context tokens (or kv_cache_tokens, if set), within kv_cache_fraction of
        the memory that is left. max_context and max_prefill_tokens of the options are numbers of tokens, not 0. states:
        the state of each layer that keeps one per sequence. Raises DeviceMemoryError, with the size needed and the size
        left, if not even one sequence fits."""
        self.backend = backend
        """Chooses the size of blocks and the layout of their memory, and computes attention over it."""
        self.block_size = backend.block_size
        self.max_blocks = math.ceil(options.max_context / self.block_size)
        """Largest number of blocks of one sequence."""
        self._layers, self._state_layers, self.device = layers, states, device
        windows = [w if w is not None and w < options.max_context else None for w in (s.window for s in layers)]
        distinct = list(dict.fromkeys(windows))
        self.group_of = [distinct.index(window) for window in windows]
        """The group of each layer."""
        members = {window: [i for i, other in enumerate(windows) if other == window] for window in distinct}
        *sizes, self.num_states = self._sizes(members, options)
        self.groups = [LayerGroup(*group, size) for group, size in zip(members.items(), sizes, strict=True)]
        self.pools: list[tuple[StateKind, int]] = [
            (Paged(self.block_size, group.window), group.num_blocks) for group in self.groups
        ]
        """The kinds of state in this memory, and the number of blocks of each, as `KVCache` takes them."""
        self.nbytes = sum(self._block_bytes(group.layers) * group.num_blocks for group in self.groups)
        if states:
            self.pools.append((PerRow(), self.num_states))
            self.nbytes += self._state_bytes() * self.num_states
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.states: list[tuple[torch.Tensor, ...]] = []
        """For each layer with a state per sequence, its tensors of all states."""
        self.allocate()

    @property
    def capacity_tokens(self) -> int:
        """Tokens of full attention that fit; without attention, tokens of all sequences that fit."""
        blocks = max((group.num_blocks for group in self.groups), default=(self.num_states - 1) * self.max_blocks + 1)
        return (blocks - 1) * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return self._block_bytes([layer for group in self.groups for layer in group.layers]) // self.block_size

    def allocate(self) -> None:
        """Take the memory, all or nothing, at the start or after `free`. Raises DeviceMemoryError."""
        try:
            for layer, group in zip(self._layers, self.group_of, strict=True):
                keys, values = self.backend.allocate(layer, self.groups[group].num_blocks)
                self.keys.append(keys)
                self.values.append(keys[..., : layer.value_dim] if layer.latent else values)
            for tensors in self._state_layers:
                shapes = (((self.num_states, *tensor.shape), tensor.dtype) for tensor in tensors)
                self.states.append(tuple(torch.zeros(s, dtype=dtype, device=self.device) for s, dtype in shapes))
        except torch.OutOfMemoryError as error:
            self.free()
            raise DeviceMemoryError(
                f"the KV cache needs {self.nbytes / 2**20:,.0f} MiB, and that much is not free on {self.device} now"
            ) from error
        tensors = [[tensor for layer in group.layers for tensor in self._stored(layer)] for group in self.groups]
        if self.states:
            tensors.append([tensor for layer in self.states for tensor in layer])
        self._copies = BlockCopies(tensors)

    def free(self) -> None:
        """Give the memory back."""
        self.keys.clear()
        self.values.clear()
        self.states.clear()
        self._copies = BlockCopies([])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_blocks(self, copies: Sequence[Mapping[int, int]]) -> None:
        """Copy blocks: for each kind, to block → from block. All are read before any is written."""
        if any(copies):
            self._copies.run(copies)

    def begin(self, batch: ForwardBatch) -> None:
        """Prepare a pass before its first layer."""
        self.backend.begin(batch, self)
        if batch.states is None:
            return
        # Keys and values are written before they are read. But a layer continues from its state, so the state of an
        # earlier sequence must be gone. Clearing it here, for all layers, leaves no kind of layer the chance to forget.
        first = np.flatnonzero(batch.contexts == np.diff(batch.starts))
        if len(first):
            index = batch.states[to_device(torch.from_numpy(first), self.device)]
            for tensors in self.states:
                for tensor in tensors:
                    tensor[index] = 0

    def chunk_states(self, layer: int, batch: ForwardBatch) -> ChunkStates:
        """The states of the n-th layer that keeps one per sequence."""
        assert batch.states is not None
        return ChunkStates(self.states[layer], batch.states, batch.starts, batch.num_single)

    def _stored(self, layer: int) -> list[torch.Tensor]:
        """The tensors of an attention layer that own memory."""
        return [self.keys[layer]] if self._layers[layer].latent else [self.keys[layer], self.values[layer]]

    def _state_bytes(self) -> int:
        return sum(math.prod(t.shape) * t.dtype.itemsize for layer in self._state_layers for t in layer)

    def _block_bytes(self, layers: list[int]) -> int:
        shapes = [self._layers[layer] for layer in layers]
        return sum(shape.token_dim * shape.dtype.itemsize for shape in shapes) * self.block_size

    def _sizes(self, members: dict[int | None, list[int]], options: EngineOptions) -> list[int]:
        """The number of blocks of each group, given as window → layers, and the number of states."""
        max_context, fraction = options.max_context, options.kv_cache_fraction
        # A prompt is admitted only when all of it fits, so each group needs that much for at least one sequence.
        least, wanted = [self.max_blocks + 1] * len(members), []
        for window in members:
            reach = max_context if window is None else min(max_context, window + options.max_prefill_tokens)
            per_sequence = min(math.ceil(reach / self.block_size) + (window is not None), self.max_blocks)
            in_all = math.ceil(options.kv_cache_tokens / self.block_size) or per_sequence * options.max_sequences
            wanted.append(max(in_all + 1, least[0]))
        if 0 < options.kv_cache_tokens < max_context:
            logger.warning(
                "kv_cache_tokens=%d is raised to %d, for one sequence of max_context tokens",
                options.kv_cache_tokens,
                max_context,
            )
        # One state for each running sequence, as many again for snapshots and forks that wait, and one for a snapshot
        # where prompts branch off.
        least.append(2)
        wanted.append(2 * options.max_sequences + 2)
        left = memory_left(self.device)
        block_bytes = [*(self._block_bytes(layers) for layers in members.values()), self._state_bytes()]
        needed = sum(size * n for size, n in zip(block_bytes, least, strict=True))
        if needed > left * fraction:
            raise DeviceMemoryError(
                f"the KV cache of a single sequence of {max_context} tokens needs {needed / 2**20:,.0f} MiB and "
                f"{self.device} has {left / 2**20:,.0f} MiB left, of which the engine may use {fraction:.0%}; "
                "lower max_context or raise kv_cache_fraction"
            )
        scale = min(1.0, left * fraction / sum(size * n for size, n in zip(block_bytes, wanted, strict=True)))
        return [max(few, int(n * scale)) for few, n in zip(least, wanted, strict=True)]
