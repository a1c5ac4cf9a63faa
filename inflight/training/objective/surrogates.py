"""Surrogates: token losses whose gradient is a policy gradient.

Each function takes `DrawnTokens` and returns losses f[n] with gradient to `logprobs`. u = π_θ / π_p has the value 1 if
the proximal policy is the current one. Then there is nothing to clip, and functions that clip u raise ValueError. They
also raise it for bounds without a ratio between them.
"""

from math import inf

import torch

from inflight.training.objective.bounds import bounded, check_interval, soft, unbounded
from inflight.training.objective.tokens import DrawnTokens, exp_ratio


@unbounded
def reinforce(tokens: DrawnTokens) -> torch.Tensor:
    """Return −A log π_θ (Williams 1992)."""
    return -tokens.advantages * tokens.logprobs


@bounded(low=inf, high=inf, dual=None)
def ppo_clip(tokens: DrawnTokens, *, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> torch.Tensor:
    """Return −min(u A, clip(u, 1 − low, 1 + high) A), and for A < 0 at most −dual · A.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476; the dual clip
    prevents a token that became much likelier from dominating a batch: Ye et al. 2020, arXiv 1912.09729, eq. 5.
    """
    if dual is not None and not dual > 1:
        raise ValueError(f"dual must be greater than 1, got {dual}")
    _check_distances(low, high)
    _check_that_u_varies(tokens, "ppo_clip")
    ratios, advantages = exp_ratio(tokens.log_ratios), tokens.advantages
    gains = torch.minimum(ratios * advantages, ratios.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        gains = torch.where(advantages < 0, torch.maximum(gains, dual * advantages), gains)
    return -gains


@bounded(cap=inf, floor=0.0)
def cispo(tokens: DrawnTokens, *, cap: float = 5.0, floor: float = 0.0) -> torch.Tensor:
    """Return −sg(max(min(u, cap), floor)) A log π_θ: the weight is bounded and every token keeps its gradient.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4, where cap is 1 + ε_high; the default is TRL's recommendation.
    """
    check_interval(floor=floor, cap=cap)
    _check_that_u_varies(tokens, "cispo")
    return -exp_ratio(tokens.log_ratios.detach()).clamp(floor, cap) * tokens.advantages * tokens.logprobs


@soft
def sapo(tokens: DrawnTokens, *, positive: float = 1.0, negative: float = 1.05) -> torch.Tensor:
    """Return −(4 / τ) σ(τ (u − 1)) A, where τ is `positive` for A > 0 and `negative` otherwise: the gradient of a token
    fades smoothly with the distance of u from 1. At u = 1 it equals the gradient of −u A.

    Source: SAPO, arXiv 2511.20347.
    """
    if not (0 < positive < inf and 0 < negative < inf):
        raise ValueError(f"positive and negative must be finite and above 0, got {positive} and {negative}")
    _check_that_u_varies(tokens, "sapo")
    ratios, advantages = exp_ratio(tokens.log_ratios), tokens.advantages
    temperatures = torch.full_like(ratios, negative).masked_fill(advantages > 0, positive)
    return -(4 / temperatures) * torch.sigmoid(temperatures * (ratios - 1)) * advantages


@bounded(low=inf, high=inf)
def gspo(tokens: DrawnTokens, *, low: float = 3e-4, high: float = 4e-4) -> torch.Tensor:
    """Return −min(s_t A_t, clip(s_t, 1 − low, 1 + high) A_t) with s_t = sg(s) · π_θ / sg(π_θ), s = exp(mean over the
    sequence of log u): every s_t has the value of s, and the gradient of its token.

    Thus each token can have a different advantage. If all tokens of a sequence have the same, the sum over them has
    value and gradient of min(s A, clip(s) A). The losses are meant to be averaged over sequences. Source: GSPO, arXiv
    2507.18071, eq. 13 and 14 (GSPO-token; eq. 5 and 7 for one advantage), and its §5.1 for the bounds.
    """
    _check_distances(low, high)
    _check_that_u_varies(tokens, "gspo")
    means = tokens.sequence_means(tokens.log_ratios.detach())[tokens.sequences]
    ratios = exp_ratio(means + (tokens.logprobs - tokens.logprobs.detach()))
    return -torch.minimum(ratios * tokens.advantages, ratios.clamp(1 - low, 1 + high) * tokens.advantages)


@bounded(low=inf, high=inf)
def gmpo(tokens: DrawnTokens, *, low: float = 0.4, high: float = 0.4) -> torch.Tensor:
    """Return −s_t A_t with s_t = sg(s) · v_t / sg(v_t): v is u, for A > 0 at most e^high and for A < 0 at least e^−low,
    and s is the geometric mean of v over the sequence. Each token is clipped for itself, and then the mean is taken.

    If all tokens of a sequence have the same advantage, the mean over them has value and gradient of −s A. The losses
    are meant to be averaged over sequences. Source: GMPO, arXiv 2507.20673, eq. 4; bounds of its §4. At low = high = ∞
    it is `gspo` without bounds.
    """
    _check_log_bounds(low, high)
    _check_that_u_varies(tokens, "gmpo")
    logs, advantages = tokens.log_ratios, tokens.advantages
    logs = torch.where(advantages > 0, logs.clamp(max=high), torch.where(advantages < 0, logs.clamp(min=-low), logs))
    means = tokens.sequence_means(logs.detach())[tokens.sequences]
    return -exp_ratio(means + (logs - logs.detach())) * advantages


@bounded(low=inf, high=inf)
def lag_clip(tokens: DrawnTokens, *, low: float = 0.2, high: float = 0.2, growth: float = 0.5) -> torch.Tensor:
    """Return −min(ρ A, clip(ρ, (1 − low)^k, (1 + high)^k) A) with k = max(lag, 1)^growth, for ρ = π_θ / π_b and the lag
    of each token in versions: PPO's clip with bounds that widen with the age of the token.

    Derivation: PPO bounds the change of log π by one version. A token of lag ℓ has changed ℓ times, and log ρ is the
    sum of these changes. If changes by different batches are uncorrelated, their sum grows as √ℓ, so that k = √ℓ
    (growth 0.5) clips the same share of tokens at each lag. Constant bounds (growth 0, `ppo_clip`) clip old tokens
    because of earlier steps, before the present step has moved anything. growth 1 is right if all versions push a token
    in the same direction. Up to lag 1 all are `ppo_clip`.

    Bias: the expected gradient lacks E[ρ A ∇log π_θ] of the tokens that moved beyond their bounds in the direction of
    A, and takes the ratio of the tokens before each token as 1, as every ratio by token does.

    Source: our own. AReaL's log-linear proximal policy (arXiv 2505.24298) bounds the mean change per version, k ≈ ℓ.
    Raises ValueError for π_p ≠ π_b, for a growth that is not finite, and for a batch without `trainer_version`.
    """
    _check_distances(low, high)
    if not -inf < growth < inf:
        raise ValueError(f"growth must be finite, got {growth}")
    if tokens.proximal_policy != "behavior":
        raise ValueError(f"lag_clip bounds π_θ / π_b: set proximal='behavior', not {tokens.proximal_policy!r}")
    ratios, advantages = exp_ratio(tokens.log_ratios), tokens.advantages
    exponents = tokens.lags.clamp(min=1).to(ratios.dtype) ** growth
    clipped = ratios.clamp(max(1 - low, 0.0) ** exponents, (1 + high) ** exponents)
    return -torch.minimum(ratios * advantages, clipped * advantages)


def _check_distances(low: float, high: float) -> None:
    if not -low <= high or low == -inf or not high > -1:
        raise ValueError(
            f"low {low} and high {high} would clip ratios to [{1 - low}, {1 + high}], in which none lies; they are "
            "distances from 1, such as low=0.2 and high=0.28"
        )


def _check_that_u_varies(tokens: DrawnTokens, name: str) -> None:
    if tokens.proximal_policy == "current":
        raise ValueError(
            f"{name} bounds π_θ / π_p, which is always 1 with proximal='current', so that it would never clip. Set "
            "proximal='behavior' to clip π_θ / π_b, or proximal='recomputed' for several optimizer steps on a batch, "
            "or proximal='loglinear'; surrogate=reinforce is the same without clipping"
        )


def _check_log_bounds(low: float, high: float) -> None:
    if not (low >= 0 and high >= 0):
        raise ValueError(f"low and high are bounds of |log u|, at least 0; got {low} and {high}")
