"""Groups that an inbox holds: what is known of one, and what all of them take."""

from collections import Counter
from dataclasses import dataclass

from inflight.core.rollout import Rollout

Group = list[Rollout]


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A group that was submitted and not handed out, and what has come of it."""

    group_id: int
    reserved: bool
    """It is not for `next`, but for who names it."""
    rollouts: Group
    """Its samples; the finish_reason of those that have not ended is ""."""

    @property
    def is_finished(self) -> bool:
        """Whether all of its samples have ended."""
        ended = sum(rollout.finish_reason != "" for rollout in self.rollouts)
        return ended > 0 and ended == self.rollouts[0].params.n


class HeldGroups:
    """Counts what finished groups hold."""

    def __init__(self) -> None:
        self.num_tokens = self.num_rollouts = self.nbytes = 0
        self._versions: Counter[int] = Counter()
        """Maps the oldest version of a token of a group to the number of such groups."""

    @property
    def oldest(self) -> int | None:
        return min(self._versions, default=None)

    def add(self, group: Group, sign: int = 1) -> None:
        self.num_tokens += sign * sum(len(rollout.token_ids) for rollout in group)
        self.num_rollouts += sign * len(group)
        self.nbytes += sign * sum(rollout.nbytes for rollout in group)
        if (scores := group[0].prompt_scores) is not None:
            self.nbytes += sign * scores.nbytes
        versions = [int(rollout.weight_versions[0]) for rollout in group if len(rollout.weight_versions)]
        if versions:
            self._versions[min(versions)] += sign
            if not self._versions[min(versions)]:
                del self._versions[min(versions)]

    def remove(self, group: Group) -> None:
        self.add(group, -1)
