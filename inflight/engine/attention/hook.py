"""The engine's attention inside Transformers models, through `AttentionInterface`.

The model sees one row of packed tokens, [1, T]. Which sequences they belong to, and where keys and values go, is in
the ForwardBatch that is current while it runs.
"""

from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface

from inflight.engine.attention.backend import AttentionBackend, ForwardBatch
from inflight.engine.kv_cache import KVCache, LayerShape

ATTENTION_NAME = "inflight"


@dataclass(frozen=True, slots=True)
class _Pass:
    batch: ForwardBatch
    cache: KVCache
    backend: AttentionBackend


_pass: ContextVar[_Pass | None] = ContextVar("inflight_pass", default=None)
_recorder: ContextVar[dict[int, LayerShape] | None] = ContextVar("inflight_layer_recorder", default=None)


def run_packed(model: nn.Module, batch: ForwardBatch, cache: KVCache, backend: AttentionBackend) -> torch.Tensor:
    """The model's logits [M, V] for a batch that the backend has begun."""
    token = _pass.set(_Pass(batch, cache, backend))
    try:
        return model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            logits_to_keep=batch.rows,
            use_cache=False,
        ).logits[0]
    finally:
        _pass.reset(token)


def record_layers(model: nn.Module, **inputs: torch.Tensor) -> dict[int, LayerShape]:
    """Run a probe forward and return what each attention layer asked for, by layer index."""
    recorded: dict[int, LayerShape] = {}
    token = _recorder.set(recorded)
    try:
        model(**inputs, use_cache=False)
    finally:
        _recorder.reset(token)
    return recorded


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls: query [1, Hq, T, D] → output [1, T, Hq, Dv]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    recorder = _recorder.get()
    if recorder is not None:
        recorder[layer] = LayerShape(
            q_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=sliding_window,
            dtype=key.dtype,
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            softcap=softcap,
            sinks=s_aux is not None,
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    current = _pass.get()
    assert current is not None, "the engine's attention runs inside run_packed"
    cache, slots = current.cache, current.batch.slots[current.cache.group_of[layer]]
    where = (slots // cache.block_size, slots % cache.block_size)
    cache.keys[layer][where] = key[0].transpose(0, 1)
    cache.values[layer][where] = value[0].transpose(0, 1)
    return current.backend.attend(layer, query[0].transpose(0, 1), s_aux)[None], None


AttentionInterface.register(ATTENTION_NAME, attend)
