"""A weight of the entropy bonus that follows the entropy of the policy."""

from dataclasses import dataclass
from math import inf
from typing import Any

from inflight.core.arguments import named


@named()
@dataclass(eq=False, slots=True, kw_only=True)
class AdaptiveEntropy:
    """Weight of an entropy bonus that keeps the entropy of the policy from falling below a target, as
    `Objective(entropy_weight=…)` (Skywork-OR1, arXiv 2505.22312, adaptive entropy control).

    After each step the coefficient rises by `delta` if the entropy of the step was below `target`, and falls by `delta`
    otherwise. It stays between 0 and `max_weight`. The next step has this coefficient as its weight, or 0 if the
    entropy was above `target`. `float(…)` returns the weight. The authors' training scripts have the default numbers.

    `grpo` calls `observe`, and saves the state with a run. An object belongs to one run.
    """

    target: float
    """Mean entropy per token, in nats. The authors take 0.2."""
    delta: float = 1e-4
    max_weight: float = 5e-3
    """Upper bound of the coefficient."""
    coefficient: float = 0.0
    """The coefficient of the next step; when the object is made, of the first step."""
    is_active: bool = True
    """Whether the next step has the coefficient as its weight."""

    def __post_init__(self) -> None:
        for name in ("target", "delta", "max_weight"):
            if not 0 < (value := getattr(self, name)) < inf:
                raise ValueError(f"{name} must be finite and above 0, got {value}")
        if not 0 <= self.coefficient <= self.max_weight:
            raise ValueError(f"coefficient must be between 0 and max_weight={self.max_weight}, got {self.coefficient}")

    def __float__(self) -> float:
        return self.coefficient if self.is_active else 0.0

    def observe(self, entropy: float) -> None:
        """Take the mean entropy per token of a step, over all ranks: `LossStats.entropy`. A custom loop calls this
        after each optimizer step."""
        moved = self.coefficient + (self.delta if entropy < self.target else -self.delta)
        self.coefficient, self.is_active = min(max(moved, 0.0), self.max_weight), entropy <= self.target

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-like."""
        return {"coefficient": self.coefficient, "is_active": self.is_active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.coefficient, self.is_active = state["coefficient"], state["is_active"]
