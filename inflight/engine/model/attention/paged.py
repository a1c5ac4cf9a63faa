"""Attention by the kernels of `inflight_kernels.attention`: C on a CPU, PyTorch's own on any device."""

import torch
from inflight_kernels import latent_attention
from inflight_kernels.attention import empty_cache_for_cpu, paged_attention
from inflight_kernels.latent import empty_latents_for_cpu

from inflight.engine.cache.kinds import LayerShape
from inflight.engine.model.attention.backend import CacheMemory, ForwardBatch
from inflight.engine.model.device import to_device


class PagedAttention:
    """use_c: use the C kernel, over a cache in the kernel's layout. Otherwise use `scaled_dot_product_attention` over
    gathered blocks. It runs everything everywhere, at the cost of copies. Latent layers use `latent_attention`."""

    block_size = 16

    def __init__(self, layers: list[LayerShape], device: torch.device, *, use_c: bool = False):
        self.name = "cpu" if use_c else "torch"
        self._layers, self._device, self._use_c = layers, device, use_c

    def allocate(self, layer: LayerShape, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._use_c and layer.latent:
            latents = empty_latents_for_cpu(blocks, layer.key_dim, layer.dtype)[:, :, None]
            return latents, latents[..., : layer.value_dim]
        if self._use_c:
            return empty_cache_for_cpu(blocks, layer.kv_heads, layer.key_dim, layer.value_dim, layer.dtype)
        shape = (blocks, self.block_size, layer.kv_heads)
        keys = torch.empty(*shape, layer.key_dim, dtype=layer.dtype, device=self._device)
        values = keys[..., : layer.value_dim]
        if not layer.latent:
            values = torch.empty(*shape, layer.value_dim, dtype=layer.dtype, device=self._device)
        return keys, values

    def begin(self, batch: ForwardBatch, memory: CacheMemory) -> None:
        self._memory = memory
        self._tables = [to_device(torch.from_numpy(table), self._device) for table in batch.tables]
        self._starts, self._contexts = torch.from_numpy(batch.starts), torch.from_numpy(batch.contexts)

    def attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        shape, memory = self._layers[layer], self._memory
        if shape.latent:
            return latent_attention(
                query,
                memory.keys[layer][:, :, 0],
                self._tables[memory.group_of[layer]],
                self._starts,
                self._contexts,
                value_dim=shape.value_dim,
                scale=shape.scale,
                window=shape.window,
            )
        return paged_attention(
            query,
            memory.keys[layer],
            memory.values[layer],
            self._tables[memory.group_of[layer]],
            self._starts,
            self._contexts,
            scale=shape.scale,
            window=shape.window,
            softcap=shape.softcap,
            sinks=sinks,
        )
