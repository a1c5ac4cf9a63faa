"""Estimates of the KL between the policy and a reference policy, per drawn token, and penalties made of them.

Sources: Schulman 2020, "Approximating KL divergence"; Tang and Munos, arXiv 2506.09477, for the gradients.
r = π_ref / π_θ of the drawn token, and ρ = π_θ / π_b.
"""

from typing import Literal

import torch

from inflight.training.objective.tokens import exp_ratio

KLEstimator = Literal["k1", "k2", "k3", "k3_clamped"]


def kl_estimate(kind: KLEstimator, logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Return estimates f[n] of KL(π_θ ‖ π_ref) from log π_θ f[n], with gradient, and log π_ref f[n], for tokens that
    π_θ drew.

    k1 = −log r is unbiased; k2 = (log r)² / 2 is biased; k3 = r − 1 − log r is unbiased and never negative, and is
    GRPO's (arXiv 2402.03300, eq. 4). k3_clamped is k3 with log r in [−20, 20] and at most 10, as verl has it.
    """
    log_ratios = reference_logprobs - logprobs
    if kind == "k1":
        return -log_ratios
    if kind == "k2":
        return log_ratios.square() / 2
    if kind == "k3":
        return torch.expm1(log_ratios) - log_ratios
    assert kind == "k3_clamped", "Objective refuses other names"
    bounded = log_ratios.clamp(-20, 20)
    return (torch.expm1(bounded) - bounded).clamp(max=10)


def kl_penalty(
    kind: KLEstimator,
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    *,
    corrected: bool,
) -> torch.Tensor:
    """Return the penalty f[n] of each token, with gradient to log π_θ f[n], for tokens that π_b drew.

    Corrected, the expected gradient is the gradient of a KL whichever policy drew the tokens: of KL(π_θ ‖ π_ref) for
    k1, k2 and k3, and of KL(π_ref ‖ π_θ) for k3_clamped: its tokens with log r > 2.6 or < −11 have none. k1 and k3 are
    multiplied by ρ with its gradient (DeepSeek-V3.2, arXiv 2512.02556, eq. 7), k2 and k3_clamped by its value: the
    estimate itself already has the gradient, and with the gradient of ρ a token beyond the clamp would be pushed away
    from the reference. The gradients of k2 and k3 are the same, −ρ log r ∇log π_θ.

    Not corrected, tokens are taken to be drawn by π_θ. If they were, the expected gradient is 0 for k1, ∇KL(π_θ ‖
    π_ref) for k2, and ∇KL(π_ref ‖ π_θ) for k3. The r of k3 has no bound: a token with probability e⁻⁸ under π_θ and e⁻¹
    under π_ref has a gradient of −1,096.
    """
    estimates = kl_estimate(kind, logprobs, reference_logprobs)
    if not corrected:
        return estimates
    ratios = exp_ratio(logprobs - behavior_logprobs)
    return (ratios if kind in ("k1", "k3") else ratios.detach()) * estimates
