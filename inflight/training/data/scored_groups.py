"""The pipeline from finished groups to a batch, used by `RolloutStream.batches` and `grpo`."""

import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isnan, nan
from statistics import fmean

import numpy as np
import torch

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout, samples_of
from inflight.observability.staleness_meter import StalenessMeter, TokenStaleness
from inflight.training.data.advantages import Advantages, resolve_advantages
from inflight.training.data.batch import PackedBatch, pack, tokens_of_samples
from inflight.training.data.staleness_filter import StalenessRule
from inflight.training.objective.aggregation import StepTotals

logger = logging.getLogger(__name__)

ForeignVersions = Callable[[str | None, np.ndarray], np.ndarray]
"""`StalenessMeter.foreign_versions`"""
LEAST_MEMBERS = 2
"""Number of members with a reward that a group needs to continue without the failed ones, unless it has only one
sample."""
_MANY_BATCHES = 3
"""Number of consecutive batches whose groups each have equal rewards. Shorter runs are common with rewards of 0 and
1."""


@dataclass(slots=True)
class Dropped:
    """Counts of omitted examples, groups, rollouts and tokens. Two records add up to one: `a + b`."""

    num_failed_groups: int = 0
    """Groups in which samples were cancelled or ended with an error, and fewer than two others have a reward."""
    num_unscored_groups: int = 0
    """Groups without a rewarded sample."""
    num_unscored_rollouts: int = 0
    """Rollouts without a reward: it was None or not finite, or the score function failed. Failed groups do not count
    here."""
    num_failed_rollouts: int = 0
    """Rollouts that were cancelled without a reward or ended with an error, and whose groups continue without them."""
    num_unfit_examples: int = 0
    """Examples that `grpo` skipped because their prompt does not fit."""
    num_replaced_groups: int = 0
    """Uniform-reward groups that were replaced. Counted only in mean rewards."""
    num_uniform_groups: int = 0
    """Groups left out of the forward pass, because all advantages are 0. They count in the averages of the loss."""
    num_truncated_rollouts: int = 0
    """Rollouts left out of the loss at their maximum length. They count in its averages and in other advantages."""
    num_stale_rollouts: int = 0
    """Rollouts that staleness rules rejected."""
    num_stale_tokens: int = 0
    """Tokens that are too old for the loss: masked tokens, and all tokens of rejected rollouts."""
    num_masked_tokens: int = 0
    """Stale tokens that stayed in the batch."""
    num_rollouts: int = 0
    """Rollouts that the staleness rules examined, old or not."""
    num_tokens: int = 0
    """Number of tokens of these rollouts."""
    sum_lengths: int = 0
    """Sum over these tokens of the length of the rollout that contains the token."""
    sum_kept_lengths: int = 0
    """The same sum over the tokens that are not stale."""

    @property
    def num_unusable_groups(self) -> int:
        """Groups that cannot be trained on: failed or unscored."""
        return self.num_failed_groups + self.num_unscored_groups

    @property
    def stale_share(self) -> float:
        """Share of stale tokens; NaN if there are no tokens."""
        return self.num_stale_tokens / self.num_tokens if self.num_tokens else nan

    @property
    def length_bias(self) -> float:
        """Mean rollout length over the tokens that are not stale, divided by the mean over all tokens. Below 1, short
        rollouts are favored. NaN if all tokens are stale."""
        num_kept = self.num_tokens - self.num_stale_tokens
        return (self.sum_kept_lengths / num_kept) / (self.sum_lengths / self.num_tokens) if num_kept else nan

    def __add__(self, other: "Dropped") -> "Dropped":
        return Dropped(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __str__(self) -> str:
        counts = {
            "groups failed": self.num_failed_groups,
            "rollouts failed": self.num_failed_rollouts,
            "groups had no reward": self.num_unscored_groups,
            "rollouts had no reward": self.num_unscored_rollouts,
            "prompts did not fit": self.num_unfit_examples,
            "groups of equal rewards were replaced": self.num_replaced_groups,
            "groups had no advantage": self.num_uniform_groups,
            "rollouts were truncated": self.num_truncated_rollouts,
        }
        parts = [f"{count:,} {name}" for name, count in counts.items() if count]
        if self.num_stale_tokens:
            bias = "" if isnan(self.length_bias) else f"; length bias {self.length_bias:.3f}"
            parts.append(
                f"{self.stale_share:.1%} of {self.num_tokens:,} tokens were too old ({self.num_masked_tokens:,} "
                f"masked, {self.num_stale_rollouts:,} of {self.num_rollouts:,} rollouts rejected{bias})"
            )
        return ", ".join(parts) or "nothing"

    def as_dict(self) -> dict[str, float]:
        """Return the counts, the share of stale tokens and the length bias by name, without NaN values."""
        numbers = asdict(self) | {"stale_share": self.stale_share, "length_bias": self.length_bias}
        return {name: number for name, number in numbers.items() if name[:4] != "sum_" and not isnan(number)}


@dataclass(slots=True)
class ScoredGroups:
    """The groups of one batch: their samples with a reward, and the counts of omissions."""

    groups: list[list[Rollout]] = field(default_factory=list)
    dropped: Dropped = field(default_factory=Dropped)
    replaced: list[list[Rollout]] = field(default_factory=list)
    """Uniform-reward groups that were replaced."""
    has_advantage: bool = False
    """True if an advantage of the last packed batch is not 0."""
    totals: StepTotals | None = None
    """Totals of the last packed batch, also if nothing was left to pack."""

    @property
    def rollouts(self) -> list[Rollout]:
        """The samples of all groups."""
        return [rollout for group in self.groups for rollout in group]

    @property
    def drawn(self) -> list[Rollout]:
        """The samples of all groups, including replaced groups."""
        return [rollout for group in (*self.groups, *self.replaced) for rollout in group]

    @property
    def mean_reward(self) -> float:
        """Mean reward of all samples, including replaced groups. There must be a sample."""

        return fmean(
            rollout.reward or 0.0 for group in (*self.groups, *self.replaced) for rollout, *_ in samples_of(group)
        )

    def add(self, group: list[Rollout]) -> bool:
        """Add the samples of a finished group that have a reward. Returns False if the group cannot be trained on. A
        sample that ended with an error never counts. The group continues without it if two others have a reward."""
        scored = [rollout for rollout in group if rollout.reward is not None and rollout.finish_reason != "error"]
        failed = [rollout for rollout in group if _has_failed(rollout)]
        if failed and len(samples_of(scored)) < min(LEAST_MEMBERS, len(samples_of(group))):
            self.dropped.num_failed_groups += 1
            return False
        if errors := [rollout.request_id for rollout in failed if rollout.finish_reason == "error"]:
            logger.warning(
                "group %d continues without samples that ended with an error: requests %s", group[0].group_id, errors
            )
        self.dropped.num_failed_rollouts += len(failed)
        self.dropped.num_unscored_rollouts += len(group) - len(scored) - len(failed)
        if not scored:
            self.dropped.num_unscored_groups += 1
            return False
        self.groups.append(scored)
        return True

    def check_usable(self, count: int, failures: Mapping[str, int]) -> None:
        """Raise InflightError if more groups than a batch of `count` groups has cannot be trained on. failures: counts
        of exceptions."""
        if (num_unusable := self.dropped.num_unusable_groups) > count:
            raise InflightError(
                f"{num_unusable} groups failed while one batch of {count} was taken: samples of "
                "them were cancelled, ended with an error (log-probabilities that are not finite, or lost frames), or "
                "none of a group's has a reward (None, not finite, or an exception); exceptions: "
                f"{dict(failures) or 'none'}"
            )

    def last_is_uniform(self, advantages: str | Advantages = "grpo") -> bool:
        """Return True if the last group has no advantage: all of its advantages, without other groups, are 0."""
        return not any(map(np.any, _advantages_of([self.groups[-1]], advantages)))

    def replace_last(self) -> None:
        """Remove the last group, which another one replaces."""
        self.replaced.append(self.groups.pop())
        self.dropped.num_replaced_groups += 1

    def pack(
        self,
        *,
        trainer_version: int,
        foreign_versions: ForeignVersions | None = None,
        staleness: Sequence[StalenessRule] = (),
        advantages: str | Advantages = "grpo",
        skip_uniform: bool = False,
        mask_truncated: bool = False,
        adapters: Collection[str | None] | None = None,
    ) -> PackedBatch | None:
        """Pack the groups for a trainer that has this version's weights. Returns None if nothing is left.

        adapters: leave out rollouts that other adapters have drawn; None means the weights alone. Rewards of
        these rollouts count in the advantages of their group, and their tokens in no total. foreign_versions:
        `StalenessMeter.foreign_versions`, for adapters that are published one by one. skip_uniform: leave out groups
        whose advantages are all 0. mask_truncated: leave out rollouts that ended at their maximum length. The batch's
        totals count both. Raises ValueError for a reward that is None or not finite, and if the number of advantages
        differs from the number of rollouts.
        """
        rollouts = self.rollouts
        # Functions concatenate the values of groups.
        values = _advantages_of(self.groups, advantages) if self.groups else []
        if len(values) != len(rollouts):
            raise ValueError(
                f"the advantages' function returned {len(values)} for {len(rollouts)} rollouts; it returns one for "
                "every rollout, groups concatenated"
            )
        self.has_advantage = any(map(np.any, values))
        # Staleness rules see every rollout, so that totals and counts do not depend on later omissions.
        foreign = [foreign_versions(r.adapter, r.weight_versions) for r in rollouts] if foreign_versions else None
        included = take_out_stale(rollouts, staleness, trainer_version, taken_ns := now_ns(), self.dropped, foreign)
        if adapters is not None:
            included = {index: one for index, one in included.items() if rollouts[index].adapter in adapters}
        without_gradient = self._without_gradient(values, skip_uniform, mask_truncated) & included.keys()
        kept = [index for index in included if index not in without_gradient]
        counted = [rollouts[index] for index in included]
        self.totals = _totals_of(counted, [rollouts[index] for index in kept])
        if not kept:
            return None
        batch = pack(
            [rollouts[index] for index in kept],
            [values[index] for index in kept],
            included=[included[index] for index in kept] if staleness else None,
            trainer_version=trainer_version,
            foreign_versions=[foreign[index] for index in kept] if foreign and any(map(np.any, foreign)) else None,
        )
        batch.taken_ns = taken_ns
        batch.totals = self.totals
        sample_tokens = tokens_of_samples(counted, np.array([rollout.num_drawn for rollout in counted]))
        if sample_tokens is not None:
            batch.sample_tokens = sample_tokens[[index not in without_gradient for index in included]]
        return batch

    def _without_gradient(
        self, advantages: Sequence[float | np.ndarray], skip_uniform: bool, mask_truncated: bool
    ) -> set[int]:
        """Return the indices of the rollouts that are left out of the forward pass and count in the totals."""
        indices, found = iter(range(len(advantages))), set[int]()
        for group in self.groups:
            members = [next(indices) for _ in group]
            if skip_uniform and not any(np.any(advantages[index]) for index in members):
                self.dropped.num_uniform_groups += 1
                found.update(members)
            elif mask_truncated:
                truncated = [i for i, rollout in zip(members, group, strict=True) if rollout.finish_reason == "length"]
                self.dropped.num_truncated_rollouts += len(truncated)
                found.update(truncated)
        return found


def _advantages_of(groups: Sequence[Sequence[Rollout]], advantages: str | Advantages) -> list[np.ndarray]:
    """Return the advantages of each rollout, a number or f[T], also of a function that computes them by PyTorch."""
    found = resolve_advantages(advantages)(groups)
    return [np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value) for value in found]


class NothingToLearn:
    """Checks every batch of a loop. Warns once in each run of batches without an advantage: their policy loss is 0, and
    training continues without learning."""

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
        if self._has_warned or not (are_single or len(rewards) == 1 or self._num_in_a_row >= _MANY_BATCHES):
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


def _totals_of(counted: Sequence[Rollout], packed: Sequence[Rollout]) -> StepTotals:
    """Return the totals of the rollouts that count in the averages of the loss, some of which are packed."""
    places = {group_id: place for place, group_id in enumerate(dict.fromkeys(r.group_id for r in packed))}
    group_tokens = torch.zeros(len(places), dtype=torch.int64)
    for rollout in counted:
        if rollout.group_id in places:
            group_tokens[places[rollout.group_id]] += rollout.num_drawn
    return StepTotals(
        num_tokens=sum(rollout.num_drawn for rollout in counted),
        num_sequences=len(samples_of(counted)),
        group_tokens=group_tokens,
        num_groups=len({rollout.group_id for rollout in counted}),
    )


def take_out_stale(
    rollouts: Sequence[Rollout],
    rules: Sequence[StalenessRule],
    trainer_version: int,
    now_ns: int,
    dropped: Dropped,
    foreign_versions: Sequence[np.ndarray] | None = None,
) -> dict[int, np.ndarray]:
    """Apply all rules, and count stale rollouts and tokens in `dropped`. foreign_versions: for each rollout, as in
    `pack`. Returns a map from the indices of the remaining rollouts to bool[T], true for tokens that take part in the
    loss."""
    included: dict[int, np.ndarray] = {}
    for index, rollout in enumerate(rollouts):
        length = rollout.num_drawn
        own_version = trainer_version - (foreign_versions[index] if foreign_versions else 0)
        old = [(rule.action, rule.too_old(rollout, own_version, now_ns)) for rule in rules]
        rejected = any(action == "reject" and too_old.any() for action, too_old in old)
        taking_part = ~np.any([too_old for _, too_old in old], axis=0) if old else np.ones(len(rollout.token_ids), bool)
        num_kept = 0 if rejected else int((taking_part & rollout.drawn).sum())
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


def _has_failed(rollout: Rollout) -> bool:
    """Return True if the rollout ended with an error, or was cancelled and has no reward."""
    is_finished = rollout.finish_reason in ("stop", "length")
    return not is_finished and (rollout.reward is None or rollout.finish_reason == "error")


def measure_consumed(meter: StalenessMeter, *parts: PackedBatch) -> TokenStaleness:
    """Report to the meter that an optimizer step has just consumed a batch, in one or several parts. Returns the
    staleness of its drawn tokens. `trainer_version` must be known."""
    assert parts[0].trainer_version is not None
    columns = [_consumed_columns(part) for part in parts]
    versions, sampled_at_ns, in_loss, group_wait_ns, lags, adapters = map(np.concatenate, zip(*columns, strict=True))
    return meter.consume(
        versions,
        sampled_at_ns,
        consumed_ns=now_ns(),
        trainer_version=parts[0].trainer_version,
        in_loss=in_loss,
        group_wait_ns=group_wait_ns,
        version_lag=lags,
        adapters=adapters,
    )


def _consumed_columns(batch: PackedBatch) -> tuple[np.ndarray, ...]:
    """Return of each drawn token of a batch its version, its time, whether it is in the loss, the time that its group
    waited for the trainer, its version lag and its adapter."""
    drawn = batch.loss_mask
    sampled_at_ns = batch.sampled_at_ns[drawn].cpu().numpy()
    sequences = batch.sequence_ids[drawn]
    groups = batch.groups[sequences].cpu().numpy()
    group_end_ns = np.zeros(len(batch.totals.group_tokens), np.int64)
    np.maximum.at(group_end_ns, groups, sampled_at_ns)
    in_loss = drawn if batch.included is None else batch.included
    waits_ns = np.maximum(batch.taken_ns - group_end_ns, 0)[groups]
    adapters = np.array([rollout.adapter for rollout in batch.rollouts] or [None] * batch.num_sequences, object)
    columns = (batch.weight_versions, in_loss, batch.version_lags)
    versions, in_loss, lags = (column[drawn].cpu().numpy() for column in columns)
    return versions, sampled_at_ns, in_loss, waits_ns, lags, adapters[sequences.cpu().numpy()]


def measure_taken(meter: StalenessMeter, scored: ScoredGroups, batch: PackedBatch | None) -> None:
    """Report to the meter's listener the tokens that the trainer has taken out of the stream, and the tokens among them
    that are in the loss of the batch packed from these groups (None: nothing was left to pack)."""
    rollouts, listener = scored.drawn, meter.listener
    if not rollouts or listener is None:
        return
    in_loss = np.zeros(0, np.int64)
    if batch is not None:
        mask = batch.loss_mask if batch.included is None else batch.loss_mask & batch.included
        in_loss = batch.weight_versions[mask].cpu().numpy()
    listener.taken(np.concatenate([rollout.weight_versions[rollout.drawn] for rollout in rollouts]), in_loss)
