"""Changes of logits before a draw: the repetition penalty, and filters (top-k, top-p, min-p), which set the logits of
the tokens that they remove to −∞.

Tokens are in the order of falling logits, and of rising ids among equal ones. Top-k leaves the first k. Top-p leaves
those whose predecessors, among the tokens that top-k leaves, have less than the share p of the weight of all of these.
Min-p leaves those with at least min_p times the weight of the first. Weights are w = exp((logit − largest) /
temperature); sums count them in units of 2⁻⁴⁰, as integers, so that the order of summation does not matter.

M rows, F of them filtered, P penalised; V vocabulary.
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


class Penalties(NamedTuple):
    """The repetition penalties of P rows, on the device of the logits."""

    rows: torch.Tensor
    """i64[P]: the rows with a penalty, each once."""
    seen_rows: torch.Tensor
    """i64[P]: their rows in the table of seen tokens."""
    factors: torch.Tensor
    """f32[P], above 0."""


def penalize(logits: torch.Tensor, seen: torch.Tensor, penalties: Penalties) -> None:
    """Divide positive logits of seen tokens by the factor of their row, and multiply other logits of seen tokens by it,
    in place.

    logits f32[M, V], seen bool[R, V], both with contiguous rows. Raises ValueError for other dtypes, shapes or strides.
    """
    is_plain = logits.dtype == torch.float32 and seen.dtype == torch.bool and logits.stride(-1) == seen.stride(-1) == 1
    if not is_plain or logits.shape[1] != seen.shape[1]:
        raise ValueError(
            f"expected logits f32[M, V] and seen bool[R, V] in contiguous rows, got {logits.dtype} "
            f"{list(logits.shape)} and {seen.dtype} {list(seen.shape)}, with strides {list(logits.stride())} and "
            f"{list(seen.stride())}"
        )
    if logits.is_cuda:
        from inflight_kernels import _filters_triton

        _filters_triton.penalize(logits, seen, *penalties)
    else:
        penalize_reference(logits, seen, penalties)


def penalize_reference(logits: torch.Tensor, seen: torch.Tensor, penalties: Penalties) -> None:
    """Compute the result of `penalize` in plain PyTorch."""
    rows, seen_rows, factors = penalties
    logits_PV, factors_P1 = logits[rows], factors[:, None]
    changed_PV = torch.where(logits_PV > 0, logits_PV / factors_P1, logits_PV * factors_P1)
    logits[rows] = torch.where(seen[seen_rows], changed_PV, logits_PV)


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
