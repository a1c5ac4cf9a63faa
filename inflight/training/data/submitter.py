"""Submits the prompts of a run: as many as a fixed bound allows, or when the lead controller starts them."""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from math import inf
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.messages import LIVE_VERSION
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.stream.ledger import Ledger
from inflight.training.data.concurrency import Concurrency
from inflight.training.data.lead import LeadController
from inflight.training.data.lead_state import LeadState, Rule

logger = logging.getLogger(__name__)

_MOST_UNFIT_IN_A_ROW = 1000
"""Number of consecutive skipped examples after which a run ends with an error."""
_JOIN_S = 60.0
"""Bound for a submission in progress when a run ends."""


class Example(NamedTuple):
    """A prompt for `engine.submit`, and the metadata for its score function."""

    prompt: Any
    metadata: Mapping[str, Any]


def as_example(example: Any) -> Example:
    """Return an example unchanged, or make one of a prompt for `engine.submit`."""
    return example if isinstance(example, Example) else Example(example, {})


class Submitted(msgspec.Struct, frozen=True):
    """The examples of a run that were submitted, from which another submitter continues."""

    num_submitted: int = 0
    """Number of examples that were submitted or skipped."""
    in_flight: list[int] = []
    """Ids of the groups that were submitted and not taken."""
    examples: dict[str, Any] | None = None
    """State of examples that observe rewards."""
    unsubmitted: list[Example] = []
    """Examples that count in the state `examples`, and were not submitted."""


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


class Submitter:
    """Takes examples, and submits their prompts.

    The trainer's thread takes the examples from their iterator, at most one batch before they are submitted. It calls
    `ask`, then `took` for every group, then `begin`, for each step, and uses `computing` when it trains on a part of
    one. Inside `in_background()` another thread submits prompts while the trainer computes, when the controller starts
    them.

    Examples that the engine refuses, such as a prompt longer than its context, are skipped, counted and logged by their
    index. If it refuses all of the first ones, its error is raised.

    Examples with a method `observe` receive each group that the trainer takes, and examples can depend on them. If they
    have `state_dict` and `load_state_dict`, their state is saved with the run, and the examples that were taken from
    them and not submitted.
    """

    def __init__(
        self,
        engine: PromptEngine,
        examples: Iterable[Any],
        sampling: SamplingParams,
        groups_per_step: int,
        *,
        ahead: int | str,
        most_groups: int = 0,
        most_tokens: int = 0,
        submitted: Submitted = NOTHING_SUBMITTED,
    ):
        """ahead, most_groups: as in `LeadController`. most_tokens: skip examples that might exceed this with an answer,
        and raise ValueError for the first ones; 0: no bound. submitted: of a run that is continued. Its examples are
        skipped, unless the examples observe rewards; these load its state."""
        self._engine, self._source, self._sampling = engine, examples, sampling
        self._observe = getattr(examples, "observe", None)
        if self._observe is None:
            self._examples = islice(examples, submitted.num_submitted, None)
        else:
            if submitted.examples is not None and hasattr(examples, "load_state_dict"):
                cast(Any, examples).load_state_dict(submitted.examples)
            self._examples = iter(examples)
        self._per_step, self._most_tokens = groups_per_step, most_tokens
        self.is_automatic = ahead == "auto"
        self.lead = LeadController(
            groups_per_step, ahead=ahead, most_groups=most_groups, spare_groups=self._spare_groups
        )
        self.in_flight = set(submitted.in_flight)
        """Ids of groups that were submitted and not taken."""
        self.num_submitted = submitted.num_submitted
        """Number of examples that were submitted or skipped."""
        self.num_unfit = 0
        """Number of examples that were skipped since the trainer last set this to 0."""
        self.num_accepted = 0
        """Number of groups that were submitted here."""
        self._num_unfit_in_a_row = 0
        self._any_accepted = submitted.num_submitted > 0  # They were accepted before the run was saved.
        self._taken_early: set[int] = set()
        """Groups that were taken before their submission returned."""
        self._buffer: deque[Any] = deque(submitted.unsubmitted)
        self._has_ended = False
        """The iterator of examples has ended."""
        self._changed = threading.Condition()
        """Guards the controller, `in_flight` and the buffer. Held briefly, and never while prompts are submitted."""
        self._submitting = threading.Lock()
        """Held while prompts are submitted, so that they are submitted in order. Taken before `_changed`."""
        self._stopped, self._is_paused = True, False
        self._error: BaseException | None = None
        """Error of the thread, raised by the next `ask`."""
        self._last_rule: Rule | None = None
        self.lead.start(len(self.in_flight), _now_s())

    # ---- the trainer's thread -----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Note that the trainer asks for the groups of a step. Raises the errors of earlier submissions."""
        with self._changed:
            self.lead.ask(_now_s())
        self.refill()

    def refill(self) -> None:
        """If the controller decides, take the examples of a batch from the iterator, and submit those that can start.
        Raises the errors of earlier submissions."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self.is_automatic:
            return
        self._take_examples(self._per_step)
        while self.submit_allowed():
            self._take_examples(self._per_step)
        with self._changed:
            self._changed.notify()

    def _take_examples(self, count: int) -> None:
        """Take examples from the iterator until the buffer has this number."""
        while not self._has_ended and len(self._buffer) < count:
            try:
                example = next(self._examples)
            except StopIteration:
                self._has_ended = True
                break
            with self._changed:
                self._buffer.append(example)

    @property
    def unsubmitted(self) -> list[Any]:
        """Examples that were taken from the iterator and not submitted."""
        with self._changed:
            return list(self._buffer)

    @property
    def is_over(self) -> bool:
        """True if all examples were submitted or skipped."""
        return self._has_ended and not self._buffer

    def fill(self, version: int | None = None) -> None:
        """Submit the prompts that are allowed now, or until the prompts end. version: the version that draws all of
        their tokens; None: each token is drawn by the newest."""
        if self.is_automatic:
            self.refill()
            return
        with self._changed:
            count = self.lead.allowed(_now_s())
        self.submit(count, version)

    def replace(self, missing: int, version: int | None = None) -> bool:
        """Have another group take the place of one that was taken and cannot be used. missing: groups that the step
        still needs, with this one. Returns False if none is left."""
        if not self.is_automatic:
            return self.submit(1, version) > 0
        with self._changed:
            self.lead.need(missing)
        self.refill()
        return not self.is_over or len(self.in_flight) >= missing

    def has_more(self, num_accepted: int) -> bool:
        """Return True if the caller should ask again: groups are in flight that were not yet when `num_accepted` was
        read, prompts are left that can start, or groups were discarded and others can take their place."""
        with self._submitting, self._changed:  # A submission in another thread might be in progress.
            # Nothing was left to take, so these were discarded by another caller (`engine.abandon`).
            if gone := self.in_flight.difference(self._engine.stream.ledger.outstanding):
                self.in_flight -= gone
                self.lead.withdraw(len(gone))
        self.refill()
        with self._submitting:
            return bool(gone) or self.num_accepted != num_accepted or (self.is_automatic and not self.is_over)

    def took(self, group_id: int, missing: int) -> None:
        """Note that the trainer has taken a group, and still needs this number for its step."""
        with self._changed:
            if group_id in self.in_flight:
                self.in_flight.discard(group_id)
                self.lead.take(missing)
            else:
                self._taken_early.add(group_id)
            self._changed.notify()

    def observe(self, group: Sequence[Rollout]) -> None:
        """Pass a finished group to the examples, if they observe rewards. Called by the trainer's thread."""
        if self._observe is not None:
            self._observe(group)

    @property
    def submitted(self) -> Submitted:
        """The examples that were submitted, as JSON-like values if the examples are. The examples that were taken from
        the iterator and not submitted are a part of it if the examples observe rewards and have a `state_dict`."""
        if self._observe is None or not hasattr(self._source, "state_dict"):
            return Submitted(self.num_submitted, sorted(self.in_flight))
        state = cast(Any, self._source).state_dict()
        return Submitted(self.num_submitted, sorted(self.in_flight), state, [_plain(e) for e in self.unsubmitted])

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Do not count the time of the block as a wait: the trainer computes on groups of its step that it has."""
        with self._changed:
            self.lead.compute(_now_s())
            self._changed.notify()
        yield
        with self._changed:
            self.lead.wait(_now_s())
            self._changed.notify()

    def begin(self) -> LeadState:
        """Note that the trainer has the groups of its step. Returns the state of the controller."""
        with self._changed:
            self.lead.begin(_now_s())
            state = self.lead.state
            self._changed.notify()
        if self.is_automatic and state.rule != self._last_rule:
            self._last_rule = state.rule
            logger.info("start of prompts: %s", state)
        return state

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Submit prompts in another thread, too, until the end of the block."""
        if not self.is_automatic:
            yield
            return
        queue = self._engine.stream.ledger.queue
        self._stopped, queue.on_ready = False, self._ready
        thread = threading.Thread(target=self._run, name="inflight-submitter", daemon=True)
        thread.start()
        try:
            yield
        finally:
            if queue.on_ready == self._ready:  # A later stream of prompts might have replaced it.
                queue.on_ready = lambda: None
            with self._changed:
                self._stopped = True
                self._changed.notify()
            thread.join(_JOIN_S)
            if thread.is_alive():
                logger.warning("a submission of prompts did not end within %.0f s; the run ends without it", _JOIN_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Submit nothing in the other thread during the block."""
        with self._submitting, self._changed:
            self._is_paused = True
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify()

    # ---- any thread ---------------------------------------------------------------------------------------------

    def submit_allowed(self) -> int:
        """Submit the prompts that can start now. Returns their number."""
        return self._submit(None, None)

    def submit(self, count: int, version: int | None = None) -> int:
        """Submit `count` prompts now. Returns the number of submitted prompts, which is smaller once they have
        ended."""
        num_submitted = 0
        while num_submitted < count:
            self._take_examples(count - num_submitted)
            if self.is_over:
                break
            num_submitted += self._submit(count - num_submitted, version)
        return num_submitted

    def _ready(self) -> None:
        with self._changed:
            self.lead.ready(_now_s())
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_a_start():
                self.submit_allowed()
        except BaseException as error:  # The trainer's thread raises it.
            self._error = error

    def _wait_for_a_start(self) -> bool:
        """Wait until a prompt can start. Returns False at the end. The trainer's next request wakes this thread when
        there is nothing to submit."""
        with self._changed:
            while not self._stopped:
                now = _now_s()
                starts_at = self.lead.next_start(now) if self._buffer and not self._is_paused else inf
                if starts_at <= now:
                    return True
                self._changed.wait(None if starts_at == inf else starts_at - now)
            return False

    def _submit(self, count: int | None, version: int | None) -> int:
        """Submit examples of the buffer, at most `count` (None: the number that can start), and skip examples that do
        not fit. Returns the number of submitted prompts."""
        with self._submitting:
            with self._changed:
                if count is None and self._is_paused:
                    return 0
                now = _now_s()
                number = min(len(self._buffer), self.lead.allowed(now) if count is None else count)
                taken = [self._buffer.popleft() for _ in range(number)]
                self.lead.start(number, now)
            accepted: list[int] = []
            numbered = deque(enumerate(map(as_example, taken), self.num_submitted))
            self.num_submitted += number
            try:
                self._submit_examples(numbered, version, accepted)
            finally:
                self.num_submitted -= len(numbered)
                with self._changed:
                    self._buffer.extendleft(example for _, example in reversed(numbered))
                    self.lead.withdraw(number - len(accepted))
                    self.in_flight.update(accepted)
                    self.num_accepted += len(accepted)
                    for group_id in self._taken_early.intersection(accepted):
                        self.in_flight.discard(group_id)
                        self.lead.take()
                    self._taken_early.clear()
            return len(accepted)

    def _submit_examples(self, numbered: deque[tuple[int, Example]], version: int | None, accepted: list[int]) -> None:
        """Submit examples and append the ids of their groups to `accepted`. Removes each example from `numbered` that
        is submitted, skipped or refused. The others are left if this raises."""
        fitting = self._within_bound(list(numbered))
        numbered.clear()
        numbered.extend(fitting)
        try:
            accepted += self._accept([example for _, example in fitting], version)
            numbered.clear()
        except InvalidRequestError:  # The engine refuses all prompts if one is invalid: submit each separately.
            while numbered:
                index, example = numbered[0]
                accepted += self._accept_alone(index, example, version)
                numbered.popleft()
            if not (accepted or self._any_accepted):
                raise
        self._any_accepted |= bool(accepted)

    def _accept(self, examples: list[Example], version: int | None) -> list[int]:
        if not examples:
            return []
        prompts, metadata = [example.prompt for example in examples], [example.metadata for example in examples]
        accepted = self._engine.submit(prompts, self._sampling, metadata=metadata, version=version)
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
        self._skip(index, why := str(reason).replace("prompt 0", "its prompt"))
        self._check_row(index, why)
        return []

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

    def _spare_groups(self) -> float:
        """Return the number of further groups that would make the engines faster or are allowed to queue."""
        stream = self._engine.stream
        capacities = [member.info.max_sequences for member in getattr(self._engine, "members", [self._engine])]
        rows = sum(map(stream.concurrency.useful_rows, capacities))
        # Sequences beyond the rows draw nothing and do not age, and keep the rows busy when others end together.
        queue = self._per_step if rows >= sum(capacities) else 0
        return (rows - stream.ledger.num_unfinished) / self._sampling.n + queue


def _now_s() -> float:
    return now_ns() / 1e9


def _plain(example: Any) -> Example:
    """Return an example for a file, with token ids as a list."""
    prompt, metadata = as_example(example)
    return Example(prompt.tolist() if hasattr(prompt, "tolist") else prompt, dict(metadata))
