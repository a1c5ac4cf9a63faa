"""The control law of the lead: by the last steps, how long before its use a group starts.

Groups that start too late make the trainer wait. Groups that start too early are trained on when they are old. The
law looks for the smallest lead with which the trainer waits for at most `WAIT_SHARE` of its time.

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
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, isnan, nan

from inflight.training.data.concurrency import UsefulGroups

WAIT_SHARE = 0.02
"""Largest share of its time that the trainer should wait for groups."""
_AIM = 0.005
"""The share that the estimate aims at. It is lower, because the estimate comes from few steps."""
_FADING = 0.9
"""Weight of a step relative to the step after it."""
_REMEMBERED_STEPS = 16
_FIRST_STEPS = 2
"""Steps with one batch in flight: no time of a step is known."""


@dataclass(frozen=True, slots=True)
class Step:
    """The times of a step in seconds; NaN if one is unknown."""

    needed_s: float
    """Lead with which this step would not have waited."""
    wait_s: float
    train_s: float
    """From the arrival of its groups to the next request, and the time of parts before."""
    num_groups: int
    """Groups taken, including failed and replaced groups."""
    num_in_flight: int
    """Groups in flight when the last of them started; 0 if it is unknown."""


class LeadLaw:
    """Estimates the lead, and the times of the next steps, by the last ones. groups_per_step: groups that a step takes
    at least."""

    def __init__(self, groups_per_step: int):
        self.steps: deque[Step] = deque(maxlen=_REMEMBERED_STEPS)
        self._per_step = groups_per_step
        self._useful = UsefulGroups(groups_per_step)
        self.lead_s = nan
        self.wait_share = nan
        self.usual_train_s = nan
        """The median. One long step, as with an evaluation, predicts nothing."""
        self._usual_wait_s = 0.0
        self.mean_wait_s = 0.0
        self.batch = groups_per_step
        """The mean number of groups that a step takes, rounded up."""

    @property
    def is_measured(self) -> bool:
        """Whether the lead is known."""
        return len(self.steps) >= _FIRST_STEPS and not isnan(self.lead_s)

    @property
    def useful_groups(self) -> float:
        """Groups in flight beyond which the trainer does not wait less; infinity if it hardly waits in most steps."""
        if self._usual_wait_s <= WAIT_SHARE * self.usual_train_s:
            return inf
        return max(self.batch, self._useful.most(self.usual_train_s))

    def add(self, step: Step) -> None:
        """Set the lead, and the means, by the steps so far and this one."""
        self.steps.append(step)
        if step.num_in_flight:
            self._useful.step(step.num_in_flight, step.wait_s)
        weighted = [(_FADING**age, step) for age, step in enumerate(reversed(self.steps))]
        total = sum(weight for weight, _ in weighted)
        self.batch = max(self._per_step, ceil(sum(w * step.num_groups for w, step in weighted) / total - 1e-6))
        timed = [(w, step) for w, step in weighted if not isnan(step.train_s)]
        if not timed:
            return
        total = sum(weight for weight, _ in timed)
        self.usual_train_s = _median([(step.train_s, w) for w, step in timed])
        self._usual_wait_s = _median([(step.wait_s, w) for w, step in timed])
        self.mean_wait_s = sum(w * step.wait_s for w, step in timed) / total
        step_s = self.mean_wait_s + sum(w * step.train_s for w, step in timed) / total
        self.wait_share = self.mean_wait_s / step_s if step_s else 0.0
        needed = sorted(((step.needed_s, w) for w, step in weighted if not isnan(step.needed_s)), reverse=True)
        budget_s, weight = _AIM * step_s * sum(w for _, w in needed), 0.0
        # Lower the lead from the largest value, and count the wait that this would have caused.
        for (needed_s, w), (next_s, _) in pairwise([*needed, (-inf, 0.0)]):
            weight += w
            if weight * (needed_s - next_s) >= budget_s:
                self.lead_s = max(0.0, needed_s - budget_s / weight)
                return
            budget_s -= weight * (needed_s - next_s)


def _median(weighted: list[tuple[float, float]]) -> float:
    """Return the median of values with weights."""
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0:
            return value
    raise AssertionError("no values")
