"""The engine's attention inside Transformers models, through `AttentionInterface`.

The model sees one row of packed tokens, [1, T]. Which sequences they belong to, and where keys and values go, is in
the ForwardBatch that is current while it runs. The n-th call of a pass belongs to the n-th attention layer.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from inflight.core.errors import UnsupportedModelError
from inflight.engine.attention.backend import ForwardBatch, KVMemory, LayerShape
from inflight.models.masks import BOTH_SIDES, mask_note, noted

ATTENTION_NAME = "inflight"


@dataclass(slots=True)
class _Pass:
    batch: ForwardBatch
    memory: KVMemory
    calls: int = 0


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one call of attention asked for in a probe."""

    module: nn.Module
    shape: LayerShape
    sees_later: bool
    """Tokens attend to those behind them, as in an encoder."""


_pass: ContextVar[_Pass | None] = ContextVar("inflight_pass", default=None)
_recorder: ContextVar[list[AttentionCall] | None] = ContextVar("inflight_layer_recorder", default=None)


def run_packed(model: nn.Module, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
    """The model's logits [M, V] for a batch that the memory's backend has begun."""
    token = _pass.set(_Pass(batch, memory))
    try:
        logits = model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            logits_to_keep=batch.rows,
            use_cache=False,
        ).logits[0]
    finally:
        _pass.reset(token)
    return logits if len(logits) == len(batch.rows) else logits[batch.rows]  # some models give all of them


def record_calls(model: nn.Module, **inputs: torch.Tensor) -> list[AttentionCall]:
    """Run a probe forward and return its calls of attention, in their order. Meanwhile Transformers asks us for masks,
    which it does not do for an attention without a mask function: what reaches the layers is a note of what the mask
    would show."""
    recorded: list[AttentionCall] = []
    token = _recorder.set(recorded)
    functions = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping  # where Transformers itself looks
    functions[ATTENTION_NAME] = mask_note
    try:
        model(**inputs, use_cache=False)
    finally:
        del functions[ATTENTION_NAME]
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
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls: query [1, Hq, T, D] → output [1, T, Hq, Dv]."""
    recorder = _recorder.get()
    if recorder is not None:
        note = noted(attention_mask, type(module).__name__)
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        shape = LayerShape(
            q_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=sliding_window if note is None else note or None,
            dtype=key.dtype,
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            softcap=softcap,
            sinks=s_aux is not None,
        )
        recorder.append(AttentionCall(module, shape, note == BOTH_SIDES or (note is None and not causal)))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    current = _pass.get()
    if current is None:
        raise RuntimeError("the engine's attention runs inside run_packed")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} hands a mask of its own to its attention")
    layer = current.calls
    current.calls += 1
    memory = current.memory
    cache_index = current.batch.cache_index[memory.group_of[layer]]
    where = (cache_index // memory.block_size, cache_index % memory.block_size)
    memory.keys[layer][where] = key[0].transpose(0, 1)
    memory.values[layer][where] = value[0].transpose(0, 1)
    return memory.backend.attend(layer, query[0].transpose(0, 1), s_aux)[None], None


AttentionInterface.register(ATTENTION_NAME, attend)
