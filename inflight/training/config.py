"""Options of a run of GRPO, in addition to model, optimizer and prompts."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from inflight.core.arguments import named
from inflight.core.sampling import SamplingParams, check_not_greedy
from inflight.training.data.advantages import OF_EACH_GROUP, Advantages, is_per_group, resolve_advantages
from inflight.training.data.lead import check_ahead
from inflight.training.data.staleness_filter import StalenessRule
from inflight.training.objective.objective import Objective, resolve
from inflight.training.schedules import Schedule, resolve_schedule


@named(
    {
        "num_generations": "sampling",
        "loss": "objective",
        "loss_type": "objective",
        "correction": "objective",
        "beta": "reward_kl_weight",
    }
)
@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Options of a run of GRPO, in addition to model, optimizer and prompts."""

    steps: int = 100
    """Number of optimizer steps of the run."""
    groups_per_step: int = 32
    """Groups of `sampling.n` rollouts per optimizer step."""
    ahead: int | Literal["auto"] = "auto"
    """Lead of the generator over the trainer. "auto": each group starts as late as possible, so that the
    trainer waits for at most 2 % of the time and tokens are young (docs/staleness.md#how-far-to-run-ahead). A number:
    this many batches in flight in addition to the next one. Only the schedule "inflight" uses it."""
    groups_in_flight: int = 0
    """Maximum number of groups that are submitted and not yet taken by the trainer, also with ahead="auto". 0: no
    bound. Only schedules with batches ahead, such as "inflight", use it; the others submit the groups of one step."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(n=8))
    """Sampling parameters of the prompts. The temperature must be above 0. `n` must be at least 2; with a teacher, with
    "reinforce++", and with a function or a critic for the advantages at least 1."""
    objective: str | Objective | None = None
    """Name, `inflight.Objective` or "module:name" of the loss (docs/objectives.md). None: "ppo_clip"."""
    staleness: tuple[StalenessRule, ...] = ()
    """Rules for tokens that are too old to train on (docs/staleness.md#rules-for-what-is-too-old)."""
    updates_per_batch: int = 1
    """Optimizer steps on the same batch. Objectives with a "recomputed" proximal policy need more than one."""
    probe_every: int = 0
    """Steps between two measurements that separate mismatch from staleness (`VersionProbe`). 0: none."""
    micro_batch_tokens: int = 0
    """Maximum number of tokens of one forward and backward pass, to save memory. 0: no bound."""
    autocast: bool = True
    """On a GPU, compute the products of fp32 parameters in bf16 (`torch.autocast`), several times as fast. Parameters,
    gradients and the loss stay in fp32. False: compute in fp32. CPUs compute in the dtype of the parameters."""
    max_grad_norm: float = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down to it. 0: no scaling. A step with a gradient that
    is not finite is always skipped."""
    advantages: str | Advantages = "grpo"
    """Computation of advantages from rewards: "grpo", "dr_grpo", "rloo", "maxrl", "reinforce++",
    "reinforce++_baseline", "gdpo", "module:name", a function (docs/training.md#advantages), or an `inflight.Critic`
    (docs/training.md#a-critic). The function gets the groups of a step and returns an advantage for each rollout,
    groups concatenated: a number, or f32[tokens]."""
    reward_kl_weight: float = 0.0
    """β of a KL penalty in the reward: r − β · Σ_t (log π_b − log π_ref) over the rollout, before advantages are
    computed, as in RLOO (arXiv 2402.14740). `Objective(kl_weight=…)` puts the penalty into the loss. Both need a
    reference policy (docs/training.md#a-reference-policy)."""
    skip_uniform_groups: bool = True
    """Leave groups without an advantage, such as most groups of equal rewards, out of the forward pass. They still
    count in the averages of the loss, so that the gradient is the same. With a KL penalty, a drift penalty or an
    entropy bonus they stay in the forward pass. A step with only such groups is skipped
    (docs/training.md#what-takes-part-in-the-loss-and-what-in-its-averages)."""
    demonstration_weight: float = 1.0
    """Weight of the negative log-likelihood of `grpo(demonstrations=…)` in the loss, averaged by the aggregation of the
    objective (docs/training.md#demonstrations)."""
    replace_uniform_groups: int = 0
    """Maximum number of groups without an advantage, such as groups of equal rewards, per step that are replaced by
    further prompts (dynamic sampling of DAPO, arXiv 2503.14476, §3.2; docs/training.md#groups-of-equal-rewards).
    Replaced groups count only in mean rewards and in `Dropped.num_replaced_groups`. 0: none. A function for
    `advantages` must be marked by `inflight.per_group`."""
    mask_truncated: bool = False
    """Leave rollouts that ended at `max_tokens` out of the loss (overlong filtering of DAPO, arXiv 2503.14476, §3.4).
    They still count in the averages of the loss, and their rewards in the advantages of the others."""
    train_as_they_finish: bool = False
    """Compute the gradients of the groups that have finished while the step waits for others. The optimizer takes one
    step for all of them, with the gradient of the whole batch (docs/training.md#train-on-groups-as-they-finish)."""
    schedule: str | Schedule = "inflight"
    """Name, "module:name", or `Schedule` (docs/extending.md#a-schedule-of-training). inflight: the generator never
    stops. sync: generate, train, publish, and wait until the weights are live. one_step_off: the engine draws a whole
    batch under one version while the trainer uses the batch before."""

    def __post_init__(self) -> None:
        objective = resolve(self.objective)
        if objective.proximal == "recomputed" and self.updates_per_batch < 2:
            raise ValueError(
                f"{self.objective!r} recomputes its proximal policy for several steps on a batch; with "
                "one step that is the policy being trained: set updates_per_batch, or take another objective"
            )
        object.__setattr__(self, "objective", objective)
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        object.__setattr__(self, "schedule", resolve_schedule(self.schedule))
        self._check_sampling()
        self._check_learning()
        self._check_parts()
        if 0 < self.micro_batch_tokens <= self.sampling.max_tokens:
            raise ValueError(
                f"micro_batch_tokens ({self.micro_batch_tokens}) must hold a prompt and an answer of "
                f"sampling.max_tokens ({self.sampling.max_tokens})"
            )
        if not (isfinite(self.demonstration_weight) and self.demonstration_weight > 0):
            raise ValueError(f"demonstration_weight must be finite and above 0, got {self.demonstration_weight}")
        check_ahead(self.ahead)
        if self.groups_in_flight and self.groups_in_flight < self.groups_per_step:
            raise ValueError(
                f"groups_in_flight ({self.groups_in_flight}) must be at least groups_per_step ({self.groups_per_step})"
            )

    def _check_sampling(self) -> None:
        objective = resolve(self.objective)
        if (
            self.sampling.n < 2
            and isinstance(self.advantages, str)
            and self.advantages != "reinforce++"
            and not objective.teacher_weight
        ):
            raise ValueError(
                f"advantages {self.advantages!r} compare the samples of a group: sampling.n must be at least 2, got "
                f"{self.sampling.n}"
            )
        if objective.teacher_top_k and self.sampling.filtered:
            raise ValueError(
                f"teacher_top_k={objective.teacher_top_k} compares distributions over the whole vocabulary: sample "
                "without top_k, top_p and min_p, or set teacher_top_k=0"
            )
        check_not_greedy("sampling", self.sampling)

    def _check_learning(self) -> None:
        resolve_advantages(self.advantages)
        if not isfinite(self.reward_kl_weight):
            raise ValueError(f"reward_kl_weight must be finite, got {self.reward_kl_weight}")
        if self.advantages == "maxrl" and self.reward_kl_weight:
            raise ValueError(
                "advantages 'maxrl' divide by a rate of success, and reward_kl_weight makes rewards negative: take a "
                "KL penalty of the objective, or other advantages"
            )
        if self.advantages == "gdpo" and self.reward_kl_weight:
            raise ValueError(
                "advantages 'gdpo' compare the separate rewards of inflight.Rewards, and reward_kl_weight changes only "
                "their sum: take a KL penalty of the objective, or other advantages"
            )
        reasons = {
            f"advantages {self.advantages!r}": self.advantages in ("reinforce++", "gdpo"),
            "a Critic": getattr(self.advantages, "learns_from_each_group", False),
            "reward_kl_weight": self.reward_kl_weight,
            "teacher_weight": resolve(self.objective).teacher_weight,
        }
        if self.replace_uniform_groups and any(reasons.values()):
            name = next(name for name, is_given in reasons.items() if is_given)
            raise ValueError(
                f"replace_uniform_groups takes groups of equal rewards out of a step, and with {name} there is "
                "something to learn from them: leave one of the two out"
            )
        # A group of equal rewards has no advantage from "reinforce++_baseline" either, whichever the others are.
        if (
            self.replace_uniform_groups
            and self.advantages != "reinforce++_baseline"
            and not is_per_group(self.advantages)
        ):
            raise ValueError(
                "replace_uniform_groups needs the advantages of each group before the others have finished, and "
                f"advantages {self.advantages!r} can depend on them: take one of {', '.join(sorted(OF_EACH_GROUP))}, "
                "or a function marked by inflight.per_group"
            )

    def _check_parts(self) -> None:
        """Raise ValueError if training on parts of a step is wanted, and another option needs all of its groups."""
        if not self.train_as_they_finish:
            return
        reason = None
        if not is_per_group(self.advantages):
            known = ", ".join(sorted(OF_EACH_GROUP))
            reason = (
                f"advantages {self.advantages!r} are computed from all groups of a step: take one of {known}, or a "
                "function marked by inflight.per_group"
            )
        elif self.updates_per_batch > 1:
            reason = f"updates_per_batch={self.updates_per_batch} goes over all groups of a step several times: set 1"
        elif self.probe_every:
            reason = f"probe_every={self.probe_every} measures the batch before it is trained on: set 0"
        elif resolve(self.objective).ranks_tokens:
            reason = "the objective has a part that ranks the tokens of all groups of a step: take another"
        if reason is not None:
            raise ValueError(
                f"train_as_they_finish begins to train before all groups of a step have finished, and {reason}, or "
                "leave train_as_they_finish out"
            )

    @property
    def skips_uniform_groups(self) -> bool:
        """Whether groups without an advantage are left out: if that is wanted, and the objective is about rewards
        alone."""
        return self.skip_uniform_groups and resolve(self.objective).is_about_rewards_alone


_LEAST = {"steps": 1, "groups_per_step": 1, "updates_per_batch": 1, "groups_in_flight": 0, "probe_every": 0}
_LEAST |= {"micro_batch_tokens": 0, "max_grad_norm": 0, "reward_kl_weight": 0, "replace_uniform_groups": 0}
