"""Which tokens are too old to train on: rules, and an account of what they took away.

Dropping what is old has a price that a mean reward does not show: long rollouts take longer to draw, so that they are
older, so that a rule that drops rollouts favours short ones. `StalenessCounts.length_bias` shows it. A bound on what is
in flight (`GRPOConfig.groups_in_flight`) keeps tokens young without that bias, at the price of idling generators; rules
and the bound may be used together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Literal

import numpy as np

from inflight.core.clock import NS_PER_MS
from inflight.core.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRule:
    """A token is too old if a bound that is given is exceeded. A rollout is as old as its oldest token."""

    max_version_lag: int | None = None
    """The trainer's version − the token's."""
    max_age_ms: float | None = None
    """When the batch is made − when the token was drawn."""
    unit: Literal["token", "rollout"] = "rollout"
    """Whether a token that is too old goes alone, or with all of its rollout."""
    action: Literal["mask", "reject"] = "mask"
    """mask: stays in the batch without a part in the loss, and counts where it is averaged. reject: leaves the batch;
    for whole rollouts. Advantages are relative to all samples either way."""

    def __post_init__(self) -> None:
        if self.max_version_lag is None and self.max_age_ms is None:
            raise ValueError("a staleness rule needs max_version_lag, max_age_ms or both")
        for name, bound in (("max_version_lag", self.max_version_lag), ("max_age_ms", self.max_age_ms)):
            if bound is not None and not bound >= 0:
                raise ValueError(f"{name} must be 0 or more, got {bound}")
        if self.unit not in ("token", "rollout") or self.action not in ("mask", "reject"):
            raise ValueError(
                f"unit is 'token' or 'rollout' and action 'mask' or 'reject', got {self.unit!r} and {self.action!r}"
            )
        if self.unit == "token" and self.action == "reject":
            raise ValueError("a token cannot be rejected out of its sequence: mask it, or reject the rollout")

    def too_old(self, rollout: Rollout, trainer_version: int, now_ns: int) -> np.ndarray:
        """bool[T]"""
        old = np.zeros(len(rollout.token_ids), bool)
        if self.max_version_lag is not None:
            old |= trainer_version - rollout.weight_versions > self.max_version_lag
        if self.max_age_ms is not None:
            old |= now_ns - rollout.sampled_at_ns > self.max_age_ms * NS_PER_MS
        return old if self.unit == "token" else np.full_like(old, old.any())


@dataclass(slots=True)
class StalenessCounts:
    """What rules took away, since they were first applied."""

    num_rollouts: int = 0
    num_tokens: int = 0
    num_masked_tokens: int = 0
    num_rejected_rollouts: int = 0
    num_rejected_tokens: int = 0
    sum_lengths: int = 0
    """Over all tokens, the length of the rollout that each belongs to."""
    sum_kept_lengths: int = 0
    """Over the tokens that take part in the loss."""

    @property
    def dropped(self) -> float:
        """Share of tokens that take no part in the loss."""
        return (self.num_masked_tokens + self.num_rejected_tokens) / self.num_tokens if self.num_tokens else nan

    @property
    def length_bias(self) -> float:
        """Mean length of the rollout that a token belongs to, over the tokens that take part in the loss, as a share of
        that over all tokens: below 1, short rollouts are favoured."""
        num_kept = self.num_tokens - self.num_masked_tokens - self.num_rejected_tokens
        return (self.sum_kept_lengths / num_kept) / (self.sum_lengths / self.num_tokens) if num_kept else nan

    def __str__(self) -> str:
        return (
            f"{self.dropped:.1%} of {self.num_tokens:,} tokens were too old ({self.num_masked_tokens:,} masked, "
            f"{self.num_rejected_tokens:,} rejected with {self.num_rejected_rollouts:,} of {self.num_rollouts:,} "
            f"rollouts); length bias {self.length_bias:.3f}"
        )


@dataclass(slots=True)
class StalenessFilter:
    """Applies rules, all of them, and counts."""

    rules: Sequence[StalenessRule]
    counts: StalenessCounts = field(default_factory=StalenessCounts)

    def apply(
        self, rollouts: Sequence[Rollout], *, trainer_version: int, now_ns: int
    ) -> tuple[list[int], list[np.ndarray]]:
        """Indices of the rollouts that stay, and for each of them bool[T], which tokens take part in the loss."""
        stay: list[int] = []
        included: list[np.ndarray] = []
        counts = self.counts
        for index, rollout in enumerate(rollouts):
            length = len(rollout.token_ids)
            old = [(rule.action, rule.too_old(rollout, trainer_version, now_ns)) for rule in self.rules]
            counts.num_rollouts += 1
            counts.num_tokens += length
            counts.sum_lengths += length * length
            if any(action == "reject" and too_old.any() for action, too_old in old):
                counts.num_rejected_rollouts += 1
                counts.num_rejected_tokens += length
                continue
            taking_part = ~np.any([too_old for _, too_old in old], axis=0) if old else np.ones(length, bool)
            num_kept = int(taking_part.sum())
            counts.num_masked_tokens += length - num_kept
            counts.sum_kept_lengths += length * num_kept
            stay.append(index)
            included.append(taking_part)
        return stay, included
