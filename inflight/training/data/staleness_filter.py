"""Rules for tokens that are too old to train on. They favor short rollouts, as long ones take longer to draw: see
`Dropped.length_bias`. `GRPOConfig.ahead` keeps tokens young without that bias."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from inflight.core.arguments import named
from inflight.core.clock import NS_PER_MS
from inflight.core.rollout import Rollout


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRule:
    """A token is too old if it exceeds a given bound. A rollout is as old as its oldest token."""

    max_version_lag: int | None = None
    """The trainer's version − the token's version. Optimizer steps since the last publish are treated as one
    version. For the tokens of an adapter, only versions that changed this adapter count."""
    max_age_ms: float | None = None
    """Time at which the batch is made − time at which the token was drawn."""
    unit: Literal["token", "rollout"] = "rollout"
    """token: only the tokens that are too old are affected. rollout: one such token affects its whole rollout."""
    action: Literal["mask", "reject"] = "mask"
    """mask: keep the tokens in the batch without a part in the loss; they count in its averages. reject: remove whole
    rollouts from the batch. Advantages are relative to all samples either way."""
    adapter: str | None = None
    """Name of the LoRA adapter whose rollouts the rule applies to. None: all rollouts."""

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

    def too_old(self, rollout: Rollout, trainer_version: int | np.ndarray, now_ns: int) -> np.ndarray:
        """Return bool[T], true for tokens of the rollout that are too old. trainer_version: one number, or i64[T], less
        the versions that changed other adapters (`PackedBatch.foreign_versions`)."""
        old = np.zeros(len(rollout.token_ids), bool)
        if self.adapter is not None and self.adapter != rollout.adapter:
            return old
        if self.max_version_lag is not None:
            old |= trainer_version - rollout.weight_versions > self.max_version_lag
        if self.max_age_ms is not None:
            old |= now_ns - rollout.sampled_at_ns > self.max_age_ms * NS_PER_MS
        old &= rollout.drawn
        return old if self.unit == "token" else np.full_like(old, old.any())


def check_rules(rules: Sequence[StalenessRule]) -> None:
    """Raise ValueError if these are not a sequence of rules."""
    if not isinstance(rules, Sequence) or not all(isinstance(rule, StalenessRule) for rule in rules):
        raise ValueError(f"staleness is a tuple of StalenessRule, got {rules!r}")
