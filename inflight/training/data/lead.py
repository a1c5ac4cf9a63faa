"""The lead controller: decides when the next groups start, by the lead that the control law sets (`lead_law.py`).

A trainer that computes on the first groups of a step does not wait for the others meanwhile. Each part of a step has a
`needed` of its own: its last group is needed at a + p, where p is the time of the parts before it. The largest is the
`needed` of the step. The time of all parts is a part of the step's time, as if the trainer had begun earlier.

All times are in seconds of any clock that only moves forward. Nothing here reads a clock or waits.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, inf, isnan, nan
from numbers import Integral
from typing import Any, Literal

from inflight.training.data.lead_law import WAIT_SHARE, LeadLaw, Step


class Rule(IntEnum):
    """Rules that decide when the next group starts."""

    FIXED = 0
    FIRST_STEPS = 1
    JUST_IN_TIME = 2
    GROWING = 3
    GENERATOR = 4
    BOUND = 5
    SCORES = 6


_REASONS = {
    Rule.FIXED: "a fixed number of batches ahead",
    Rule.FIRST_STEPS: "one batch until the times of steps are known",
    Rule.JUST_IN_TIME: "the smallest lead with which the trainer hardly waits",
    Rule.GROWING: "the trainer waited too long, and the lead grows",
    Rule.GENERATOR: "the generator is the slower half, and more groups would not speed it up",
    Rule.BOUND: "the bound on groups in flight",
    Rule.SCORES: "more groups in flight do not shorten the waits: scores or tools are the slower half",
}


@dataclass(frozen=True, slots=True)
class LeadState:
    """The lead after a step, and its reason."""

    seconds: float
    """The lead; NaN in the first steps, and with a fixed bound."""
    groups: int
    """Groups in flight: started, and not taken by the trainer."""
    wait_share: float
    """Share of the time of the last steps in which the trainer waited for groups; NaN before the first."""
    rule: Rule
    """The rule that decides when the next group starts."""

    @property
    def reason(self) -> str:
        """The rule in words."""
        return _REASONS[self.rule]

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name; "rule" is the number of the `Rule`."""
        numbers = {"seconds": self.seconds, "groups": float(self.groups), "wait_share": self.wait_share}
        return numbers | {"rule": float(self.rule)}

    def __str__(self) -> str:
        lead = "" if isnan(self.seconds) else f"lead {self.seconds:.3g} s, "
        wait = "" if isnan(self.wait_share) else f"the trainer waited {self.wait_share:.1%} of the time, "
        return f"{lead}{wait}{self.groups} groups in flight: {self.reason}"


class LeadController:
    """Decides when the next groups start. Not safe to use from several threads at once.

    groups_per_step: groups of a step; steps that take more, since groups failed or were replaced, are noticed. ahead:
    "auto", or a fixed number of batches in flight in addition to the next one. most_groups: groups in flight at most;
    0: no bound. spare_groups: called for the number of further groups that would make the engines faster.
    """

    def __init__(
        self,
        groups_per_step: int,
        *,
        ahead: int | str = "auto",
        most_groups: int = 0,
        spare_groups: Callable[[], float] = lambda: inf,
    ):
        self.law = LeadLaw(groups_per_step)
        self._per_step, self._spare_groups = groups_per_step, spare_groups
        self._fixed = None if ahead == "auto" else (1 + int(ahead)) * groups_per_step
        self._most_groups = most_groups or inf
        self.in_flight = 0
        self._num_unready = 0
        self._starts: deque[tuple[float, float, int]] = deque()
        """Start of each group in flight, the predicted time at which it is needed (NaN: no prediction), and the number
        of groups in flight with it."""
        self._readies: deque[float] = deque()
        """Times at which groups in flight became ready."""
        self._asked: float | None = None
        """When the trainer asked for the groups that it waits for; None while it trains."""
        self._computes_since: float | None = None
        """When it began to compute on some of them; None while it waits or trains."""
        self._computed_s, self._needed_s = 0.0, -inf
        """Seconds that it has computed on parts of the present step, and the lead with which it would not have waited
        for them."""
        self._began: float | None = None
        """When the trainer last had the groups of a step, less the time that it had computed on parts of it."""
        self._num_taken = 0
        """Groups taken for the present step."""
        self.missing = groups_per_step
        """Usable groups that the present step still needs. The caller sets it if one that was taken does not count."""
        self._train_s = nan
        """Seconds of the last step, from the arrival of its groups to the next request, and on parts of it before."""

    def start(self, count: int, now: float) -> None:
        """Note that groups start."""
        for position in range(self.in_flight, self.in_flight + count):
            due = self._due(position, now) if self.law.is_measured else nan
            self._starts.append((now, due, position + 1))
        self.in_flight += count
        self._num_unready += count

    def withdraw(self, count: int) -> None:
        """Note that the last groups to start were refused, or that another caller discarded groups in flight."""
        for _ in range(min(count, len(self._starts))):
            self._starts.pop()
        self.in_flight -= count
        self._num_unready = max(0, self._num_unready - count)

    def ready(self, now: float) -> None:
        """Note that a group can be taken."""
        if self._num_unready:
            self._num_unready -= 1
            self._readies.append(now)

    def ask(self, now: float) -> None:
        """Note that the trainer asks for the groups of a step."""
        if self._asked is None:
            if self._began is not None:
                self._train_s = now - self._began
            self._asked, self._num_taken, self.missing = now, 0, self._per_step
            self._computed_s, self._needed_s = 0.0, -inf

    def take(self, missing: int | None = None) -> None:
        """Note that the trainer takes a group, and still needs this number for its step."""
        self.missing = self.missing if missing is None else missing
        if self.in_flight:
            self.in_flight -= 1
            self._num_taken += 1
            # Groups of a continued run can have been ready before the controller was made.
            self._num_unready = min(self._num_unready, self.in_flight)

    def compute(self, now: float) -> None:
        """Note that the trainer computes on the groups that it has taken, instead of waiting for the others."""
        if self._asked is not None:
            self._needed_s = max(self._needed_s, self._needed(self._asked))  # An unknown one, NaN, changes nothing.
            self._computes_since = now

    def wait(self, now: float) -> None:
        """Note that the trainer waits again for the groups of its step."""
        if self._computes_since is not None:
            self._computed_s += now - self._computes_since
            self._computes_since = None

    def begin(self, now: float) -> None:
        """Note that the trainer has the groups of its step, and trains."""
        if self._asked is None:
            return
        self.wait(now)
        needed_s = max(self._needed(self._asked), self._needed_s)  # NaN if the first is.
        began, number = now - self._computed_s, 0
        for _ in range(min(self._num_taken, len(self._starts))):
            _, _, number = self._starts.popleft()
            if self._readies:
                self._readies.popleft()
        self.law.add(Step(needed_s, max(0.0, began - self._asked), self._train_s, self._num_taken, number))
        self._asked, self._began = None, began

    def allowed(self, now: float) -> int:
        """Return the number of groups that may start now."""
        count, room = 0, self._room
        while count < room and self._due(self.in_flight + count, now) - self._lead <= now:
            count += 1
        return count

    def next_start(self, now: float) -> float:
        """Return the time at which the next group may start if nothing happens until then; infinity if only an event
        allows one."""
        if self._room < 1:
            return inf
        start = self._due(self.in_flight, now) - self._lead
        # While the trainer waits, its next request is predicted from the current time, so that this start is never due.
        is_waiting = self._asked is not None and self._computes_since is None
        return now if start <= now else inf if is_waiting else start

    @property
    def state(self) -> LeadState:
        """The lead, and what decides it."""
        return LeadState(self.law.lead_s, self.in_flight, self.law.wait_share, self._rule)

    @property
    def _lead(self) -> float:
        return self.law.lead_s if self._fixed is None and self.law.is_measured else inf

    @property
    def _room(self) -> float:
        """Groups that the bounds allow to start."""
        bound = self._fixed or (self.law.useful_groups if self.law.is_measured else self._per_step)
        room = min(bound, self._most_groups) - self.in_flight
        if self._fixed is None and room > 0:
            room = min(room, max(self.law.batch - self._num_unready, self._spare_groups()))
        return room

    def _needed(self, asked: float) -> float:
        """Return the lead with which the trainer would not have waited for the last group taken; NaN if unknown."""
        last = min(self._num_taken, len(self._starts)) - 1
        if not 0 <= last < len(self._readies):
            return nan
        start, due, _ = self._starts[last]
        return self._readies[last] - start + (0.0 if isnan(due) else due - asked) - self._computed_s

    def _due(self, position: int, now: float) -> float:
        """Return the time at which the trainer will need the group with this position among the groups in flight."""
        if not self.law.is_measured:
            return now
        if self._asked is None:
            assert self._began is not None
            due = self._began + self.law.usual_train_s
        else:
            missing = ceil(self.missing * self.law.batch / self._per_step)
            if position < missing:
                return self._asked
            begins = (now if self._computes_since is None else self._computes_since) - self._computed_s
            position, due = position - missing, begins + self.law.usual_train_s
        return due + position // self.law.batch * (self.law.usual_train_s + self.law.mean_wait_s)

    @property
    def _rule(self) -> Rule:
        if self._fixed is not None:
            return Rule.FIXED
        if not self.law.is_measured:
            return Rule.FIRST_STEPS
        if self.in_flight >= self._most_groups:
            return Rule.BOUND
        if self.in_flight >= self.law.useful_groups and self._spare_groups() >= 1:
            return Rule.SCORES
        if self._room < 1:
            return Rule.GENERATOR
        return Rule.GROWING if self.law.wait_share > WAIT_SHARE else Rule.JUST_IN_TIME


def check_ahead(ahead: int | str) -> None:
    """Raise ValueError unless it is "auto" or a number of batches."""
    if ahead != "auto" and (isinstance(ahead, str | bool) or not isinstance(ahead, Integral) or ahead < 0):
        raise ValueError(f'ahead must be "auto" or a number of batches of at least 0, got {ahead!r}')


def read_ahead(text: str) -> int | Literal["auto"]:
    """Return the value of `--ahead`: "auto", or a number. Raises ValueError."""
    ahead: Any = int(text) if text.isdecimal() else text
    check_ahead(ahead)
    return ahead
