"""Advantages are their formulas, restated in plain float64 loops, and their expectations the gradients that their
sources say, by enumeration."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from made_batches import make_group, make_rollouts

import inflight
from inflight.core.rollout import Rollout, Turn
from inflight.training.data.advantages import (
    ADVANTAGES,
    group_advantages,
    maxrl_advantages,
    of_rewards,
    reinforce_advantages,
    resolve_advantages,
    rloo_advantages,
    turn_advantages,
)

REWARDS = [[1.0, 0.0, 0.5, 2.0], [0.25, 3.0, 0.0], [0.7, 0.7], [0.0, 0.0, 0.0], [5.0], [0.1, 0.1, 0.1]]
EPS = 1e-4


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values, ddof=0):
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - ddof))


def plain(name: str) -> list[float]:
    """The advantages of REWARDS by the formula in the source of each."""
    out = []
    every = [r for group in REWARDS for r in group]
    centred = [r - mean(group) for group in REWARDS for r in group]
    for group in REWARDS:
        for index, r in enumerate(group):
            others = group[:index] + group[index + 1 :]
            if name == "grpo":
                out.append((r - mean(group)) / (deviation(group) + EPS))
            elif name == "dr_grpo":
                out.append(r - mean(group))
            elif name == "rloo":
                out.append(r - mean(others) if others else 0.0)
            elif name == "maxrl":
                out.append((r - mean(group)) / mean(group) if mean(group) > 0 else 0.0)
            elif name == "reinforce++":
                out.append((r - mean(every)) / (deviation(every) + EPS))
            elif name == "reinforce++_baseline":
                out.append((r - mean(group) - mean(centred)) / (deviation(centred) + EPS))
    return out


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_choice_is_its_formula(name):
    assert ADVANTAGES[name](REWARDS) == pytest.approx(plain(name), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "reinforce++"])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e9])
def test_a_group_of_equal_rewards_gets_exactly_0(name, reward):
    for count in (1, 3, 7):
        assert ADVANTAGES[name]([[reward] * count, [0.0, 1.0]])[:count] == [0.0] * count


def test_the_global_normalization_gives_equal_rewards_what_they_are_worth_in_the_batch():
    solved, failed = reinforce_advantages([[1.0, 1.0], [0.0, 0.0]])[::2]
    assert solved == -failed == pytest.approx(1, abs=1e-3)
    assert reinforce_advantages([]) == []


def expected_gradient(function, p: float, n: int) -> float:
    """E[(1/n) Σ_i A_i ∂ log π(y_i) / ∂p] over all outcomes of n samples that each succeed with probability p."""
    total = []
    for outcome in product((0.0, 1.0), repeat=n):
        probability = math.prod(p if r else 1 - p for r in outcome)
        scores = [1 / p if r else -1 / (1 - p) for r in outcome]
        total.append(probability * mean([a * s for a, s in zip(function([outcome]), scores, strict=True)]))
    return math.fsum(total)


@pytest.mark.parametrize("p", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_expectations_over_all_outcomes_are_the_gradients_of_the_sources(p, n):
    """The gradient of the mean reward p is 1. MaxRL's is that of log p up to order n − 1 (arXiv 2602.02710)."""
    assert expected_gradient(rloo_advantages, p, n) == pytest.approx(1, rel=1e-12)
    assert expected_gradient(ADVANTAGES["dr_grpo"], p, n) == pytest.approx((n - 1) / n, rel=1e-12)
    orders = math.fsum((1 - p) ** (k - 1) for k in range(1, n))
    assert expected_gradient(maxrl_advantages, p, n) == pytest.approx(orders, rel=1e-12)
    assert orders == pytest.approx((1 - (1 - p) ** (n - 1)) / p, rel=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
@pytest.mark.filterwarnings("ignore:a reward is -inf")
def test_a_reward_that_is_none_or_not_finite_is_named(name, bad):
    with pytest.raises(ValueError, match=f"sample 1 of group 2 has reward {bad}"):
        ADVANTAGES[name]([[1.0], [0.0, 1.0], [1.0, bad]])


def test_maxrl_gives_no_advantage_to_a_group_whose_mean_is_not_above_0_and_warns():
    with pytest.warns(UserWarning, match=r"a reward is -1.5; MaxRL divides by a group's mean reward"):
        advantages = maxrl_advantages([[1.0, -0.5], [0.5, -1.5], [-1.0, 1.0], [-1.0, -1.0], [0.0, 1.0]])
    assert advantages == pytest.approx([3, -3, 0, 0, 0, 0, 0, 0, -1, 1])


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown advantages 'ppo'; choose grpo, dr_grpo, rloo, maxrl"):
        resolve_advantages("ppo")
    with pytest.raises(ValueError, match="unknown advantages 'ppo'"):
        turn_advantages("ppo")
    assert callable(turn_advantages("inflight.training.data.advantages:rloo_advantages"))
    own = of_rewards(group_advantages)
    assert resolve_advantages(own) is own


# Turns

DRAWN = [
    [
        np.array([1, 1, 0, 0, 1, 1, 1], bool),
        np.array([1, 0, 1], bool),
        np.array([0, 1, 0, 1, 0, 1], bool),
    ],
    [np.array([1, 1], bool), np.array([1], bool)],
]
TURN_REWARDS = [[[0.5, 1.0], [0.0, 3.0], [1.0, 0.0, 2.0]], [[1.0], [0.0]]]


def episode(mask: np.ndarray, rewards: list[float], sample: int) -> Rollout:
    """A rollout with a turn for each run of drawn or given tokens. Drawn turns have these rewards in order."""
    edges = [0, *(np.flatnonzero(np.diff(mask.astype(int))) + 1).tolist(), len(mask)]
    given = iter(rewards)
    turns = [
        Turn(begin, end, bool(mask[begin]), next(given) if mask[begin] else None, began_ns=begin)
        for begin, end in pairwise(edges)
    ]
    [rollout] = make_group(np.random.default_rng(0), 0, 1, 1)
    ids = np.zeros(len(mask), np.int32)
    return replace(rollout, sample=sample, token_ids=ids, turns=tuple(turns), reward=sum(rewards))


def turn_values(rewards, drawn, name: str, discount: float = 1.0) -> list[np.ndarray]:
    groups = [
        [episode(mask, given, sample) for sample, (given, mask) in enumerate(zip(of_group, masks, strict=True))]
        for of_group, masks in zip(rewards, drawn, strict=True)
    ]
    return list(turn_advantages(name, discount=discount)(groups))


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_a_turn_gets_the_advantage_of_its_return_among_those_of_the_same_turn(name, discount):
    ours = turn_values(TURN_REWARDS, DRAWN, name, discount)
    assert [a.dtype for a in ours] == [np.float32] * 5
    expected = []
    for rewards, masks in zip(TURN_REWARDS, DRAWN, strict=True):
        for sample, mask in enumerate(masks):
            row, turn, before = [], -1, False
            for drawn in mask:
                turn += bool(drawn and not before)
                before = drawn
                if not drawn:
                    row.append(0.0)
                    continue
                having = [index for index, of_sample in enumerate(rewards) if len(of_sample) > turn]
                returns = [
                    math.fsum(discount ** (j - turn) * rewards[i][j] for j in range(turn, len(rewards[i])))
                    for i in having
                ]
                if name == "rloo" and len(having) == 1:
                    last = [of_sample[-1] for index, of_sample in enumerate(rewards) if index != sample]
                    row.append(returns[0] - math.fsum(last) / len(last))
                else:
                    row.append(ADVANTAGES[name]([returns])[having.index(sample)])
            expected.append(row)
    for got, row in zip(ours, expected, strict=True):
        assert got.tolist() == pytest.approx(row, rel=1e-6)
    assert any(row[-1] for row in expected)


def test_one_turn_is_the_advantage_of_the_sample_and_other_tokens_get_0():
    [first, second] = turn_values([[[1.0], [0.0]]], [[np.array([0, 1, 1, 0], bool), np.array([1], bool)]], "grpo")
    high, low = group_advantages([[1.0, 0.0]])
    assert first.tolist() == pytest.approx([0, high, high, 0])
    assert second.tolist() == pytest.approx([low])


def test_turns_without_tokens_and_turns_next_to_each_other_are_turns():
    masks = [np.array([1, 1, 1], bool), np.array([1], bool)]
    first, second = (episode(mask, [0.0], sample) for sample, mask in enumerate(masks))
    first.turns = (
        Turn(0, 2, True, 1.0, began_ns=1),
        Turn(2, 3, True, 0.5, began_ns=2),
        Turn(3, 3, True, 3.0, began_ns=3),
    )
    second.turns = (
        Turn(0, 1, True, 2.0, began_ns=1),
        Turn(1, 1, True, None, began_ns=2),
        Turn(1, 1, True, 1.0, began_ns=3),
    )
    values = turn_advantages("rloo")([[first, second]])
    assert values[0].tolist() == [4.5 - 3, 4.5 - 3, 3.5 - 1]
    assert values[1].tolist() == [3 - 4.5]


def test_turns_of_several_sequences_of_an_episode_are_in_the_order_of_their_requests():
    later, earlier, other = (episode(np.array([1, 1], bool), [0.0], sample) for sample in (0, 0, 1))
    later.turns, earlier.turns = (Turn(0, 2, True, 1.0, began_ns=9),), (Turn(0, 2, True, 4.0, began_ns=5),)
    other.turns = (Turn(0, 1, True, 1.0, began_ns=6), Turn(1, 2, True, 0.5, began_ns=7))
    values = turn_advantages("rloo")([[later, other, earlier]])
    assert [v.tolist() for v in values] == [[0.5, 0.5], [-3.5, -0.5], [3.5, 3.5]]


def test_an_episode_counts_once_whatever_its_sequences():
    group = [
        episode(np.array([1], bool), [reward], sample) for sample, reward in ((0, 1.0), (0, 1.0), (1, 0.0), (0, 1.0))
    ]
    for name, function in ADVANTAGES.items():
        high, low = function([[1.0, 0.0]])
        assert resolve_advantages(name)([group]) == [high, high, low, high]


def turn_gradients(name: str, n: int, p: float, q: float) -> tuple[list[float], list[float]]:
    """The expected gradients of two turns, and the exact ones, by enumeration of all groups of n samples. The policy
    continues to turn two with probability p, and takes action 1 there with probability q."""
    first, second = {0: 0.3, 1: 0.0}, {0: 0.2, 1: 1.0}  # rewards
    outcomes = [  # rewards, probability, gradients of log π by the logits of p and q
        ([first[0]], 1 - p, (-p, 0.0)),
        ([first[1], second[0]], p * (1 - q), (1 - p, -q)),
        ([first[1], second[1]], p * q, (1 - p, 1 - q)),
    ]
    exact = [
        sum(chance * sum(rewards[turn:]) * slopes[turn] for rewards, chance, slopes in outcomes) for turn in (0, 1)
    ]
    expected = [0.0, 0.0]
    for group in product(outcomes, repeat=n):
        drawn = [np.array([True] + [False, True] * (len(rewards) - 1)) for rewards, _, _ in group]
        advantages = turn_values([[rewards for rewards, _, _ in group]], [drawn], name)
        chance = math.prod(chance for _, chance, _ in group)
        for (rewards, _, slopes), values in zip(group, advantages, strict=True):
            for turn in range(len(rewards)):
                expected[turn] += chance * values[2 * turn].item() * slopes[turn] / n
    return expected, exact


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.31, 0.9])
def test_rloo_is_unbiased_for_turns_that_the_policy_decides_to_reach(n, p):
    expected, exact = turn_gradients("rloo", n, p, 0.6)
    assert expected == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.31, 0.9])
def test_dr_grpo_weighs_turns_down_by_the_documented_factor(n, p):
    expected, exact = turn_gradients("dr_grpo", n, p, 0.6)
    assert expected[0] / exact[0] == pytest.approx((n - 1) / n, rel=1e-5)
    assert expected[1] / exact[1] == pytest.approx(1 - (1 - (1 - p) ** n) / (n * p), rel=1e-5)


def test_a_lone_sample_of_several_turns_has_nothing_to_be_compared_with():
    [values] = turn_values([[[1.0, 2.0]]], [[np.array([1, 0, 1], bool)]], "rloo")
    assert values.tolist() == [0, 0, 0]


def test_equal_rewards_of_spared_turns_give_no_advantage_at_all():
    rollouts = make_rollouts(4)
    for rollout in rollouts:
        rollout.reward = 0.1
    assert inflight.spared_advantages([rollouts]) == [0.0] * 4
    assert inflight.spared_advantages([rollouts[:1]]) == [0.1], "the baseline of one sample is 0"
