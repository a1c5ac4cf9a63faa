"""When prompts are submitted: three ways in which a generator and a trainer share their time.

A schedule yields the groups of one optimizer step after another; between two of them the trainer trains and publishes.
Letters are batches, numbers the weight versions that draw them:

    inflight       engine    A0 A0 A1 B1 B1 B2 C2 C3 …    never stops; new weights between two forward passes
                   trainer         [A  ][B  ][C  ]
    sync           engine    A0          B1          C2    one of the two works at a time
                   trainer       [A  ]       [B  ]
    one_step_off   engine    A0 B0    C1    D2             the next batch, under one version, beside the training
                   trainer      [A  ][B  ][C  ]

When the prompts end, what is in flight is still taken: the last batch may be smaller. A group that cannot be trained
on, because a sample of it was cancelled or ended with an error, or none has a reward, is replaced by another prompt
while its batch is taken; so are groups of equal rewards, up to a bound, where that is wanted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION
from inflight.core.sampling import SamplingParams
from inflight.observability.staleness_meter import StalenessMeter
from inflight.training.data.rollout_stream import RolloutStream
from inflight.training.data.scored_groups import ScoredGroups
from inflight.training.data.scoring import GroupScorer, Score

_LIVE_S = 3600.0
"""As long as a publisher waits for a slot, which an evaluation may keep."""


class Example(NamedTuple):
    """A prompt, as `engine.submit` takes it, and what its score function needs to know."""

    prompt: Any
    metadata: Mapping[str, Any]


def as_example(example: Any) -> Example:
    """An example as such, or what `engine.submit` takes for a prompt: text, token ids, chat messages, or a row of a
    dataset, whose other columns become metadata."""
    return example if isinstance(example, Example) else Example(example, {})


class RolloutEngine(Protocol):
    """What a training loop asks of an engine; `inflight.launch` returns one."""

    @property
    def stream(self) -> RolloutStream: ...
    @property
    def staleness(self) -> StalenessMeter: ...
    def submit(
        self, prompts: Any, params: SamplingParams, *, metadata: Any, version: int | None = None, train: bool = True
    ) -> list[int]: ...
    def cancel(self, group_ids: list[int] | None = None) -> None: ...
    def wait_for_version(self, version: int, *, timeout_s: float) -> None: ...


class WeightPublisher(Protocol):
    """What a training loop asks of a publisher."""

    @property
    def version(self) -> int:
        """The newest version that was published."""
        ...

    def publish(self) -> int: ...


class HasProgress(Protocol):
    """Where a training loop notes how far it has come, and reads it when it goes on; `inflight.Run` is one."""

    progress: dict[str, Any]


@dataclass(slots=True)
class Admission:
    """Keeps at most `limit` groups in flight: submitted, and not taken by the trainer yet.

    As a context manager it cancels, at the end, what is still in flight.
    """

    engine: RolloutEngine
    publisher: WeightPublisher
    examples: Iterator[Any]
    """Each is an `Example`, or a prompt as `as_example` takes it."""
    sampling: SamplingParams
    score: Score | GroupScorer
    """Computes the rewards of a group as soon as it has finished."""
    groups_per_step: int
    limit: int
    in_flight: set[int] = field(default_factory=set)
    num_submitted: int = 0
    """Examples that were taken so far."""
    most_replaced: int = 0
    """Groups of equal rewards that further prompts take the place of, at most, for each batch."""

    def fill(self, version: int | None = None) -> None:
        """Submit prompts up to the limit, or until there are no more.

        version: the version that draws all of their tokens; None: each token is drawn by the newest.
        """
        self._submit(list(islice(self.examples, max(0, self.limit - len(self.in_flight)))), version)

    def take(self, version: int | None = None) -> ScoredGroups:
        """The next groups that can be trained on, with their rewards: those of one step, fewer if the prompts have
        ended.

        version: the one with which the groups were submitted, for what replaces those that cannot be trained on, or
        that have equal rewards.
        Raises InflightError if more groups than a step has cannot, and what the stream raises.
        """
        scored, count = ScoredGroups(), self.groups_per_step
        for group in self.engine.stream.groups(score=self.score):
            self.in_flight.discard(group[0].group_id)
            if scored.add(group):
                if len(scored.replaced) < self.most_replaced and scored.last_is_uniform and self._replace(version):
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
            self._replace(version)
        return scored

    def wait_until_live(self) -> int:
        """Wait until a slot holds the newest version that was published: prompts can be pinned to it. Returns it."""
        version = self.publisher.version
        self.engine.wait_for_version(version, timeout_s=_LIVE_S)
        return version

    def _submit(self, taken: list[Any], version: int | None) -> None:
        if examples := [as_example(example) for example in taken]:
            prompts, metadata = [example.prompt for example in examples], [example.metadata for example in examples]
            self.in_flight.update(self.engine.submit(prompts, self.sampling, metadata=metadata, version=version))
            self.num_submitted += len(examples)

    def _replace(self, version: int | None) -> bool:
        """Submit one more prompt, under the live version if `version` is gone: no slot keeps an older version once the
        last group that is pinned to it has ended. Returns whether there was a prompt."""
        examples = list(islice(self.examples, 1))
        try:
            self._submit(examples, version)
        except InvalidRequestError:
            if version is None:
                raise
            self._submit(examples, LIVE_VERSION)  # raises again if it was the prompt that the engine refused
        return bool(examples)

    def __enter__(self) -> "Admission":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if in_flight := sorted(self.in_flight):
            with nullcontext() if kind is None else suppress(InflightError):  # it would hide the first error
                self.engine.stream.drop(in_flight)
                self.engine.cancel(in_flight)


def _in_flight(admission: Admission) -> Iterator[ScoredGroups]:
    """Groups as they finish, while as many others as are admitted stay in flight."""
    admission.fill()
    while (scored := admission.take()).groups:
        admission.fill()
        yield scored


def _in_turn(admission: Admission) -> Iterator[ScoredGroups]:
    """A whole batch under the newest weights, then nothing until it has been trained on and its weights are live."""
    admission.fill()
    while (scored := admission.take()).groups:
        yield scored
        admission.wait_until_live()
        admission.fill()


def _one_step_off(admission: Admission) -> Iterator[ScoredGroups]:
    """Each batch is drawn, all of it under one version, while the one before it is trained on.

    What replaces a group that failed may be of the version after it, if nothing else holds the batch's version.
    """
    version = admission.wait_until_live()
    admission.fill(version)
    while (scored := admission.take(version)).groups:
        version = admission.wait_until_live()
        admission.fill(version)
        yield scored


RolloutSchedule = Literal["inflight", "sync", "one_step_off"]
ROLLOUT_SCHEDULES: Mapping[RolloutSchedule, Callable[[Admission], Iterator[ScoredGroups]]] = {
    "inflight": _in_flight,
    "sync": _in_turn,
    "one_step_off": _one_step_off,
}
"""Each yields the groups of one optimizer step after another, until the prompts have ended."""
