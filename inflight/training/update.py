"""The optimizer steps on one batch."""

import logging
import math
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import nn

from inflight.core.errors import NonFiniteLossError
from inflight.core.spans import span
from inflight.training.config import GRPOConfig
from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import resolve
from inflight.training.objective.statistics import LossStats
from inflight.training.reference import ReferenceScorer
from inflight.training.step import clip_and_step, ess_factor

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Update:
    """What became of the optimizer steps on one batch."""

    stats: LossStats | None = None
    """Statistics of the first step; None if its loss was not finite."""
    grad_norm: float | None = None
    """Norm of the gradient, before it was clipped, of the first step that had a finite loss."""
    lr_factor: float | None = None
    """What the learning rate of that step was multiplied by; None where none is (`GRPOConfig.scale_lr_by_ess`)."""
    num_skipped: int = 0
    """Steps that were not taken because their loss or gradient was not finite."""


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: PackedBatch,
    config: GRPOConfig,
    *,
    score_reference: ReferenceScorer | None = None,
) -> Update:
    """Take the optimizer steps on one batch. A batch on the CPU is moved in micro-batches. score_reference: computes
    the log-probabilities that the KL penalty refers to, where the objective has one and the batch does not bring
    them."""
    parts = batch.micro_batches(config.micro_batch_tokens) if config.micro_batch_tokens else [batch]
    if resolve(config.objective).proximal == "recomputed":
        with torch.no_grad():
            parts = [part.with_column("proximal_logprobs", token_logprobs(model, part)) for part in parts]
    has_penalty = resolve(config.objective).kl_weight
    if has_penalty and score_reference is not None and batch.reference_logprobs is None:
        with span("reference"):
            parts = [part.with_column("reference_logprobs", score_reference(part)) for part in parts]
    update = Update()
    for index in range(config.updates_per_batch):
        try:
            stats = _backward(model, parts, config)
        except NonFiniteLossError as error:
            optimizer.zero_grad()
            update.num_skipped += 1
            logger.warning("an optimizer step was skipped: %s", error)
            continue
        factor = ess_factor(stats.sequences.ess, config.scale_lr_by_ess) if config.scale_lr_by_ess else None
        with span("optimizer step"):
            norm = clip_and_step(
                optimizer, max_grad_norm=config.max_grad_norm, lr_factor=1.0 if factor is None else factor
            )
        update.num_skipped += not math.isfinite(norm)
        if update.grad_norm is None:
            update.grad_norm, update.lr_factor = norm, factor
        update.stats = stats if index == 0 else update.stats
    return update


def _backward(model: nn.Module, parts: list[PackedBatch], config: GRPOConfig) -> LossStats:
    """Add up the gradients of the micro-batches, at least one. Returns their statistics."""
    of_parts: list[LossStats] = []
    for part in parts:
        with span("forward", tokens=part.num_drawn):
            loss, stats = policy_loss(model, part, objective=config.objective)
        with span("backward"):
            loss.backward()
        of_parts.append(stats)
    return reduce(add, of_parts)
