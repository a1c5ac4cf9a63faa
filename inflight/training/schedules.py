"""When prompts are submitted: three ways in which a generator and a trainer share their time.

A schedule yields the groups of one optimizer step after another; between two of them the trainer trains and publishes.
Letters are batches, numbers the weight versions that draw them:

    inflight       engine    A0 A0 A1 B1 B1 B2 C2 C3 …    never stops; new weights between two forward passes
                   trainer         [A  ][B  ][C  ]
    sync           engine    A0          B1          C2    one of the two works at a time
                   trainer       [A  ]       [B  ]
    one_step_off   engine    A0 B0    C1    D2             the next batch, under one version, beside the training
                   trainer      [A  ][B  ][C  ]
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol, assert_never, get_args

from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.observability.staleness import StalenessMeter
from inflight.training.rollouts import RolloutStream, usable

Schedule = Literal["inflight", "sync", "one_step_off"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

Groups = list[list[Rollout]]


class Example(NamedTuple):
    """A prompt, as text or token ids, and what its score function needs to know."""

    prompt: Any
    metadata: Mapping[str, Any]


class RolloutEngine(Protocol):
    """What a training loop asks of an engine; `inflight.launch` returns one."""

    @property
    def stream(self) -> RolloutStream: ...
    @property
    def staleness(self) -> StalenessMeter: ...
    def submit(
        self, prompts: Any, params: SamplingParams, *, metadata: Any, version: int | None = None
    ) -> list[int]: ...
    def cancel(self, group_ids: list[int] | None = None) -> None: ...
    def wait_for_version(self, version: int) -> None: ...


class AnyPublisher(Protocol):
    """What a training loop asks of a publisher."""

    @property
    def version(self) -> int:
        """The newest version that was published."""
        ...

    def publish(self) -> int: ...


class Admission:
    """Keeps at most `limit` groups in flight: submitted, and not taken by the trainer yet.

    As a context manager it cancels, at the end, what is still in flight.
    """

    def __init__(self, engine: RolloutEngine, examples: Iterator[Example], sampling: SamplingParams, *, limit: int):
        self._engine, self._examples, self._sampling, self._limit = engine, examples, sampling, limit

    def fill(self, version: int | None = None) -> None:
        """Submit prompts up to the limit. version: the one that draws all of their tokens; None: the newest each."""
        count = self._limit - len(self._engine.stream.outstanding)
        chosen = [next(self._examples) for _ in range(count)]
        if chosen:
            prompts, metadata = [example.prompt for example in chosen], [example.metadata for example in chosen]
            self._engine.submit(prompts, self._sampling, metadata=metadata, version=version)

    def take(self, count: int) -> Groups:
        """The next `count` groups in which every sample ended by itself."""
        groups: Groups = []
        for group in self._engine.stream.groups():
            if usable(group):
                groups.append(group)
            if len(groups) == count:
                return groups
        raise InflightError(
            f"only {len(groups)} of {count} groups ended by themselves; the others failed or were cancelled"
        )

    def close(self) -> None:
        self._engine.cancel()
        for _ in self._engine.stream.groups():  # what was cancelled still arrives
            pass

    def __enter__(self) -> "Admission":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(InflightError):  # it would hide the first one
                self.close()


def batches(
    schedule: Schedule, engine: RolloutEngine, publisher: AnyPublisher, admission: Admission, *, groups_per_step: int
) -> Generator[Groups, None, None]:
    """The groups of one optimizer step after another, without end."""
    match schedule:
        case "inflight":
            return _inflight(admission, groups_per_step)
        case "sync":
            return _sync(engine, publisher, admission, groups_per_step)
        case "one_step_off":
            return _one_step_off(engine, publisher, admission, groups_per_step)
        case _:
            assert_never(schedule)


def _inflight(admission: Admission, groups_per_step: int) -> Generator[Groups, None, None]:
    """Groups as they finish, while as many others as are admitted stay in flight."""
    admission.fill()
    while True:
        groups = admission.take(groups_per_step)
        admission.fill()
        yield groups


def _sync(
    engine: RolloutEngine, publisher: AnyPublisher, admission: Admission, groups_per_step: int
) -> Generator[Groups, None, None]:
    """A whole batch under the newest weights, then nothing until it has been trained on and its weights are live."""
    while True:
        admission.fill()
        yield admission.take(groups_per_step)
        engine.wait_for_version(publisher.version)


def _one_step_off(
    engine: RolloutEngine, publisher: AnyPublisher, admission: Admission, groups_per_step: int
) -> Generator[Groups, None, None]:
    """Each batch is drawn, all of it under one version, while the one before it is trained on."""
    admission.fill(publisher.version)
    while True:
        groups = admission.take(groups_per_step)
        engine.wait_for_version(publisher.version)
        admission.fill(publisher.version)
        yield groups
