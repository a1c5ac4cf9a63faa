"""The policy loss of drawn tokens, its gradient and the statistics of their ratios, in one pass.

loss = Σ_t a_t · c(w_t) · L_t, where w = π_p / π_b, u = π_θ / π_p and ρ = π_θ / π_b are the ratios of a token's
probability under the policy being trained (θ), the proximal one (p) and the one that drew it (b). Nothing is left for
autograd to differentiate, and on a GPU one kernel reads each token once. n tokens.
"""

from math import inf
from typing import Literal, NamedTuple

import torch

Correction = Literal["none", "truncate", "mask"]
Surrogate = Literal["reinforce", "ppo_clip", "cispo"]

LOG_RATIO_BOUND = 20.0
"""log w and log u are clamped to ±20 before they are exponentiated; log ρ, for statistics in float64, is not."""
CLIPPED_TOLERANCE = 1e-4
"""Relative difference of a gradient from that without bounds from which on a token counts as clipped."""
NUM_CLASSES = 3


class PolicyLossTerms(NamedTuple):
    loss: torch.Tensor
    """f32[]"""
    gradient: torch.Tensor
    """f32[n], of the loss to `logprobs`."""
    sums: torch.Tensor
    """f64[3, 8], by class: tokens, Σρ, Σρ², min ρ, max ρ, Σ(ρ − 1 − log ρ), Σ|log ρ|, clipped tokens. Without tokens
    min and max are inf and −inf."""


def policy_loss_terms(
    logprobs: torch.Tensor,
    behavior: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    classes: torch.Tensor,
    *,
    correction: Correction = "none",
    low: float = 0.0,
    high: float = inf,
    surrogate: Surrogate = "reinforce",
    clip_low: float = inf,
    clip_high: float = inf,
    dual: float = inf,
) -> PolicyLossTerms:
    """Of f32[n] log π_θ, log π_b and log π_p of the drawn tokens, their advantages A and the weights a that their terms
    are summed with (aggregation, masks, weights of sequences; 0 is allowed), and i64[n] classes: 0 of unknown version,
    1 drawn by the trainer's own, 2 by an older one. Results carry no graph.

    correction: c is 1 ("none"), min(max(w, low), high) ("truncate"), or w · 1[low ≤ w ≤ high] ("mask").
    surrogate: L is, with sg(·) a value without gradient,
      "reinforce"  −A log π_θ
      "ppo_clip"   −min(u A, clip(u, 1 − clip_low, 1 + clip_high) A), and for A < 0 no more than −dual · A
      "cispo"      −sg(min(max(u, clip_low), clip_high)) A log π_θ: here clip_low is u's floor, 0 for none, and
                   clip_high its cap

    The gradient is that of PyTorch's autograd, ties included: of the two sides of a minimum that are equal each has
    half, and a bound belongs to what it bounds. A token is clipped if its gradient differs from the one with every
    bound of c and L open, whatever its weight. Sources of the formulas: `inflight.training.objective.surrogates` and
    `corrections`.

    Results repeat to the bit. On a GPU float32 runs in one kernel; everything else takes the reference. Raises
    ValueError for shapes that do not fit and for bounds that make no sense.
    """
    tensors = (logprobs, behavior, proximal, advantages, weights, classes)
    if logprobs.ndim != 1 or any(tensor.shape != logprobs.shape for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"expected logprobs, behavior, proximal, advantages, weights and classes, each [n], got {shapes}"
        )
    if correction not in ("none", "truncate", "mask"):
        raise ValueError(f"expected correction 'none', 'truncate' or 'mask', got {correction!r}")
    if surrogate not in ("reinforce", "ppo_clip", "cispo"):
        raise ValueError(f"expected surrogate 'reinforce', 'ppo_clip' or 'cispo', got {surrogate!r}")
    if not low <= high or low == inf:
        raise ValueError(f"expected low ≤ high, low finite, got low {low} and high {high}")
    floor, cap = clip_bounds(surrogate, clip_low, clip_high)
    if not floor <= cap or floor == inf:
        hint = "; for cispo clip_low is the floor of u, 0 for none" if surrogate == "cispo" else ""
        raise ValueError(
            f"clip_low {clip_low} and clip_high {clip_high} would bound u by {floor} from below and {cap} from above"
            f"{hint}"
        )
    if not dual > 1:
        raise ValueError(f"dual must be greater than 1, got {dual}")

    function = policy_loss_terms_reference
    if logprobs.is_cuda and len(logprobs) and all(tensor.dtype == torch.float32 for tensor in tensors[:-1]):
        from inflight_kernels._policy_loss_triton import policy_loss_terms as function
    return function(
        *tensors,
        correction=correction,
        low=low,
        high=high,
        surrogate=surrogate,
        clip_low=clip_low,
        clip_high=clip_high,
        dual=dual,
    )


def clip_bounds(surrogate: Surrogate, clip_low: float, clip_high: float) -> tuple[float, float]:
    """What u is clamped to."""
    return (clip_low, clip_high) if surrogate == "cispo" else (1 - clip_low, 1 + clip_high)


@torch.no_grad()
def policy_loss_terms_reference(
    logprobs: torch.Tensor,
    behavior: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    classes: torch.Tensor,
    *,
    correction: Correction = "none",
    low: float = 0.0,
    high: float = inf,
    surrogate: Surrogate = "reinforce",
    clip_low: float = inf,
    clip_high: float = inf,
    dual: float = inf,
) -> PolicyLossTerms:
    """The same in plain PyTorch, in the dtype of its arguments and on any device."""
    open_c = exp_ratio(proximal - behavior) if correction != "none" else torch.ones_like(logprobs)
    c = open_c
    if correction == "truncate":
        c = open_c.clamp(low, high)
    elif correction == "mask":
        c = torch.where((open_c >= low) & (open_c <= high), open_c, 0.0)

    floor, cap = clip_bounds(surrogate, clip_low, clip_high)
    log_ratios = logprobs - proximal
    u = exp_ratio(log_ratios)
    if surrogate == "reinforce":
        losses, slopes, open_slopes = -advantages * logprobs, -advantages, -advantages
    elif surrogate == "cispo":
        slopes, open_slopes = -u.clamp(floor, cap) * advantages, -u * advantages
        losses = slopes * logprobs
    else:
        gains, clipped_gains = u * advantages, u.clamp(floor, cap) * advantages
        open_slopes = torch.where(log_ratios.abs() <= LOG_RATIO_BOUND, -gains, 0.0)
        inside = (u >= floor) & (u <= cap)
        share = torch.where(inside, 1.0, _share_of_less(gains, clipped_gains))
        gains = torch.minimum(gains, clipped_gains)
        least = torch.where(advantages < 0, dual * advantages, -inf)
        share = share * _share_of_less(least, gains)
        losses, slopes = -torch.maximum(gains, least), open_slopes * share

    gradient, open_gradient = c * slopes, open_c * open_slopes
    clipped = (gradient - open_gradient).abs() > CLIPPED_TOLERANCE * open_gradient.abs()
    loss = (weights * (c * losses)).sum(dtype=torch.float64).to(logprobs.dtype)
    return PolicyLossTerms(loss, weights * gradient, ratio_sums(logprobs - behavior, clipped, classes))


def exp_ratio(log_ratios: torch.Tensor) -> torch.Tensor:
    """The ratio of a log-ratio that is clamped to ±20, so that it is finite (as verl does)."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _share_of_less(less: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """What autograd gives to the one side of a minimum, or to the other of a maximum, if only this side has a
    gradient: all where less < more, half where they are equal."""
    return (less < more).to(less.dtype) + 0.5 * (less == more).to(less.dtype)


def ratio_sums(log_ratios: torch.Tensor, clipped: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """`PolicyLossTerms.sums` of log ρ f[n], of bool[n], which tokens are clipped, and of i64[n] classes."""
    logs = log_ratios.double()
    ratios = logs.exp()
    columns = [torch.ones_like(logs), ratios, ratios.square(), ratios - 1 - logs, logs.abs(), clipped.double()]
    summed = logs.new_zeros(NUM_CLASSES, 6).index_add(0, classes, torch.stack(columns, 1))
    least = logs.new_full((NUM_CLASSES,), inf).scatter_reduce(0, classes, ratios, "amin")
    most = logs.new_full((NUM_CLASSES,), -inf).scatter_reduce(0, classes, ratios, "amax")
    return torch.cat([summed[:, :3], least[:, None], most[:, None], summed[:, 3:]], 1)
