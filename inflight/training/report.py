"""Report of one optimizer step of `grpo`."""

from dataclasses import dataclass, field
from math import nan
from statistics import fmean, pstdev

from inflight.core.rollout import Rollout, samples_of
from inflight.observability.staleness_meter import TokenStaleness
from inflight.training.critic import CriticStats
from inflight.training.data.lead import LeadState
from inflight.training.data.scored_groups import Dropped
from inflight.training.evaluation import EvaluationResult
from inflight.training.objective.probe import RatioCauses
from inflight.training.objective.statistics import LossStats, known


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step."""

    step: int
    version: int
    """The newest version sent to the engine after the step."""
    reward: float
    """Mean over all rollouts that were drawn for the step, including replaced groups."""
    reward_parts: dict[str, float]
    """The same mean of each of several score functions, by its name (`inflight.Rewards`)."""
    num_tokens: int
    """Drawn tokens of the step's rollouts."""
    stats: LossStats | None
    """Statistics of the first update. None if there was nothing to learn or the loss was not finite."""
    grad_norm: float | None
    """Norm of the first update's gradient before it was clipped; None if there was no gradient."""
    nll: float | None
    """Negative log-likelihood of the step's demonstrations, before the update; None without demonstrations."""
    num_skipped: int
    """Updates since the run began that were not taken because their loss or gradient was not finite."""
    reward_kl: float | None
    """Mean KL of a sample, Σ_t KL_t, that was charged to its reward; None without a KL penalty in the reward."""
    staleness: TokenStaleness | None
    """Staleness of the step's tokens; None if there was no batch."""
    causes: RatioCauses | None
    """Ratios split into mismatch and staleness; None in steps that `probe_every` does not select."""
    critic: CriticStats | None
    """Statistics of the critic, if `GRPOConfig.advantages` is one."""
    lead: LeadState
    """How far the generator ran ahead when the step began, and why."""
    dropped: Dropped
    """Counts of omissions since the run began, by reason."""
    failures: dict[str, int]
    """Number of exceptions of score functions and rollout functions since the program began, "error: NAME", and of
    further attempts, "retries: NAME"; for episodes also "turn_timeout" and "episode_timeout"."""
    finished_ns: int
    """The time at which the step ended, CLOCK_MONOTONIC."""
    groups: list[list[Rollout]] = field(repr=False)
    """The step's rollouts, with text, rewards and metadata."""
    evaluations: tuple[EvaluationResult, ...] = ()
    """Evaluations of earlier versions that have ended since the step before."""
    entropy_weight: float | None = None
    """Weight of the entropy bonus in the step, if it is an `AdaptiveEntropy`."""

    @property
    def rollouts(self) -> list[Rollout]:
        """The samples of all groups."""
        return [rollout for group in self.groups for rollout in group]

    @property
    def num_groups(self) -> int:
        """Groups of the step, without replaced groups."""
        return len(self.groups)

    @property
    def mean_length(self) -> float:
        """Drawn tokens per rollout."""
        return self.num_tokens / sum(map(len, self.groups))

    @property
    def lengths(self) -> dict[str, float]:
        """The least and the largest number of drawn tokens of a rollout, "min" and "max"; their standard deviation,
        "std"; and the mean of the rollouts that stopped by themselves, "stopped_mean", NaN if none did."""
        lengths = [rollout.num_drawn for rollout in self.rollouts]
        stopped = [rollout.num_drawn for rollout in self.rollouts if rollout.finish_reason == "stop"]
        numbers = {"min": min(lengths), "max": max(lengths), "std": pstdev(lengths)}
        return numbers | {"stopped_mean": fmean(stopped) if stopped else nan}

    @property
    def truncated(self) -> float:
        """Share of the rollouts that ended because they had reached `max_tokens`."""
        reasons = [rollout.finish_reason for rollout in self.rollouts]
        return reasons.count("length") / len(reasons)

    @property
    def reward_std(self) -> float:
        """Mean over groups of the standard deviation of their rewards; 0 if the rewards of each group are equal."""
        return fmean(pstdev([r.reward or 0.0 for r, *_ in samples_of(group)]) for group in self.groups)

    def as_dict(self) -> dict[str, float]:
        """Return all values as numbers under flat names, for any logger (docs/training.md#numbers-for-a-logger):
        `_NUMBERS`, `LossStats.as_dict` ("ratio/ess", …), "reward/NAME", "length/min", "staleness/token_age_ms",
        "lead/wait_share", "dropped/stale_share", "failures/error/NAME", "probe/mismatch/kl", "critic/loss" and the
        like, and `EvaluationResult.as_dict` of the newest finished evaluation. Values of None or NaN are left out."""
        numbers: dict[str, float | None] = {} if self.stats is None else {**self.stats.as_dict()}
        numbers |= {name: getattr(self, name) for name in _NUMBERS}
        numbers |= {f"reward/{name}": mean for name, mean in self.reward_parts.items()}
        numbers |= {f"length/{name}": number for name, number in self.lengths.items()}
        if self.staleness is not None:
            for column in ("weight_lag_ms", "policy_age_ms", "token_age_ms", "version_lag"):
                numbers[f"staleness/{column}"] = float(getattr(self.staleness, column).mean())
            numbers["staleness/age_over_bound"] = self.staleness.age_over_bound
        numbers |= {f"lead/{name}": number for name, number in self.lead.as_dict().items()}
        numbers |= {f"dropped/{name}": number for name, number in self.dropped.as_dict().items()}
        numbers |= {f"failures/{name.replace(': ', '/')}": number for name, number in self.failures.items()}
        if self.causes is not None:
            for cause in ("mismatch", "staleness", "total"):
                numbers |= getattr(self.causes, cause).as_dict(f"probe/{cause}")
        numbers |= {} if self.critic is None else self.critic.as_dict()
        for evaluation in self.evaluations:
            numbers |= evaluation.as_dict()
        return known(numbers)


_NUMBERS = ("step", "version", "reward", "reward_std", "reward_kl", "num_tokens", "mean_length", "truncated")
_NUMBERS += ("grad_norm", "nll", "num_groups", "num_skipped", "entropy_weight")
