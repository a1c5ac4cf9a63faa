"""Which tokens are too old to train on.

Rules that drop rollouts favor short ones, as long ones take longer to draw: `Dropped.length_bias` shows it. A bound on
what is in flight (`GRPOConfig.groups_in_flight`) keeps tokens young without that bias, and idles generators.
"""

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
    """A token is too old if a bound that is given is exceeded. A rollout is as old as its oldest token."""

    max_version_lag: int | None = None
    """The trainer's version − the token's. Optimizer steps since the last publish are taken for one version."""
    max_age_ms: float | None = None
    """The time at which the batch is made − the time at which the token was drawn."""
    unit: Literal["token", "rollout"] = "rollout"
    """token: a token that is too old goes alone. rollout: it takes all of its rollout with it."""
    action: Literal["mask", "reject"] = "mask"
    """mask: it stays in the batch without a part in the loss, and counts in what the loss is averaged over. reject: it
    leaves the batch, which only whole rollouts can. Advantages are relative to all samples either way."""

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
        """Returns bool[T], which tokens of the rollout are too old."""
        old = np.zeros(len(rollout.token_ids), bool)
        if self.max_version_lag is not None:
            old |= trainer_version - rollout.weight_versions > self.max_version_lag
        if self.max_age_ms is not None:
            old |= now_ns - rollout.sampled_at_ns > self.max_age_ms * NS_PER_MS
        return old if self.unit == "token" else np.full_like(old, old.any())


def check_rules(rules: Sequence[StalenessRule]) -> None:
    """Raises ValueError if these are not a sequence of rules."""
    if not isinstance(rules, Sequence) or not all(isinstance(rule, StalenessRule) for rule in rules):
        raise ValueError(f"staleness is a tuple of StalenessRule, got {rules!r}")
