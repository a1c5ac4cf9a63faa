"""From finished groups to a batch: the one pipeline of `RolloutStream.batches` and `grpo`. It adds, packs and, once an
optimizer step has consumed the batch, measures how old its tokens were."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite, isnan, nan, sqrt

import numpy as np

from inflight.core.clock import now_ns
from inflight.core.rollout import Rollout
from inflight.observability.staleness_meter import StalenessMeter, TokenStaleness
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.staleness_filter import StalenessRule

Advantages = Callable[[Sequence[Sequence[float | None]]], Sequence[float]]
"""A function of the rewards of each group that returns an advantage for every sample, groups concatenated."""


def group_advantages(
    rewards: Sequence[Sequence[float | None]], *, scale: bool = True, ddof: int = 0, eps: float = 1e-4
) -> list[float]:
    """(r − mean of its group) / (standard deviation of its group + eps), for every sample, groups concatenated (Shao et
    al., DeepSeekMath, arXiv 2402.03300, §4.1).

    scale: False leaves the division out (Dr. GRPO, arXiv 2503.20783). ddof: the standard deviation divides by n − ddof.
    0, that of the samples themselves, as the paper writes it; 1, the estimate for all samples that could be drawn, is
    what TRL, verl, slime and SkyRL take: their advantages are √((n − 1) / n) times these, 0.71 for n = 2 and 0.94 for
    n = 8. A group of equal rewards, or of one sample, gets 0.

    Raises ValueError for a reward that is None or not finite: leave such samples out before.
    """
    advantages: list[float] = []
    for index, group in enumerate(rewards):
        bad = next((i for i, reward in enumerate(group) if reward is None or not isfinite(reward)), None)
        if bad is not None:
            raise ValueError(
                f"sample {bad} of group {index} has reward {group[bad]}; a group's advantages need finite rewards: "
                "leave out the samples that have none"
            )
        r = np.asarray(group, np.float64)
        centred = r - r.mean() if len(r) else r
        spread = sqrt((centred**2).sum() / (len(r) - ddof)) if len(r) > ddof else 0.0
        advantages += (centred / (spread + eps) if scale else centred).tolist()
    return advantages


@dataclass(slots=True)
class Dropped:
    """Counts of what was left out. Two records add up to one: `a + b`."""

    num_failed_groups: int = 0
    """Groups of which a sample was cancelled or ended with an error."""
    num_unscored_groups: int = 0
    """Groups of which no sample has a reward."""
    num_unscored_rollouts: int = 0
    """Rollouts that have no reward: it was None, not finite, or took too long. Those of unscored groups are among
    them, those of failed groups are not."""
    num_uniform_groups: int = 0
    """Groups of equal rewards, which were left out of the forward pass and still count in what the loss is averaged
    over."""
    num_stale_rollouts: int = 0
    """Rollouts that staleness rules rejected."""
    num_stale_tokens: int = 0
    """Tokens that have no part in the loss because they are too old: masked ones, and all of rejected rollouts."""
    num_masked_tokens: int = 0
    """The stale tokens that stayed in the batch."""
    num_rollouts: int = 0
    """Rollouts to which the staleness rules were applied, old or not."""
    num_tokens: int = 0
    """Tokens of these rollouts."""
    sum_lengths: int = 0
    """The sum over these tokens of the length of the rollout that each belongs to."""
    sum_kept_lengths: int = 0
    """The same sum over the tokens that are not stale."""

    @property
    def num_unusable_groups(self) -> int:
        """Groups of which nothing can be trained on: failed or unscored."""
        return self.num_failed_groups + self.num_unscored_groups

    @property
    def stale_share(self) -> float:
        """Share of the tokens that are stale; NaN if there are no tokens."""
        return self.num_stale_tokens / self.num_tokens if self.num_tokens else nan

    @property
    def length_bias(self) -> float:
        """Mean length of the rollout that a token belongs to, over the tokens that are not stale, as a share of that
        over all tokens: below 1, short rollouts are favoured. NaN if all tokens are stale."""
        num_kept = self.num_tokens - self.num_stale_tokens
        return (self.sum_kept_lengths / num_kept) / (self.sum_lengths / self.num_tokens) if num_kept else nan

    def __add__(self, other: "Dropped") -> "Dropped":
        return Dropped(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __str__(self) -> str:
        return (
            f"{self.num_failed_groups:,} groups failed, {self.num_unscored_groups:,} groups and "
            f"{self.num_unscored_rollouts:,} rollouts had no reward, {self.num_uniform_groups:,} groups had equal "
            f"rewards, {self.stale_share:.1%} of {self.num_tokens:,} tokens were too old "
            f"({self.num_masked_tokens:,} masked, {self.num_stale_rollouts:,} of {self.num_rollouts:,} rollouts "
            f"rejected; length bias {self.length_bias:.3f})"
        )

    def as_dict(self) -> dict[str, float]:
        """The counts, the share of stale tokens and the length bias, under their names; what is NaN is left out."""
        numbers = asdict(self) | {"stale_share": self.stale_share, "length_bias": self.length_bias}
        return {name: number for name, number in numbers.items() if name[:4] != "sum_" and not isnan(number)}


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


def take_out_stale(
    rollouts: Sequence[Rollout], rules: Sequence[StalenessRule], trainer_version: int, now_ns: int, dropped: Dropped
) -> dict[int, np.ndarray]:
    """Apply all rules, and count what they take out in `dropped`.

    Returns a map of the indices of the rollouts that stay to bool[T], which of their tokens take part in the loss.
    """
    included: dict[int, np.ndarray] = {}
    for index, rollout in enumerate(rollouts):
        length = len(rollout.token_ids)
        old = [(rule.action, rule.too_old(rollout, trainer_version, now_ns)) for rule in rules]
        rejected = any(action == "reject" and too_old.any() for action, too_old in old)
        taking_part = ~np.any([too_old for _, too_old in old], axis=0) if old else np.ones(length, bool)
        num_kept = 0 if rejected else int(taking_part.sum())
        dropped.num_rollouts += 1
        dropped.num_tokens += length
        dropped.sum_lengths += length * length
        dropped.sum_kept_lengths += length * num_kept
        dropped.num_stale_tokens += length - num_kept
        if rejected:
            dropped.num_stale_rollouts += 1
        else:
            dropped.num_masked_tokens += length - num_kept
            included[index] = taking_part
    return included


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
