"""Operations of a decoder's layers on single tokens: products with weights, activations and norms.

The gated activation of an MLP is act(gate) · up (Shazeer 2020, "GLU Variants Improve Transformer"), with silu(x) = x ·
σ(x) or gelu_tanh(x) = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))). RMSNorm is n = x / √(mean(x²) + ε) in fp32 (Zhang
and Sennrich 2019, "Root Mean Square Layer Normalization") and y = round(n · (offset + weight)), with the rounding of
Transformers.

T tokens, I intermediate, D hidden, E experts.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from inflight_kernels import _cpu
from inflight_kernels._norm import Norm

Activation = Literal["silu", "gelu_tanh"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [T, K] by weight [N, K] and add bias [N] → [T, N], by the fastest product for weights as a slot stores
    them.

    On a CPU with AVX2, a kernel of this package computes few rows. In float32 it takes any number of rows with AVX-512,
    else 32. In bfloat16 it takes 48 rows with products of bfloat16, or 8 with AMX, and any number without such
    products. Each row of its result is the same, bit for bit, whatever the other rows are. So a sequence that continues
    elsewhere, or whose keys are computed again, continues with the same tokens. All other products are computed by
    oneDNN, in one of few numbers of rows. In fp32 it takes half the time of the BLAS that `F.linear` uses
    (docs/performance.md).
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    (rows, width), (columns, depth) = x.shape, weight.shape
    fits = width == depth and (bias is None or bias.shape == (columns,))
    if fits and weight.is_contiguous() and _cpu.takes(*given):
        out = x.new_empty(rows, columns)
        is_bf16 = x.dtype == torch.bfloat16
        if _cpu.call("linear", x, x.stride(0), weight, bias, out, is_bf16, rows, columns, width):
            return out
    return product(x, weight, bias)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, groups: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each row of x [S, K] by the matrix of its group in weight [E, N, K], and add the group's row of bias
    [E, N] → [S, N], on a CPU. groups: i64[S], rising, so that the rows of a group share a read of its matrix. The
    matrices, or their transposes, are contiguous for speed. Raises IndexError for a group beyond E.

    Few rows per group are computed by a kernel with the promise of `linear`: a row does not depend on other rows. In a
    recorded pass the kernel takes any number of rows, because a replay can have other groups.
    """
    fits = x.shape[1] == weight.shape[2] and groups.dtype == torch.int64 and groups.is_contiguous()
    fits &= bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous() and _cpu.takes(x, bias))
    transposed = not weight.is_contiguous()
    stored = weight.transpose(1, 2) if transposed else weight
    if fits and stored.is_contiguous() and _cpu.takes(x, stored):
        out, is_bf16 = x.new_empty(len(x), weight.shape[1]), x.dtype == torch.bfloat16
        sizes, any_rows = (len(x), weight.shape[1], weight.shape[2]), _cpu.is_recorded()
        kernel, x_read = ("grouped_linear_transposed", x.float()) if transposed else ("grouped_linear", x)
        rows = (x_read, x_read.stride(0), stored, bias, groups, len(weight))
        if _cpu.call(kernel, *rows, out, is_bf16, *sizes, any_rows):
            return out
    return grouped_linear_reference(x, weight, groups, bias)


def grouped_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, groups: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the same with a product for each group."""
    found, counts = groups.unique_consecutive(return_counts=True)
    parts = zip(x.split(counts.tolist()), found.tolist(), strict=True)
    products = (product(part, weight[group], None if bias is None else bias[group]) for part, group in parts)
    return torch.cat([x.new_empty(0, weight.shape[1]), *products])


def sort_choices(choices: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the experts i64[T, k] that tokens have chosen → (experts, tokens, places): the experts i64[T·k], rising, as
    `grouped_linear` takes them; the token i64[T·k] of each; and the place i64[T, k] of each choice among them. PyTorch
    sorts experts beyond `num_experts`."""
    choices = choices.contiguous()
    if choices.is_cpu and choices.dtype == torch.int64 and _cpu.library() is not None:
        experts, tokens = choices.new_empty(choices.numel()), choices.new_empty(choices.numel())
        places = torch.empty_like(choices)
        given = (choices, choices.numel(), choices.shape[1], num_experts, experts, tokens, places)
        if _cpu.call("sort_choices", *given):
            return experts, tokens, places
    return sort_choices_reference(choices)


def sort_choices_reference(choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the same in plain PyTorch."""
    experts, order = choices.flatten().sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return experts, order // choices.shape[1], places.view(choices.shape)


def mix_experts(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add up the rows of x [S, D] at places i64[T, k], times weights [T, k] of any float dtype → [T, D] in x's dtype,
    summed in fp32. Places are not checked against their range."""
    weights = weights.float().contiguous()
    if _cpu.takes(x) and x.is_contiguous() and places.is_contiguous():
        out = x.new_empty(len(places), x.shape[1])
        if _cpu.call("mix_experts", x, places, weights, out, x.dtype == torch.bfloat16, *places.shape, x.shape[1]):
            return out
    return mix_experts_reference(x, places, weights)


def mix_experts_reference(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the same in plain PyTorch."""
    return F.embedding_bag(places, x.float(), per_sample_weights=weights.float(), mode="sum").to(x.dtype)


def unrounded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply as `linear` does, but keep a GPU's float32 sums of products of bfloat16 or float16: [T, N] in float32.
    On a CPU, and for float32, this is the result of `linear`."""
    if x.device.type == "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return linear(x, weight, bias)
    out = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out.add_(bias)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by a library alone. On a CPU that is faster for many rows, and the last bits of a row depend on the
    number of rows."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = len(x)
    # Rows are rounded up to 4 binary digits and zeros, by at most an eighth: oneDNN keeps half a megabyte of code for
    # every number of rows that it has seen, up to a thousand of them per process.
    if more := -rows % (1 << max(0, rows.bit_length() - 4)):
        x = F.pad(x, (0, 0, 0, more))
    if x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")[:rows]
    return F.linear(x, weight, bias)[:rows]


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute from gate_up [T, 2·I] of any float dtype, the gate in the first half → act(gate) · up [T, I] in the same
    dtype; the activation is computed in fp32 and rounded before the product. Rows can have any distance. Raises
    ValueError if the shape does not fit or the activation is unknown."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"expected gate_up [T, 2·I], got {list(gate_up.shape)}")
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"expected activation 'silu' or 'gelu_tanh', got {activation!r}")
    if gate_up.is_cuda:
        from inflight_kernels import _tokenwise_triton

        return _tokenwise_triton.gated_activation(gate_up, activation)
    if _cpu.takes(gate_up):
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        kind, is_bf16 = int(activation == "gelu_tanh"), gate_up.dtype == torch.bfloat16
        if _cpu.call("gated_activation", gate_up, gate_up.stride(0), out, is_bf16, *out.shape, kind):
            return out
    return gated_activation_reference(gate_up, activation)


def gated_activation_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute the same in plain PyTorch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def clamped_gate(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Compute the gate of gpt-oss from gate_up [T, 2·I] of any float dtype, with gates at even places and the others
    at odd ones → [T, I] in the same dtype: g · σ(alpha · g) · (u + 1). The gate g is at most `limit`, and u is within
    ±limit. On a CPU it is computed in fp32. Rows can have any distance."""
    if _cpu.takes(gate_up):
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        is_bf16 = gate_up.dtype == torch.bfloat16
        if _cpu.call("clamped_gate", gate_up, gate_up.stride(0), out, is_bf16, *out.shape, alpha, limit):
            return out
    return clamped_gate_reference(gate_up, alpha, limit)


def clamped_gate_reference(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Compute the same in plain PyTorch."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Compute from x [T, D] of any float dtype → y [T, D] in x's dtype. Rows of x can have any distance. Raises
    ValueError if the shapes do not fit."""
    return add_rms_norm(x, None, norm)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute from x and residual [T, D] of one dtype → (y, s), both [T, D]: s = x + residual rounded to that dtype, or
    x without a residual, and y = rms_norm(s). Raises ValueError as `rms_norm` does."""
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"expected a residual like x, {x.dtype} {list(x.shape)}, got {residual.dtype} {list(residual.shape)}"
        )
    if x.ndim != 2 or norm.weight.shape != x.shape[1:]:
        raise ValueError(f"expected x [T, D] and weight [D], got {list(x.shape)} and {list(norm.weight.shape)}")
    if x.is_cuda:
        from inflight_kernels import _tokenwise_triton

        return _tokenwise_triton.add_rms_norm(x, residual, norm)
    if _cpu.takes(x, norm.weight, *(() if residual is None else (residual,))):
        y = x.new_empty(x.shape)
        s, stride = (None, 0) if residual is None else (torch.empty_like(y), residual.stride(0))
        is_bf16 = x.dtype == torch.bfloat16
        if _cpu.call("rms_norm", x, x.stride(0), residual, stride, s, norm.weight, y, is_bf16, *x.shape, *norm[1:]):
            return y, x if s is None else s
    return add_rms_norm_reference(x, residual, norm)


def rms_norm_reference(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Compute `rms_norm` over the last dimension in plain PyTorch, for x with any number of dimensions."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.cast_first:
        normed = normed.to(x.dtype).float()
    return (normed * (norm.offset + norm.weight.float())).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `add_rms_norm` in plain PyTorch."""
    s = x if residual is None else x + residual
    return rms_norm_reference(s, norm), s
