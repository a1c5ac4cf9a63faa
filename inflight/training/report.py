"""What a training loop reports of an optimizer step."""

from dataclasses import dataclass, field

from inflight.core.rollout import Rollout
from inflight.observability.staleness_meter import TokenStaleness
from inflight.training.data.scored_groups import Dropped
from inflight.training.objective.probe import RatioCauses
from inflight.training.objective.statistics import LossStats, known


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step."""

    step: int
    version: int
    """The newest version that the engine was sent, after the step."""
    reward: float
    """Mean over all rollouts of the step."""
    num_tokens: int
    """Drawn tokens of the step's rollouts."""
    stats: LossStats | None
    """Statistics of the first update. None if there was nothing to learn, because every group was uniform or too old,
    or if the loss was not finite."""
    grad_norm: float | None
    """Norm of the first update's gradient before it was clipped; None where there was none."""
    num_skipped: int
    """Updates since the run began that were not taken because their loss or gradient was not finite."""
    staleness: TokenStaleness | None
    """How old the step's tokens were; None if there was no batch."""
    causes: RatioCauses | None
    """How much of the ratios is mismatch and how much staleness; None in steps that `probe_every` does not pick."""
    dropped: Dropped
    """What was left out since the run began, and why. Groups that failed or have no reward were replaced by others."""
    finished_ns: int
    """The time at which the step ended, CLOCK_MONOTONIC."""
    groups: list[list[Rollout]] = field(repr=False)
    """The step's rollouts, with text, rewards and metadata."""

    @property
    def mean_length(self) -> float:
        """Drawn tokens per rollout."""
        return self.num_tokens / sum(map(len, self.groups))

    @property
    def truncated(self) -> float:
        """Share of the rollouts that ended because they had reached `max_tokens`."""
        reasons = [rollout.finish_reason for group in self.groups for rollout in group]
        return reasons.count("length") / len(reasons)

    def as_dict(self) -> dict[str, float]:
        """All of it as numbers under flat names, for any logger: those of `LossStats.as_dict` ("loss", "ratio/ess", …),
        "step", "version", "reward", "num_tokens" (drawn; "ratio/num_tokens" is those in the loss), "mean_length",
        "truncated", "grad_norm", "num_skipped", those of `Dropped.as_dict` ("dropped/num_failed_groups",
        "dropped/stale_share", …), means of "staleness/weight_lag_ms", "/policy_age_ms", "/token_age_ms" and
        "/version_lag", and "probe/mismatch/kl" and the like where the step was probed. What is None or NaN is left
        out."""
        names = ("step", "version", "reward", "num_tokens", "mean_length", "truncated", "grad_norm", "num_skipped")
        numbers: dict[str, float | None] = {} if self.stats is None else {**self.stats.as_dict()}
        numbers |= {name: getattr(self, name) for name in names}
        if self.staleness is not None:
            for column in ("weight_lag_ms", "policy_age_ms", "token_age_ms", "version_lag"):
                numbers[f"staleness/{column}"] = float(getattr(self.staleness, column).mean())
        numbers |= {f"dropped/{name}": number for name, number in self.dropped.as_dict().items()}
        if self.causes is not None:
            for cause in ("mismatch", "staleness", "total"):
                numbers |= getattr(self.causes, cause).as_dict(f"probe/{cause}")
        return known(numbers)
