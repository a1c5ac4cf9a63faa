"""Estimates of KL(π_θ ‖ π_ref) to be added to the loss, from tokens that π_θ drew.

Source: Schulman 2020, "Approximating KL divergence". r = π_ref / π_θ of the drawn token.
"""

from typing import Literal, get_args

import torch

KLEstimator = Literal["k1", "k2", "k3", "k3_clamped"]


def kl_estimate(kind: KLEstimator, logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Returns estimates f[n] from log π_θ f[n], with gradient, and log π_ref f[n].

    k1 = −log r is unbiased, and its gradient is 0 in expectation; k2 = (log r)² / 2 is biased and has the gradient of
    KL(π_θ ‖ π_ref); k3 = r − 1 − log r is unbiased, never negative, has the gradient of KL(π_ref ‖ π_θ), and is what
    GRPO uses (arXiv 2402.03300, eq. 4). Nothing bounds it: a token to which π_θ gives e⁻⁸ and π_ref e⁻¹ has a gradient
    of −1,096, and far enough apart it is infinite. k3_clamped is k3 with log r in [−20, 20] and at most 10, as verl has
    it: a token beyond (log r > 2.6 or < −11) has no gradient of its own. For tokens that another policy drew see
    `Objective.kl_correction`. Raises ValueError for another kind.
    """
    log_ratios = reference_logprobs - logprobs
    if kind == "k1":
        return -log_ratios
    if kind == "k2":
        return log_ratios.square() / 2
    if kind == "k3":
        return torch.expm1(log_ratios) - log_ratios
    if kind == "k3_clamped":
        bounded = log_ratios.clamp(-20, 20)
        return (torch.expm1(bounded) - bounded).clamp(max=10)
    raise ValueError(f"unknown KL estimator {kind!r}; choose {', '.join(get_args(KLEstimator))}")
