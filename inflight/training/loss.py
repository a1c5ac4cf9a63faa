"""The policy loss: log-probabilities of the drawn tokens under the trainer's model, corrected and averaged."""

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from inflight_kernels import selective_logprobs
from torch import nn

from inflight.training.batch import PackedBatch, padded
from inflight.training.corrections import ppo_clip, truncated_importance_sampling, uncorrected

Correction = Literal["none", "tis", "ppo_clip"]


@dataclass(frozen=True, slots=True)
class LossStats:
    """Statistics over the drawn tokens of a batch. ρ = π_θ / π_b per token, log-probabilities natural."""

    loss: float
    num_tokens: int
    ess: float
    """Effective sample size (Σρ)² / (n Σρ²), in (0, 1]; 1 when the data is on-policy."""
    ratio_mean: float
    """Its expectation is 1; another value tells of a trainer that means something else by log π."""
    ratio_min: float
    ratio_max: float
    kl: float
    """KL(π_b ‖ π_θ) by the k3 estimator, ρ − 1 − log ρ (Schulman, "Approximating KL divergence", 2020)."""
    logprob_diff: float
    """Mean |log π_θ − log π_b|."""
    clipped: float
    """Share of tokens whose ratio is beyond the correction's bound."""


def policy_loss(
    model: nn.Module,
    batch: PackedBatch,
    *,
    correction: Correction = "tis",
    cap: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[torch.Tensor, LossStats]:
    """The mean over drawn tokens of the corrected policy-gradient loss, a scalar with gradient, and statistics.

    correction: "none", "tis" (truncated importance sampling with `cap`) or "ppo_clip" (`clip_low`, `clip_high`); the
    formulas are in `inflight.training.corrections`. Raises ValueError for another name.
    """
    logprobs = token_logprobs(model, batch)
    drawn = batch.loss_mask
    behavior, advantages = batch.behavior_logprobs[drawn], batch.advantages[drawn]
    ratios = torch.exp(logprobs.detach() - behavior)
    match correction:
        case "none":
            losses = uncorrected(logprobs, behavior, advantages)
            clipped = torch.zeros_like(ratios, dtype=torch.bool)
        case "tis":
            losses = truncated_importance_sampling(logprobs, behavior, advantages, cap=cap)
            clipped = ratios > cap
        case "ppo_clip":
            losses = ppo_clip(logprobs, behavior, advantages, clip_low=clip_low, clip_high=clip_high)
            clipped = torch.where(advantages >= 0, ratios > 1 + clip_high, ratios < 1 - clip_low)
        case _:
            if correction not in ("none", "tis", "ppo_clip"):
                raise ValueError(f"unknown correction {correction!r}; choose none, tis or ppo_clip")
            assert_never(correction)
    loss = losses.mean()
    return loss, _statistics(loss, logprobs.detach() - behavior, ratios, clipped)


def token_logprobs(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Log-probabilities f32[n] of the drawn tokens at the temperatures they were drawn at, with gradient."""
    device = next(model.parameters()).device
    if batch.input_ids.device != device:
        raise ValueError(
            f"the batch is on {batch.input_ids.device}, the model on {device}; call batch.to({str(device)!r})"
        )
    ids_BS, positions_BS, row_T, column_T = padded(batch)
    logits_BSV = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits
    drawn = batch.loss_mask
    # The token at position p was drawn from the logits at p − 1; a drawn token is never the first of its sequence.
    logits_nV = logits_BSV[row_T[drawn], column_T[drawn] - 1]
    return selective_logprobs(logits_nV, batch.input_ids[drawn], batch.temperatures[drawn])


def _statistics(loss: torch.Tensor, log_ratios: torch.Tensor, ratios: torch.Tensor, clipped: torch.Tensor) -> LossStats:
    n = len(ratios)
    ess = ratios.double().sum() ** 2 / (n * (ratios.double() ** 2).sum())
    return LossStats(
        loss=loss.item(),
        num_tokens=n,
        ess=ess.item(),
        ratio_mean=ratios.mean().item(),
        ratio_min=ratios.min().item(),
        ratio_max=ratios.max().item(),
        kl=(ratios - 1 - log_ratios).mean().item(),
        logprob_diff=log_ratios.abs().mean().item(),
        clipped=clipped.float().mean().item(),
    )
