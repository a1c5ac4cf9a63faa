"""The policy part of a loss with its gradient and statistics: in one pass where the objective is one of those that the
kernel knows, else by autograd."""

from inspect import signature
from typing import Any

import torch
from inflight_kernels import PolicyLossTerms, policy_loss_terms
from inflight_kernels.policy_loss import ratio_sums

from inflight.training.objective.corrections import token_mask, token_truncate, uncorrected
from inflight.training.objective.objective import (
    Objective,
    TokenFunction,
    bare,
    knows_what_is_clipped,
    policy_terms,
    without_bounds,
)
from inflight.training.objective.surrogates import cispo, ppo_clip, reinforce
from inflight.training.objective.tokens import DrawnTokens


def differentiated_terms(
    objective: Objective, tokens: DrawnTokens, weights: torch.Tensor, classes: torch.Tensor
) -> PolicyLossTerms:
    """Σ_t weights_t · w_t · m_t · L_t, its gradient f[n] to `tokens.logprobs`, and sums of ratios by class i64[n], in
    which tokens that were truncated, clipped or left out count as clipped, none where that is not known
    (`knows_what_is_clipped`)."""
    options = kernel_options(objective)
    if options is None:
        return _by_autograd(objective, tokens, weights, classes)
    kept = torch.ones_like(classes, dtype=torch.bool)
    for trust_region in objective.trust_regions:
        kept &= trust_region(tokens)
    # Left out by its advantage, not by its weight: what it is clipped by would still count, and then twice.
    advantages = torch.where(kept, tokens.advantages, 0.0)
    terms = policy_loss_terms(
        tokens.logprobs, tokens.behavior, tokens.proximal, advantages, weights, classes, **options
    )
    if objective.trust_regions:
        terms.sums[:, 7].index_add_(0, classes, (~kept & (tokens.advantages != 0)).double())
    return terms


def kernel_options(objective: Objective) -> dict[str, Any] | None:
    """What the objective is to `policy_loss_terms`, or None if it cannot be told in its terms."""
    correction, surrogate = bare(objective.correction), bare(objective.surrogate)
    if correction not in _CORRECTIONS or surrogate not in _SURROGATES:
        return None
    options: dict[str, Any] = {"correction": _CORRECTIONS[correction][0], "surrogate": _SURROGATES[surrogate][0]}
    for function, names in (
        (objective.correction, _CORRECTIONS[correction][1]),
        (objective.surrogate, _SURROGATES[surrogate][1]),
    ):
        parameters = signature(function).parameters  # of a partial, with its bounds as defaults
        bounds = {theirs: parameters[ours].default for ours, theirs in names.items()}
        options |= {name: bound for name, bound in bounds.items() if bound is not None}
    return options


_CORRECTIONS: dict[TokenFunction, tuple[str, dict[str, str]]] = {
    uncorrected: ("none", {}),
    token_truncate: ("truncate", {"floor": "low", "cap": "high"}),
    token_mask: ("mask", {"low": "low", "high": "high"}),
}
_SURROGATES: dict[TokenFunction, tuple[str, dict[str, str]]] = {
    reinforce: ("reinforce", {}),
    ppo_clip: ("ppo_clip", {"low": "clip_low", "high": "clip_high", "dual": "dual"}),
    cispo: ("cispo", {"floor": "clip_low", "cap": "clip_high"}),
}


def _by_autograd(
    objective: Objective, tokens: DrawnTokens, weights: torch.Tensor, classes: torch.Tensor
) -> PolicyLossTerms:
    loss = (weights * policy_terms(objective, tokens)).sum()
    [gradient] = torch.autograd.grad(loss, tokens.logprobs)
    sums = ratio_sums(tokens.log_behavior_ratios, _clipped(objective, tokens), classes)
    return PolicyLossTerms(loss.detach(), gradient, sums)


def _clipped(objective: Objective, tokens: DrawnTokens) -> torch.Tensor:
    """bool[n]: tokens whose gradient is not that of the same formula without bounds."""
    if not knows_what_is_clipped(objective):
        return torch.zeros_like(tokens.logprobs, dtype=torch.bool)
    gradients = [
        torch.autograd.grad(policy_terms(each, tokens).sum(), tokens.logprobs)[0]
        for each in (objective, without_bounds(objective))
    ]
    return (gradients[0] - gradients[1]).abs() > 1e-4 * gradients[1].abs()
