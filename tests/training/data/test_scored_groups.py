"""From finished groups to a batch: what is left out on the way, and what of it still counts."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from made_batches import make_rollouts
from tiny_models import make_model

import inflight
from inflight.core.rollout import Rollout, Turn
from inflight.observability.staleness_meter import StalenessMeter
from inflight.training.data.advantages import group_advantages
from inflight.training.data.batch import pack
from inflight.training.data.scored_groups import Dropped, ScoredGroups, measure_consumed
from inflight.training.data.staleness_filter import StalenessRule
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective


def groups_with(rewards: list[list[float | None]]) -> list[list[Rollout]]:
    rollouts = iter(make_rollouts(sum(map(len, rewards))))
    groups = [[next(rollouts) for _ in of_group] for of_group in rewards]
    for index, (group, of_group) in enumerate(zip(groups, rewards, strict=True)):
        for rollout, reward in zip(group, of_group, strict=True):
            rollout.group_id, rollout.reward = index, reward
    return groups


def test_failed_groups_and_rollouts_without_a_reward_are_left_out_and_counted_apart():
    groups = groups_with([[1.0, 0.0], [None, 2.0], [None, None], [1.0, 0.0], [0.0, None]])
    groups[3][0].finish_reason = "error"
    groups[4][1].finish_reason = "cancelled"
    scored = ScoredGroups()
    assert [scored.add(group) for group in groups] == [True, True, False, False, False]
    assert scored.groups == [groups[0], groups[1][1:]]
    assert scored.dropped == Dropped(num_failed_groups=2, num_unscored_groups=1, num_unscored_rollouts=3)
    assert scored.dropped.num_unusable_groups == 3
    assert scored.mean_reward == 1.0


@pytest.mark.parametrize("per_token", [False, True])
def test_a_function_can_compute_advantages_by_pytorch(per_token):
    def advantages(groups):
        rewards = torch.tensor([rollout.reward for group in groups for rollout in group])
        centred = rewards - rewards.mean()
        lengths = [len(rollout.token_ids) for group in groups for rollout in group]
        return [a.expand(length) for a, length in zip(centred, lengths, strict=True)] if per_token else centred

    scored = ScoredGroups(groups_with([[1.0, 0.0], [2.0, 0.0]]))
    batch = scored.pack(trainer_version=3, advantages=advantages, skip_uniform=True)
    assert batch.advantages[batch.drawn].unique().tolist() == [-0.75, 0.25, 1.25]
    assert not scored.last_is_uniform(advantages)


@pytest.mark.medium
@pytest.mark.parametrize("aggregation", ["token", "sequence", "group", "constant"])
def test_groups_of_equal_rewards_are_left_out_of_the_forward_pass_and_still_count(aggregation):
    groups = groups_with([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    gradients, num_rollouts = [], []
    for skip_uniform in (True, False):
        scored = ScoredGroups(groups)
        batch = scored.pack(trainer_version=3, skip_uniform=skip_uniform)
        assert scored.dropped.num_uniform_groups == (3 if skip_uniform else 0)
        trained = make_model("qwen3")
        for part in batch.micro_batches(60):
            policy_loss(trained, part, objective=Objective(aggregation=aggregation, max_tokens=16))[0].backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trained.parameters()]))
        num_rollouts.append(batch.num_sequences)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert num_rollouts == [4, 10]


def test_a_batch_of_which_nothing_is_left_is_none():
    uniform = ScoredGroups(groups_with([[1.0, 1.0]]))
    assert uniform.pack(trainer_version=9, skip_uniform=True) is None
    stale = ScoredGroups(groups_with([[1.0, 0.0], [0.0, 1.0]]))
    assert stale.pack(trainer_version=100, staleness=[StalenessRule(max_version_lag=50, action="reject")]) is None
    assert (stale.dropped.num_stale_rollouts, stale.dropped.stale_share) == (4, 1.0)
    assert ScoredGroups().pack(trainer_version=0) is None


@pytest.mark.parametrize("bad", [None, math.nan])
def test_a_reward_that_is_none_or_not_finite_is_named(bad):
    with pytest.raises(ValueError, match="sample 0 of group 0 has reward"):
        ScoredGroups(groups_with([[bad, 1.0]])).pack(trainer_version=0)


def test_what_is_consumed_is_measured_against_the_version_that_the_batch_was_made_for():
    batch = ScoredGroups(groups_with([[1.0, 0.0]])).pack(trainer_version=9)
    staleness = measure_consumed(StalenessMeter(), batch)
    assert staleness.version_lag.tolist() == [9 - v for r in batch.rollouts for v in r.weight_versions]


def test_records_of_what_was_dropped_add_up_and_become_numbers_and_a_sentence():
    one = Dropped(num_failed_groups=1, num_stale_tokens=5, num_tokens=20, sum_lengths=200, sum_kept_lengths=120)
    total = one + Dropped(num_failed_groups=2, num_uniform_groups=4, num_tokens=5, sum_lengths=25, sum_kept_lengths=25)
    assert (total.num_failed_groups, total.num_uniform_groups, total.stale_share) == (3, 4, 0.2)
    assert total.length_bias == pytest.approx((145 / 20) / (225 / 25))
    assert total + Dropped() == total
    numbers = total.as_dict()
    assert numbers["num_failed_groups"] == 3
    assert numbers["stale_share"] == 0.2
    assert set(asdict(total)) - set(numbers) == {"sum_lengths", "sum_kept_lengths"}
    assert not {"stale_share", "length_bias"} & set(Dropped().as_dict())
    assert "3 groups failed" in str(total)
    assert "20.0% of 25 tokens were too old" in str(total)


def test_the_standard_deviation_is_that_of_the_samples_or_its_estimate():
    rewards = [[1.0, 0.0, 0.0, 4.0], [2.0, 5.0], [7.0]]
    for ddof in (0, 1):
        expected = [(r - np.mean(g)) / (np.std(g, ddof=ddof) + 1e-4) for g in rewards[:2] for r in g]
        assert group_advantages(rewards, ddof=ddof) == pytest.approx([*expected, 0.0])
    assert group_advantages(rewards, scale=False) == pytest.approx([-0.25, -1.25, -1.25, 2.75, -1.5, 1.5, 0.0])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "group", "constant"])
def test_truncated_rollouts_have_no_part_in_the_loss_and_still_count(aggregation):
    """In averages, and in the advantages of the others: the gradient is that of a batch in which they are masked."""
    groups = groups_with([[1.0, 0.0, 3.0], [1.0, 1.0], [0.0, 2.0, 2.0, 5.0], [1.0, 0.0]])
    for rollout in (groups[0][0], groups[2][1], groups[2][2]):
        rollout.finish_reason = "stop"
    objective = Objective(aggregation=aggregation, max_tokens=16)
    scored = ScoredGroups(groups)
    batch = scored.pack(trainer_version=3, skip_uniform=True, mask_truncated=True)
    assert [rollout.request_id for rollout in batch.rollouts] == [0, 6, 7]
    assert (scored.dropped.num_truncated_rollouts, scored.dropped.num_uniform_groups) == (6, 1)
    masked = pack(
        [rollout for group in groups for rollout in group],
        group_advantages([[rollout.reward for rollout in group] for group in groups]),
        included=[np.full(len(r.token_ids), r.finish_reason == "stop") for group in groups for r in group],
        trainer_version=3,
    )
    gradients = []
    for whole in (batch, masked):
        trained = make_model("qwen3")
        for part in whole.micro_batches(60):
            policy_loss(trained, part, objective=objective)[0].backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trained.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert gradients[0].norm() > 0


def test_advantages_are_a_choice_or_a_function_that_returns_one_for_every_rollout():
    groups = groups_with([[1.0, 0.0], [1.0, 1.0]])
    rloo = ScoredGroups(groups).pack(trainer_version=3, advantages="rloo")
    assert rloo.advantages[rloo.drawn].unique().tolist() == [-1, 0, 1]

    def by_token(of_groups):
        assert of_groups == groups
        return [np.arange(len(rollout.token_ids), dtype=np.float32) for group in of_groups for rollout in group]

    own = ScoredGroups(groups).pack(trainer_version=3, advantages=by_token)
    assert own.advantages[own.drawn].tolist() == [i for g in groups for r in g for i in range(len(r.token_ids))]
    with pytest.raises(ValueError, match="the advantages' function returned 1 for 4 rollouts"):
        ScoredGroups(groups).pack(trainer_version=3, advantages=lambda of_groups: [1.0])


def test_a_function_of_advantages_is_not_called_without_groups():
    assert ScoredGroups().pack(trainer_version=0, advantages=np.concatenate) is None


def test_groups_of_equal_rewards_that_have_an_advantage_are_trained_on():
    scored = ScoredGroups(groups_with([[1.0, 1.0], [0.0, 0.0]]))
    assert scored.pack(trainer_version=3, skip_uniform=True, advantages="reinforce++").num_sequences == 4
    assert scored.dropped.num_uniform_groups == 0
    assert scored.pack(trainer_version=3, skip_uniform=True, advantages="reinforce++_baseline") is None
    assert scored.dropped.num_uniform_groups == 2


@pytest.mark.parametrize("advantages", [inflight.turn_advantages("rloo"), inflight.policy_advantages("rloo")])
def test_a_group_whose_turns_or_players_have_advantages_is_not_uniform(advantages):
    """Two samples of a game of two players, whose rewards add up to 0."""
    [group] = groups_with([[0.0] * 4])
    for index, (rollout, own) in enumerate(zip(group, [1.0, -1.0, -1.0, 1.0], strict=True)):
        rollout.sample, rollout.adapter = index // 2, "ab"[index % 2]
        rollout.turns = (Turn(0, len(rollout.token_ids), True, own, began_ns=1 + index % 2),)
    assert ScoredGroups([group]).last_is_uniform("grpo")
    assert not ScoredGroups([group]).last_is_uniform(advantages)
    for rollout in group:
        rollout.turns = (Turn(0, len(rollout.token_ids), True, 1.0, began_ns=1),)
    assert ScoredGroups([group]).last_is_uniform(advantages)


def test_a_group_that_is_replaced_counts_in_the_mean_reward_alone():
    scored = ScoredGroups()
    for group in groups_with([[1.0, 0.0], [1.0, 1.0]]):
        scored.add(group)
        if scored.last_is_uniform():
            scored.replace_last()
    assert [len(groups) for groups in (scored.groups, scored.replaced)] == [1, 1]
    assert scored.mean_reward == 0.75
    assert scored.dropped == Dropped(num_replaced_groups=1)
    assert scored.pack(trainer_version=3).totals.num_sequences == 2
