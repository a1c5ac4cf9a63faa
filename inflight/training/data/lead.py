"""The lead: the time by which a group starts before the trainer needs it.

Groups that start too late make the trainer wait. Groups that start too early are trained on when they are old. The
controller looks for the smallest lead with which the trainer waits for at most `WAIT_SHARE` of its time.

The i-th group starts at s(i), and the i-th group to be ready (drawn and scored) is ready at r(i). The trainer asks for
the groups of step k at time a(k), and has taken c groups in all once it has them. It can begin no earlier than r(c).
When group c started, the controller predicted a(k) as p, and started the group at s = p − ℓ, where ℓ is the lead. With
another lead the step would have waited for

    wait(ℓ) = r − a = (s + (r − s)) − a = (r − s) + (p − a) − ℓ = needed − ℓ

so that `needed` is the lead of a step without a wait: the time from the start of a group to a whole batch of ready
groups, plus the error of the prediction. It has a distribution: lengths differ, rewards jitter, steps take longer next
to an evaluation. Its values in the last steps estimate it, newer ones with more weight. The lead is the smallest ℓ with

    mean(max(0, needed − ℓ)) ≤ aim · mean(time of a step).

Since r(c) counts ready groups and not the groups of one batch, it includes the cost of long answers: later groups
overtake a group that takes several steps, and the law starts as many groups more. By Little's law a lead of ℓ keeps
ℓ · (groups per second of the trainer) groups in flight.

A longer lead does not speed up a generator that is the slower half. `needed` then grows with the lead, because groups
share the engine. A bound ends this growth: samples are added only while they make the engines faster (`Concurrency`).
If the engines are fastest with all rows, a further batch is allowed to queue; it draws no tokens there and so does not
age. A judge, a sandbox or a tool can be the slower half, too. If the trainer waits in most steps, groups are added only
while they shorten its waits (`UsefulGroups`). One batch is always allowed; without it the trainer would wait forever.

A trainer that computes on the first groups of a step does not wait for the others meanwhile. Each part of a step has a
`needed` of its own: its last group is needed at a + p, where p is the time of the parts before it. The largest is the
`needed` of the step. The time of all parts counts as time of the step, as if the trainer had begun that much earlier.

All times are in seconds of any clock that only moves forward. Nothing here reads a clock or waits.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, isnan, nan

from inflight.training.data.lead_state import WAIT_SHARE, LeadState, Rule
from inflight.training.data.useful_groups import UsefulGroups

_AIM = 0.005
"""The share that the estimate aims at. It is lower, because the estimate comes from few steps."""
_FADING = 0.9
"""Weight of a step relative to the step after it."""
_REMEMBERED_STEPS = 16
_FIRST_STEPS = 2
"""Steps with one batch in flight: no time of a step is known."""


@dataclass(frozen=True, slots=True)
class _Step:
    needed_s: float
    """Lead with which this step would not have waited; NaN if it is unknown."""
    wait_s: float
    train_s: float
    num_groups: int


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
        self._steps: deque[_Step] = deque(maxlen=_REMEMBERED_STEPS)
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
        self._missing = groups_per_step
        """Usable groups that the present step still needs."""
        self._train_s = nan
        """Seconds of the last step, from the arrival of its groups to the next request, and on parts of it before."""
        self._usual_train_s, self._usual_wait_s = nan, 0.0
        """Medians of the last steps: the time from groups to request, and the wait. One long step, as with an
        evaluation, predicts nothing."""
        self._mean_wait_s, self._batch = 0.0, groups_per_step
        """Means of the last steps: the wait, and the groups that a step takes, including failed and replaced groups."""
        self._lead_s, self._wait_share = nan, nan
        self._useful = UsefulGroups(groups_per_step)

    def start(self, count: int, now: float) -> None:
        """Note that groups start."""
        for position in range(self.in_flight, self.in_flight + count):
            due = self._due(position, now) if self._is_measured else nan
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
            self._asked, self._num_taken, self._missing = now, 0, self._per_step
            self._computed_s, self._needed_s = 0.0, -inf

    def take(self, missing: int | None = None) -> None:
        """Note that the trainer takes a group, and still needs this number for its step."""
        self._missing = self._missing if missing is None else missing
        if self.in_flight:
            self.in_flight -= 1
            self._num_taken += 1
            # Groups of a continued run can have been ready before the controller was made.
            self._num_unready = min(self._num_unready, self.in_flight)

    def need(self, missing: int) -> None:
        """Note that the step needs this number of groups, since one that was taken does not count."""
        self._missing = missing

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
        if number:
            self._useful.step(number, max(0.0, began - self._asked))
        self._steps.append(_Step(needed_s, max(0.0, began - self._asked), self._train_s, self._num_taken))
        self._asked, self._began = None, began
        self._solve()

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
        return LeadState(self._lead_s, self.in_flight, self._wait_share, self._rule)

    @property
    def _is_measured(self) -> bool:
        return len(self._steps) >= _FIRST_STEPS and not isnan(self._lead_s)

    @property
    def _lead(self) -> float:
        return self._lead_s if self._fixed is None and self._is_measured else inf

    @property
    def _room(self) -> float:
        """Groups that the bounds allow to start."""
        bound = self._fixed or (self._useful_most if self._is_measured else self._per_step)
        room = min(bound, self._most_groups) - self.in_flight
        if self._fixed is None and room > 0:
            room = min(room, max(self._batch - self._num_unready, self._spare_groups()))
        return room

    @property
    def _useful_most(self) -> float:
        """Groups in flight beyond which the trainer does not wait less; infinity if it hardly waits in most steps."""
        if self._usual_wait_s <= WAIT_SHARE * self._usual_train_s:
            return inf
        return max(self._batch, self._useful.most(self._usual_train_s))

    def _needed(self, asked: float) -> float:
        """Return the lead with which the trainer would not have waited for the last group taken; NaN if unknown."""
        last = min(self._num_taken, len(self._starts)) - 1
        if not 0 <= last < len(self._readies):
            return nan
        start, due, _ = self._starts[last]
        return self._readies[last] - start + (0.0 if isnan(due) else due - asked) - self._computed_s

    def _due(self, position: int, now: float) -> float:
        """Return the time at which the trainer will need the group with this position among the groups in flight."""
        if not self._is_measured:
            return now
        if self._asked is None:
            assert self._began is not None
            due = self._began + self._usual_train_s
        else:
            missing = ceil(self._missing * self._batch / self._per_step)
            if position < missing:
                return self._asked
            begins = (now if self._computes_since is None else self._computes_since) - self._computed_s
            position, due = position - missing, begins + self._usual_train_s
        return due + position // self._batch * (self._usual_train_s + self._mean_wait_s)

    def _solve(self) -> None:
        """Set the lead, and the means, by the steps so far."""
        weighted = [(_FADING**age, step) for age, step in enumerate(reversed(self._steps))]
        total = sum(weight for weight, _ in weighted)
        self._batch = max(self._per_step, ceil(sum(w * step.num_groups for w, step in weighted) / total - 1e-6))
        timed = [(w, step) for w, step in weighted if not isnan(step.train_s)]
        if not timed:
            return
        total = sum(weight for weight, _ in timed)
        self._usual_train_s = _median([(step.train_s, w) for w, step in timed])
        self._usual_wait_s = _median([(step.wait_s, w) for w, step in timed])
        self._mean_wait_s = sum(w * step.wait_s for w, step in timed) / total
        step_s = self._mean_wait_s + sum(w * step.train_s for w, step in timed) / total
        self._wait_share = self._mean_wait_s / step_s if step_s else 0.0
        needed = sorted(((step.needed_s, w) for w, step in weighted if not isnan(step.needed_s)), reverse=True)
        budget_s, weight = _AIM * step_s * sum(w for _, w in needed), 0.0
        # Lower the lead from the largest value, and count the wait that this would have caused.
        for (needed_s, w), (next_s, _) in pairwise([*needed, (-inf, 0.0)]):
            weight += w
            if weight * (needed_s - next_s) >= budget_s:
                self._lead_s = max(0.0, needed_s - budget_s / weight)
                return
            budget_s -= weight * (needed_s - next_s)

    @property
    def _rule(self) -> Rule:
        if self._fixed is not None:
            return Rule.FIXED
        if not self._is_measured:
            return Rule.FIRST_STEPS
        if self.in_flight >= self._most_groups:
            return Rule.BOUND
        if self.in_flight >= self._useful_most and self._spare_groups() >= 1:
            return Rule.SCORES
        if self._room < 1:
            return Rule.GENERATOR
        return Rule.GROWING if self._wait_share > WAIT_SHARE else Rule.JUST_IN_TIME


def _median(weighted: list[tuple[float, float]]) -> float:
    """Return the median of values with weights."""
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0:
            return value
    raise AssertionError("no values")
