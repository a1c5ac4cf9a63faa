"""Corrections: the importance weight of a token that another policy drew.

w = π_p / π_b per token, both probabilities of the drawn token, π_b as recorded by the engine. Each function takes
`DrawnTokens` and returns weights f[n] without gradient. They multiply the tokens' losses. With the default π_p = π_θ, w
is the whole ratio ρ = π_θ / π_b. Bounds without a ratio between them raise ValueError.
"""

from math import inf

import torch

from inflight.training.objective.bounds import bounded, check_interval, soft, unbounded
from inflight.training.objective.tokens import LOG_RATIO_BOUND, DrawnTokens, exp_ratio


@unbounded
def uncorrected(tokens: DrawnTokens) -> torch.Tensor:
    """Return w = 1, correct for on-policy data."""
    return torch.ones_like(tokens.log_weights)


@bounded(cap=inf, floor=0.0)
def token_truncate(tokens: DrawnTokens, *, cap: float = 2.0, floor: float = 0.0) -> torch.Tensor:
    """Return max(min(w, cap), floor): truncated importance sampling (TIS). The cap bounds the variance at the price of
    a bias on tokens that became likelier.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (cap 2).
    """
    check_interval(floor=floor, cap=cap)
    return exp_ratio(tokens.log_weights).clamp(floor, cap)


@bounded(low=0.0, high=inf)
def token_mask(tokens: DrawnTokens, *, low: float = 0.5, high: float = 5.0) -> torch.Tensor:
    """Return w · 1[low ≤ w ≤ high]: tokens far from the trainer's policy, on either side, are left out.

    Source: IcePop, Ling team 2025 (ringtech.notion.site/icepop); the bounds are verl's and NeMo-RL's.
    """
    return _inside(exp_ratio(tokens.log_weights), low, high)


@bounded(cap=inf, floor=0.0)
def sequence_truncate(tokens: DrawnTokens, *, cap: float = 2.0, floor: float = 0.0) -> torch.Tensor:
    """Return max(min(Π_t w_t, cap), floor), the product over the token's sequence. Without a cap it is the unbiased
    weight of a sequence; the weight and its variance grow exponentially with length.

    Source: Liu and Li 2025, "When speed kills stability" (sequence-level TIS); `sequence_truncate` of TRL.
    """
    check_interval(floor=floor, cap=cap)
    return _product(tokens).clamp(floor, cap)


@bounded(low=0.0, high=inf)
def sequence_mask(tokens: DrawnTokens, *, low: float = 0.5, high: float = 2.0) -> torch.Tensor:
    """Return Π_t w_t · 1[low ≤ Π_t w_t ≤ high]: whole sequences are left out.

    Source: Liu and Li 2025 (masked importance sampling, MIS); `sequence_mask` of TRL (low 0, high 3).
    """
    return _inside(_product(tokens), low, high)


@soft
def vespo(
    tokens: DrawnTokens, *, positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0)
) -> torch.Tensor:
    """Return W^k e^(λ (1 − W)) with W = Π_t w_t, the product over the token's sequence, and (k, λ) `positive` for A ≥ 0
    and `negative` otherwise: 1 at W = 1, and a smooth descent to 0 on both sides instead of a bound.

    Source: VESPO, arXiv 2602.10693; the values are the defaults of TRL's `vespo`.
    """
    for name, (k, decay) in (("positive", positive), ("negative", negative)):
        if not (0 <= k < inf and 0 < decay < inf):
            raise ValueError(f"{name} must be a power of at least 0 and a decay above 0, got {(k, decay)}")
    logs = tokens.sequence_sums(tokens.log_weights).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[tokens.sequences]
    is_negative = tokens.advantages < 0
    k, decay = (torch.full_like(logs, p).masked_fill(is_negative, n) for p, n in zip(positive, negative, strict=True))
    return (k * logs + decay * (1 - logs.exp())).exp()


def _product(tokens: DrawnTokens) -> torch.Tensor:
    return exp_ratio(tokens.sequence_sums(tokens.log_weights))[tokens.sequences]


def _inside(weights: torch.Tensor, low: float, high: float) -> torch.Tensor:
    check_interval(low=low, high=high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)
