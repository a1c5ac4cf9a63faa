"""Schedules submit prompts: three ways to divide time between a generator and a trainer.

A schedule yields the groups of one optimizer step after another. Between two of them the trainer trains and publishes.
Letters are batches, numbers the weight versions that draw them:

    inflight       engine    A0 A0 A1 B1 B1 B2 C2 C3 …    never stops; new weights between two forward passes
                   trainer         [A  ][B  ][C  ]
    sync           engine    A0          B1          C2    one of the two works at a time
                   trainer       [A  ]       [B  ]
    one_step_off   engine    A0 B0    C1    D2             the next batch, under one version, during training
                   trainer      [A  ][B  ][C  ]

When the prompts end, the groups in flight are still taken: the last batch can be smaller. While a batch is taken,
further prompts replace groups that cannot be trained on and, if configured, groups of equal rewards. If configured, the
trainer computes on the groups that a step has so far while it waits for others (`Admission.while_incomplete`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from inflight.core.by_name import resolve_by_name
from inflight.core.errors import InflightError
from inflight.core.spans import span
from inflight.observability.staleness_meter import StalenessMeter
from inflight.training.data.examples import NOTHING_SUBMITTED, Example, PromptEngine, Submitted, as_example
from inflight.training.data.lead import LeadState
from inflight.training.data.rollout_stream import RolloutStream
from inflight.training.data.scored_groups import Dropped, ScoredGroups
from inflight.training.data.scoring import GroupScorer, Score
from inflight.training.data.submitter import Submitter

__all__ = ["SCHEDULES", "Admission", "Example", "RolloutEngine", "Schedule", "WeightPublisher", "as_example"]

_WAIT = "wait for rollouts"
"""Span of the time in which the trainer neither trains nor publishes."""
LIVE_S = 3600.0
"""Maximum time for a version to go live. An evaluation can keep its slot, and large weights take minutes to arrive."""


class RolloutEngine(PromptEngine, Protocol):
    """The part of an engine that a training loop uses; `inflight.launch` returns one."""

    @property
    def stream(self) -> RolloutStream: ...
    @property
    def staleness(self) -> StalenessMeter: ...
    def cancel(self, group_ids: list[int] | None = None) -> None: ...
    def wait_for_version(self, version: int, *, timeout_s: float) -> None: ...


class WeightPublisher(Protocol):
    """The part of a publisher that a training loop uses."""

    @property
    def version(self) -> int:
        """The newest published version."""
        ...

    def publish(self) -> int: ...


class HasProgress(Protocol):
    """Stores the progress of a training loop, which reads it to resume; `inflight.Run` is one."""

    progress: dict[str, Any]


class Admission:
    """The groups of a run of `grpo`: submits prompts (`Submitter`), and takes finished groups. As a context manager it
    cancels the groups in flight at the end."""

    def __init__(
        self,
        engine: RolloutEngine,
        publisher: WeightPublisher,
        examples: Iterable[Any],
        score: Score | GroupScorer | None,
        config: Any,
        submitted: Submitted = NOTHING_SUBMITTED,
        adapter: str | None = None,
    ):
        """examples: each is an `Example`, or a prompt as in `as_example`. Examples that might exceed
        `config.micro_batch_tokens` are skipped; before the first step they raise ValueError instead. score: computes
        the rewards of a group as soon as it has finished; None: its rollouts have rewards. config: a `GRPOConfig`; its
        module imports this one. submitted: of a run that is continued. adapter: draws the tokens of prompts. None: the
        weights alone, or the adapter of episodes."""
        self.engine, self.publisher, self._score, self._config = engine, publisher, score, config
        batches_ahead = resolve_schedule(config.schedule).batches_ahead
        self.submitter = Submitter(
            engine,
            examples,
            config.sampling,
            config.groups_per_step,
            ahead=config.ahead if batches_ahead is None else batches_ahead,
            most_groups=0 if batches_ahead == 0 else config.groups_in_flight,
            most_tokens=config.micro_batch_tokens,
            submitted=submitted,
            adapter=adapter,
        )
        if (continue_saved := getattr(engine, "continue_saved", None)) is not None:
            continue_saved()
        self._num_taken = 0
        """Number of calls of `take`."""
        self._background = ExitStack()
        self.while_incomplete: Callable[[ScoredGroups], None] | None = None
        """Called by `take` before it waits, with the groups of the step so far: each call has the groups of the call
        before, in the same order, and perhaps more. None: `take` only waits."""
        self.lead: LeadState = self.submitter.lead.state
        """State of the lead controller when the last groups were taken."""
        self.unreported = Dropped()
        """Counts of groups and rollouts that were omitted after the last step."""

    def fill(self, version: int | None = None) -> None:
        """Submit the prompts that are allowed in flight, or until the prompts end. version: the version that draws all
        of their tokens; None: each token is drawn by the newest."""
        with span(_WAIT):
            self.submitter.fill(version)

    def take(self, version: int | None = None) -> ScoredGroups:
        """Return the next groups that can be trained on, with rewards: the groups of one step, or fewer if the prompts
        have ended. version: the version with which the groups were submitted; it also draws replacements. Raises
        InflightError if more groups than a step has cannot be trained on, and the exceptions of the stream."""
        with ExitStack() as waiting:
            waiting.enter_context(span(_WAIT))
            return self._take(version, waiting)

    def _take(self, version: int | None, waiting: ExitStack) -> ScoredGroups:
        scored, count, submitter = ScoredGroups(), self._config.groups_per_step, self.submitter
        before_waiting = None if self.while_incomplete is None else partial(self._compute, scored, waiting)
        submitter.ask()
        while len(scored.groups) < count:
            num_accepted = submitter.num_accepted
            group = next(self.engine.stream.groups(score=self._score, before_waiting=before_waiting), None)
            if group is None:
                if not submitter.has_more(num_accepted):
                    break
                if not submitter.is_automatic:  # Another caller has discarded groups: `has_more` has counted them.
                    submitter.submit(count - len(scored.groups) - len(submitter.in_flight), version)
                continue
            is_usable = scored.add(group)
            missing = count - len(scored.groups)
            submitter.took(group[0].group_id, missing)
            submitter.examples.observe(group)
            self._check(scored)
            may_replace = is_usable and len(scored.replaced) < self._config.replace_uniform_groups
            is_replaced = may_replace and scored.last_is_uniform(self._config.advantages)
            if is_replaced and submitter.replace(missing + 1, version):
                scored.replace_last()
            elif not is_usable:
                submitter.replace(missing, version)
        if not scored.groups and not self._num_taken:
            self.engine.stream.scoring.check(scored, 1)
        self._num_taken += 1
        self.lead = submitter.begin()
        scored.dropped.num_unfit_examples = submitter.fitting.take_num_unfit()
        if not scored.groups:
            self.unreported = scored.dropped
        return scored

    @property
    def failures(self) -> dict[str, int]:
        """Number of exceptions of score functions and rollout functions, "error: NAME", and of further attempts,
        "retries: NAME"; of episodes also the time limits that they reached."""
        return dict(self.engine.stream.failures + self.submitter.failures)

    def _check(self, scored: ScoredGroups) -> None:
        """Raise InflightError if more groups than a step has cannot be trained on."""
        count = self._config.groups_per_step
        if scored.dropped.num_unusable_groups > count:
            self.engine.stream.scoring.check(scored, count)
            scored.check_usable(count, self.failures)

    def _compute(self, scored: ScoredGroups, waiting: ExitStack) -> None:
        """Have the trainer compute on the groups of an incomplete step. waiting: holds the span of the wait."""
        assert self.while_incomplete is not None
        waiting.close()
        with self.submitter.computing():
            self.while_incomplete(scored)
        waiting.enter_context(span(_WAIT))

    def wait_until_live(self) -> int:
        """Wait until a slot holds the newest published version. Returns the version, for pinned prompts."""
        version = self.publisher.version
        with span(_WAIT):
            self.engine.wait_for_version(version, timeout_s=LIVE_S)
        return version

    def __enter__(self) -> "Admission":
        self._background.enter_context(self.submitter.in_background())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._background.close()
        if in_flight := sorted(self.submitter.in_flight):
            # An error here would hide the first error.
            with nullcontext() if kind is None else suppress(InflightError):
                self.engine.stream.ledger.drop(in_flight)
                self.engine.cancel(in_flight)


def _in_flight(admission: Admission) -> Iterator[ScoredGroups]:
    """Yield groups in the order in which they finish, and keep the admitted number of others in flight."""
    admission.fill()
    while (scored := admission.take()).groups:
        admission.fill()
        yield scored


def _in_turn(admission: Admission) -> Iterator[ScoredGroups]:
    """Yield a whole batch under the newest weights. Submit the next only after training, once the new weights are
    live."""
    admission.fill()
    while (scored := admission.take()).groups:
        yield scored
        admission.wait_until_live()
        admission.fill()


def _one_step_off(admission: Admission) -> Iterator[ScoredGroups]:
    """Draw each batch under one version, while the previous batch is trained on.

    A replacement of a failed group can use the next version, if no other group holds the batch's version.
    """
    version = admission.wait_until_live()
    admission.fill(version)
    while (scored := admission.take(version)).groups:
        version = admission.wait_until_live()
        admission.fill(version)
        yield scored


@dataclass(frozen=True, slots=True)
class Schedule:
    """Function that submits prompts, and the number of batches it keeps in flight."""

    run: Callable[[Admission], Iterator[ScoredGroups]]
    """Yields the groups of one optimizer step after another, until the prompts have ended. Between two of them the
    trainer trains and publishes."""
    batches_ahead: int | None = 0
    """Batches in flight in addition to the next one. None: `GRPOConfig.ahead` decides. Unless it is 0,
    `GRPOConfig.groups_in_flight` bounds the groups in flight, too."""


SCHEDULES: Mapping[str, Schedule] = {
    "inflight": Schedule(_in_flight, batches_ahead=None),
    "sync": Schedule(_in_turn),
    "one_step_off": Schedule(_one_step_off),
}


def resolve_schedule(schedule: str | Schedule) -> Schedule:
    """Return the schedule itself, or load it by its name in `SCHEDULES` or as "module:name". Raises ValueError."""
    found = resolve_by_name(schedule, SCHEDULES, "schedule")
    if not isinstance(found, Schedule):
        raise ValueError(f"schedule {schedule!r} must be a Schedule, got {type(found).__name__}")
    return found
