"""Optimizer steps on one batch. At the end of each, gradients are clipped. Non-finite values change nothing."""

import logging
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from inflight.core.arguments import named
from inflight.core.errors import NonFiniteLossError, NonFiniteWeightsError
from inflight.core.spans import span
from inflight.core.text import listed
from inflight.training.config import GRPOConfig
from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import bf16_on_gpu, token_logprobs
from inflight.training.objective.adaptive_entropy import AdaptiveEntropy
from inflight.training.objective.aggregation import StepTotals, divisor
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import PRESETS, Objective, resolve
from inflight.training.objective.statistics import LossStats
from inflight.training.ranks.group import RankGroup, equal_micro_batches
from inflight.training.reference import ReferenceScorer
from inflight.training.schedules import WeightPublisher
from inflight.training.teacher import AddTeacher
from inflight.weights.tensors import is_peft, unwrap

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
    nll: float | None = None
    """Negative log-likelihood of the demonstrations in the first step, if there were any."""
    entropy_weight: float | None = None
    """Weight of the entropy bonus in these steps, if it is an `AdaptiveEntropy`."""


@dataclass(eq=False)
class Learner:
    """Adds up the gradient of an optimizer step, of a batch that arrives in one or several parts, and takes the step.

    A token of the step weighs 1 / N times a factor of its own group, with N the tokens, sequences or groups of the step
    (`divisor`). N is known once all parts have arrived. Until then each part is divided by an estimate of N. `step`
    multiplies the sum of the gradients by estimate / N before it clips.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: GRPOConfig
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    score_reference: ReferenceScorer | None = None
    """Computes the reference log-probabilities of the KL penalty, if the objective has one and the batch lacks them."""
    add_teacher: AddTeacher | None = None
    """Adds the scores of a teacher to a micro-batch."""
    demonstrations: Iterator[PackedBatch] | None = None
    """For each step a batch. Its negative log-likelihood times `config.demonstration_weight` is added to the loss.
    Every rank computes all of it."""
    ranks: RankGroup | None = None
    """The ranks that add the gradients of their shares of each part, and take the step together."""

    def __post_init__(self) -> None:
        self._objective = resolve(self.config.objective)
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau follows a number, and grpo gives it none: leave lr_scheduler out, and call "
                "scheduler.step(report.reward) after each report"
            )
        self._begin()

    def _begin(self) -> None:
        """Begin a step without parts."""
        self.has_batch = False
        """A part of the step is in the loss."""
        self._count, self._estimate = 0.0, 0.0
        """N of the parts so far, and the estimate of the N of the step (0: there is none yet)."""
        self._parts: list[tuple[PackedBatch, float]] = []
        """Micro-batches for further steps on the same batch, each with the weight of its loss."""
        self._stats: LossStats | None = None
        self._is_lost = False
        """A loss was not finite."""

    def count(self, totals: StepTotals) -> None:
        """Count a part of the step of which nothing is in the loss."""
        self._count += divisor(self._objective.aggregation, totals)

    def add(self, batch: PackedBatch, *, share: float = 1.0) -> None:
        """Add the gradient of a part. share: the expected share of the step that has arrived with this part; 1 if it is
        the only one. It decides the estimate of N, which the result does not depend on, except for rounding."""
        config = self.config
        if not self.has_batch:
            self.optimizer.zero_grad()  # Another loop can have left gradients, such as supervised training before.
        self.has_batch = True
        self.count(batch.totals)
        self._estimate = self._estimate or self._count / share or 1.0
        weight = divisor(self._objective.aggregation, batch.totals) / self._estimate
        parts = equal_micro_batches(batch, config.micro_batch_tokens, self.ranks)
        if self._objective.proximal == "recomputed":
            with torch.no_grad(), bf16_on_gpu(self.model, config.autocast):
                scored = [token_logprobs(self.model, part) for part in parts]
            parts = [part.with_column("proximal_logprobs", own) for part, own in zip(parts, scored, strict=True)]
        if self._objective.kl_weight and self.score_reference is not None and batch.reference_logprobs is None:
            with span("reference"):
                parts = [part.with_column("reference_logprobs", self.score_reference(part)) for part in parts]
        if self.add_teacher is not None:
            with span("teacher"):
                parts = [self.add_teacher(part) for part in parts]
        if config.updates_per_batch > 1:
            self._parts += [(part, weight) for part in parts]
        for part in parts:
            self._add(part, weight)

    def next_demonstrations(self) -> PackedBatch | None:
        """Return the demonstrations of the next step, if steps have some. Raises InflightError after the last. Rank 0
        calls this before the other ranks begin the step: they wait in its collective calls, and do not receive errors
        there."""
        return None if self.demonstrations is None else next(self.demonstrations)

    def step(self, demonstrations: PackedBatch | None = None) -> Update:
        """Take the optimizer steps of the parts and of `next_demonstrations`, and a step of the learning rate if one of
        them was taken. A step of which a loss or the gradient is not finite is not taken. Without a batch, nothing
        changes."""
        update = self._take(demonstrations) if self.has_batch else Update()
        if self.has_batch and self.lr_scheduler is not None and update.num_skipped < self.config.updates_per_batch:
            self.lr_scheduler.step()
        self._begin()
        return update

    def publish(self, publisher: WeightPublisher) -> int:
        """Publish the weights. Raises NonFiniteWeightsError if some that training changes are not finite, on all
        ranks."""
        with nullcontext() if self.ranks is None else self.ranks.together():
            check_finite(self.model, trainable=True)
        return publisher.publish()

    def drop(self) -> None:
        """Drop the gradients of a step that was not taken."""
        if self.has_batch:
            self.optimizer.zero_grad()
            self._begin()

    def _take(self, demonstrations: PackedBatch | None) -> Update:
        update, scale = Update(), self._estimate / (self._count or 1.0)
        for index in range(self.config.updates_per_batch):
            if index:
                self._stats, self._is_lost = None, False
                for part, weight in self._parts:
                    self._add(part, weight)
            nll = None if demonstrations is None else self._add_nll(demonstrations, scale)
            if self._is_lost or self._stats is None:
                update.num_skipped += 1
                continue
            with span("optimizer step"):
                if self.ranks is not None:
                    self.ranks.average_gradients(self.model, self.optimizer)
                scale_gradients(self.optimizer, scale)
                norm = clip_and_step(self.optimizer, max_grad_norm=self.config.max_grad_norm)
            update.num_skipped += not math.isfinite(norm)
            if update.grad_norm is None:
                update.grad_norm = norm
            if index == 0:
                stats = self._stats if self.ranks is None else self.ranks.sum_stats(self._stats)
                update.stats, update.nll = replace(stats, loss=stats.loss * scale), nll
        if isinstance(weight := self._objective.entropy_weight, AdaptiveEntropy):
            update.entropy_weight = float(weight)
            if update.stats is not None and update.stats.num_tokens and update.stats.entropy is not None:
                weight.observe(update.stats.entropy)
        return update

    def _add(self, part: PackedBatch, weight: float) -> None:
        """Add the gradient and the statistics of a micro-batch."""
        stats = self._backward(part, weight, self._objective)
        if stats is not None:
            self._stats = stats if self._stats is None else self._stats + stats

    def _add_nll(self, demonstrations: PackedBatch, scale: float) -> float:
        """Add the gradient of demonstrations. Returns their negative log-likelihood. scale: the factor of all gradients
        in `step`."""
        weight = self.config.demonstration_weight / scale
        own = replace(PRESETS["none"], aggregation=self._objective.aggregation, max_tokens=self._objective.max_tokens)
        parts = equal_micro_batches(demonstrations, self.config.micro_batch_tokens, self.ranks)
        found = [self._backward(part, weight, own) for part in parts]
        return sum(stats.loss for stats in found if stats is not None) / weight

    def _backward(self, part: PackedBatch, weight: float, objective: Objective) -> LossStats | None:
        """Add the gradient of a micro-batch, and return its statistics, unless the loss of this or an earlier one was
        not finite. If the loss of one rank is not finite, no rank computes gradients: a backward pass needs all
        ranks."""
        if self._is_lost:
            return None
        loss = stats = None
        try:
            with span("forward", tokens=part.num_drawn), bf16_on_gpu(self.model, self.config.autocast):
                loss, stats = policy_loss(self.model, part, objective=objective)
        except NonFiniteLossError as error:
            logger.warning("an optimizer step was skipped: %s", error)
        self._is_lost = loss is None if self.ranks is None else self.ranks.any(loss is None)
        if self._is_lost or loss is None or stats is None:
            self.optimizer.zero_grad()
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # A backward pass would have done that.
            return None
        with span("backward"):
            (loss * weight).backward()
        return replace(stats, loss=stats.loss * weight)


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the gradients of the optimizer's parameters."""
    if factor == 1:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


@named()
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


def check_trains(optimizer: torch.optim.Optimizer, module: nn.Module, name: str) -> None:
    """Raise ValueError if the optimizer changes no parameter of a module, called `name`."""
    ours = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(f"the optimizer has no trainable parameter of the {name}; make it from {name}.parameters()")


def check_belong(model: nn.Module, optimizer: torch.optim.Optimizer, publisher: object) -> None:
    """Raise ValueError if the optimizer changes no parameter of the model, or the publisher publishes another model,
    and TypeError for a publisher that cannot publish."""
    if not callable(getattr(publisher, "publish", None)):
        raise TypeError(f"publisher must be made by engine.publisher(model), got {type(publisher).__name__}")
    check_trains(optimizer, model, "model")
    reads = getattr(publisher, "reads", None)  # A custom publisher does not have it.
    if reads is not None and reads(model) is False:
        raise ValueError(
            "the publisher publishes another model than the trained one; make it by engine.publisher(model)"
        )


@torch.no_grad()
def check_finite(model: nn.Module, *, trainable: bool = False) -> None:
    """Raise NonFiniteWeightsError, naming parameters, if some are NaN or infinite. It reads every parameter once; of a
    parameter that is spread over ranks, the part of this rank. trainable: only parameters that training changes."""
    own = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    parameters = {
        name: parameter
        for name, parameter in own.items()
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
        raise NonFiniteWeightsError(
            f"{listed(bad)} of {len(parameters)} parameters hold NaN or infinite values; they are not "
            "published, and the engine keeps the weights that it has. Go on from a checkpoint, with a smaller learning "
            "rate or max_grad_norm"
        )


def trained_adapter(engine: Any, model: nn.Module) -> str | None:
    """Return the adapter that has to draw the tokens: the active one of a PEFT model, if the engine has slots for
    adapters, as a publisher then sends nothing else. None: the weights alone. engine: an engine, or `Episodes`. Raises
    ValueError if all turns of episodes would be drawn with another adapter."""
    info = getattr(getattr(engine, "engine", engine), "info", None)
    if getattr(info, "adapter_layout", None) is None:
        return None
    # A publisher refuses several active adapters.
    active = cast(Any, unwrap(model)).active_adapters[0] if is_peft(model) else None
    drawing = getattr(engine, "adapter", None)
    if drawing not in (None, active):
        trained = "the weights" if active is None else f"the adapter {active!r}"
        raise ValueError(
            f"the trainer trains {trained}, and episodes draw with {drawing!r}: pass Episodes(…, adapter={active!r})"
        )
    return active
