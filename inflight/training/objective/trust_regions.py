"""Trust regions as masks that select the tokens in the loss.

Each function takes `DrawnTokens` and returns bool[n], true for a token that takes part. A token that does not still
counts where losses are averaged, so that leaving tokens out never makes the others weigh more. Bounds that exclude
every token raise ValueError.
"""

from math import inf, log1p

import torch

from inflight.training.objective.bounds import bounded, check_interval, ranks_tokens
from inflight.training.objective.tokens import DrawnTokens

_LEAST_REST = log1p(-1e-6)
"""Largest log-probability of a token in a binary KL, at which all others together have probability 1e-6."""


@bounded(low=0.0, high=inf)
def geometric_mask(tokens: DrawnTokens, *, low: float = 0.99, high: float = 1.01) -> torch.Tensor:
    """Keep the sequences whose geometric mean of w = π_p / π_b is in [low, high]; of ρ = π_θ / π_b with
    proximal="behavior", as w is 1 then. Unlike a product the mean does not grow with length (1.1 per token is 2.6 after
    10 tokens and 13,781 after 100).

    Source: Liu and Li 2025; verl's geometric rejection; the bounds are SkyRL's. With NeMo-RL's [0.999, 1.002] and
    untruncated token weights it is its seq-mask-tis.
    """
    check_interval(low=low, high=high)
    is_behavior = tokens.proximal_policy == "behavior"
    means = tokens.sequence_means(tokens.log_behavior_ratios if is_behavior else tokens.log_weights).exp()
    return ((means >= low) & (means <= high))[tokens.sequences]


@bounded(delta=inf)
def binary_tv_mask(tokens: DrawnTokens, *, delta: float = 0.2) -> torch.Tensor:
    """Leave out a token that moved further than `delta` in probability in the direction of its advantage: A > 0 and π_θ
    − π_b > delta, or A < 0 and π_θ − π_b < −delta.

    Source: DPPO-Binary-TV, arXiv 2602.04879; prime-rl's default, 0.2.
    """
    _check_distance(delta=delta)
    moved = tokens.logprobs.detach().exp() - tokens.behavior.exp()
    return ~(((tokens.advantages > 0) & (moved > delta)) | ((tokens.advantages < 0) & (moved < -delta)))


@bounded(delta=inf)
def binary_kl_mask(tokens: DrawnTokens, *, delta: float = 0.05) -> torch.Tensor:
    """Leave out a token that moved further than `delta` nats in the direction of its advantage: A > 0 and π_θ > π_b, or
    A < 0 and π_θ < π_b, and KL(π_b ‖ π_θ) > delta. The KL compares two outcomes: the drawn token, and any other.

    Source: DPPO-Binary-KL, arXiv 2602.04879; delta is verl's example's.
    """
    _check_distance(delta=delta)
    moved = tokens.log_behavior_ratios * tokens.advantages > 0
    return ~(moved & (_binary_kl(tokens.behavior, tokens.logprobs.detach()) > delta))


@bounded(delta=inf)
def kpop_mask(tokens: DrawnTokens, *, delta: float = 0.1) -> torch.Tensor:
    """Leave out a token with KL(π_θ ‖ π_b) or KL(π_b ‖ π_θ) above `delta` nats, whatever its advantage. The KL compares
    two outcomes: the drawn token, and any other.

    Source: KPop, Ling team 2026 (ringtech.notion.site/kpop); delta as in prime-rl's pull request 3283. AReaL's
    `binary_kl` with its example's bound, 2, leaves out far fewer.
    """
    _check_distance(delta=delta)
    ours, behavior = tokens.logprobs.detach(), tokens.behavior
    return (_binary_kl(ours, behavior) <= delta) & (_binary_kl(behavior, ours) <= delta)


@bounded(delta=inf)
def opsm_mask(tokens: DrawnTokens, *, delta: float = 1e-4) -> torch.Tensor:
    """Leave out a token with A < 0 if its sequence has mean(log π_b − log π_θ) > delta: bad answers that the policy no
    longer gives.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556; delta is slime's.
    """
    _check_distance(delta=delta)
    drifted = tokens.sequence_means(-tokens.log_behavior_ratios) > delta
    return ~((tokens.advantages < 0) & drifted[tokens.sequences])


@ranks_tokens
@bounded(bound=inf)
def m2po_mask(tokens: DrawnTokens, *, bound: float = 0.04) -> torch.Tensor:
    """Leave out tokens with the largest (log ρ)², ρ = π_θ / π_b, among tokens that moved in the direction of their
    advantage: A > 0 and ρ > 1, or A < 0 and ρ < 1. The fewest tokens are left out that reduce the mean over the rest of
    them to `bound` or below. Each micro-batch is ranked separately.

    Source: M2PO, arXiv 2510.01161, Algorithm 1. The authors' code (Infini-AI-Lab/M2PO) selects the same tokens. It
    clips their ratios at the resulting bound where the paper masks them. `second_moment_mask` ranks all tokens.
    """
    _check_distance(bound=bound)
    log_ratios, advantages = tokens.log_behavior_ratios, tokens.advantages
    pushed = ((advantages > 0) & (log_ratios > 0)) | ((advantages < 0) & (log_ratios < 0))
    kept = torch.ones_like(pushed)
    kept[pushed] = _within_second_moment(log_ratios[pushed], bound)
    return kept


@ranks_tokens
@bounded(bound=inf)
def second_moment_mask(tokens: DrawnTokens, *, bound: float = 0.04) -> torch.Tensor:
    """Leave out the tokens with the largest (log ρ)², ρ = π_θ / π_b, in either direction. The fewest tokens are left
    out that reduce the mean over the remaining tokens to `bound` or below. Each micro-batch is ranked separately.

    Source: AReaL's `m2_threshold`, under the name M2PO; `m2po_mask` is the paper's.
    """
    _check_distance(bound=bound)
    return _within_second_moment(tokens.log_behavior_ratios, bound)


def _within_second_moment(log_ratios: torch.Tensor, bound: float) -> torch.Tensor:
    """Return bool[n], true for the smallest log-ratios, as many as have a mean square of at most `bound`."""
    squares = log_ratios.square()
    ranked, order = squares.sort(stable=True)
    means = ranked.double().cumsum(0) / torch.arange(1, len(ranked) + 1, device=ranked.device)
    kept = torch.empty_like(squares, dtype=torch.bool)
    kept[order] = means <= bound  # Means rise with the rank, so that the kept tokens are the first ones.
    return kept


def _binary_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL f[n] between two outcomes, the token and any other, from log-probabilities p and q f[n] of the token.
    Probabilities of the others are at least 1e-6."""
    rests = [torch.log(-torch.expm1(logs.clamp(max=_LEAST_REST))) for logs in (p, q)]
    return p.exp() * (p - q) + rests[0].exp() * (rests[0] - rests[1])


def _check_distance(**bound: float) -> None:
    [(name, value)] = bound.items()
    if not value >= 0:
        raise ValueError(f"{name} is a distance from the policy that drew, at least 0; got {value}")
