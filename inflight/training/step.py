"""Optimizer steps on one batch. At the end of each, gradients are clipped. Non-finite values change nothing."""

import logging
import math
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from inflight.core.errors import NonFiniteLossError, NonFiniteWeightsError
from inflight.core.spans import span
from inflight.training.config import GRPOConfig
from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import bf16_on_gpu, token_logprobs
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import resolve
from inflight.training.objective.statistics import LossStats
from inflight.training.reference import ReferenceScorer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Update:
    """Results of the optimizer steps on one batch."""

    stats: LossStats | None = None
    """Statistics of the first step; None if its loss was not finite."""
    grad_norm: float | None = None
    """Norm of the gradient, before it was clipped, of the first step that had a finite loss."""
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
    the reference log-probabilities of the KL penalty, if the objective has one and the batch does not contain them."""
    parts = batch.micro_batches(config.micro_batch_tokens) if config.micro_batch_tokens else [batch]
    if resolve(config.objective).proximal == "recomputed":
        with torch.no_grad(), bf16_on_gpu(model, config.autocast):
            scored = [token_logprobs(model, part) for part in parts]
        parts = [part.with_column("proximal_logprobs", logprobs) for part, logprobs in zip(parts, scored, strict=True)]
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
        with span("optimizer step"):
            norm = clip_and_step(optimizer, max_grad_norm=config.max_grad_norm)
        update.num_skipped += not math.isfinite(norm)
        if update.grad_norm is None:
            update.grad_norm = norm
        update.stats = stats if index == 0 else update.stats
    return update


def _backward(model: nn.Module, parts: list[PackedBatch], config: GRPOConfig) -> LossStats:
    """Add up the gradients of a non-empty list of micro-batches. Returns their statistics."""
    of_parts: list[LossStats] = []
    for part in parts:
        with span("forward", tokens=part.num_drawn), bf16_on_gpu(model, config.autocast):
            loss, stats = policy_loss(model, part, objective=config.objective)
        with span("backward"):
            loss.backward()
        of_parts.append(stats)
    return reduce(add, of_parts)


def clip_and_step(optimizer: torch.optim.Optimizer, *, max_grad_norm: float = 1.0) -> float:
    """Scale the gradients of the optimizer's parameters down to `max_grad_norm` if their norm is larger (0: leave them
    as they are), take a step and zero them. Returns the norm before scaling.

    If the norm is NaN or infinite no step is taken, since it would make every parameter NaN: parameters and the
    optimizer's state remain unchanged, the gradients are zeroed, and a warning is logged. Test the returned norm with
    `math.isfinite`. Raises ValueError for a bound that is negative or NaN.
    """
    if not max_grad_norm >= 0:
        raise ValueError(f"max_grad_norm must be at least 0 (0 does not clip), got {max_grad_norm}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    total = nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    if math.isfinite(norm):
        optimizer.step()
    else:
        logger.warning("an optimizer step was skipped: the norm of its gradient is %s", norm)
    optimizer.zero_grad()
    return norm


@torch.no_grad()
def check_finite(model: nn.Module, *, trainable: bool = False) -> None:
    """Raise NonFiniteWeightsError, naming parameters, if some are NaN or infinite. It reads every parameter once.
    trainable: only parameters that training changes."""
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if (parameter.requires_grad or not trainable)
        and parameter.numel()
        and parameter.is_floating_point()
        and parameter.element_size() > 1  # This excludes layers quantized to 4 or 8 bits.
    }
    # The norm is NaN if one value is.
    largest = [torch.linalg.vector_norm(p, math.inf).float() for p in parameters.values()]
    if not largest:
        return
    finite = torch.stack([value.to(largest[0].device) for value in largest]).isfinite().tolist()  # one transfer
    bad = [name for name, is_finite in zip(parameters, finite, strict=True) if not is_finite]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise NonFiniteWeightsError(
            f"{', '.join(bad[:3])}{more} of {len(parameters)} parameters hold NaN or infinite values; they are not "
            "published, and the engine keeps the weights that it has. Go on from a checkpoint, with a smaller learning "
            "rate or max_grad_norm"
        )
