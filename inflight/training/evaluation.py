"""Held-out prompts, answered by one version of the weights while training continues."""

import logging
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import nn

from inflight.core.arguments import named
from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout, samples_of
from inflight.core.sampling import SamplingParams
from inflight.core.workers import Workers
from inflight.stream.held_groups import Group
from inflight.training.data.examples import as_example, check_examples
from inflight.training.data.rewards import mean_parts
from inflight.training.data.scoring import GroupScorer, Score, Scorer
from inflight.training.schedules import LIVE_S, RolloutEngine
from inflight.training.step import trained_adapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Results of one version on held-out prompts."""

    name: str
    step: int
    """The optimizer step after which the evaluation began; 0: before the first."""
    version: int
    """The newest version at the start. It drew every token, unless the samples are episodes or an adapter drew them."""
    newest_version: int
    """The newest version that drew a token: `version`, unless the samples are episodes or an adapter drew
    them."""
    reward: float | None
    """Mean over the samples that have a reward; None if there are none."""
    num_failed: int
    """Samples without a reward."""
    rollouts: list[Rollout] = field(repr=False)

    def as_dict(self) -> dict[str, float]:
        """Return "NAME/reward", "NAME/step" and the like, and "NAME/reward/PART" of each of several score functions."""
        samples = samples_of(self.rollouts)
        lengths = [sum(rollout.num_drawn for rollout in sample) for sample in samples]
        reasons = [sample[0].finish_reason for sample in samples]
        numbers: dict[str, Any] = {} if self.reward is None else {"reward": self.reward}
        numbers |= {"step": self.step, "version": self.version, "newest_version": self.newest_version}
        numbers["num_failed"] = self.num_failed
        numbers |= {"mean_length": fmean(lengths), "truncated": reasons.count("length") / len(reasons)}
        numbers |= {f"reward/{part}": mean for part, mean in mean_parts(self.rollouts).items()}
        return {f"{self.name}/{key}": number for key, number in numbers.items()}


@named()
class Evaluation:
    """Evaluates held-out prompts during training: they are not trained on, and generation and training continue.

        evaluation = inflight.Evaluation(engine, held_out, score, every=25)
        for report in inflight.grpo(…, evaluation=evaluation):
            ...
        evaluation.results

    The version that was the newest at the start draws every token. A slot keeps it until the end: with
    `launch(slots=3)` other versions are published in the meantime, with two slots publishing waits. One evaluation runs
    at a time. One that is due earlier is skipped. Skips and failures are logged, and training continues. In a custom
    loop, call `start` after `publish`, `finished` now and then, and `wait` last.

    Of `Episodes`, and with an adapter, each token is drawn by the version that is live then: `version` or a newer one.
    No slot keeps a version between two turns, and none keeps a version of adapters. The last version is
    `EvaluationResult.newest_version`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        examples: Iterable[Any],
        score: Score | GroupScorer | None,
        *,
        sampling: SamplingParams | None = None,
        every: int = 25,
        name: str = "eval",
        adapter: str | None = None,
    ):
        """engine: an engine, or `Episodes`. examples: as in `grpo`; all of them are answered each time. score: None for
        episodes, which have rewards. sampling: None is greedy, with at most 256 tokens. every: optimizer steps between
        two; `grpo` evaluates before the first step and after the last, too. name: prefix of its numbers.
        adapter: the engine's LoRA adapter that draws the tokens, with the newest version at each token: no slot keeps
        an older one. None: in `grpo` the adapter that is trained; otherwise the weights alone. Raises
        ValueError without a prompt, for `every` below 1, for episodes with a score, and for prompts without."""
        self._engine, self._adapter = engine, adapter
        self._trained: str | None = None
        """The adapter that `grpo` trains."""
        check_examples(examples)
        self._examples = [as_example(example) for example in examples]
        if not self._examples:
            raise ValueError("an evaluation needs at least one prompt")
        if every < 1:
            raise ValueError(f"every must be at least 1 optimizer step, got {every}")
        self._are_episodes = not getattr(engine, "can_pin", True)
        if self._are_episodes != (score is None):
            raise ValueError("prompts need a score, and episodes have rewards: give score=None for episodes alone")
        if self._are_episodes and adapter is not None:
            raise ValueError("adapter is for prompts; give it to Episodes(…, adapter=…)")
        self.sampling, self.every, self.name = sampling or SamplingParams(temperature=0), every, name
        self._scorer = score if score is None or isinstance(score, GroupScorer) else Scorer(score)
        self._own_scorer = None if self._scorer is score else self._scorer
        self._workers = Workers("evaluation")
        self._running: _Running | None = None
        self.last_begun: int | None = None
        """The step after which the last evaluation began."""
        self.results: list[EvaluationResult] = []
        """Finished evaluations, in the order in which they began."""
        self._num_told = 0

    def follow(self, model: nn.Module) -> None:
        """Draw prompts with the adapter of this model that is trained, unless another one was given."""
        self._trained = None if self._are_episodes else trained_adapter(self._engine, model)

    @property
    def running(self) -> list[int]:
        """Ids of the groups of the evaluation in progress."""
        return self._running.group_ids if self._running is not None else []

    def start(self, step: int, version: int) -> None:
        """Start to evaluate a version that has just been published, after this step. Waits until it is live, submits
        its prompts, and returns. Warns if optimizer steps were taken since the publish. Raises the errors of
        `engine.submit`."""
        if self._engine.staleness.unpublished_steps and version == self._engine.staleness.published_version:
            warnings.warn(
                f"the evaluation after step {step} draws with version {version}, and the trainer has other weights: "
                "call publisher.publish() first, and give the version that it returns",
                stacklevel=2,
            )
        self._take_result()
        if self._running is not None:
            logger.warning(
                "the evaluation after step %d is left out: the one after step %d is still under way",
                step,
                self._running.step,
            )
            return
        prompts, metadata = [e.prompt for e in self._examples], [e.metadata for e in self._examples]
        how: dict[str, Any] = {"version": version}
        adapter = self._trained if self._adapter is None else self._adapter
        if self._are_episodes or adapter is not None:
            self._engine.wait_for_version(version, timeout_s=LIVE_S)
            how = {} if adapter is None else {"adapter": adapter}
        ids = self._engine.submit(prompts, self.sampling, metadata=metadata, train=False, **how)
        result = self._workers.start(self._evaluate, step, version, ids)
        self._running, self.last_begun = _Running(step, ids, result), step

    def finished(self) -> list[EvaluationResult]:
        """Return the results that have arrived since the last call."""
        self._take_result()
        new, self._num_told = self.results[self._num_told :], len(self.results)
        return new

    def wait(self) -> list[EvaluationResult]:
        """Wait until the running evaluation has ended: as long as its answers take, while the engine lives."""
        if self._running is not None:
            wait([self._running.result])
            self._take_result()
        return self.results[self._num_told :]

    def adopt(self, results: Sequence[EvaluationResult]) -> None:
        """Add results of rank 0, on another rank of the trainer. `finished` does not return them."""
        self.results += results
        self._num_told = len(self.results)

    def close(self) -> None:
        """Cancel the evaluation in progress, and end the scorer's threads."""
        self._take_result()
        running, self._running = self._running, None
        if running is not None:
            self._give_up(running.group_ids)
        if self._own_scorer is not None:
            self._own_scorer.close()

    def _take_result(self) -> None:
        running = self._running
        if running is None or not running.result.done():
            return
        self._running = None
        error = running.result.exception()
        if error is None:
            self.results.append(running.result.result())
        else:
            logger.error("the evaluation after step %d has failed: %s: %s", running.step, type(error).__name__, error)

    def _evaluate(self, step: int, version: int, group_ids: list[int]) -> EvaluationResult:
        """Return the result. An episode counts once, whatever its number of rollouts."""
        try:
            groups = self._engine.stream.collect(group_ids)
            if self._scorer is not None:
                _score(groups, self._scorer)
        except Exception:  # `_take_result` reports the error; after `close` it is dropped.
            self._give_up(group_ids)
            raise
        rollouts = [rollout for group in groups for rollout in group]
        samples = [rollout for rollout, *_ in samples_of(rollouts)]
        scores = [rollout.reward for rollout in samples if rollout.reward is not None]
        drawn = [int(rollout.weight_versions[rollout.drawn].max(initial=0)) for rollout in rollouts]
        return EvaluationResult(
            name=self.name,
            step=step,
            version=version,
            newest_version=max(version, *drawn),
            reward=fmean(scores) if scores else None,
            num_failed=len(samples) - len(scores),
            rollouts=rollouts,
        )

    def _give_up(self, group_ids: list[int]) -> None:
        with suppress(InflightError):  # The engine might have ended.
            self._engine.stream.ledger.drop(group_ids)
            self._engine.cancel(group_ids)


def _score(groups: list[Group], scorer: GroupScorer) -> None:
    """Fill in the rewards of the rollouts. Raises the exception of the score function if none has a reward."""
    scorings = [scorer.start(group) for group in groups]
    for group, scoring in zip(groups, scorings, strict=True):
        for rollout, reward in zip(group, scoring.result(), strict=True):
            rollout.reward = reward
    error = scorer.last_error
    if error is not None and all(rollout.reward is None for group in groups for rollout in group):
        raise error


@dataclass(frozen=True, slots=True)
class _Running:
    step: int
    group_ids: list[int]
    result: "Future[EvaluationResult]"
