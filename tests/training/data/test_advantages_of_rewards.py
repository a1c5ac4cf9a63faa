"""Advantages of pass@k and of several rewards are their definitions, restated by enumeration and in plain float64."""

import math
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from made_batches import make_group

import inflight
from inflight.core.rollout import Turn
from inflight.training.data.advantages import is_per_group, resolve_advantages, rloo_advantages

EPS = 1e-4


def with_rewards(*rewards, n=None):
    """Groups whose samples have these rewards, or mappings of names to rewards."""
    groups = []
    for index, of_group in enumerate(rewards):
        members = make_group(np.random.default_rng(index), index, n or len(of_group), 3)[: len(of_group)]
        for rollout, reward in zip(members, of_group, strict=True):
            rollout.rewards = reward if isinstance(reward, dict) else {}
            rollout.reward = sum(reward.values()) if isinstance(reward, dict) else reward
        groups.append(members)
    return groups


def mean(values):
    return math.fsum(values) / len(values)


# ---- pass@k -------------------------------------------------------------------------------------------------------


def best_of(k, values, chances):
    """E[max of k samples] and its gradient by the logits of the chances, by enumeration."""
    total, gradient = 0.0, np.zeros(len(values))
    for outcome in product(range(len(values)), repeat=k):
        weight = math.prod(chances[i] for i in outcome) * max(values[i] for i in outcome)
        total += weight
        gradient += weight * (np.bincount(outcome, minlength=len(values)) - k * chances)
    return total, gradient


@pytest.mark.parametrize(("n", "k"), [(4, 1), (2, 2), (4, 2), (5, 3), (4, 4)])
@pytest.mark.parametrize("values", [(0.0, 1.0), (0.2, -1.0, 3.0)])
def test_the_expected_gradient_is_that_of_the_best_of_k(n, k, values):
    """E[(1/n) Σ_i A_i ∂ log π(y_i)] over all groups of n samples."""
    logits = np.linspace(-0.4, 0.8, len(values))
    chances = np.exp(logits) / np.exp(logits).sum()
    advantages, found = inflight.pass_at_k_advantages(k), np.zeros(len(values))
    members = with_rewards([0.0] * n)
    for outcome in product(range(len(values)), repeat=n):
        for rollout, index in zip(members[0], outcome, strict=True):
            rollout.reward = values[index]
        weight = math.prod(chances[i] for i in outcome)
        for a, index in zip(advantages(members), outcome, strict=True):
            found += weight * a / n * (np.eye(len(values))[index] - chances)
    _, expected = best_of(k, values, chances)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_an_advantage_is_the_mean_gain_over_all_choices_of_others():
    rewards = [0.3, 1.0, -2.0, 1.0, 0.5, 0.7]
    for k in range(2, 7):
        expected = []
        for i, r in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :]
            expected.append(k * mean([max(r, *chosen) - max(chosen) for chosen in combinations(others, k - 1)]))
        assert inflight.pass_at_k_advantages(k)(with_rewards(rewards)) == pytest.approx(expected, rel=1e-12)


def test_k_of_1_is_rloo_and_equal_rewards_have_no_advantage():
    rewards = [[1.0, 0.0, 0.5], [0.7] * 4]
    assert inflight.pass_at_k_advantages(1)(with_rewards(*rewards)) == rloo_advantages(rewards)
    assert inflight.pass_at_k_advantages(3)(with_rewards([1 / 3] * 4)) == [0.0] * 4


def test_groups_that_lost_samples_get_0_and_too_few_samples_are_an_error():
    advantages = inflight.pass_at_k_advantages(3)
    assert advantages(with_rewards([1.0, 0.0], n=3)) == [0.0, 0.0]
    with pytest.raises(ValueError, match="pass@3 needs 3 samples of each prompt, and there are 2"):
        advantages(with_rewards([1.0, 0.0]))
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        inflight.pass_at_k_advantages(0)
    assert is_per_group(advantages)


# ---- several rewards ----------------------------------------------------------------------------------------------

PARTS = [
    [{"correct": 1.0, "short": 0.2}, {"correct": 0.0, "short": 0.9}, {"correct": 1.0, "short": 0.4}],
    [{"correct": 0.0, "short": 0.3}, {"correct": 0.0}, {"correct": 0.0, "short": 5.0}, {"correct": 0.0, "short": 0.3}],
    [{"correct": 1.0, "short": 2.0}, {"correct": 1.0, "short": 2.0}],
]


def plain_gdpo(parts, weights):
    """GDPO by its formula, with loops."""
    sums = []
    for group in parts:
        for sample in group:
            total = 0.0
            for name, value in sample.items():
                of_name = [other[name] for other in group if name in other]
                deviation = math.sqrt(mean([(v - mean(of_name)) ** 2 for v in of_name]))
                total += weights.get(name, 1.0) * (value - mean(of_name)) / (deviation + EPS)
            sums.append(total)
    deviation = math.sqrt(mean([(a - mean(sums)) ** 2 for a in sums]))
    return [(a - mean(sums)) / (deviation + EPS) for a in sums]


@pytest.mark.parametrize("weights", [{}, {"short": 0.25}, {"correct": 2.0, "short": -1.0}])
def test_gdpo_is_its_formula(weights):
    groups = with_rewards(*PARTS)
    for rollout in (rollout for group in groups for rollout in group):
        rollout.reward = sum(weights.get(name, 1.0) * part for name, part in rollout.rewards.items())
    advantages = inflight.gdpo_advantages(weights)
    assert advantages(groups) == pytest.approx(plain_gdpo(PARTS, weights), rel=1e-10, abs=1e-12)
    assert advantages(groups)[-2:] == [0.0, 0.0]
    if not weights:
        assert resolve_advantages("gdpo")(groups) == advantages(groups)
    assert not is_per_group(advantages)


def test_gdpo_keeps_apart_rewards_whose_sums_are_equal():
    """A rare reward counts more than a frequent one, though both samples have the sum 1."""
    parts = [[{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}]]
    first, second, *_ = inflight.gdpo_advantages()(with_rewards(*parts))
    assert first > second > 0


def test_sequences_of_an_episode_count_once():
    groups = with_rewards([{"a": 1.0}, {"a": 0.0}, {"a": 0.0}])
    first = replace(groups[0][0], turns=(Turn(0, len(groups[0][0].token_ids), True),))
    second = replace(first, request_id=77)
    plain = inflight.gdpo_advantages()(groups)
    assert inflight.gdpo_advantages()([[first, second, *groups[0][1:]]]) == [plain[0], *plain]


def test_an_episode_that_a_limit_ended_has_no_advantage_and_others_have_theirs():
    groups = with_rewards([{"a": 1.0}, {"a": 0.0}, {"a": 0.5}], [{"a": 1.0}, {"a": 0.0}, {"a": 0.5}, {}])
    found = inflight.gdpo_advantages()(groups)
    assert found == [*found[:3], *found[:3], 0.0]


def test_rewards_that_gdpo_does_not_see_are_refused():
    groups = with_rewards([{"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 1.0}])
    with pytest.raises(ValueError, match=r"sample 0 of group 0 has the reward 2.0.*give its weights"):
        inflight.gdpo_advantages({"b": 0.5})(groups)
    with pytest.raises(ValueError, match="score with Rewards"):
        inflight.gdpo_advantages()(with_rewards([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"replace_uniform_groups takes groups of equal rewards.*'gdpo'"):
        inflight.GRPOConfig(advantages="gdpo", replace_uniform_groups=1)
    with pytest.raises(ValueError, match="computed from all groups of a step"):
        inflight.GRPOConfig(advantages="gdpo", train_as_they_finish=True)
