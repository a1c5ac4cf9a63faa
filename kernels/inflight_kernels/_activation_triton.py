"""The Triton kernel of `activation`, one program per row and block of columns."""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK: Any = 1024


@triton.jit
def gated_activation_kernel(gate_up, out, stride_t, I: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < I
    gate = tl.load(gate_up + row * stride_t + columns, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * stride_t + I + columns, mask=mask).to(tl.float32)
    if GELU:
        # (1 + tanh(a)) / 2 = σ(2a), here with 2 √(2/π)
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    activated = activated.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * I + columns, (activated * up).to(out.dtype.element_ty), mask=mask)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        launch: Any = gated_activation_kernel[(rows, triton.cdiv(width, BLOCK))]
        launch(gate_up, out, gate_up.stride(0), I=width, GELU=activation == "gelu_tanh", BLOCK=BLOCK)
    return out
