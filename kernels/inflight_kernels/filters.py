"""Top-k, top-p and min-p: sets the logits of all tokens that the filters remove to −∞.

Tokens are in the order of falling logits, and of rising ids among equal ones. Top-k leaves the first k. Top-p leaves
those whose predecessors, among the tokens that top-k leaves, have less than the share p of the weight of all of these.
Min-p leaves those with at least min_p times the weight of the first. Weights are w = exp((logit − largest) /
temperature); sums count them in units of 2⁻⁴⁰, as integers, so that the order of summation does not matter.

M rows, F of them filtered; V vocabulary.
"""

import torch

UNITS = 2.0**40
"""Units of a weight of 1. A vocabulary has less than 2²³ tokens, so that a sum fits into 63 bits."""


def cut_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> None:
    """Set the logits of removed tokens to −∞, in place.

    logits f32[M, V], contiguous rows. rows i64[F]: the rows with filters, each once. temperatures f32[F], above 0;
    top_ks i64[F], at least 1, V or more for none; top_ps f64[F], in (0, 1], 1 for none; min_ps f32[F], 0 for none. All
    on one device. Tokens of weight 0 are removed. Of a row with a NaN or +∞ all tokens are removed. Raises ValueError
    for other dtypes or strides.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1 or top_ps.dtype != torch.float64:
        raise ValueError(
            f"expected logits f32 in contiguous rows and top_ps f64, got {logits.dtype} with strides "
            f"{list(logits.stride())} and {top_ps.dtype}"
        )
    if logits.is_cuda:
        from inflight_kernels import _filters_triton

        _filters_triton.cut_logits(logits, rows, temperatures, top_ks, top_ps, min_ps)
    else:
        cut_logits_reference(logits, rows, temperatures, top_ks, top_ps, min_ps)


def cut_logits_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> None:
    """Compute what `cut_logits` does, in plain PyTorch, by sorting."""
    logits_FV = logits[rows]
    peak_F1 = logits_FV.amax(-1, keepdim=True)
    weights_FV = torch.exp((logits_FV - peak_F1) / temperatures[:, None])
    sorted_FV, order_FV = logits_FV.sort(dim=-1, descending=True, stable=True)
    weights_FV = weights_FV.gather(1, order_FV).nan_to_num_(0.0)
    units_FV = (weights_FV.double() * UNITS).long()
    left_FV = torch.arange(logits.shape[1], device=logits.device) < top_ks[:, None]
    units_FV *= left_FV
    before_FV = units_FV.cumsum(-1) - units_FV
    least_F1 = needed_units(units_FV.sum(-1), top_ps)[:, None]
    left_FV &= (before_FV < least_F1) | (top_ps[:, None] >= 1)
    left_FV &= (weights_FV >= min_ps[:, None]) & (weights_FV > 0) & peak_F1.isfinite()
    cut_FV = sorted_FV.masked_fill(~left_FV, float("-inf"))
    logits[rows] = torch.empty_like(cut_FV).scatter_(1, order_FV, cut_FV)


def needed_units(totals_F: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Return the units i64[F] that the tokens up to the last one that top-p leaves must have: at least one."""
    return (totals_F.double() * top_ps).ceil().long().clamp(min=1)
