"""The gated activation of a transformer's MLP: act(gate) · up (Shazeer 2020, "GLU Variants Improve Transformer").

silu(x) = x · σ(x);  gelu_tanh(x) = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
T tokens, I intermediate.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from inflight_kernels import _cpu

Activation = Literal["silu", "gelu_tanh"]


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [T, 2·I] of any float dtype, the gate in the first half → act(gate) · up [T, I] in the same dtype; the
    activation is computed in fp32 and rounded before the product. Rows may lie any distance apart.
    Raises ValueError if the shape does not fit or the activation is not known."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"expected gate_up [T, 2·I], got {list(gate_up.shape)}")
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"expected activation 'silu' or 'gelu_tanh', got {activation!r}")
    if gate_up.is_cuda:
        from inflight_kernels import _activation_triton

        return _activation_triton.gated_activation(gate_up, activation)
    if _cpu.takes(gate_up):
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        kind, is_bf16 = int(activation == "gelu_tanh"), gate_up.dtype == torch.bfloat16
        if _cpu.call("gated_activation", gate_up, gate_up.stride(0), out, is_bf16, *out.shape, kind):
            return out
    return gated_activation_reference(gate_up, activation)


def gated_activation_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The same in plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)
