"""GRPO (Shao et al., arXiv 2402.03300) against a generator that never stops: groups of rollouts come in scored, a
corrected policy-gradient step is taken, and new weights are published while the generator goes on drawing."""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import nn

from inflight.core.clock import now_ns
from inflight.core.errors import NonFiniteLossError
from inflight.core.sampling import SamplingParams
from inflight.core.spans import span, spanned
from inflight.session import LaunchedEngine
from inflight.training.data.batch import PackedBatch
from inflight.training.data.scored_groups import Dropped, group_advantages, measure_consumed
from inflight.training.data.scoring import Score, Scorer
from inflight.training.data.staleness_filter import StalenessRule, check_rules
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective, resolve
from inflight.training.objective.probe import VersionProbe
from inflight.training.objective.statistics import LossStats
from inflight.training.reference import ReferenceScorer, reference_scorer
from inflight.training.report import StepReport
from inflight.training.schedules import ROLLOUT_SCHEDULES, Admission, Example, RolloutSchedule, WeightPublisher
from inflight.training.step import check_finite, clip_and_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """What a run of GRPO is made of, besides model, optimizer and prompts."""

    steps: int = 100
    groups_per_step: int = 32
    """Groups of `sampling.n` rollouts that one optimizer step consumes."""
    groups_in_flight: int = 0
    """Groups submitted and not taken by the trainer yet, at most: what bounds how old tokens get. 0: twice
    groups_per_step. For schedule "inflight"; the others submit the groups of one step."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(n=8))
    objective: str | Objective | None = None
    """What is minimised: an `Objective`, or the name of one of `objective.PRESETS`; None is "tis"."""
    correction: InitVar[str | Objective | None] = None
    """Another name of the argument `objective`; giving both raises ValueError. It is read as `objective`."""
    staleness: tuple[StalenessRule, ...] = ()
    """Which tokens are too old to train on. `groups_in_flight` keeps them from getting that old."""
    updates_per_batch: int = 1
    """Optimizer steps on the same batch. With more than one, objectives whose proximal policy is "recomputed" have one
    to differ from."""
    probe_every: int = 0
    """Steps between two at which mismatch and staleness are told apart (`VersionProbe`); 0: never."""
    micro_batch_tokens: int = 0
    """Tokens of one forward and backward pass at most, for a step that does not fit into memory; 0: no bound."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it; 0: none are. Steps with a gradient that is not finite are
    skipped either way."""
    scale_advantages: bool = True
    """Divide by the standard deviation of the group's rewards; False is Dr. GRPO's (arXiv 2503.20783)."""
    advantage_ddof: int = 0
    """That standard deviation divides by n − ddof: 0 as in the paper, 1 as in TRL, verl, slime and SkyRL."""
    skip_uniform_groups: bool = True
    """Leave groups of equal rewards out of the forward pass. Their advantage is 0, and they still count in what the
    loss is averaged over, so that the gradient is the same, and cheaper. Where the objective has a KL penalty or an
    entropy bonus they stay, as these are about them too. A step of nothing but such groups is not taken."""
    schedule: RolloutSchedule = "inflight"
    """inflight: the generator never stops. For comparison, sync: generate, then train, then publish and wait until it
    is live; one_step_off: a whole batch is drawn, under one version, while the one before it is trained on."""

    def __post_init__(self, correction: str | Objective | None) -> None:
        objective = resolve(self.objective, correction=correction)
        if objective.proximal == "recomputed" and self.updates_per_batch < 2:
            raise ValueError(
                f"{self.objective or correction!r} recomputes its proximal policy for several steps on a batch; with "
                "one step that is the policy being trained: set updates_per_batch, or take another objective"
            )
        object.__setattr__(self, "objective", objective)
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.schedule not in ROLLOUT_SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(ROLLOUT_SCHEDULES)}, got {self.schedule!r}")
        if self.sampling.n < 2:
            raise ValueError(
                f"GRPO compares the samples of a group: sampling.n must be at least 2, got {self.sampling.n}"
            )
        if self.sampling.greedy:
            raise ValueError(
                "sampling.temperature is 0, which always takes the likeliest token: the samples of a group would be "
                "one and the same, without an importance ratio; take a temperature above 0"
            )
        if self.advantage_ddof >= self.sampling.n:
            raise ValueError(f"advantage_ddof ({self.advantage_ddof}) must be less than sampling.n ({self.sampling.n})")
        if 0 < self.micro_batch_tokens <= self.sampling.max_tokens:
            raise ValueError(
                f"micro_batch_tokens ({self.micro_batch_tokens}) must hold a prompt and an answer of "
                f"sampling.max_tokens ({self.sampling.max_tokens})"
            )
        check_rules(self.staleness)
        if self.groups_in_flight and self.groups_in_flight < self.groups_per_step:
            raise ValueError(
                f"groups_in_flight ({self.groups_in_flight}) must be at least groups_per_step ({self.groups_per_step})"
            )

    @property
    def skips_uniform_groups(self) -> bool:
        """Whether groups of equal rewards are left out: if that is wanted, and the objective is about rewards alone."""
        objective = resolve(self.objective)
        return self.skip_uniform_groups and not objective.kl_weight and not objective.entropy_weight


_LEAST = dict.fromkeys(("steps", "groups_per_step", "updates_per_batch"), 1)
_LEAST |= dict.fromkeys(("groups_in_flight", "probe_every", "micro_batch_tokens", "max_grad_norm", "advantage_ddof"), 0)


def grpo(
    engine: LaunchedEngine,
    publisher: WeightPublisher,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Iterable[Example],
    score: Score | Scorer,
    config: GRPOConfig,
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    *,
    reference: nn.Module | None = None,
) -> Iterator[StepReport]:
    """Train for `config.steps` optimizer steps, or until the examples end; yields after each. Groups still in flight at
    the end are cancelled.

    reference: the policy that the objective's KL penalty refers to, where it has one, such as a copy of the model made
    before training; it is put into evaluation mode, and scores every batch once. None: a PEFT model without its
    adapters. Where there is neither, ValueError is raised at once.
    An update whose loss or gradient is not finite is not taken; it is counted and logged. Weights that are not finite
    are never published: NonFiniteWeightsError ends the run, and the engine keeps those that it has.
    """
    score_reference = reference_scorer(resolve(config.objective), model, reference)
    check_finite(model)
    advantages_of = partial(group_advantages, scale=config.scale_advantages, ddof=config.advantage_ddof)

    def steps() -> Iterator[StepReport]:
        meter = engine.staleness
        meter.trainer_version = publisher.version
        probe = VersionProbe(model) if config.probe_every else None
        if probe is not None:
            probe.remember(meter.trainer_version)
        num_skipped, dropped = 0, Dropped()
        limit = config.groups_per_step
        if config.schedule == "inflight":
            limit = config.groups_in_flight or 2 * limit
        prompts = iter(examples)
        with Admission(engine, publisher, prompts, config.sampling, score, config.groups_per_step, limit) as admission:
            source = ROLLOUT_SCHEDULES[config.schedule](admission)
            for step, scored in enumerate(islice(spanned("wait for rollouts", source), config.steps), 1):
                batch = scored.pack(
                    trainer_version=meter.trainer_version,
                    staleness=config.staleness,
                    advantages_of=advantages_of,
                    skip_uniform=config.skips_uniform_groups,
                )
                dropped += scored.dropped
                update = Update()
                staleness = causes = None
                if batch is not None:
                    causes = probe.causes(batch) if probe is not None and step % config.probe_every == 0 else None
                    update = train_step(model, optimizer, batch, config, score_reference=score_reference)
                    num_skipped += update.num_skipped
                    if lr_scheduler is not None and update.num_skipped < config.updates_per_batch:
                        lr_scheduler.step()
                    staleness = measure_consumed(meter, batch)
                check_finite(model, trainable=True)
                version = publisher.publish()
                if probe is not None:
                    probe.remember(meter.trainer_version)
                yield StepReport(
                    step=step,
                    version=version,
                    reward=scored.mean_reward,
                    num_tokens=sum(len(rollout.token_ids) for rollout in scored.rollouts),
                    stats=update.stats,
                    grad_norm=update.grad_norm,
                    num_skipped=num_skipped,
                    staleness=staleness,
                    causes=causes,
                    dropped=dropped,
                    finished_ns=now_ns(),
                    groups=scored.groups,
                )
        logger.info("left out of the batches: %s", dropped)

    return steps()


@dataclass(slots=True)
class Update:
    """What became of the optimizer steps on one batch."""

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
    the log-probabilities that the KL penalty refers to, where the objective has one and the batch does not bring
    them."""
    parts = batch.micro_batches(config.micro_batch_tokens) if config.micro_batch_tokens else [batch]
    if resolve(config.objective).proximal == "recomputed":
        with torch.no_grad():
            parts = [part.with_column("proximal_logprobs", token_logprobs(model, part)) for part in parts]
    if score_reference is not None and batch.reference_logprobs is None:
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
        update.grad_norm = norm if update.grad_norm is None else update.grad_norm
        update.stats = stats if index == 0 else update.stats
    return update


def _backward(model: nn.Module, parts: list[PackedBatch], config: GRPOConfig) -> LossStats | None:
    """Add up the gradients of the micro-batches. Returns their statistics."""
    total: LossStats | None = None
    for part in parts:
        with span("forward", tokens=part.num_drawn):
            loss, stats = policy_loss(model, part, objective=config.objective)
        with span("backward"):
            loss.backward()
        total = stats if total is None else total + stats
    return total
