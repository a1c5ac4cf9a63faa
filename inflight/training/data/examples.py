"""The examples of a run: they are read from their iterator, and their prompts are submitted if they fit."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.text import listed
from inflight.stream.ledger import Ledger
from inflight.training.data.concurrency import Concurrency

logger = logging.getLogger(__name__)

_MOST_UNFIT_IN_A_ROW = 1000
"""Number of consecutive skipped examples after which a run ends with an error."""


class Example(NamedTuple):
    """A prompt for `engine.submit`, and the metadata for its score function."""

    prompt: Any
    metadata: Mapping[str, Any]


def as_example(example: Any) -> Example:
    """Return an example unchanged, or make one of a prompt for `engine.submit`."""
    return example if isinstance(example, Example) else Example(example, {})


def check_examples(examples: Any) -> None:
    """Raise TypeError for a text, a mapping or a table. Their elements are no prompts, but characters, keys or names of
    columns."""
    if isinstance(examples, (str, Mapping)) or type(examples).__name__ == "DataFrame":
        raise TypeError(
            f"examples are a list or another iterable of prompts, got {type(examples).__name__} of "
            f"{listed([repr(each) for each in examples])}: put one prompt into a list, take one split of a "
            'DatasetDict, or the rows of a table (frame.to_dict("records"))'
        )


class Submitted(msgspec.Struct, frozen=True):
    """The examples of a run that were submitted, from which another submitter continues."""

    num_submitted: int = 0
    """Number of examples that were submitted or skipped."""
    in_flight: list[int] = []
    """Ids of the groups that were submitted and not taken."""
    examples: dict[str, Any] | None = None
    """State of examples that observe rewards."""
    unsubmitted: list[Example] = []
    """Examples that were read and not submitted."""
    num_read: int = 0
    """Number of examples that were submitted, skipped or left in `unsubmitted`. 0: as `num_submitted`."""


NOTHING_SUBMITTED = Submitted()


class GroupStream(Protocol):
    """The part of a stream that decides when prompts start."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def concurrency(self) -> Concurrency: ...


class PromptEngine(Protocol):
    """The part of an engine that receives prompts."""

    @property
    def stream(self) -> GroupStream: ...
    def submit(
        self, prompts: Any, params: SamplingParams, /, *, metadata: Any, version: int | None = None, train: bool = True
    ) -> list[int]: ...
    def prompt_lengths(self, prompts: Any, /) -> list[int]: ...


class Examples:
    """Reads examples from their iterator, at most a batch before they are submitted.

    Examples with a method `observe` receive each group that the trainer takes, and examples can depend on them. If they
    have `state_dict` and `load_state_dict`, their state is saved with the run.
    """

    def __init__(self, examples: Iterable[Any], submitted: Submitted):
        check_examples(examples)
        self._source, self._observe = examples, getattr(examples, "observe", None)
        self.buffer: deque[Any] = deque(submitted.unsubmitted)
        """Examples that were read and not submitted."""
        self._has_ended = False
        """The iterator has ended."""
        if self._observe is None:
            self._left = islice(examples, max(submitted.num_submitted, submitted.num_read), None)
        else:
            if submitted.examples is not None and hasattr(examples, "load_state_dict"):
                cast(Any, examples).load_state_dict(submitted.examples)
            self._left = iter(examples)

    @property
    def are_over(self) -> bool:
        """True if all were submitted or skipped."""
        return self._has_ended and not self.buffer

    @property
    def can_continue(self) -> bool:
        """False if a loaded run begins again with the first example: they observe rewards and have no state."""
        return self._observe is None or hasattr(self._source, "state_dict")

    def read(self, count: int) -> None:
        """Read examples until the buffer has this number."""
        while not self._has_ended and len(self.buffer) < count:
            try:
                self.buffer.append(next(self._left))
            except StopIteration:
                self._has_ended = True

    def observe(self, group: Sequence[Rollout]) -> None:
        """Pass a finished group to examples that observe rewards."""
        if self._observe is not None:
            self._observe(group)

    def submitted(self, num_submitted: int, in_flight: list[int], unsubmitted: list[Any]) -> Submitted:
        """Return the record from which another run continues, JSON-like if the examples are. unsubmitted: a copy of the
        buffer."""
        if not self.can_continue:
            return Submitted(num_submitted, in_flight)
        state = None if self._observe is None else cast(Any, self._source).state_dict()
        left = [plain_example(example) for example in unsubmitted]
        return Submitted(num_submitted, in_flight, state, left, num_submitted + len(left))


class FittingExamples:
    """Submits the examples that fit. Others, such as a prompt longer than the engine's context, are skipped, counted
    and logged by their index. If all of the first ones do not fit, that is an error."""

    def __init__(
        self,
        engine: PromptEngine,
        sampling: SamplingParams,
        most_tokens: int,
        *,
        any_accepted: bool,
        adapter: str | None = None,
    ):
        """most_tokens: skip examples that might exceed this with an answer, and raise ValueError for the first ones; 0:
        no bound. any_accepted: examples have been accepted before. adapter: draws the tokens; not for episodes."""
        self._engine, self._sampling, self._most_tokens = engine, sampling, most_tokens
        self._any_accepted = any_accepted
        self._named: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
        self.num_unfit = 0
        """Number of examples that were skipped since the last call of `take_num_unfit`."""
        self._num_unfit_in_a_row = 0

    def take_num_unfit(self) -> int:
        """Return `num_unfit`, and set it to 0."""
        number, self.num_unfit = self.num_unfit, 0
        return number

    def submit(self, numbered: deque[tuple[int, Example]], version: int | None, accepted: dict[int, Example]) -> None:
        """Submit examples, and add them to `accepted` by the ids of their groups. Removes each example from `numbered`
        that is submitted, skipped or refused. The others are left if this raises."""
        fitting = self._within_bound(list(numbered))
        numbered.clear()
        numbered.extend(fitting)
        try:
            accepted |= self._accept([example for _, example in fitting], version)
            numbered.clear()
        except InvalidRequestError:  # The engine refuses all prompts if one is invalid: submit each separately.
            while numbered:
                index, example = numbered[0]
                accepted |= self._accept_alone(index, example, version)
                numbered.popleft()
            if not (accepted or self._any_accepted):
                raise
        self._any_accepted |= bool(accepted)

    def _accept(self, examples: list[Example], version: int | None) -> dict[int, Example]:
        if not examples:
            return {}
        prompts, metadata = [example.prompt for example in examples], [example.metadata for example in examples]
        submit: Any = self._engine.submit  # Episodes take no adapter here.
        accepted = submit(prompts, self._sampling, metadata=metadata, version=version, **self._named)
        self._num_unfit_in_a_row = 0
        return dict(zip(accepted, examples, strict=True))

    def _accept_alone(self, index: int, example: Example, version: int | None) -> dict[int, Example]:
        """Submit an example, under the live version if `version` is gone: no slot keeps an older version once the last
        group that is pinned to it has ended."""
        reason: InvalidRequestError | None = None
        for pinned in [version] if version is None else [version, LIVE_VERSION]:
            try:
                return self._accept([example], pinned)
            except InvalidRequestError as error:
                reason = error
        self._skip(index, why := str(reason).replace("prompt 0", "its prompt"))
        self._check_row(index, why)
        return {}

    def _within_bound(self, numbered: list[tuple[int, Example]]) -> list[tuple[int, Example]]:
        """Return the examples whose longest sequences fit into `most_tokens`."""
        most_tokens, max_tokens = self._most_tokens, self._sampling.max_tokens
        if not most_tokens:
            return numbered
        if (longest := getattr(self._engine, "longest_sequence", 0)) > most_tokens:
            raise ValueError(
                f"episodes can have sequences of {longest} tokens, the engine's context, and micro_batch_tokens is "
                f"{most_tokens}; allow at least {longest}, or launch with a smaller max_context"
            )
        fitting, reason = [], ""
        for (index, example), length in zip(numbered, self._lengths(numbered), strict=True):
            if length is None or (longest := length + max_tokens) <= most_tokens:
                fitting.append((index, example))
                continue
            reason = (
                f"its prompt has {length} tokens, and with an answer of sampling.max_tokens "
                f"({max_tokens}) that does not fit into micro_batch_tokens ({most_tokens})"
            )
            if not self._any_accepted:
                raise ValueError(f"example {index}: {reason}; allow at least {longest}, or leave such examples out")
            self._skip(index, reason)
        if numbered and not fitting:
            self._check_row(numbered[-1][0], reason)
        return fitting

    def _lengths(self, numbered: list[tuple[int, Example]]) -> list[int | None]:
        """Return the tokens of each prompt; None for a prompt that the engine will refuse when it is submitted."""
        try:
            return [*self._engine.prompt_lengths([example.prompt for _, example in numbered])]
        except InvalidRequestError:  # One bad prompt is enough: measure each separately.
            return [None] if len(numbered) == 1 else [self._lengths([one])[0] for one in numbered]

    def _skip(self, index: int, reason: str) -> None:
        self.num_unfit += 1
        self._num_unfit_in_a_row += 1
        logger.warning("example %d is skipped: %s", index, reason)

    def _check_row(self, index: int, reason: str) -> None:
        """Raise InflightError if too many examples in a row, up to this one, were skipped."""
        if (count := self._num_unfit_in_a_row) >= _MOST_UNFIT_IN_A_ROW:
            raise InflightError(f"{count} examples in a row were refused, up to example {index}: {reason}")


def plain_example(example: Any) -> Example:
    """Return an example for a file, with token ids as a list of integers."""
    prompt, metadata = as_example(example)
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    elif isinstance(prompt, (list, tuple)) and prompt and hasattr(prompt[0], "item"):
        prompt = [int(token) for token in prompt]
    return Example(prompt, dict(metadata))
