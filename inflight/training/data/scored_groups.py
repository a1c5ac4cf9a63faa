"""From finished groups to a batch: the one pipeline of `RolloutStream.batches` and `grpo`. It adds, packs and, once an
optimizer step has consumed the batch, measures how old its tokens were."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from inflight.core.clock import now_ns
from inflight.core.rollout import Rollout
from inflight.observability.staleness_meter import StalenessMeter, TokenStaleness
from inflight.training.data.advantages import Advantages, group_advantages
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.dropped import Dropped
from inflight.training.data.staleness_filter import StalenessRule, take_out_stale


@dataclass(slots=True)
class ScoredGroups:
    """The groups of one batch: their samples that have a reward, and the count of what was left out."""

    groups: list[list[Rollout]] = field(default_factory=list)
    dropped: Dropped = field(default_factory=Dropped)

    @property
    def rollouts(self) -> list[Rollout]:
        """The samples of all groups."""
        return [rollout for group in self.groups for rollout in group]

    @property
    def mean_reward(self) -> float:
        """Mean reward of all samples. There must be one."""
        rewards = [rollout.reward or 0.0 for rollout in self.rollouts]
        return sum(rewards) / len(rewards)

    def add(self, group: list[Rollout]) -> bool:
        """Take the samples of a finished group that have a reward. Returns False if nothing of it can be trained on:
        a sample was cancelled or ended with an error, or none has a reward."""
        if not ended_by_itself(group):
            self.dropped.num_failed_groups += 1
            return False
        scored = [rollout for rollout in group if rollout.reward is not None]
        self.dropped.num_unscored_rollouts += len(group) - len(scored)
        if not scored:
            self.dropped.num_unscored_groups += 1
            return False
        self.groups.append(scored)
        return True

    def pack(
        self,
        *,
        trainer_version: int,
        staleness: Sequence[StalenessRule] = (),
        advantages_of: Advantages = group_advantages,
        skip_uniform: bool = False,
    ) -> PackedBatch | None:
        """Pack the groups, with advantages relative to their groups, for a trainer that has this version's weights.

        staleness: the rules that say which tokens are too old. skip_uniform: leave out groups of equal rewards; the
        batch's totals count them. Returns None if nothing is left. Raises ValueError for a reward that is None or not
        finite.
        """
        groups: list[list[Rollout]] = []
        uniform: list[list[Rollout]] = []
        for group in self.groups:
            is_uniform = skip_uniform and len({rollout.reward for rollout in group}) == 1
            (uniform if is_uniform else groups).append(group)
        self.dropped.num_uniform_groups += len(uniform)
        advantages = advantages_of([[rollout.reward for rollout in group] for group in groups])
        rollouts = [rollout for group in groups for rollout in group]
        included = take_out_stale(rollouts, staleness, trainer_version, now_ns(), self.dropped)
        if not included:
            return None
        batch = pack(
            [rollouts[index] for index in included],
            [advantages[index] for index in included],
            included=list(included.values()) if staleness else None,
            trainer_version=trainer_version,
        )
        batch.totals = replace(
            batch.totals,
            num_tokens=batch.totals.num_tokens + sum(len(rollout.token_ids) for group in uniform for rollout in group),
            num_sequences=batch.totals.num_sequences + sum(map(len, uniform)),
            num_groups=len(batch.totals.group_tokens) + len(uniform),
        )
        return batch


def ended_by_itself(group: list[Rollout]) -> bool:
    """Whether every sample of the group stopped or reached its maximum length."""
    return all(rollout.finish_reason in ("stop", "length") for rollout in group)


def measure_consumed(meter: StalenessMeter, batch: PackedBatch) -> TokenStaleness:
    """Tell the meter that an optimizer step has just consumed this batch, whose `trainer_version` must be known.
    Returns how old its drawn tokens were."""
    assert batch.trainer_version is not None
    drawn = batch.loss_mask
    return meter.consume(
        batch.weight_versions[drawn].cpu().numpy(),
        batch.sampled_at_ns[drawn].cpu().numpy(),
        consumed_ns=now_ns(),
        trainer_version=batch.trainer_version,
    )
