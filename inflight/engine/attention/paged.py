"""Attention by the kernels of `inflight_kernels.attention`: C on a CPU, PyTorch's own anywhere."""

import torch
from inflight_kernels.attention import empty_cache_for_cpu, paged_attention, paged_attention_reference

from inflight.engine.attention.backend import ForwardBatch, LayerShape
from inflight.engine.device import to_device
from inflight.engine.kv_memory import KVMemory


class _PagedAttention:
    name = ""
    block_size = 16
    _function = staticmethod(paged_attention_reference)

    def __init__(self, layers: list[LayerShape], device: torch.device):
        self._layers, self._device = layers, device

    def begin(self, batch: ForwardBatch, memory: KVMemory) -> None:
        self._batch, self._memory = batch, memory
        self._tables = [to_device(torch.from_numpy(table), self._device) for table in batch.tables]

    def attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        shape, batch, memory = self._layers[layer], self._batch, self._memory
        return self._function(
            query,
            memory.keys[layer],
            memory.values[layer],
            self._tables[memory.group_of[layer]],
            batch.starts,
            batch.contexts,
            scale=shape.scale,
            window=shape.window,
            softcap=shape.softcap,
            sinks=sinks,
        )


class CpuAttention(_PagedAttention):
    """The C kernel over a cache in the layout that it likes."""

    name = "cpu"
    _function = staticmethod(paged_attention)

    def allocate(self, layer: LayerShape, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        return empty_cache_for_cpu(blocks, layer.kv_heads, layer.key_dim, layer.value_dim, layer.dtype)


class TorchAttention(_PagedAttention):
    """`scaled_dot_product_attention` over gathered blocks: runs everything everywhere, and costs copies."""

    name = "torch"

    def allocate(self, layer: LayerShape, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, self.block_size, layer.kv_heads)
        keys = torch.empty(*shape, layer.key_dim, dtype=layer.dtype, device=self._device)
        return keys, torch.empty(*shape, layer.value_dim, dtype=layer.dtype, device=self._device)
