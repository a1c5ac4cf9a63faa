"""The number of groups in flight beyond which the trainer does not wait less."""

from dataclasses import dataclass

from inflight.training.data.concurrency import BUCKETS_PER_OCTAVE, bucket_of, largest_of

_ENOUGH = 0.96
"""Groups are useful until the steps per second are this share of the highest ones."""
_LEAST_STEPS = 5
_AVERAGED_STEPS = 32
_REMEMBERED_STEPS = 64
"""After this many steps without a number of groups, its waits are forgotten."""


@dataclass(slots=True)
class _Waits:
    """The mean wait of the steps with about the same number of groups in flight."""

    count: int = 0
    mean_s: float = 0.0
    last_step: int = 0

    def add(self, wait_s: float) -> None:
        self.count = min(self.count + 1, _AVERAGED_STEPS)
        self.mean_s += (wait_s - self.mean_s) / self.count


class UsefulGroups:
    """Averages the trainer's waits for numbers of groups in flight that are half an octave apart.

    Groups queue at a judge, a sandbox or a tool of limited throughput. With more of them in flight each takes longer:
    tokens are older and the trainer is no faster. least: the number that is always useful.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._waits: dict[int, _Waits] = {}
        self._num_steps = 0

    def step(self, number: int, wait_s: float) -> None:
        """Note the wait of a step, and the number of groups in flight when its last group started."""
        self._num_steps += 1
        waits = self._waits.setdefault(bucket_of(number), _Waits())
        waits.last_step = self._num_steps
        waits.add(wait_s)
        for bucket in [b for b, w in self._waits.items() if w.last_step <= self._num_steps - _REMEMBERED_STEPS]:
            del self._waits[bucket]

    def most(self, train_s: float) -> float:
        """Return the smallest number with which steps are about as fast as they can be. train_s: seconds of a step
        without its wait. Numbers of which too little is known are tried: twice the largest one if that is the fastest,
        and the next smaller one."""
        known = {bucket: train_s + waits.mean_s for bucket, waits in self._waits.items() if waits.count >= _LEAST_STEPS}
        if not known:
            return 2 * self._least
        fastest_s = min(known.values())
        enough = min(bucket for bucket, step_s in known.items() if _ENOUGH * step_s <= fastest_s)
        if enough == max(known):
            enough += BUCKETS_PER_OCTAVE
        elif enough - 1 not in known and enough > bucket_of(self._least):
            enough -= 1
        return largest_of(enough)
