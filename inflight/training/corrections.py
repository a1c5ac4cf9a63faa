"""Per-token corrections for data that older policies drew.

ρ_t = exp(log π_θ(a_t) − log π_b(a_t)) with π_b as recorded by the engine. Each function returns the loss of every
token, f32[n]; its gradient with respect to `logprobs` is what is named in its docstring. n drawn tokens.
"""

import torch


def uncorrected(logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """−A log π_θ: REINFORCE that takes the data to be on-policy."""
    return -advantages * logprobs


def truncated_importance_sampling(
    logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, advantages: torch.Tensor, *, cap: float = 2.0
) -> torch.Tensor:
    """−sg(min(ρ, C)) A log π_θ; C bounds the variance at the price of a bias on tokens that became likelier.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (C = 2 there).
    """
    weights = torch.exp(logprobs.detach() - behavior_logprobs).clamp(max=cap)
    return -weights * advantages * logprobs


def ppo_clip(
    logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """−min(ρ A, clip(ρ, 1 − low, 1 + high) A), with ρ against the recorded policy.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; separate bounds as in DAPO, arXiv 2503.14476.
    """
    ratios = torch.exp(logprobs - behavior_logprobs)
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)
