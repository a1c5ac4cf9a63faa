"""What is minimised, put together: a correction, a surrogate, trust regions and an aggregation.

loss = Σ_t a_t · ( w_t · m_t · L_t + β · KL_t − η · H_t ), with a_t the aggregation's weight, w_t the correction's,
m_t 1 where every trust region lets the token take part, else 0, and L_t the surrogate's loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import Any, Literal, get_args

import torch

from inflight.training.objective.aggregation import Aggregation
from inflight.training.objective.corrections import (
    sequence_mask,
    sequence_truncate,
    token_mask,
    token_truncate,
    uncorrected,
)
from inflight.training.objective.kl import KLEstimator
from inflight.training.objective.surrogates import cispo, gspo, ppo_clip, reinforce
from inflight.training.objective.tokens import NO_TOKENS, DrawnTokens
from inflight.training.objective.trust_regions import (
    binary_tv_mask,
    geometric_mask,
    m2po_mask,
    opsm_mask,
    second_moment_mask,
)

TokenFunction = Callable[[DrawnTokens], torch.Tensor]
Proximal = Literal["current", "behavior", "recomputed", "loglinear"]


def bare(function: TokenFunction) -> TokenFunction:
    """A function without the bounds that `functools.partial` gave it."""
    return function.func if isinstance(function, partial) else function


_OPEN: dict[TokenFunction, dict[str, Any]] = {
    token_truncate: {"cap": inf, "floor": 0.0},
    token_mask: {"low": 0.0, "high": inf},
    sequence_truncate: {"cap": inf, "floor": 0.0},
    sequence_mask: {"low": 0.0, "high": inf},
    ppo_clip: {"low": inf, "high": inf, "dual": None},
    cispo: {"cap": inf, "floor": 0.0},
    gspo: {"low": inf, "high": inf},
}
_CLIPPED: tuple[TokenFunction, ...] = (ppo_clip, cispo, gspo)
_OURS: set[TokenFunction] = {
    *_OPEN,
    uncorrected,
    reinforce,
    geometric_mask,
    binary_tv_mask,
    opsm_mask,
    m2po_mask,
    second_moment_mask,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A policy objective. The functions are those of `corrections`, `surrogates` and `trust_regions`, with
    `functools.partial` for their bounds, or functions of one's own from `DrawnTokens` to f[n].

    Raises ValueError for what cannot be meant: bounds between which nothing lies, clipping that never clips, names that
    do not exist. `LossStats.clipped` is None with a correction or surrogate of one's own, as nothing is known of its
    bounds."""

    correction: TokenFunction = token_truncate
    surrogate: TokenFunction = reinforce
    trust_regions: tuple[TokenFunction, ...] = ()
    aggregation: Aggregation = "token"
    max_tokens: int | None = None
    """What the aggregation "constant" divides by: the length that the generator allows."""
    proximal: Proximal = "current"
    """π_p. current: π_θ itself, for one optimizer step per batch. behavior: π_b, so that the surrogate's ratio is the
    whole of ρ and there is nothing left to correct. recomputed: the batch's `proximal_logprobs`, computed before the
    first of several steps. loglinear: between π_b and π_θ by versions, which saves that forward pass (AReaL,
    arXiv 2505.24298): log π_p = log π_b + α (log π_θ − log π_b), α = (v − 1 − v_b) / (v − v_b) in [0, 1]."""
    kl: KLEstimator = "k3"
    kl_weight: float = 0.0
    """β, of the KL to the batch's `reference_logprobs`."""
    kl_correction: bool = False
    """Whether the KL of a token is multiplied by ρ = π_θ / π_b, with its gradient: else it is that of tokens of π_b
    (DeepSeek-V3.2, arXiv 2512.02556, eq. 7)."""
    entropy_weight: float = 0.0
    """η, of the entropy of the distributions that tokens are drawn from."""

    def __post_init__(self) -> None:
        for function in (self.correction, self.surrogate, *self.trust_regions):
            if bare(function) in _OURS:
                function(NO_TOKENS)  # which refuses bounds that make no sense
        if self.proximal == "current" and bare(self.surrogate) in _CLIPPED:
            name = getattr(bare(self.surrogate), "__name__", "the surrogate")
            raise ValueError(
                f"{name} bounds π_θ / π_p, which is always 1 with proximal='current', so that it "
                "would never clip. Set proximal='behavior' and correction=uncorrected to clip π_θ / π_b, or "
                "proximal='recomputed' for several optimizer steps on a batch, or proximal='loglinear'; "
                "surrogate=reinforce is the same without clipping"
            )
        if self.proximal == "behavior" and self.correction is not uncorrected:
            raise ValueError(
                "with proximal='behavior' the surrogate's ratio is the whole of ρ and nothing is left to correct; "
                "give correction=uncorrected"
            )
        if self.aggregation not in get_args(Aggregation):
            raise ValueError(f"unknown aggregation {self.aggregation!r}; choose {', '.join(get_args(Aggregation))}")
        if self.aggregation == "constant" and not (self.max_tokens and self.max_tokens > 0):
            raise ValueError(
                f"aggregation 'constant' needs max_tokens, the length that it divides by; got {self.max_tokens}"
            )
        if not 0 <= self.kl_weight < inf:
            raise ValueError(f"kl_weight must be finite and at least 0, got {self.kl_weight}")
        if not isfinite(self.entropy_weight):
            raise ValueError(f"entropy_weight must be finite, got {self.entropy_weight}")
        if self.kl not in get_args(KLEstimator):
            raise ValueError(f"unknown KL estimator {self.kl!r}; choose {', '.join(get_args(KLEstimator))}")
        if self.proximal not in ("current", "behavior", "recomputed", "loglinear"):
            raise ValueError(
                f"unknown proximal policy {self.proximal!r}; choose current, behavior, recomputed or loglinear"
            )


PRESETS: dict[str, Objective] = {
    "none": Objective(correction=uncorrected),
    "tis": Objective(correction=token_truncate),
    "icepop": Objective(correction=token_mask),
    "sequence_tis": Objective(correction=sequence_truncate),
    "sequence_mask": Objective(correction=sequence_mask),
    "geometric_mask": Objective(trust_regions=(geometric_mask,)),
    "ppo_clip": Objective(correction=uncorrected, surrogate=ppo_clip, proximal="behavior"),
    "cispo": Objective(correction=uncorrected, surrogate=cispo, proximal="behavior"),
    "gspo": Objective(correction=uncorrected, surrogate=gspo, proximal="behavior", aggregation="sequence"),
    "decoupled_ppo": Objective(surrogate=ppo_clip, proximal="recomputed"),
    "loglinear_ppo": Objective(surrogate=ppo_clip, proximal="loglinear"),
    "dppo": Objective(correction=partial(token_truncate, cap=inf), trust_regions=(binary_tv_mask,)),
    "opsm": Objective(trust_regions=(opsm_mask,)),
    "m2po": Objective(correction=partial(token_truncate, cap=inf), trust_regions=(m2po_mask,)),
    "second_moment": Objective(correction=partial(token_truncate, cap=inf), trust_regions=(second_moment_mask,)),
}
"""By name, with the bounds of the functions' defaults."""


def resolve(correction: str | Objective) -> Objective:
    """An objective, or the one of this name. Raises ValueError."""
    if isinstance(correction, Objective):
        return correction
    if correction not in PRESETS:
        raise ValueError(f"unknown correction {correction!r}; choose {', '.join(PRESETS)}, or give an Objective")
    return PRESETS[correction]


def loglinear_proximal(
    logprobs: torch.Tensor, behavior: torch.Tensor, versions: torch.Tensor, trainer_version: int
) -> torch.Tensor:
    """log π_p f[n] by interpolation: π_p is taken to be one version older than π_θ = `trainer_version`.

    A token of version v − 1 or newer was drawn by π_p itself. Source: AReaL's `prox_logp_method=loglinear`.
    """
    lag = (trainer_version - versions).clamp(min=0)
    alpha = ((lag - 1) / lag.clamp(min=1)).clamp(min=0).to(behavior.dtype)
    return behavior + alpha * (logprobs.detach() - behavior)


def policy_terms(objective: Objective, tokens: DrawnTokens) -> torch.Tensor:
    """w_t · m_t · L_t f[n], with gradient to `tokens.logprobs`."""
    terms = objective.correction(tokens) * objective.surrogate(tokens)
    for trust_region in objective.trust_regions:
        terms = torch.where(trust_region(tokens), terms, 0.0)
    return terms


def without_bounds(objective: Objective) -> Objective:
    """The same formula with every bound wide open and no trust region. Functions of one's own stay as they are."""
    return replace(
        objective,
        correction=_opened(objective.correction),
        surrogate=_opened(objective.surrogate),
        trust_regions=(),
    )


def knows_what_is_clipped(objective: Objective) -> bool:
    """Whether it can be told which tokens bounds have touched: of a function of one's own it is not known what it would
    be without them. A trust region has none but itself."""
    return bare(objective.correction) in _OURS and bare(objective.surrogate) in _OURS


def _opened(function: TokenFunction) -> TokenFunction:
    return partial(bare(function), **_OPEN[bare(function)]) if bare(function) in _OPEN else function
