"""The engine's attention inside Transformers models, through `AttentionInterface`, and its layers with a state.

The model sees one row of packed tokens, [1, T]. The current ForwardBatch has their sequences, and the places of their
keys and values. The n-th call of attention in a pass belongs to the n-th attention layer, and likewise for layers with
a state per sequence. A run that records calls finds these layers (`cache/classify.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from inflight.engine.cache.kinds import ChunkStates, LayerKind, LayerShape, StateTensor
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import ForwardBatch
from inflight.engine.model.attention.latent import LatentHeads
from inflight.model_checks.indexers import NoChoice, sparse_attention
from inflight.model_checks.masks import BOTH_SIDES, mask_note, noted

ATTENTION_NAME = "inflight"


@dataclass(slots=True)
class _Pass:
    batch: ForwardBatch
    memory: KVMemory
    calls: int = 0
    """Attention layers that ran so far."""
    state_calls: int = 0
    """Layers with a state per sequence that ran so far."""


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call of a layer that mixes tokens."""

    module: nn.Module
    shape: LayerShape | None = None
    """For attention."""
    state: tuple[StateTensor, ...] = ()
    """For a layer with a state per sequence."""
    sees_later: bool = False
    """Tokens attend to later ones, as in an encoder."""


_current: ContextVar[_Pass | list[Call] | None] = ContextVar("inflight_pass", default=None)
"""The pass that calls belong to, or the list in which they are recorded."""


@contextmanager
def running(batch: ForwardBatch, memory: KVMemory) -> Iterator[None]:
    """Run a pass inside the block: attention, and layers with a state, belong to this batch."""
    token = _current.set(_Pass(batch, memory))
    try:
        yield
    finally:
        _current.reset(token)


def run_packed(model: nn.Module, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
    """Return the model's logits [M, V] for a batch that the memory has begun."""
    with running(batch, memory):
        logits = model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            logits_to_keep=batch.rows,
            use_cache=False,
        ).logits[0]
    return logits if len(logits) == len(batch.rows) else logits[batch.rows]  # some models return all of them


def route(module: nn.Module, kind: LayerKind) -> None:
    """Let a module, and its deep copies, compute from the states of sequences during passes."""
    own = type(module).forward

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        if isinstance(current, _Pass):
            return kind.forward(module, next_states(), *args, **kwargs)
        if current is not None:
            current.append(Call(module, state=tuple(kind.tensors(module))))
        return own(module, *args, **kwargs)

    # A method of the instance is copied with it, so that the module of every slot has its own.
    module.forward = MethodType(forward, module)


def next_states() -> ChunkStates:
    """Return the states of the next layer that keeps one per sequence, during a pass."""
    current = _current.get()
    assert isinstance(current, _Pass)
    layer = current.state_calls
    current.state_calls += 1
    return current.memory.chunk_states(layer, current.batch)


def has_state(module: nn.Module) -> bool:
    """Return whether a module computes from the states of sequences during passes."""
    return isinstance(vars(module).get("forward"), MethodType)


def keep_latents(module: nn.Module) -> None:
    """Let a module with latent attention, and its deep copies, hand latents to `attend` during passes."""
    own = type(module).expand_kv  # type: ignore[attr-defined]

    def expand_kv(module: nn.Module, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return own(module, latent, rotated) if _current.get() is None else (latent, rotated)

    module.expand_kv = MethodType(expand_kv, module)  # type: ignore[assignment]


_ALL_KEYS = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
"""The note of `mask_note` for full attention."""


def attend_to_all_keys(model: nn.Module) -> None:
    """Let sparse attention in a model, and in its deep copies, attend to all keys during passes."""
    NoChoice.begin(model)
    for module in sparse_attention(model):
        module.register_forward_pre_hook(_note_all_keys, with_kwargs=True)


def _note_all_keys(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if isinstance(_current.get(), _Pass):
        options = {**options, "attention_mask": _ALL_KEYS}
    return args, options


@torch.inference_mode()
def record_calls(model: PreTrainedModel) -> list[Call]:
    """Run the model over two tokens, and return the calls of its layers in their order. Raises UnsupportedModelError
    for a mask that the engine does not support, and the exceptions of the model."""
    positions = torch.arange(2, device=next(model.parameters()).device)[None]
    calls: list[Call] = []
    token = _current.set(calls)
    # Transformers makes masks only for an attention that has a mask function. This one notes the window of the mask.
    functions = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping  # Transformers looks mask functions up here
    functions[ATTENTION_NAME] = mask_note
    try:
        model(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            logits_to_keep=positions[0, 1:],
            use_cache=False,
        )
    finally:
        del functions[ATTENTION_NAME]
        _current.reset(token)
    return calls


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
    """Compute attention for Transformers: query [1, Hq, T, D] → output [1, T, Hq, Dv]. With latent attention the key
    is the latent [1, 1, T, L], and the value the rotated key [1, 1, T, R]."""
    current = _current.get()
    heads = LatentHeads.of(module) if "expand_kv" in vars(module) else None
    if heads is not None:
        key, value = torch.cat((key, value), 3), key
    if isinstance(current, list):
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
            latent=heads is not None,
        )
        current.append(Call(module, shape, sees_later=note == BOTH_SIDES or (note is None and not causal)))
        value_dim = value.shape[-1] if heads is None else heads.values_HWL.shape[1]
        return value.new_zeros(1, query.shape[2], query.shape[1], value_dim), None
    if current is None:
        raise RuntimeError("the engine's attention runs inside run_packed")
    noted(attention_mask, type(module).__name__)  # raises for a mask of the model's own
    layer = current.calls
    current.calls += 1
    memory = current.memory
    cache_index = current.batch.cache_index[memory.group_of[layer]]
    where = (cache_index // memory.block_size, cache_index % memory.block_size)
    memory.keys[layer][where] = key[0].transpose(0, 1)
    query = query[0].transpose(0, 1)
    if heads is not None:
        return heads.expand(memory.backend.attend(layer, heads.absorb(query), s_aux))[None], None
    memory.values[layer][where] = value[0].transpose(0, 1)
    return memory.backend.attend(layer, query, s_aux)[None], None


AttentionInterface.register(ATTENTION_NAME, attend)
