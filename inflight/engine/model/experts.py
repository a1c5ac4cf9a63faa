"""The experts of mixtures on a CPU, through Transformers' `ExpertsInterface`.

Transformers itself calls PyTorch's grouped product, which has kernels for GPUs alone: on a CPU it is a loop over all
experts. Here tokens are sorted by expert, and each of the two products is one call of a C kernel. It reads the experts
that have tokens, as they are in a slot.
"""

from typing import Any

import torch
from inflight_kernels import clamped_gate, gated_activation, grouped_linear, mix_experts, sort_choices
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

EXPERTS_NAME = "inflight"


def compute_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum [T, D] of the outputs of experts with Transformers' `use_experts_implementation`.
    hidden_states: [T, D]; top_k_index: i64[T, k], the experts of each token; top_k_weights: [T, k]."""
    if hidden_states.device.type != "cpu" or getattr(module, "has_post_expert_norm", False):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    experts, tokens, places = sort_choices(top_k_index, len(module.down_proj))
    x = hidden_states.index_select(0, tokens)
    if module.has_gate:
        x = _gate(module, _product(module, "gate_up_proj", x, experts))
    else:
        x = module.act_fn(_product(module, "up_proj", x, experts))
    x = _product(module, "down_proj", x, experts)
    return mix_experts(x, places, top_k_weights).to(hidden_states.dtype)


def _gate(module: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """Compute the gate: by a kernel if it is gpt-oss's, or Transformers' default one with SiLU."""
    gate = type(module)._apply_gate
    if gate.__module__ == ExpertsInterface.__module__ and isinstance(module.act_fn, (SiLUActivation, nn.SiLU)):
        return gated_activation(gate_up, "silu")
    if gate.__qualname__ == "GptOssExperts._apply_gate":
        return clamped_gate(gate_up, module.alpha, module.limit)
    return module._apply_gate(gate_up)


def _product(module: Any, name: str, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its expert's matrix, and add its bias."""
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
    return grouped_linear(x, weight.transpose(1, 2) if module.is_transposed else weight, experts, bias)


ExpertsInterface.register(EXPERTS_NAME, compute_experts)
