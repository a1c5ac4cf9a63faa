"""Warns when batches have no advantage: their policy loss is 0, and training continues without learning."""

import warnings

from inflight.training.data.scored_groups import ScoredGroups

_MANY = 3
"""Number of consecutive batches whose groups each have equal rewards. Shorter runs are common with rewards of 0 and
1."""


class NothingToLearn:
    """Checks every batch of a loop. Warns once in each run of batches without an advantage."""

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._has_warned = False

    def note(self, scored: ScoredGroups) -> None:
        """Check the groups of a packed batch. The warning names the line of the user's loop, two generators up."""
        if not scored.groups:
            return
        if scored.has_advantage:
            self._num_in_a_row, self._has_warned = 0, False
            return
        self._num_in_a_row += 1
        rewards = {rollout.reward for rollout in scored.rollouts}
        are_single = all(rollout.params.n == 1 for rollout in scored.rollouts)
        if self._has_warned or not (are_single or len(rewards) == 1 or self._num_in_a_row >= _MANY):
            return
        self._has_warned = True
        reasons = []
        if len(rewards) == 1 and len(scored.rollouts) > 1:
            reasons.append(f"all {len(scored.rollouts)} rewards of a batch are {rewards.pop()}")
        elif not are_single:
            reasons.append(f"the rewards of each group are equal, in {self._num_in_a_row} batches in a row")
        if are_single:
            reasons.append(
                "every group has one sample (n=1), and advantages that are relative to a group need more; submit with "
                "SamplingParams(n=8), or choose advantages='reinforce++'"
            )
        warnings.warn(
            f"there is nothing to learn from these rollouts: {', and '.join(reasons)}. All advantages are 0, and so is "
            "the policy loss",
            stacklevel=4,
        )
