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
further prompts replace groups that cannot be trained on and, if configured, groups of equal rewards.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

from inflight.core.by_name import resolve_by_name
from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION
from inflight.core.sampling import SamplingParams
from inflight.observability.staleness_meter import StalenessMeter
from inflight.training.data.rollout_stream import RolloutStream
from inflight.training.data.scored_groups import ScoredGroups
from inflight.training.data.scoring import GroupScorer, Score

logger = logging.getLogger(__name__)

LIVE_S = 3600.0
"""Time that a publisher waits for a slot, because an evaluation can keep it."""
_MOST_UNFIT_IN_A_ROW = 1000
"""Number of consecutive skipped examples after which a run ends with an error."""


class Example(NamedTuple):
    """A prompt for `engine.submit`, and the metadata for its score function."""

    prompt: Any
    metadata: Mapping[str, Any]


def as_example(example: Any) -> Example:
    """Return an example unchanged, or make one of a prompt for `engine.submit`."""
    return example if isinstance(example, Example) else Example(example, {})


class RolloutEngine(Protocol):
    """The part of an engine that a training loop uses; `inflight.launch` returns one."""

    @property
    def stream(self) -> RolloutStream: ...
    @property
    def staleness(self) -> StalenessMeter: ...
    def submit(
        self, prompts: Any, params: SamplingParams, *, metadata: Any, version: int | None = None, train: bool = True
    ) -> list[int]: ...
    def prompt_lengths(self, prompts: Any) -> list[int]: ...
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


@dataclass(slots=True)
class Admission:
    """Keeps at most `limit` groups in flight: submitted, and not taken by the trainer yet. As a context manager it
    cancels them at the end.

    Examples that the engine refuses, such as a prompt longer than its context, are skipped, counted and logged by their
    index. If it refuses all of the first ones, its error is raised.
    """

    engine: RolloutEngine
    publisher: WeightPublisher
    examples: Iterator[Any]
    """Each is an `Example`, or a prompt as in `as_example`. Examples that might exceed `config.micro_batch_tokens` are
    skipped; before the first step they raise ValueError instead."""
    score: Score | GroupScorer
    """Computes the rewards of a group as soon as it has finished."""
    config: Any
    """A `GRPOConfig`. Its module imports this one."""
    in_flight: set[int] = field(default_factory=set)
    num_submitted: int = 0
    """Number of examples taken so far."""
    num_unfit: int = 0
    """Examples skipped since the last batch was taken."""
    limit: int = field(init=False)
    _num_unfit_in_a_row: int = 0
    _any_accepted: bool = False

    def __post_init__(self) -> None:
        config, ahead = self.config, resolve_schedule(self.config.schedule).batches_ahead
        self.limit = (ahead and config.groups_in_flight) or (1 + ahead) * config.groups_per_step
        self._any_accepted = self.num_submitted > 0  # They were accepted before the run was saved.

    def fill(self, version: int | None = None) -> None:
        """Submit prompts up to the limit, or until the prompts end. version: the version that draws all of their
        tokens; None: each token is drawn by the newest."""
        self._submit(max(0, self.limit - len(self.in_flight)), version)

    def take(self, version: int | None = None) -> ScoredGroups:
        """Return the next groups that can be trained on, with rewards: the groups of one step, or fewer if the prompts
        have ended. version: the version with which the groups were submitted; it also draws replacements. Raises
        InflightError if more groups than a step has cannot be trained on, and the exceptions of the stream."""
        scored, count = ScoredGroups(), self.config.groups_per_step
        for group in self.engine.stream.groups(score=self.score):
            self.in_flight.discard(group[0].group_id)
            if scored.add(group):
                may_replace = len(scored.replaced) < self.config.replace_uniform_groups
                if may_replace and scored.last_is_uniform and self._submit(1, version):
                    scored.replace_last()
                if len(scored.groups) == count:
                    break
                continue
            if (num_unusable := scored.dropped.num_unusable_groups) > count:
                raise InflightError(
                    f"{num_unusable} groups failed while one batch of {count} was taken: samples of them were "
                    "cancelled, ended with an error (log-probabilities that are not finite, or lost frames), or none "
                    "of a group's has a reward (None, not finite, or it took too long)"
                )
            self._submit(1, version)
        scored.dropped.num_unfit_examples, self.num_unfit = self.num_unfit, 0
        return scored

    def wait_until_live(self) -> int:
        """Wait until a slot holds the newest published version. Returns the version, for pinned prompts."""
        version = self.publisher.version
        self.engine.wait_for_version(version, timeout_s=LIVE_S)
        return version

    def _submit(self, count: int, version: int | None) -> int:
        """Submit `count` further prompts, and skip prompts that do not fit. Returns the number of submitted prompts."""
        num_accepted = 0
        while num_accepted < count and (taken := list(islice(self.examples, count - num_accepted))):
            numbered = list(enumerate(map(as_example, taken), self.num_submitted))
            self.num_submitted += len(numbered)
            fitting = self._within_bound(numbered)
            try:
                accepted = self._accept([example for _, example in fitting], version)
            except InvalidRequestError:  # One of them is invalid, so each is submitted separately.
                accepted = [one for index, example in fitting for one in self._accept_alone(index, example, version)]
                if not (accepted or self._any_accepted):
                    raise
            self._any_accepted |= bool(accepted)
            self.in_flight.update(accepted)
            num_accepted += len(accepted)
        return num_accepted

    def _accept(self, examples: list[Example], version: int | None) -> list[int]:
        if not examples:
            return []
        prompts, metadata = [example.prompt for example in examples], [example.metadata for example in examples]
        accepted = self.engine.submit(prompts, self.config.sampling, metadata=metadata, version=version)
        self._num_unfit_in_a_row = 0
        return accepted

    def _accept_alone(self, index: int, example: Example, version: int | None) -> list[int]:
        """Submit an example, under the live version if `version` is gone: no slot keeps an older version once the last
        group that is pinned to it has ended."""
        reason: InvalidRequestError | None = None
        for pinned in [version] if version is None else [version, LIVE_VERSION]:
            try:
                return self._accept([example], pinned)
            except InvalidRequestError as error:
                reason = error
        self._skip(index, str(reason).replace("prompt 0", "its prompt"))
        if self._num_unfit_in_a_row >= _MOST_UNFIT_IN_A_ROW:
            raise InflightError(
                f"{self._num_unfit_in_a_row} examples in a row were refused by the engine, up to example {index}"
            ) from reason
        return []

    def _within_bound(self, numbered: list[tuple[int, Example]]) -> list[tuple[int, Example]]:
        """Return the examples whose longest sequences fit into `micro_batch_tokens`."""
        most_tokens, max_tokens = self.config.micro_batch_tokens, self.config.sampling.max_tokens
        if not most_tokens:
            return numbered
        try:
            lengths = self.engine.prompt_lengths([example.prompt for _, example in numbered])
        except InvalidRequestError:  # The engine refuses the same prompt when it is submitted.
            return numbered
        fitting = []
        for (index, example), length in zip(numbered, lengths, strict=True):
            longest = length + max_tokens
            if longest <= most_tokens:
                fitting.append((index, example))
                continue
            reason = (
                f"its prompt has {length} tokens, and with an answer of sampling.max_tokens "
                f"({max_tokens}) that does not fit into micro_batch_tokens ({most_tokens})"
            )
            if not self._any_accepted:
                raise ValueError(f"example {index}: {reason}; allow at least {longest}, or leave such examples out")
            self._skip(index, reason)
        return fitting

    def _skip(self, index: int, reason: str) -> None:
        self.num_unfit += 1
        self._num_unfit_in_a_row += 1
        logger.warning("example %d is skipped: %s", index, reason)

    def __enter__(self) -> "Admission":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if in_flight := sorted(self.in_flight):
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
    batches_ahead: int = 0
    """Batches in flight in addition to the next one. `GRPOConfig.groups_in_flight` can replace their number of
    groups."""


SCHEDULES: Mapping[str, Schedule] = {
    "inflight": Schedule(_in_flight, batches_ahead=1),
    "sync": Schedule(_in_turn),
    "one_step_off": Schedule(_one_step_off),
}


def resolve_schedule(schedule: str | Schedule) -> Schedule:
    """Return the schedule itself, or load it by its name in `SCHEDULES` or as "module:name". Raises ValueError."""
    found = resolve_by_name(schedule, SCHEDULES, "schedule")
    if not isinstance(found, Schedule):
        raise ValueError(f"schedule {schedule!r} must be a Schedule, got {type(found).__name__}")
    return found
