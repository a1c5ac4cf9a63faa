"""The kind of Transformers' own layers with a state: Gated DeltaNet, Mamba-2, short convolutions.

The module computes as in Transformers. Its `cache` is a copy of the states of the sequences in the pass, and the new
states are written back. Single tokens are computed together, and longer chunks one after another.
"""

from typing import Any

import torch
from torch import nn

from inflight.core.errors import UnsupportedModelError
from inflight.engine.cache.kinds import ChunkStates, LayerKind, StateTensor
from inflight.model_checks.mixers import LAYER_TYPES, CarriedState, advance, keeps_state, state_after_two


def _tensors(module: nn.Module) -> list[StateTensor]:
    return [StateTensor(tuple(tensor.shape), tensor.dtype) for tensor in state_after_two(module)]


def _forward(
    module: nn.Module,
    states: ChunkStates,
    hidden_states: torch.Tensor,
    *_: Any,
    attention_mask: torch.Tensor | None = None,
    **__: Any,
) -> torch.Tensor:
    """Map hidden states [1, T, D] of all chunks to [1, T, D]."""
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} receives a mask of its model")
    hidden_TD, single = hidden_states[0], states.num_single
    parts = [_advance(module, states, slice(0, single), hidden_TD[:single, None])[:, 0]] if single else []
    for chunk in range(single, len(states.index)):
        start, end = states.starts[chunk : chunk + 2]
        parts.append(_advance(module, states, slice(chunk, chunk + 1), hidden_TD[None, start:end])[0])
    return torch.cat(parts)[None]


def _advance(module: nn.Module, states: ChunkStates, chunks: slice, hidden_BTD: torch.Tensor) -> torch.Tensor:
    """Compute the next tokens of these chunks' sequences, and write their new states."""
    index = states.index[chunks]
    carried = CarriedState(tuple(tensor.index_select(0, index) for tensor in states.tensors), in_place=True)
    out = advance(module, carried, hidden_BTD)
    for tensor, new in zip(states.tensors, carried.state, strict=True):
        tensor.index_copy_(0, index, new.to(tensor.dtype))
    return out


TRANSFORMERS_STATES = LayerKind(layer_types=LAYER_TYPES, detect=keeps_state, tensors=_tensors, forward=_forward)
