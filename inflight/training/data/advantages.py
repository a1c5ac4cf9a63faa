"""Advantages: a sample's reward relative to a baseline.

The functions in `ADVANTAGES` take the rewards of each group of one batch and return an advantage for every sample,
groups concatenated; r is a reward, n the number of samples of its group. A group of equal rewards gets exactly 0 from
all of them but "reinforce++". A reward that is None or not finite raises ValueError: leave such samples out before.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from math import comb, fsum, isclose, isfinite, sqrt
from statistics import fmean
from typing import Any, cast

import numpy as np

from inflight.core.arguments import named
from inflight.core.by_name import resolve_by_name
from inflight.core.rollout import Rollout, Turn, samples_of

GroupRewards = Sequence[Sequence[float | None]]
RewardAdvantages = Callable[[GroupRewards], Sequence[float]]
Advantages = Callable[[Sequence[Sequence[Rollout]]], Sequence[float | np.ndarray]]
"""Custom function from the groups of one batch to an advantage for every sample, groups concatenated: one number for
all of its tokens, or f32[tokens]."""


@named()
def group_advantages(rewards: GroupRewards, *, scale: bool = True, ddof: int = 0, eps: float = 1e-4) -> list[float]:
    """Return (r − mean of its group) / (standard deviation of its group + eps) (Shao et al., DeepSeekMath, arXiv
    2402.03300, §4.1). scale: False leaves the division out (Dr. GRPO, arXiv 2503.20783). ddof: the standard deviation
    divides by n − ddof: 0 as in the paper, 1 as in TRL, verl, slime and SkyRL. A group of one sample gets 0."""

    def of_group(r: np.ndarray) -> np.ndarray:
        centred = _centred(r)
        if not scale:
            return centred
        return centred / (sqrt((centred**2).sum() / (len(r) - ddof)) + eps) if len(r) > ddof else np.zeros(len(r))

    return _of_each(rewards, of_group)


def rloo_advantages(rewards: GroupRewards) -> list[float]:
    """Return r − mean of the others of its group, equal to (r − mean) · n / (n − 1). Its expectation is the gradient of
    the mean reward (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740, eq. 6). A group of one sample gets 0."""
    return _of_each(rewards, lambda r: _centred(r) * (len(r) / max(1, len(r) - 1)))


def maxrl_advantages(rewards: GroupRewards) -> list[float]:
    """Return (r − mean of its group) / mean of its group, and 0 where the mean is not above 0. For rewards of 0 and 1
    this is the gradient of the logarithm of the pass rate, up to order n − 1 (MaxRL, Tajwar et al., arXiv 2602.02710;
    prime-rl's `max_rl`). A negative reward causes a warning, because the mean is meant as a success rate."""
    if least := min((reward for group in rewards for reward in group if reward is not None and reward < 0), default=0):
        warnings.warn(
            f"a reward is {least}; MaxRL divides by a group's mean reward, as a rate of success. Groups whose mean is "
            "not above 0 get no advantage, and a mean close to 0 gives large ones: give rewards of at least 0, or take "
            "other advantages",
            stacklevel=2,
        )
    return _of_each(rewards, lambda r: _centred(r) / r.mean() if r.mean() > 0 else np.zeros(len(r)))


def reinforce_advantages(rewards: GroupRewards, *, baseline: bool = False, eps: float = 1e-4) -> list[float]:
    """Return (r' − mean of the batch) / (standard deviation of the batch + eps), over all samples of the batch
    (REINFORCE++, Hu et al., arXiv 2501.03262, global advantage normalization). baseline: False: r' is r, and groups
    have no effect. True: r' is r − mean of its group ("REINFORCE++ w/ baseline"), and its mean over the batch is 0."""
    values = np.array(_of_each(rewards, _centred if baseline else lambda r: r), np.float64)
    if not baseline:
        values = _centred(values)
    return (values / (sqrt((values**2).mean()) + eps)).tolist() if len(values) else []


WEIGHT = "inflight.weight"
"""Key of the weight of an episode in its metadata; 1 without the key."""
ADVANTAGES: dict[str, RewardAdvantages] = {
    "grpo": group_advantages,
    "dr_grpo": partial(group_advantages, scale=False),
    "rloo": rloo_advantages,
    "maxrl": maxrl_advantages,
    "reinforce++": reinforce_advantages,
    "reinforce++_baseline": partial(reinforce_advantages, baseline=True),
}
"""Advantages by name."""
OF_EACH_GROUP = frozenset({"grpo", "dr_grpo", "rloo", "maxrl"})
"""Names of the advantages that do not depend on the other groups of a batch."""


@named()
def per_group(advantages: Advantages) -> Advantages:
    """Mark a function for `advantages=`: the advantages of a group do not depend on the other groups, so that
    `GRPOConfig(train_as_they_finish=True)` accepts it. Returns the function. Also a decorator."""
    vars(advantages)["is_per_group"] = True
    return advantages


def is_per_group(advantages: str | Callable[..., Any]) -> bool:
    """Return True for names in `OF_EACH_GROUP`, and for functions of `per_group` and their names as "module:name"."""
    if isinstance(advantages, str) and advantages in ADVANTAGES:
        return advantages in OF_EACH_GROUP
    named = any(advantages is ADVANTAGES[name] for name in OF_EACH_GROUP)
    return named or bool(getattr(resolve_advantages(cast(Any, advantages)), "is_per_group", False))


def resolve_advantages(advantages: str | Advantages) -> Advantages:
    """Return the function of the groups' rollouts itself, or load it by its name in `ADVANTAGES` or as "module:name".
    Raises ValueError for an unknown name."""
    if isinstance(advantages, str) and advantages in ADVANTAGES:
        return of_rewards(ADVANTAGES[advantages])
    found: Any = resolve_by_name(advantages, ADVANTAGES | OF_NAMED_REWARDS, "advantages")
    if not callable(found):
        raise ValueError(f"advantages {advantages!r} must be a function of the groups, got {type(found).__name__}")
    return cast(Advantages, found)


def of_rewards(function: RewardAdvantages) -> Advantages:
    """Convert a function of rewards to the same function of the groups' rollouts. The token sequences of an episode
    count as one sample, and get the same advantage."""

    def advantages(groups: Sequence[Sequence[Rollout]]) -> list[float]:
        samples = [samples_of(group) for group in groups]
        values = function([[rollouts[0].reward for rollouts in of_group] for of_group in samples])
        return _of_rollouts(groups, chain(*samples), values)

    return advantages


@named()
def turn_advantages(advantages: str | RewardAdvantages = "rloo", *, discount: float = 1.0) -> Advantages:
    """Return a function for `advantages=` that compares the turns of episodes. advantages: a name in `ADVANTAGES`,
    "module:name", or a function of rewards. discount: γ.

    The rewards r_j belong to the drawn turns of an episode, in the order in which they were requested; None is 0. A
    rollout without turns is one turn with its reward. The return of turn k is G_k = Σ_{j ≥ k} γ^(j − k) r_j. All tokens
    of a turn get the advantage of its return among the returns that the other samples of its group have from the same
    turn on, as PipelineRL groups by step; given tokens get 0.

    "rloo" is unbiased: its expectation is the gradient of the mean return, for every turn. A turn that no other sample
    of its group reaches is compared with the mean of the other samples' returns from the last turn that each has. That
    mean does not depend on the turn's tokens either. Other advantages relative to the group give 0 to such a turn
    (docs/training.md#advantages has the bias).
    Raises ValueError for another name. The function raises the errors of the advantages.
    """
    function = resolve_by_name(advantages, ADVANTAGES, "advantages")
    is_unbiased = advantages == "rloo" or function is rloo_advantages

    def compare(groups: Sequence[Sequence[Rollout]]) -> list[np.ndarray]:
        out: list[np.ndarray] = []
        compared: list[list[tuple[np.ndarray, float]]] = []  # per turn of a group: views of `out`, each with its return
        for group in groups:
            columns = {id(rollout): np.zeros(len(rollout.token_ids), np.float32) for rollout in group}
            out += columns.values()
            samples = [_with_returns(rollouts, columns, discount) for rollouts in samples_of(group)]
            for turn in zip_longest(*samples):
                members = [index for index, of_sample in enumerate(turn) if of_sample is not None]
                others = [sample[-1][1] for index, sample in enumerate(samples) if index != members[0] and sample]
                if is_unbiased and len(members) == 1 and others:
                    view, value = turn[members[0]]
                    view[:] = value - fmean(others)
                else:
                    compared.append([turn[index] for index in members])
        values = iter(function([[value for _, value in turn] for turn in compared]))
        for turn in compared:
            for view, _ in turn:
                view[:] = next(values)
        return out

    return per_group(compare) if is_per_group(advantages) else compare


@named()
def pass_at_k_advantages(k: int) -> Advantages:
    """Return a function for `advantages=` whose expectation is the gradient of the mean of the largest reward of k
    samples: of pass@k, if rewards are 0 and 1 (Walder & Karkhanis, arXiv 2505.15201).

    A sample with reward r gets k · E[max(r, m) − m]: m is the largest reward of k − 1 other samples of its group, and E
    is the mean over all choices of them. For k = 1 it gets its advantage of "rloo". A group in which fewer than k
    samples have a reward gets 0. Raises ValueError for k below 1; the function does for `n` below k.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    compare = of_rewards(rloo_advantages if k == 1 else partial(_of_each, function=partial(_pass_at_k, k=k)))

    @per_group
    def advantages(groups: Sequence[Sequence[Rollout]]) -> Sequence[float | np.ndarray]:
        for group in groups:
            if k > (most := max(group[0].params.n, len(samples_of(group)))):
                raise ValueError(
                    f"pass@{k} needs {k} samples of each prompt, and there are {most}: set n, or a lower k"
                )
        return compare(groups)

    return advantages


def _pass_at_k(r: np.ndarray, *, k: int) -> np.ndarray:
    n = len(r)
    if n < k:
        return np.zeros(n)
    # Share of the choices of k − 1 among n − 1 others, in ascending order, in which number j is the largest.
    shares = np.array([comb(j, k - 2) for j in range(n - 1)]) / comb(n - 1, k - 1)
    others = (np.sort(np.delete(r, index)) for index in range(n))
    return np.array([k * shares @ np.maximum(own - of, 0) for own, of in zip(r, others, strict=True)])


@named()
def gdpo_advantages(weights: Mapping[str, float] | None = None, *, eps: float = 1e-4) -> Advantages:
    """Return a function for `advantages=` that compares each reward of `Rewards` separately (GDPO, Liu et al., arXiv
    2601.05242): A = Σ_j w_j (r_j − mean of its group) / (standard deviation of its group + eps), and then
    (A − mean of the batch) / (standard deviation of the batch + eps). Standard deviations divide by n.

    weights: as in `Rewards`, whose weights they should equal; names without a weight have 1. A sample without a result
    of a score function gets 0 for it. The function raises ValueError if the reward of a sample is not the sum of its
    `rewards` with the weights.
    """
    given = dict(weights or {})

    def advantages(groups: Sequence[Sequence[Rollout]]) -> list[float]:
        samples = [samples_of(group) for group in groups]
        sums = np.array([a for of_group in samples for a in _sums_of_parts([s[0] for s in of_group], given, eps)])
        # The mean of the batch is 0, as the mean of each group; subtracting it would add rounding to exact zeros.
        values = sums / (sqrt((sums**2).mean()) + eps) if len(sums) else sums
        return _of_rollouts(groups, chain(*samples), values.tolist())

    return advantages


def _sums_of_parts(members: Sequence[Rollout], weights: Mapping[str, float], eps: float) -> np.ndarray:
    """Return the weighted sum f64[n] of the advantages of each reward in a group."""
    for rollout in members:
        total = fsum(weights.get(name, 1.0) * part for name, part in rollout.rewards.items())
        if rollout.reward is None or not isclose(total, rollout.reward, abs_tol=1e-6):
            raise ValueError(
                f"gdpo compares the rewards of inflight.Rewards, and sample {rollout.sample} of group "
                f"{rollout.group_id} has the reward {rollout.reward} and the rewards {rollout.rewards}: score with "
                "Rewards, and give its weights, gdpo_advantages(weights); a reward_kl_weight is not among them"
            )
    sums = np.zeros(len(members))
    for name in dict.fromkeys(name for rollout in members for name in rollout.rewards):
        having = [index for index, rollout in enumerate(members) if name in rollout.rewards]
        parts = [members[index].rewards[name] for index in having]
        sums[having] += weights.get(name, 1.0) * np.array(group_advantages([parts], eps=eps))
    return sums


OF_NAMED_REWARDS: dict[str, Advantages] = {"gdpo": gdpo_advantages()}
"""Advantages of the results of several score functions, by name."""


@per_group
def spared_advantages(groups: Sequence[Sequence[Rollout]]) -> list[float]:
    """Return w_i (r_i − Σ_{j ≠ i} w_j r_j / (n − 1)) for every sample i of a group of n, for `advantages=`.

    w is the weight of an episode: 0 if `Session.spare` has ended it, 1 / share if it was spared, and 1 otherwise. The
    expectation is the gradient of the mean reward that all episodes would have if none was ended. A group of one sample
    has the baseline 0. Raises ValueError for a reward that is None.
    """
    samples = [samples_of(group) for group in groups]
    return _of_rollouts(groups, chain(*samples), [value for of_group in samples for value in _spared(of_group)])


def _spared(samples: Sequence[Sequence[Rollout]]) -> list[float]:
    weights = [float(rollout.metadata.get(WEIGHT, 1.0)) for rollout, *_ in samples]
    if any(rollout.reward is None for rollout, *_ in samples):
        raise ValueError("spared_advantages needs rewards: leave out the samples that have none")
    rewards = [rollout.reward or 0.0 for rollout, *_ in samples]
    if len(samples) > 1 and set(weights) == {1.0} and len(set(rewards)) == 1:  # Rounding would leave differences.
        return [0.0] * len(samples)
    total = fsum(w * r for w, r in zip(weights, rewards, strict=True))
    others = max(1, len(samples) - 1)
    return [w * (r - (total - w * r) / others) for w, r in zip(weights, rewards, strict=True)]


@named()
def policy_advantages(advantages: str | RewardAdvantages = "rloo") -> Advantages:
    """Return a function for `advantages=` for episodes of several policies, each an adapter. advantages: a name in
    `ADVANTAGES`, "module:name", or a function of rewards.

    The reward of a policy in an episode is the sum of the rewards of its own turns. It is compared with the rewards of
    the same policy in the other samples of the group. All tokens of the policy get the advantage. Raises ValueError for
    another name.
    """
    function = resolve_by_name(advantages, ADVANTAGES, "advantages")

    def compare(groups: Sequence[Sequence[Rollout]]) -> list[float]:
        compared: list[list[list[Rollout]]] = []
        for group in groups:
            for adapter in dict.fromkeys(rollout.adapter for rollout in group):
                compared.append(samples_of(rollout for rollout in group if rollout.adapter == adapter))
        values = function([[_own_reward(sample) for sample in samples] for samples in compared])
        return _of_rollouts(groups, chain(*compared), values)

    return per_group(compare) if is_per_group(advantages) else compare


def _of_rollouts(
    groups: Sequence[Sequence[Rollout]], samples: Iterable[Sequence[Rollout]], values: Sequence[float]
) -> list[float]:
    """Return the value of the sample of each rollout, groups concatenated."""
    found = {id(rollout): value for sample, value in zip(samples, values, strict=True) for rollout in sample}
    return [found[id(rollout)] for group in groups for rollout in group]


def _own_reward(rollouts: Sequence[Rollout]) -> float | None:
    """Return the sum of the rewards of the turns of these rollouts; without turns, the reward of the rollout."""
    if not rollouts[0].turns:
        return rollouts[0].reward
    return fsum(turn.reward or 0.0 for rollout in rollouts for turn in rollout.turns)


def _with_returns(
    sample: Sequence[Rollout], columns: Mapping[int, np.ndarray], discount: float
) -> list[tuple[np.ndarray, float]]:
    """Return the part of the columns f32[T] and the return G_k of each drawn turn k of a sample."""
    turns: list[tuple[int, np.ndarray, float]] = []
    for rollout in sample:
        column = columns[id(rollout)]
        whole = (Turn(0, len(column), True, rollout.reward),)
        drawn = [turn for turn in rollout.turns or whole if turn.drawn]
        turns += [(turn.began_ns, column[turn.begin : turn.end], turn.reward or 0.0) for turn in drawn]
    turns.sort(key=lambda turn: turn[0])
    returns = _returns([reward for _, _, reward in turns], discount)
    return [(view, value) for (_, view, _), value in zip(turns, returns, strict=True)]


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    out: list[float] = []
    for reward in reversed(rewards):
        out.append(reward + discount * (out[-1] if out else 0.0))
    return out[::-1]


def _of_each(rewards: GroupRewards, function: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """Apply a function of f64[n] to the rewards of each group. Raises ValueError for a reward that is not finite."""
    advantages: list[float] = []
    for index, group in enumerate(rewards):
        bad = next((i for i, reward in enumerate(group) if reward is None or not isfinite(reward)), None)
        if bad is not None:
            raise ValueError(
                f"sample {bad} of group {index} has reward {group[bad]}; a group's advantages need finite rewards: "
                "leave out the samples that have none"
            )
        advantages += function(np.array(group, np.float64)).tolist()
    return advantages


def _centred(r: np.ndarray) -> np.ndarray:
    """Return r − mean, exactly 0 if all are equal."""
    return r - r.mean() if len(r) and r.min() < r.max() else np.zeros(len(r))
