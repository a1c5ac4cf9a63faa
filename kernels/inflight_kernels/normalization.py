"""RMSNorm, alone and behind a residual sum, with the rounding of Transformers.

n = x / √(mean(x²) + ε) in fp32 (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization");
y = round(n · (offset + weight)), with offset 1 in Gemma and 0 in OLMo 2 and gpt-oss. With `cast_first`, as in Llama
and Qwen, n is rounded to the dtype of x before the product too.
T tokens, D hidden.
"""

import torch

from inflight_kernels import _cpu


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, cast_first: bool = True
) -> torch.Tensor:
    """x [T, D] of any float dtype, weight [D] → y [T, D] in x's dtype. Rows of x may lie any distance apart.
    Raises ValueError if the shapes do not fit."""
    _check(x, weight)
    if x.is_cuda:
        from inflight_kernels import _normalization_triton

        return _normalization_triton.rms_norm(x, weight, eps, offset, cast_first)
    if _cpu.takes(x, weight):
        y = torch.empty(x.shape, dtype=x.dtype)
        if _cpu_rms_norm(x, None, None, weight, y, eps, offset, cast_first):
            return y
    return rms_norm_reference(x, weight, eps, offset=offset, cast_first=cast_first)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual [T, D] of one dtype, weight [D] → (y, s), both [T, D]: s = x + residual rounded to that dtype,
    y = rms_norm(s). Raises ValueError as `rms_norm` does."""
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"expected a residual like x, {x.dtype} {list(x.shape)}, got {residual.dtype} {list(residual.shape)}"
        )
    if x.is_cuda:
        from inflight_kernels import _normalization_triton

        return _normalization_triton.add_rms_norm(x, residual, weight, eps, offset, cast_first)
    if _cpu.takes(x, residual, weight):
        y, s = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        if _cpu_rms_norm(x, residual, s, weight, y, eps, offset, cast_first):
            return y, s
    return add_rms_norm_reference(x, residual, weight, eps, offset=offset, cast_first=cast_first)


def _cpu_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    s: torch.Tensor | None,
    weight: torch.Tensor,
    y: torch.Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> bool:
    stride = residual.stride(0) if residual is not None else 0
    wide = x.dtype == torch.bfloat16
    return _cpu.call(
        "rms_norm", x, x.stride(0), residual, stride, s, weight, y, wide, *x.shape, eps, offset, cast_first
    )


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, cast_first: bool = True
) -> torch.Tensor:
    """`rms_norm` over the last dimension in plain PyTorch, for x with any number of dimensions."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast_first:
        normed = normed.to(x.dtype).float()
    return (normed * (offset + weight.float())).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain PyTorch."""
    s = x + residual
    return rms_norm_reference(s, weight, eps, offset=offset, cast_first=cast_first), s


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"expected x [T, D] and weight [D], got {list(x.shape)} and {list(weight.shape)}")
