"""x · Wᵀ + b by the fastest product there is for weights as they lie in a slot, unpacked."""

import torch
import torch.nn.functional as F

from inflight_kernels import _cpu


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] → [T, N].

    On a CPU few rows go to a kernel of our own, which reads the weights once and in order; in fp32 more of them go to
    oneDNN, which takes half the time of the BLAS behind `F.linear` (docs/performance.md).
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if weight.is_contiguous() and _cpu.takes(x, weight, *(() if bias is None else (bias,))):
        out = x.new_empty(len(x), len(weight))
        is_bf16 = x.dtype == torch.bfloat16
        if _cpu.call("linear", x, x.stride(0), weight, bias, out, is_bf16, len(x), len(weight), x.shape[1]):
            return out
    if x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
