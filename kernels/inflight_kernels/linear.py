"""x · Wᵀ + b by the fastest product that PyTorch has for weights as they lie in a slot, unpacked."""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] → [T, N].

    In fp32 on a CPU oneDNN's product takes half the time of `F.linear`, which goes to a BLAS (docs/performance.md).
    """
    if x.dtype == torch.float32 and x.device.type == "cpu" and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
