"""GRPO (Shao et al., arXiv 2402.03300) against a generator that never stops.

The reference loop: groups of rollouts come in, are scored, their advantages are relative to their group, one corrected
policy-gradient step is taken, and the new weights are published while the generator goes on drawing.
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.observability.staleness import StalenessMeter, TokenStaleness
from inflight.training.loss import Correction, LossStats, policy_loss
from inflight.training.rollouts import RolloutStream, Score, consume, pack_groups, score_groups, usable
from inflight.weights.publisher import Publisher


class Example(NamedTuple):
    """A prompt, as text or token ids, and what its score function needs to know."""

    prompt: Any
    metadata: Mapping[str, Any]


class RolloutEngine(Protocol):
    """What the loop asks of an engine; `inflight.launch` returns one."""

    @property
    def stream(self) -> RolloutStream: ...
    @property
    def staleness(self) -> StalenessMeter: ...
    def submit(self, prompts: Any, params: SamplingParams, *, metadata: Any) -> list[int]: ...
    def cancel(self, group_ids: list[int] | None = None) -> None: ...
    def wait_for_version(self, version: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """What a run of GRPO is made of, besides model, optimizer and prompts."""

    steps: int = 100
    groups_per_step: int = 32
    """Groups of `sampling.n` rollouts that one optimizer step consumes."""
    groups_in_flight: int = 0
    """Groups submitted and not consumed yet, at most: what bounds how old tokens get. 0: twice groups_per_step."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(n=8))
    correction: Correction = "tis"
    max_grad_norm: float = 1.0
    skip_uniform_groups: bool = True
    """Leave groups of equal rewards out of the loss; their advantage is 0."""
    sync: bool = False
    """The ordinary alternation, for comparison: generate, then train, then publish and wait until it is live."""

    def __post_init__(self) -> None:
        if self.sampling.n < 2:
            raise ValueError(
                f"GRPO compares the samples of a group: sampling.n must be at least 2, got {self.sampling.n}"
            )
        if self.groups_in_flight and self.groups_in_flight < self.groups_per_step:
            raise ValueError(
                f"groups_in_flight ({self.groups_in_flight}) must be at least groups_per_step ({self.groups_per_step})"
            )


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step."""

    step: int
    version: int
    """Published after the step."""
    reward: float
    """Mean over all rollouts of the step."""
    num_tokens: int
    """Drawn tokens of the step's rollouts."""
    stats: LossStats | None
    """None if every group was uniform, so that there was nothing to learn."""
    staleness: TokenStaleness | None
    finished_ns: int


Groups = Generator[list[list[Rollout]], None, None]


def grpo(
    engine: RolloutEngine,
    publisher: Publisher,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Iterator[Example],
    score: Score,
    config: GRPOConfig,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Iterator[StepReport]:
    """Train for `config.steps` optimizer steps; yields after each. Groups still in flight at the end are cancelled."""
    source = _alternating(engine, publisher, examples, config) if config.sync else _inflight(engine, examples, config)
    for step in range(1, config.steps + 1):
        groups = next(source)
        score_groups(groups, score)
        rewards = [float(rollout.reward or 0) for group in groups for rollout in group]
        useful = [group for group in groups if not (config.skip_uniform_groups and uniform(group))]
        stats = staleness = None
        if useful:
            trainer_version = publisher.version
            batch = pack_groups(useful).to(next(model.parameters()).device)
            loss, stats = policy_loss(model, batch, correction=config.correction)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            staleness = consume(engine.staleness, batch, trainer_version)
        yield StepReport(
            step=step,
            version=publisher.publish(),
            reward=sum(rewards) / len(rewards),
            num_tokens=sum(len(rollout.token_ids) for group in groups for rollout in group),
            stats=stats,
            staleness=staleness,
            finished_ns=now_ns(),
        )
    source.close()


def _inflight(engine: RolloutEngine, examples: Iterator[Example], config: GRPOConfig) -> Groups:
    """Groups as they finish, while as many others stay in flight."""
    in_flight = config.groups_in_flight or 2 * config.groups_per_step
    try:
        _submit(engine, examples, in_flight, config)
        while True:
            groups = _take(engine, config.groups_per_step)
            _submit(engine, examples, in_flight - len(engine.stream.outstanding), config)
            yield groups
    finally:
        engine.cancel()
        for _ in engine.stream.groups():  # what was cancelled still arrives
            pass


def _alternating(
    engine: RolloutEngine, publisher: Publisher, examples: Iterator[Example], config: GRPOConfig
) -> Groups:
    """Generate a whole batch under the newest weights, then nothing until it has been trained on."""
    while True:
        _submit(engine, examples, config.groups_per_step, config)
        yield _take(engine, config.groups_per_step)
        engine.wait_for_version(publisher.version)


def _submit(engine: RolloutEngine, examples: Iterator[Example], count: int, config: GRPOConfig) -> None:
    chosen = [next(examples) for _ in range(count)]
    if chosen:
        engine.submit([e.prompt for e in chosen], config.sampling, metadata=[e.metadata for e in chosen])


def _take(engine: RolloutEngine, count: int) -> list[list[Rollout]]:
    """The next `count` groups in which every sample ended by itself."""
    groups: list[list[Rollout]] = []
    for group in engine.stream.groups():
        if usable(group):
            groups.append(group)
        if len(groups) == count:
            return groups
    raise InflightError(
        f"only {len(groups)} of {count} groups ended by themselves; the others failed or were cancelled"
    )


def uniform(group: list[Rollout]) -> bool:
    """Whether all samples of the group got the same reward, so that nothing can be learned from it."""
    return len({rollout.reward for rollout in group}) == 1
