"""Top-k, top-p and min-p: sets the logits of all tokens that the filters remove to −∞.

Tokens are in the order of falling logits, and of rising ids among equal ones. Top-k leaves the first k. Top-p leaves
those whose predecessors, among the tokens that top-k leaves, have less than the share p of the weight of all of these.
Min-p leaves those with at least min_p times the weight of the first. Weights are w = exp((logit − largest) /
temperature); sums count them in units of 2⁻⁴⁰, as integers, so that the order of summation does not matter.

M rows, F of them filtered; V vocabulary.
"""

from typing import NamedTuple

import torch

UNITS = 2.0**40
"""Units of a weight of 1. A vocabulary has less than 2²³ tokens, so that a sum fits into 63 bits."""


class Filters(NamedTuple):
    """The filters of F rows, on the device of the logits."""

    rows: torch.Tensor
    """i64[F]: the rows with filters, each once."""
    temperatures: torch.Tensor
    """f32[F], above 0."""
    top_ks: torch.Tensor
    """i64[F], at least 1; V or more for none."""
    top_ps: torch.Tensor
    """f64[F], in (0, 1]; 1 for none."""
    min_ps: torch.Tensor
    """f32[F]; 0 for none."""


def cut_logits(logits: torch.Tensor, filters: Filters) -> None:
    """Set the logits of removed tokens to −∞, in place.

    logits f32[M, V], contiguous rows. Tokens of weight 0 are removed. Of a row with a NaN or +∞ all tokens are removed.
    Raises ValueError for other dtypes or strides.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1 or filters.top_ps.dtype != torch.float64:
        raise ValueError(
            f"expected logits f32 in contiguous rows and top_ps f64, got {logits.dtype} with strides "
            f"{list(logits.stride())} and {filters.top_ps.dtype}"
        )
    if logits.is_cuda:
        from inflight_kernels import _filters_triton

        _filters_triton.cut_logits(logits, *filters)
    else:
        cut_logits_reference(logits, filters)


def cut_logits_reference(logits: torch.Tensor, filters: Filters) -> None:
    """Compute the result of `cut_logits` in plain PyTorch, by sorting."""
    rows, temperatures, top_ks, top_ps, min_ps = filters
    logits_FV = logits[rows]
    peak_F1 = logits_FV.amax(-1, keepdim=True)
    weights_FV = torch.exp((logits_FV - peak_F1) / temperatures[:, None])
    sorted_FV, order_FV = logits_FV.sort(dim=-1, descending=True, stable=True)
    weights_FV = weights_FV.gather(1, order_FV).nan_to_num_(0.0)
    units_FV = (weights_FV.double() * UNITS).long()
    left_FV = torch.arange(logits.shape[1], device=logits.device) < top_ks[:, None]
    units_FV *= left_FV
    before_FV = units_FV.cumsum(-1) - units_FV
    needed_F = (units_FV.sum(-1).double() * top_ps).ceil().long().clamp(min=1)
    left_FV &= (before_FV < needed_F[:, None]) | (top_ps[:, None] >= 1)
    left_FV &= (weights_FV >= min_ps[:, None]) & (weights_FV > 0) & peak_F1.isfinite()
    cut_FV = sorted_FV.masked_fill(~left_FV, float("-inf"))
    logits[rows] = torch.empty_like(cut_FV).scatter_(1, order_FV, cut_FV)
