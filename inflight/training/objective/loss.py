"""The policy loss: log-probabilities of the drawn tokens under the trainer's model, corrected and summed."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from inflight.core.arguments import named
from inflight.core.errors import NonFiniteLossError
from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import TokenScores, score_tokens
from inflight.training.objective.aggregation import token_weights
from inflight.training.objective.distillation import LOGPROBS, TOP_IDS, TOP_LOGPROBS, top_k_kl
from inflight.training.objective.kl import kl_penalty
from inflight.training.objective.objective import Objective, loglinear_proximal, resolve
from inflight.training.objective.statistics import LossStats, RatioStats, ratio_sums
from inflight.training.objective.tokens import LOG_RATIO_BOUND, DrawnTokens, exp_ratio

CLIPPED_TOLERANCE = 1e-4
"""A token is clipped if its gradient differs by more than this share from its gradient without bounds."""


@named({"correction": "objective", "loss": "objective", "loss_type": "objective"})
def policy_loss(
    model: nn.Module,
    batch: PackedBatch,
    *,
    objective: str | Objective | None = None,
) -> tuple[torch.Tensor, LossStats]:
    """Return the loss of a batch or micro-batch, a scalar with gradient, and statistics.

    objective: an `Objective`, the name of one of `objective.PRESETS`, or "module:name"; None is "ppo_clip". The batch
    can be on the CPU. Its layout is computed there, without a synchronisation with the device. Losses of the
    micro-batches of a step add up to the loss of the step, and so do their statistics (except with `m2po_mask` and
    `second_moment_mask`: they rank the tokens of a micro-batch). Raises ValueError for an unknown name and for a column
    that the objective needs and the batch lacks, and NonFiniteLossError for a loss or a log-probability that is not
    finite.
    """
    objective = resolve(objective)
    top = {"at": _of_teacher(batch, TOP_IDS)[batch.drawn]} if objective.teacher_top_k else {}
    scores = score_tokens(model, batch, entropy=objective.needs_entropies, **top)
    return loss_of_scores(objective, batch.to(scores.logprobs.device), scores)


def loss_of_scores(objective: Objective, batch: PackedBatch, scores: TokenScores) -> tuple[torch.Tensor, LossStats]:
    """Compute the result of `policy_loss` from the output of `score_tokens`, for trainers with a custom forward pass.
    All tensors are on one device. Raises ValueError if the objective needs entropies and `scores` has none."""
    if objective.needs_entropies and scores.entropies is None:
        raise ValueError("the objective needs entropies: inflight.training.model.forward.score_tokens(…, entropy=True)")
    if objective.teacher_top_k and scores.at is None:
        raise ValueError(f"the objective needs score_tokens(…, at=batch.columns[{TOP_IDS!r}][batch.drawn])")
    rows, sequences = batch.drawn, batch.sequence_ids[batch.drawn]
    logprobs, entropies, of_top = scores.logprobs, scores.entropies, scores.at
    lengths = torch.zeros_like(batch.groups).index_add(0, sequences, torch.ones_like(sequences))
    if batch.sample_tokens is not None:
        lengths = batch.sample_tokens
    of_sequences = token_weights(
        objective.aggregation, lengths, batch.groups, batch.totals, max_tokens=objective.max_tokens
    )
    if batch.included is not None:
        included = torch.nonzero(batch.included[rows]).flatten()
        rows, sequences, logprobs = rows[included], sequences[included], logprobs[included]
        entropies = entropies if entropies is None else entropies[included]
        of_top = of_top if of_top is None else of_top[included]
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        tokens = _drawn_tokens(objective, batch, rows, sequences, leaf)
        if entropies is not None:
            tokens = replace(tokens, entropies=entropies.detach())
        weights = of_sequences[sequences].to(leaf.dtype)
        value, gradient = _differentiated(objective.policy_terms(tokens), weights, leaf)
        num_clipped = kl_sum = teacher_sum = None
        if (without_bounds := objective.terms_without_bounds(tokens)) is not None:
            _, expected = _differentiated(without_bounds, weights, leaf)
            changed = (gradient - expected).abs() > CLIPPED_TOLERANCE * expected.abs()
            num_clipped = (changed | _beyond_exponent(tokens, expected)).sum()
        if objective.kl_weight:
            reference = _column(batch, "reference_logprobs", "a KL penalty (kl_weight)", "reference")[rows]
            kls = kl_penalty(objective.kl, leaf, reference, tokens.behavior, corrected=objective.kl_correction)
            penalty = objective.kl_weight * (weights * kls).sum()
            value, gradient = value + penalty.detach(), gradient + torch.autograd.grad(penalty, leaf)[0]
            kl_sum = kls.detach().sum()
        if objective.teacher_weight and not objective.teacher_top_k:
            ratios = _log_teacher_ratios(batch, rows, leaf.detach())
            teacher_sum = -(exp_ratio(tokens.log_behavior_ratios) * ratios).sum()
        if objective.drift_weight:
            drift = objective.drift_weight * (weights * (leaf - tokens.behavior).square()).sum()
            value, gradient = value + drift.detach(), gradient + torch.autograd.grad(drift, leaf)[0]
    loss = _KnownGradient.apply(logprobs, value, gradient)
    if (entropy_weight := float(objective.entropy_weight)) and entropies is not None:
        loss = loss - entropy_weight * (weights * entropies).sum()
    if objective.teacher_top_k and of_top is not None:
        divergences = top_k_kl(objective.teacher_kl, of_top, _of_teacher(batch, TOP_LOGPROBS)[rows])
        loss = loss + objective.teacher_weight * (weights * divergences).sum()
        teacher_sum = divergences.detach().sum()
    sum_entropy = None if entropies is None else entropies.detach().sum()
    return loss, _statistics(loss.detach(), batch, rows, tokens, num_clipped, sum_entropy, kl_sum, teacher_sum)


def _differentiated(
    terms: torch.Tensor, weights: torch.Tensor, logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Σ_t weights_t · terms_t and its gradient f[n] to `logprobs`."""
    total = (weights * terms).sum(dtype=torch.float64).to(terms.dtype)
    return total.detach(), torch.autograd.grad(total, logprobs)[0]


def _beyond_exponent(tokens: DrawnTokens, expected: torch.Tensor) -> torch.Tensor:
    """Return bool[n], true for a token with an advantage that has no gradient even without bounds, because `exp_ratio`
    clamped its log-ratio or the mean log-ratio of its sequence."""
    logs = tokens.log_ratios.detach()
    largest = torch.maximum(logs.abs(), tokens.sequence_means(logs)[tokens.sequences].abs())
    return (expected == 0) & (tokens.advantages != 0) & (largest > LOG_RATIO_BOUND)


def _drawn_tokens(
    objective: Objective, batch: PackedBatch, rows: torch.Tensor, sequences: torch.Tensor, logprobs: torch.Tensor
) -> DrawnTokens:
    behavior = batch.behavior_logprobs[rows].to(logprobs.dtype)
    if objective.proximal == "behavior":
        proximal = behavior
    elif objective.proximal == "recomputed":
        column = _column(batch, "proximal_logprobs", "the proximal policy 'recomputed'", "model")
        proximal = column[rows].to(logprobs.dtype)
    elif objective.proximal == "loglinear":
        if batch.trainer_version is None:
            raise ValueError("the proximal policy 'loglinear' needs batch.trainer_version, the version being trained")
        proximal = loglinear_proximal(logprobs, behavior, batch.version_lags[rows])
    else:
        proximal = logprobs.detach()
    advantages = batch.advantages[rows].to(logprobs.dtype)
    if objective.teacher_weight and not objective.teacher_top_k:
        advantages = advantages + objective.teacher_weight * _log_teacher_ratios(batch, rows, logprobs.detach())
    return DrawnTokens(
        logprobs=logprobs,
        behavior=behavior,
        proximal=proximal,
        advantages=advantages,
        sequences=sequences,
        num_sequences=batch.num_sequences,
        proximal_policy=objective.proximal,
        batch=batch,
        rows=rows,
    )


def _log_teacher_ratios(batch: PackedBatch, rows: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(π_teacher / π_θ) f[n] of the drawn tokens, within ±20. log π_θ is the present policy's: corrected by ρ
    = π_θ / π_b, its expectation times ∇log π_θ is −∇KL(π_θ ‖ π_teacher). With the recorded log π_b instead, tokens of
    older policies would add ∇KL(π_θ ‖ π_b), away from the policy that drew them."""
    ratios = _of_teacher(batch, LOGPROBS)[rows].to(logprobs.dtype) - logprobs
    return ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _of_teacher(batch: PackedBatch, name: str) -> torch.Tensor:
    if name not in batch.columns:
        raise ValueError(
            f"teacher_weight needs batch.columns[{name!r}]: give inflight.grpo(…, teacher=…), or score the rollouts by "
            "an inflight.TeacherScorer, or add the columns by inflight.with_teacher(teacher, batch)"
        )
    return batch.columns[name]


def _column(batch: PackedBatch, name: str, purpose: str, whose: str) -> torch.Tensor:
    column = getattr(batch, name)
    if column is None:
        raise ValueError(
            f"{purpose} needs batch.{name}: with torch.no_grad(): batch = batch.with_column({name!r}, "
            f"inflight.token_logprobs({whose}, batch)), before the first optimizer step on the batch"
        )
    return column


class _KnownGradient(torch.autograd.Function):
    """A scalar whose gradient is known: the objective is differentiated once, apart from the model."""

    @staticmethod
    def forward(ctx: Any, logprobs: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [gradient] = ctx.saved_tensors
        return grads[0] * gradient, None, None


def _statistics(
    loss: torch.Tensor,
    batch: PackedBatch,
    rows: torch.Tensor,
    tokens: DrawnTokens,
    *optional: torch.Tensor | None,
) -> LossStats:
    """Return the statistics, copied from the device in one transfer. optional: the number of clipped tokens and the
    sums of entropies, of the KL penalty and of the KL to a teacher, if they are known."""
    if batch.trainer_version is None:
        classes = torch.zeros_like(rows)
    else:  # 1: this version drew the token, 2: an older one.
        classes = torch.where(batch.version_lags[rows] <= 0, 1, 2)
    of_sequences = tokens.sequence_sums(tokens.log_behavior_ratios)
    sums = ratio_sums(tokens.log_behavior_ratios, classes)
    has_gradient = tokens.sequence_sums(tokens.advantages.abs()) > 0
    sums = torch.cat([sums, ratio_sums(of_sequences, torch.where(has_gradient, 0, 1))[:1]])
    numbers = [loss, *(value for value in optional if value is not None)]
    total, *rest = torch.cat([torch.stack([value.double() for value in numbers]), sums.flatten()]).tolist()
    clipped, entropy, kl, teacher_kl = (None if value is None else rest.pop(0) for value in optional)
    unknown, mismatch, stale, sequences = (RatioStats.from_sums(rest[7 * i : 7 * i + 7]) for i in range(4))
    ratios = unknown + mismatch + stale
    # Bounds can hide a log-probability of −∞ from the loss: a clipped ratio is finite.
    if not (math.isfinite(total) and math.isfinite(ratios.sum_abs_log)):
        raise NonFiniteLossError(_what_is_not_finite(batch, rows, tokens))
    for observer in tuple(batch.observers):  # The tuple is a copy, because an observer that fails removes itself.
        observer(batch, rows, tokens.log_behavior_ratios)
    return LossStats(
        loss=total,
        ratios=ratios,
        mismatch=mismatch,
        stale=stale,
        num_clipped=None if clipped is None else int(clipped),
        sum_entropy=entropy,
        sum_reference_kl=kl,
        sum_teacher_kl=teacher_kl,
        sequences=sequences,
    )


def _what_is_not_finite(batch: PackedBatch, rows: torch.Tensor, tokens: DrawnTokens) -> str:
    bad = torch.nonzero(~tokens.logprobs.isfinite()).flatten().tolist()
    if not bad:
        return "the loss is not finite though log-probabilities are; look at advantages, reference and proximal columns"
    row, sequence = int(rows[bad[0]]), int(tokens.sequences[bad[0]])
    first = int(batch.drawn[batch.sequence_ids[batch.drawn] == sequence][0])
    return (
        f"token {row - first} of the answer of sequence {sequence} (id {int(batch.input_ids[row])}) has "
        f"log-probability {tokens.logprobs[bad[0]].item()} under the trainer's model, and {len(bad)} of {len(rows)} "
        "tokens have one that is not finite: weights or activations have overflowed, or the token is not in the "
        "model's vocabulary or not in the set that it was drawn from"
    )
