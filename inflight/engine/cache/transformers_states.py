"""The kind of Transformers' own layers with a state: Gated DeltaNet, Mamba-2, short convolutions.

The module computes as in Transformers. On a CPU it runs once over the tokens of all sequences: the functions with which
it mixes tokens are replaced by our kernels, which read and write the states of the engine where they are. Elsewhere the
states of the pass are copied into the module's `cache`, and the new ones are copied back. Single tokens are then
computed together, and longer chunks one after another.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from inflight_kernels import layer_states
from inflight_kernels._cpu import takes
from torch import nn
from transformers.activations import ACT2FN

from inflight.core.errors import UnsupportedModelError
from inflight.engine.cache.kinds import ChunkStates, LayerKind, StateTensor
from inflight.model_checks.mixers import (
    LAYER_TYPES,
    CarriedState,
    StatesElsewhere,
    advance,
    functions_replaced,
    keeps_state,
    names_in_forward,
    state_after_two,
)


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
    if _has_kernels(module, states, hidden_states):
        functions = {name: partial(_bound, function, states) for name, function in _KERNELS.items()}
        with functions_replaced(module, functions):
            return advance(module, StatesElsewhere(), hidden_states)
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


# ---- all chunks at once ---------------------------------------------------------------------------------------------


def _has_kernels(module: nn.Module, states: ChunkStates, hidden_states: torch.Tensor) -> bool:
    """Return whether the layer mixes tokens by functions that are replaced, in memory that the kernels take."""
    used = names_in_forward(type(module)) & _KERNELS.keys()
    columns, *recurrent = states.tensors
    return (
        "causal_conv1d_fn" in used
        and len(used) == len(states.tensors)
        and takes(columns, hidden_states)
        and all(takes(tensor) and tensor.dtype == torch.float32 for tensor in recurrent)
    )


def _bound(function: Callable[..., Any], states: ChunkStates, _: Any) -> Callable[..., Any]:
    chunks = layer_states.Chunks(states.index, torch.from_numpy(states.starts))
    return partial(function, states.tensors, chunks)


def _convolve(
    states: tuple[torch.Tensor, ...],
    chunks: layer_states.Chunks,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Map [1, C, T] to [1, C, T]."""
    x, is_silu = hidden_states[0].T, activation in ("silu", "swish")
    x = x if x.stride(1) == 1 else x.contiguous()
    out = layer_states.short_convolution(x, weight, bias, states[0], chunks, silu=is_silu).T[None]
    return out if activation is None or is_silu else ACT2FN[activation](out)


def _delta_rule(
    states: tuple[torch.Tensor, ...],
    chunks: layer_states.Chunks,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map query, key and value [1, T, H, D] to [1, T, H, Dv], and nothing. g: the logarithms of decays."""
    decay, normed = g[0].float().exp(), use_qk_l2norm_in_kernel
    out = layer_states.delta_rule(query[0], key[0], value[0], decay, beta[0], states[1], chunks, normed=normed)
    return out[None].to(query.dtype), out.new_empty(0)


def _scan(
    states: tuple[torch.Tensor, ...],
    chunks: layer_states.Chunks,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map hidden states [1, T, H, P] to [1, T, H, P], and nothing. dt: [1, T, H], before its bias and softplus."""
    steps = nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)
    out = layer_states.selective_scan(hidden_states[0], steps[0], A, B[0], C[0], D, states[1], chunks)
    return out[None].to(hidden_states.dtype), out.new_empty(0)


_KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
}
"""Functions of Transformers that mix the tokens of a prompt, and what replaces them."""

TRANSFORMERS_STATES = LayerKind(layer_types=LAYER_TYPES, detect=keeps_state, tensors=_tensors, forward=_forward)
