"""GRPO (Shao et al., arXiv 2402.03300) against a generator that never stops.

The reference loop: groups of rollouts come in, are scored, their advantages are relative to their group, one corrected
policy-gradient step is taken, and the new weights are published while the generator goes on drawing.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import nn

from inflight.core.clock import now_ns
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.spans import span, spanned
from inflight.observability.staleness import TokenStaleness
from inflight.training.batch import PackedBatch
from inflight.training.forward import token_logprobs
from inflight.training.loss import policy_loss
from inflight.training.objective import Objective, resolve
from inflight.training.probe import RatioCauses, VersionProbe
from inflight.training.rollouts import consume, pack_groups
from inflight.training.schedules import SCHEDULES, Admission, Example, RolloutEngine, Schedule, WeightPublisher, batches
from inflight.training.scoring import Score, Scorer
from inflight.training.staleness import StalenessCounts, StalenessFilter, StalenessRule
from inflight.training.statistics import LossStats

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
    correction: str | Objective = "tis"
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
    skip_uniform_groups: bool = True
    """Leave groups of equal rewards out of the loss; their advantage is 0."""
    schedule: Schedule = "inflight"
    """inflight: the generator never stops. For comparison, sync: generate, then train, then publish and wait until it
    is live; one_step_off: a whole batch is drawn, under one version, while the one before it is trained on."""

    def __post_init__(self) -> None:
        if resolve(self.correction).proximal == "recomputed" and self.updates_per_batch < 2:
            raise ValueError(
                f"{self.correction!r} recomputes its proximal policy for several steps on a batch; with one step that "
                "is the policy being trained: set updates_per_batch, or take another correction"
            )
        for name in ("updates_per_batch", "groups_per_step", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.sampling.n < 2:
            raise ValueError(
                f"GRPO compares the samples of a group: sampling.n must be at least 2, got {self.sampling.n}"
            )
        if self.groups_in_flight and self.groups_in_flight < self.groups_per_step:
            raise ValueError(
                f"groups_in_flight ({self.groups_in_flight}) must be at least groups_per_step ({self.groups_per_step})"
            )

    @property
    def admitted_groups(self) -> int:
        """The bound on the groups in flight that follows from schedule and settings."""
        if self.schedule == "inflight":
            return self.groups_in_flight or 2 * self.groups_per_step
        return self.groups_per_step


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step."""

    step: int
    version: int
    """The newest that the engine was sent, after the step."""
    reward: float
    """Mean over all rollouts of the step."""
    num_tokens: int
    """Drawn tokens of the step's rollouts."""
    stats: LossStats | None
    """None if there was nothing to learn: every group was uniform, or too old."""
    staleness: TokenStaleness | None
    causes: RatioCauses | None
    """Where the step was one of `probe_every`."""
    num_failed: int
    """Groups of which a sample was cancelled or ended with an error, or none has a reward, since the run began; others
    took their place."""
    num_unscored: int
    """Rollouts that were left out because they have no reward (None, not finite, or too late), since the run began."""
    dropped: StalenessCounts
    """What the staleness rules took away since the run began."""
    finished_ns: int
    groups: list[list[Rollout]] = field(repr=False)
    """The step's rollouts, with text, rewards and metadata."""


def grpo(
    engine: RolloutEngine,
    publisher: WeightPublisher,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Iterable[Example],
    score: Score | Scorer,
    config: GRPOConfig,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Iterator[StepReport]:
    """Train for `config.steps` optimizer steps, or until the examples end; yields after each. Groups still in flight at
    the end are cancelled."""
    with Admission(engine, examples, config.sampling, limit=config.admitted_groups, score=score) as admission:
        source = batches(config.schedule, engine, publisher, admission, groups_per_step=config.groups_per_step)
        trainer_version = publisher.version
        rules = StalenessFilter(config.staleness)
        probe = VersionProbe(model) if config.probe_every else None
        if probe is not None:
            probe.remember(trainer_version)
        for step, groups in enumerate(islice(spanned("wait for rollouts", source), config.steps), 1):
            rewards = [float(rollout.reward or 0) for group in groups for rollout in group]
            useful = [group for group in groups if not (config.skip_uniform_groups and uniform(group))]
            batch = pack_groups(useful, trainer_version=trainer_version, staleness=rules) if useful else None
            stats = staleness = causes = None
            if batch is not None:
                causes = probe.causes(batch) if probe is not None and step % config.probe_every == 0 else None
                stats = train_step(model, optimizer, batch, config)
                if scheduler is not None:
                    scheduler.step()
                staleness = consume(engine.staleness, batch, trainer_version)
            trainer_version += 1
            if probe is not None:
                probe.remember(trainer_version)
            yield StepReport(
                step=step,
                version=publisher.publish(),
                reward=sum(rewards) / len(rewards),
                num_tokens=sum(len(rollout.token_ids) for group in groups for rollout in group),
                stats=stats,
                staleness=staleness,
                causes=causes,
                num_failed=admission.num_failed,
                num_unscored=admission.num_unscored,
                dropped=replace(rules.counts),
                finished_ns=now_ns(),
                groups=groups,
            )
        if config.staleness:
            logger.info("staleness rules: %s", rules.counts)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: PackedBatch, config: GRPOConfig) -> LossStats:
    """The optimizer steps on one batch; statistics of the first. A batch on the CPU is moved in micro-batches."""
    parts = batch.micro_batches(config.micro_batch_tokens) if config.micro_batch_tokens else [batch]
    if resolve(config.correction).proximal == "recomputed":
        with torch.no_grad():
            parts = [part.with_column("proximal_logprobs", token_logprobs(model, part)) for part in parts]
    first: LossStats | None = None
    for _ in range(config.updates_per_batch):
        total: LossStats | None = None
        for part in parts:
            with span("forward", tokens=part.num_drawn):
                loss, stats = policy_loss(model, part, correction=config.correction)
            with span("backward"):
                loss.backward()
            total = stats if total is None else total + stats
        with span("optimizer step"):
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        first = first or total
    assert first is not None
    return first


def uniform(group: list[Rollout]) -> bool:
    """Whether all samples of the group got the same reward, so that nothing can be learned from it."""
    return len({rollout.reward for rollout in group}) == 1
