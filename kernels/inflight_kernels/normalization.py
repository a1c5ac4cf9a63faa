"""RMSNorm, alone and behind a residual sum, with the rounding of Transformers.

n = x / √(mean(x²) + ε) in fp32 (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization");
y = round(n · (offset + weight)). T tokens, D hidden.
"""

import torch

from inflight_kernels import _cpu
from inflight_kernels._norm import Norm


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x [T, D] of any float dtype → y [T, D] in x's dtype. Rows of x may lie any distance apart.
    Raises ValueError if the shapes do not fit."""
    return _add_rms_norm(x, None, norm)[0]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual [T, D] of one dtype → (y, s), both [T, D]: s = x + residual rounded to that dtype,
    y = rms_norm(s). Raises ValueError as `rms_norm` does."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"expected a residual like x, {x.dtype} {list(x.shape)}, got {residual.dtype} {list(residual.shape)}"
        )
    return _add_rms_norm(x, residual, norm)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, s); without a residual s is x."""
    if x.ndim != 2 or norm.weight.shape != x.shape[1:]:
        raise ValueError(f"expected x [T, D] and weight [D], got {list(x.shape)} and {list(norm.weight.shape)}")
    if x.is_cuda:
        from inflight_kernels import _normalization_triton

        return _normalization_triton.add_rms_norm(x, residual, norm)
    if _cpu.takes(x, norm.weight, *(() if residual is None else (residual,))):
        y = torch.empty(x.shape, dtype=x.dtype)
        s, stride = (None, 0) if residual is None else (torch.empty_like(y), residual.stride(0))
        is_bf16 = x.dtype == torch.bfloat16
        if _cpu.call("rms_norm", x, x.stride(0), residual, stride, s, norm.weight, y, is_bf16, *x.shape, *norm[1:]):
            return y, x if s is None else s
    return add_rms_norm_reference(x, residual, norm)


def rms_norm_reference(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """`rms_norm` over the last dimension in plain PyTorch, for x with any number of dimensions."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.cast_first:
        normed = normed.to(x.dtype).float()
    return (normed * (norm.offset + norm.weight.float())).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain PyTorch; without a residual s is x."""
    s = x if residual is None else x + residual
    return rms_norm_reference(s, norm), s
