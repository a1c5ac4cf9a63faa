"""The Triton kernels of `tokenwise`: a program per row for RMSNorm, per row and block of columns for the activation."""

from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels._launch import guarded
from inflight_kernels._norm import Norm

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
        launch = guarded(gated_activation_kernel[(rows, triton.cdiv(width, BLOCK))])
        launch(gate_up, out, gate_up.stride(0), I=width, GELU=activation == "gelu_tanh", BLOCK=BLOCK)
    return out


@triton.jit
def weigh(normed, weight, offset, DTYPE: tl.constexpr, CAST_FIRST: tl.constexpr):
    """Return normed values times offset + weight, all fp32, rounded to DTYPE as Transformers rounds them."""
    if CAST_FIRST:
        normed = normed.to(DTYPE).to(tl.float32)
    return (normed * (offset + weight)).to(DTYPE)


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    s,
    stride_x,
    stride_residual,
    eps,
    offset,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CAST_FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * stride_residual + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(s.dtype.element_ty)
        tl.store(s + row * D + columns, rounded, mask=mask)
        values = rounded.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * D + columns, weigh(normed, w, offset, y.dtype.element_ty, CAST_FIRST), mask=mask)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    y, s, stride_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device), None, 0
    if residual is not None:
        residual = residual if residual.stride(1) == 1 else residual.contiguous()
        s, stride_residual = torch.empty_like(y), residual.stride(0)
    if rows:
        block = triton.next_power_of_2(width)
        launch = guarded(rms_norm_kernel[(rows,)])
        launch(
            x,
            residual,
            norm.weight.contiguous(),
            y,
            s,
            x.stride(0),
            stride_residual,
            norm.eps,
            norm.offset,
            D=width,
            BLOCK=block,
            CAST_FIRST=norm.cast_first,
            num_warps=min(max(block // 512, 1), 16),
        )
    return y, x if s is None else s
