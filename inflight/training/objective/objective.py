"""The minimised loss: a correction, a surrogate, trust regions and an aggregation.

loss = Σ_t a_t · ( w_t · m_t · L_t + β · KL_t + τ · D_t + δ · (log ρ_t)² − η · H_t ), with a_t the aggregation's weight,
w_t the correction's, m_t 1 if every trust region includes the token, else 0, L_t the surrogate's loss, and D_t the
divergence from a teacher over its k likeliest tokens (`distillation.py`).
"""

from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import get_args

import torch

from inflight.core.arguments import named
from inflight.core.by_name import resolve_by_name
from inflight.training.objective import corrections, surrogates
from inflight.training.objective import trust_regions as regions
from inflight.training.objective.adaptive_entropy import AdaptiveEntropy
from inflight.training.objective.aggregation import Aggregation
from inflight.training.objective.bounds import (
    Clips,
    TokenFunction,
    clips,
    declares,
    needs_entropies,
    open_form,
    ranks_tokens,
)
from inflight.training.objective.distillation import TeacherKL
from inflight.training.objective.kl import KLEstimator
from inflight.training.objective.tokens import DrawnTokens, Proximal


@named({"beta": "kl_weight", "kl_coef": "kl_weight", "entropy_coef": "entropy_weight", "loss": "surrogate"})
@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A policy objective. Its parts are functions of `corrections`, `surrogates` and `trust_regions`, or custom ones.
    `functools.partial` sets their bounds. They take `DrawnTokens` and return f[n], a trust region bool[n].
    `Objective()` is "ppo_clip", the default: the clipped ratio to the policy that drew each token. Weights of tokens
    instead of a clipped ratio: surrogate=reinforce, proximal="current" and a correction.

    Raises ValueError for meaningless settings: bounds without a value between them, clipping that never clips, names
    that do not exist. `LossStats.clipped` is None unless `clips` is "hard".
    """

    correction: TokenFunction = corrections.token_truncate
    """The weights w = π_p / π_b. They are 1 with proximal="behavior"."""
    surrogate: TokenFunction = surrogates.ppo_clip
    trust_regions: tuple[TokenFunction, ...] = ()
    aggregation: Aggregation = "token"
    max_tokens: int | None = None
    """The length that the generator allows. The aggregation "constant" divides by it."""
    proximal: Proximal = "behavior"
    """The proximal policy π_p. current: π_θ itself, for one optimizer step per batch. behavior: π_b, so that the
    surrogate's ratio is the whole of ρ and there is nothing left to correct. recomputed: the batch's
    `proximal_logprobs`, computed before the first of several steps. loglinear: between π_b and π_θ by versions, without
    that forward pass (AReaL, arXiv 2505.24298): log π_p = log π_b + α (log π_θ − log π_b), α = (v − 1 − v_b) / (v −
    v_b) in [0, 1]."""
    kl: KLEstimator = "k3"
    kl_weight: float = 0.0
    """β, the weight of the KL to the batch's `reference_logprobs`."""
    kl_correction: bool = True
    """Weight the KL of a token by ρ = π_θ / π_b, so that its expected gradient is right for tokens that an older policy
    drew, as in flight (`kl.kl_penalty`). False takes every token to be drawn by π_θ; k1 has no gradient then."""
    teacher_weight: float = 0.0
    """τ, the weight of a teacher (on-policy distillation, docs/training.md#a-teacher). With teacher_top_k=0 the
    advantage of a token is A + τ · (log π_teacher − log π_θ), and gets the correction and the bounds of any advantage.
    Otherwise the loss has the divergence from the teacher over its likeliest tokens."""
    teacher_top_k: int = 0
    """Number k of the teacher's likeliest tokens at each position that the divergence compares, with all others as one
    more token. 0: only the drawn token is compared."""
    teacher_kl: TeacherKL = "reverse"
    """Divergence over the k likeliest tokens: "reverse", KL(π_θ ‖ π_teacher), or "forward", KL(π_teacher ‖ π_θ)
    (`distillation.top_k_kl`)."""
    drift_weight: float = 0.0
    """δ, the weight of (log ρ)², ρ = π_θ / π_b, of every token, also of tokens that a trust region leaves out. It pulls
    π_θ back to the policy that drew the token, and needs no reference policy. prime-rl's default is 1e-3 (`kl_tau`,
    after Kimi K2.5, arXiv 2602.02276)."""
    entropy_weight: float | AdaptiveEntropy = 0.0
    """η, the weight of the entropy of the distributions that tokens are drawn from, or an `AdaptiveEntropy`."""

    def __post_init__(self) -> None:
        none, where = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        nothing = DrawnTokens(
            logprobs=none,
            behavior=none,
            proximal=none,
            advantages=none,
            sequences=where,
            num_sequences=0,
            proximal_policy=self.proximal,
            entropies=none,
        )
        for function in self._parts:
            if clips(function) != "unknown":  # The call raises if the arguments are meaningless.
                function(nothing)
            if (form := open_form(function)) is not None:
                form(nothing)
        for what, name, names in (
            ("aggregation", self.aggregation, get_args(Aggregation)),
            ("KL estimator", self.kl, get_args(KLEstimator)),
            ("divergence from a teacher", self.teacher_kl, get_args(TeacherKL)),
            ("proximal policy", self.proximal, get_args(Proximal)),
        ):
            if name not in names:
                raise ValueError(f"unknown {what} {name!r}; choose {', '.join(names)}")
        if self.proximal == "behavior" and self.correction not in (corrections.token_truncate, corrections.uncorrected):
            raise ValueError(
                "with proximal='behavior', the default, the surrogate's ratio is the whole of ρ and nothing is left to "
                "correct. Set surrogate=reinforce and proximal='current' to weight tokens by the correction, or leave "
                "correction out"
            )
        if self.proximal == "behavior" and self.surrogate is surrogates.reinforce:
            raise ValueError(
                "surrogate=reinforce has no ratio, so that with proximal='behavior', the default, nothing corrects for "
                "tokens of older policies. Set proximal='current' and a correction such as token_truncate, or "
                "correction=uncorrected if π_θ drew all tokens"
            )
        if self.aggregation == "constant" and not (self.max_tokens and self.max_tokens > 0):
            raise ValueError(
                f"aggregation 'constant' needs max_tokens, the length that it divides by; got {self.max_tokens}"
            )
        for name in ("kl_weight", "teacher_weight", "drift_weight"):
            if not 0 <= (weight := getattr(self, name)) < inf:
                raise ValueError(f"{name} must be finite and at least 0, got {weight}")
        if self.teacher_top_k < 0 or (self.teacher_top_k and not self.teacher_weight):
            raise ValueError(
                f"teacher_top_k must be at least 0, and needs a teacher_weight above 0; got {self.teacher_top_k} and "
                f"teacher_weight={self.teacher_weight}"
            )
        if self.kl_weight and self.kl == "k1" and not self.kl_correction:
            raise ValueError(
                "kl='k1' with kl_correction=False has an expected gradient of 0, so that kl_weight="
                f"{self.kl_weight} would only add noise: leave kl_correction at True, or choose kl='k2'"
            )
        if not isfinite(self.entropy_weight):
            raise ValueError(f"entropy_weight must be finite, got {self.entropy_weight}")

    @property
    def _parts(self) -> tuple[TokenFunction, ...]:
        return self.correction, self.surrogate, *self.trust_regions

    @property
    def clips(self) -> Clips:
        """Kind of clipping of correction and surrogate. hard: both declare their bounds (`bounds.bounded`), so that
        clipped tokens are counted. soft: one of them weakens the gradients of all tokens (`bounds.soft`). unknown: one
        of them declares neither."""
        kinds = {clips(self.correction), clips(self.surrogate)}
        return next(kind for kind in ("unknown", "soft", "hard") if kind in kinds)

    @property
    def is_about_rewards_alone(self) -> bool:
        """True if a token without an advantage adds nothing to the loss."""
        return not (self.kl_weight or self.teacher_weight or self.drift_weight or self.entropy_weight)

    @property
    def needs_entropies(self) -> bool:
        """True if the loss needs the entropies of the trainer's distributions."""
        return self.entropy_weight != 0 or any(declares(part, needs_entropies) for part in self._parts)

    @property
    def ranks_tokens(self) -> bool:
        """True if a part is declared by `bounds.ranks_tokens`: a token's loss depends on other sequences."""
        return any(declares(part, ranks_tokens) for part in self._parts)

    def policy_terms(self, tokens: DrawnTokens) -> torch.Tensor:
        """Return the policy terms w_t · m_t · L_t, f[n] with gradient to `tokens.logprobs`. Raises ValueError for a
        part that returns another shape."""
        losses = torch.as_tensor(self.surrogate(tokens))
        terms = self.correction(tokens) * losses
        for trust_region in self.trust_regions:
            terms = torch.where(trust_region(tokens), terms, 0.0)
        if not losses.shape == terms.shape == tokens.logprobs.shape:
            raise ValueError(
                f"parts of an objective return one value per token, {list(tokens.logprobs.shape)}: the surrogate has "
                f"returned {list(losses.shape)}, and with correction and trust regions there are {list(terms.shape)}"
            )
        return terms

    def terms_without_bounds(self, tokens: DrawnTokens) -> torch.Tensor | None:
        """Return the policy terms without any bound or trust region, or None if the correction or the surrogate does
        not declare its bounds."""
        correction, surrogate = open_form(self.correction), open_form(self.surrogate)
        return None if correction is None or surrogate is None else correction(tokens) * surrogate(tokens)


def _weighted(correction: TokenFunction, *trust_regions: TokenFunction, drift_weight: float = 0.0) -> Objective:
    """Return an objective of REINFORCE with weights."""
    return Objective(
        correction=correction,
        surrogate=surrogates.reinforce,
        proximal="current",
        trust_regions=trust_regions,
        drift_weight=drift_weight,
    )


_UNTRUNCATED = partial(corrections.token_truncate, cap=inf)

DEFAULT = "ppo_clip"
PRESETS: dict[str, Objective] = {
    "none": _weighted(corrections.uncorrected),
    "tis": _weighted(corrections.token_truncate),
    "icepop": _weighted(corrections.token_mask),
    "sequence_tis": _weighted(corrections.sequence_truncate),
    "sequence_mask": _weighted(corrections.sequence_mask),
    "vespo": _weighted(corrections.vespo),
    "geometric_mask": _weighted(corrections.token_truncate, regions.geometric_mask),
    DEFAULT: Objective(),
    "cispo": Objective(surrogate=surrogates.cispo),
    "sapo": Objective(surrogate=surrogates.sapo),
    "gspo": Objective(surrogate=surrogates.gspo, aggregation="sequence"),
    "gmpo": Objective(surrogate=surrogates.gmpo, aggregation="sequence"),
    "lag_clip": Objective(surrogate=surrogates.lag_clip),
    "decoupled_ppo": Objective(proximal="recomputed"),
    "loglinear_ppo": Objective(proximal="loglinear"),
    "dppo": _weighted(_UNTRUNCATED, regions.binary_tv_mask),
    "dppo_kl": _weighted(_UNTRUNCATED, regions.binary_tv_mask, drift_weight=1e-3),
    "dppo_binary_kl": _weighted(_UNTRUNCATED, regions.binary_kl_mask),
    "kpop": _weighted(_UNTRUNCATED, regions.kpop_mask),
    "dro": _weighted(corrections.uncorrected, drift_weight=0.025),
    "opsm": Objective(trust_regions=(regions.opsm_mask,)),
    "m2po": _weighted(_UNTRUNCATED, regions.m2po_mask),
    "second_moment": _weighted(_UNTRUNCATED, regions.second_moment_mask),
}
"""Objectives by name. The bounds are the defaults of their functions."""


def resolve(objective: str | Objective | None = None) -> Objective:
    """Return the objective itself, or load it by the name of a preset or as "module:name"; None is "ppo_clip", the
    default.

    Raises ValueError for an unknown name.
    """
    found = resolve_by_name(DEFAULT if objective is None else objective, PRESETS, "objective")
    if not isinstance(found, Objective):
        raise ValueError(f"objective {objective!r} must be an Objective, got {type(found).__name__}")
    return found


def loglinear_proximal(logprobs: torch.Tensor, behavior: torch.Tensor, lags: torch.Tensor) -> torch.Tensor:
    """Return log π_p f[n] by interpolation, for a π_p one version older than π_θ. lags: i64[n], versions between each
    token's and π_θ.

    A token of that older version or a newer one was drawn by π_p itself. Source: AReaL's `prox_logp_method=loglinear`.
    """
    lag = lags.clamp(min=0)
    alpha = ((lag - 1) / lag.clamp(min=1)).clamp(min=0).to(behavior.dtype)
    return behavior + alpha * (logprobs.detach() - behavior)
