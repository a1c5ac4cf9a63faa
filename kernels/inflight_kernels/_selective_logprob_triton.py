"""The Triton kernels of `selective_logprob`, one program per row."""

from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels._launch import guarded
from inflight_kernels._linear_logprob_triton import LOWEST, fast_exp

BLOCK_V: Any = 4096


@triton.jit
def forward_kernel(
    logits, tokens, temperatures, logprobs, lses, stride_n, V: tl.constexpr, BLOCK: tl.constexpr = BLOCK_V
):
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = 1.0 / tl.load(temperatures + row)
    base = logits + row * stride_n
    peak = tl.cast(LOWEST, tl.float32)
    total = 0.0
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < V, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_peak = tl.maximum(peak, tl.max(z, 0))
        total = total * tl.exp(peak - new_peak) + tl.sum(fast_exp(z - new_peak), 0)
        peak = new_peak
    lse = peak + tl.log(total)
    chosen = tl.load(base + tl.load(tokens + row)).to(tl.float32) * inverse_temperature
    tl.store(lses + row, lse)
    tl.store(logprobs + row, chosen - lse)


@triton.jit
def backward_kernel(
    logits, tokens, temperatures, lses, grads, grad_logits, stride_n, V: tl.constexpr, BLOCK: tl.constexpr = BLOCK_V
):
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = 1.0 / tl.load(temperatures + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < V
    z = tl.load(logits + row * stride_n + columns, mask=mask, other=float("-inf")).to(tl.float32)
    # In a row of nothing but −∞ the difference of two −∞ would make p NaN.
    p = tl.where(z == float("-inf"), 0.0, fast_exp(z * inverse_temperature - tl.load(lses + row)))
    hit = (columns == tl.load(tokens + row)).to(tl.float32)
    grad = (hit - p) * tl.load(grads + row) * inverse_temperature
    tl.store(grad_logits + row * V + columns, grad.to(grad_logits.dtype.element_ty), mask=mask)


class SelectiveLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        rows, vocabulary = logits.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        tokens, temperatures = tokens.contiguous(), temperatures.float().contiguous()
        logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
        lses = torch.empty_like(logprobs)
        if rows:
            launch = guarded(forward_kernel[(rows,)])
            launch(logits, tokens, temperatures, logprobs, lses, logits.stride(0), V=vocabulary)
        ctx.save_for_backward(logits, tokens, temperatures, lses)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, tokens, temperatures, lses = ctx.saved_tensors
        rows, vocabulary = logits.shape
        grad_logits = torch.empty(rows, vocabulary, dtype=logits.dtype, device=logits.device)
        if rows:
            grad = grads[0].contiguous()
            launch = guarded(backward_kernel[(rows, triton.cdiv(vocabulary, BLOCK_V))])
            launch(logits, tokens, temperatures, lses, grad, grad_logits, logits.stride(0), V=vocabulary)
        return grad_logits, None, None
