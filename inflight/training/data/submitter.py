"""Submits the prompts of a run: as many as a fixed bound allows, or when the lead controller starts them."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from inflight.core.clock import now_ns
from inflight.core.sampling import SamplingParams
from inflight.stream.open_groups import PLAYER
from inflight.training.data.examples import (
    NOTHING_SUBMITTED,
    Example,
    Examples,
    FittingExamples,
    PromptEngine,
    Submitted,
    as_example,
    plain_example,
)
from inflight.training.data.lead import LeadController, LeadState, Rule

logger = logging.getLogger(__name__)

_JOIN_S = 60.0
"""Bound for a submission in progress when a run ends."""


class Submitter:
    """Takes examples, and submits their prompts.

    The trainer's thread reads the examples. It calls `ask`, then `took` for every group, then `begin`, for each step,
    and uses `computing` when it trains on a part of one. Inside `in_background()` another thread submits prompts while
    the trainer computes, when the controller starts them.
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
        adapter: str | None = None,
    ):
        """ahead, most_groups: as in `LeadController`. most_tokens, adapter: as in `FittingExamples`. submitted: of a
        run that is continued. Its examples are skipped, unless the examples observe rewards; these load its state."""
        self._engine, self._samples, self._per_step = engine, sampling.n, groups_per_step
        self.examples = Examples(examples, submitted)
        any_accepted = submitted.num_submitted > 0
        self.fitting = FittingExamples(engine, sampling, most_tokens, any_accepted=any_accepted, adapter=adapter)
        self.is_automatic = ahead == "auto"
        self.lead = LeadController(
            groups_per_step, ahead=ahead, most_groups=most_groups, spare_groups=self._spare_groups
        )
        self.in_flight = set(submitted.in_flight)
        """Ids of groups that were submitted and not taken."""
        self.num_submitted = submitted.num_submitted
        """Number of examples that were submitted or skipped."""
        self.num_accepted = 0
        """Number of groups that were submitted here."""
        self._examples = _examples_in_flight(engine, submitted)
        """Examples of the groups in flight now, or when `submitted` was read last."""
        self._recorded = set(submitted.in_flight)
        """Groups in flight when `submitted` was read last."""
        self._taken_early: set[int] = set()
        """Groups that were taken before their submission returned."""
        self._changed = threading.Condition()
        """Guards the controller, `in_flight` and the buffer of examples, except that the trainer's thread appends to
        the buffer without it. Held briefly, and never while prompts are submitted or the state of examples is read."""
        self._submitting = threading.Lock()
        """Held while prompts are submitted, so that they are submitted in order. Taken before `_changed`."""
        self._stopped, self._is_paused = True, False
        self._error: BaseException | None = None
        """Error of the thread, raised by the next `fill`."""
        self._last_rule: Rule | None = None
        self.lead.start(len(self.in_flight), _now_s())

    # ---- the trainer's thread -----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Note that the trainer asks for the groups of a step. Raises the errors of earlier submissions."""
        with self._changed:
            self.lead.ask(_now_s())
        if self.is_automatic:
            self.fill()

    def fill(self, version: int | None = None) -> None:
        """Submit the prompts that are allowed now, or until the prompts end. version: the version that draws all of
        their tokens, if the bound is fixed; None: each token is drawn by the newest. Raises the errors of earlier
        submissions."""
        if not self.is_automatic:
            with self._changed:
                count = self.lead.allowed(_now_s())
            self.submit(count, version)
            return
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self.examples.read(self._per_step)
        while self._submit():
            self.examples.read(self._per_step)
        with self._changed:
            self._changed.notify()

    def submit(self, count: int, version: int | None = None) -> int:
        """Submit `count` prompts now, with a fixed bound. Returns the number of submitted prompts, which is smaller
        once they have ended."""
        num_submitted = 0
        while num_submitted < count:
            self.examples.read(count - num_submitted)
            if self.examples.are_over:
                break
            num_submitted += self._submit(count - num_submitted, version)
        return num_submitted

    def replace(self, missing: int, version: int | None = None) -> bool:
        """Have another group take the place of one that was taken and cannot be used. missing: groups that the step
        still needs, with this one. Returns False if none is left."""
        if not self.is_automatic:
            return self.submit(1, version) > 0
        with self._changed:
            self.lead.missing = missing
        self.fill()
        return not self.examples.are_over or len(self.in_flight) >= missing

    @property
    def failures(self) -> Counter[str]:
        """Counts of exceptions of episodes, if the engine runs them."""
        return Counter(getattr(self._engine, "failures", ()))

    def has_more(self, num_accepted: int) -> bool:
        """Return True if the caller should ask again: groups are in flight that were not yet when `num_accepted` was
        read, prompts are left that can start, or groups were discarded and others can take their place."""
        with self._submitting, self._changed:  # A submission in another thread might be in progress.
            # Nothing was left to take, so these were discarded by another caller (`engine.abandon`).
            if gone := self.in_flight.difference(self._engine.stream.ledger.outstanding):
                for group_id in gone:
                    self._leave(group_id)
                self.lead.withdraw(len(gone))
        if self.is_automatic:
            self.fill()
        with self._submitting:
            can_start = self.is_automatic and not self.examples.are_over
            return bool(gone) or self.num_accepted != num_accepted or can_start

    def took(self, group_id: int, missing: int) -> None:
        """Note that the trainer has taken a group, and still needs this number for its step."""
        with self._changing():
            if group_id in self.in_flight:
                self._leave(group_id)
                self.lead.take(missing)
            else:
                self._taken_early.add(group_id)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Do not count the time of the block as a wait: the trainer computes on groups of its step that it has."""
        with self._changing():
            self.lead.compute(_now_s())
        yield
        with self._changing():
            self.lead.wait(_now_s())

    def begin(self) -> LeadState:
        """Note that the trainer has the groups of its step. Returns the state of the controller."""
        with self._changing():
            self.lead.begin(_now_s())
            state = self.lead.state
        if self.is_automatic and state.rule != self._last_rule:
            self._last_rule = state.rule
            logger.info("start of prompts: %s", state)
        return state

    @property
    def submitted(self) -> Submitted:
        """The record from which another submitter continues."""
        with self._changed:
            num_submitted, in_flight, unsubmitted = self.num_submitted, sorted(self.in_flight), self.unsubmitted
            self._recorded = self.in_flight.copy()
            self._examples = {each: self._examples[each] for each in in_flight if each in self._examples}
        return self.examples.submitted(num_submitted, in_flight, unsubmitted)

    def submitted_again(self, record: Submitted) -> dict[str, Any]:
        """Return the fields of the last record with its groups in flight as not submitted. They were dropped since."""
        if not self.examples.can_continue:
            return {"in_flight": []}
        with self._changed:
            known = [self._examples[group_id] for group_id in record.in_flight if group_id in self._examples]
        return {
            "in_flight": [],
            "num_submitted": record.num_submitted - len(known),
            "num_read": max(record.num_submitted, record.num_read),
            "unsubmitted": [*map(plain_example, known), *record.unsubmitted],
        }

    @property
    def unsubmitted(self) -> list[Any]:
        """Examples that were read and not submitted."""
        with self._changed:
            return list(self.examples.buffer)

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
            with self._changing():
                self._stopped = True
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
            with self._changing():
                self._is_paused = False

    def _leave(self, group_id: int) -> None:
        """Note that a group is not in flight any more. Holds `_changed`."""
        self.in_flight.discard(group_id)
        if group_id not in self._recorded:
            self._examples.pop(group_id, None)

    # ---- any thread ---------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, and wake the other thread at the end."""
        with self._changed:
            yield
            self._changed.notify()

    def _ready(self) -> None:
        with self._changing():
            self.lead.ready(_now_s())

    def _run(self) -> None:
        try:
            while self._wait_for_a_start():
                self._submit()
        except BaseException as error:  # The trainer's thread raises it.
            self._error = error

    def _wait_for_a_start(self) -> bool:
        """Wait until a prompt can start. Returns False at the end. The trainer's next request wakes this thread when
        there is nothing to submit."""
        with self._changed:
            while not self._stopped:
                now = _now_s()
                starts_at = self.lead.next_start(now) if self.examples.buffer and not self._is_paused else inf
                if starts_at <= now:
                    return True
                self._changed.wait(None if starts_at == inf else starts_at - now)
            return False

    def _submit(self, count: int | None = None, version: int | None = None) -> int:
        """Submit examples of the buffer, at most `count` (None: the number that can start now), and skip examples that
        do not fit. Returns the number of submitted prompts."""
        with self._submitting:
            with self._changed:
                if count is None and self._is_paused:
                    return 0
                now, buffer = _now_s(), self.examples.buffer
                number = min(len(buffer), self.lead.allowed(now) if count is None else count)
                taken = [buffer.popleft() for _ in range(number)]
                self.lead.start(number, now)
            accepted: dict[int, Example] = {}
            numbered = deque(enumerate(map(as_example, taken), self.num_submitted))
            self.num_submitted += number
            try:
                self.fitting.submit(numbered, version, accepted)
            finally:
                self.num_submitted -= len(numbered)
                with self._changed:
                    buffer.extendleft(example for _, example in reversed(numbered))
                    self.lead.withdraw(number - len(accepted))
                    self.in_flight.update(accepted)
                    self._examples |= accepted
                    self.num_accepted += len(accepted)
                    for group_id in self._taken_early.intersection(accepted):
                        self._leave(group_id)
                        self.lead.take()
                    self._taken_early.clear()
            return len(accepted)

    def _spare_groups(self) -> float:
        """Return the number of further groups that would make the engines faster or are allowed to queue."""
        stream = self._engine.stream
        capacities = [member.info.max_sequences for member in getattr(self._engine, "members", [self._engine])]
        rows = sum(map(stream.concurrency.useful_rows, capacities))
        # Sequences beyond the rows draw nothing and do not age, and keep the rows busy when others end together.
        queue = self._per_step if rows >= sum(capacities) else 0
        return (rows - stream.ledger.num_unfinished) / self._samples + queue


def _examples_in_flight(engine: PromptEngine, submitted: Submitted) -> dict[int, Example]:
    """Return the examples of the groups that a loaded run continues."""
    examples: dict[int, Example] = {}
    known = engine.stream.ledger.table.known(submitted.in_flight) if submitted.in_flight else ()
    for record in known:
        if record.prompt is not None:
            metadata = record.prompt.metadata
            row = Example(metadata["row"], metadata["metadata"]) if PLAYER in metadata else None  # of Episodes
            examples[record.group_id] = row or Example(record.prompt.token_ids, metadata)
    return examples


def _now_s() -> float:
    return now_ns() / 1e9
