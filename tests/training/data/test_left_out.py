"""Rules, skipped groups, masked answers and ranks, in every combination: loss and gradient, restated in float64."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from made_batches import make_group

from inflight.core.rollout import Rollout, Turn
from inflight.training.data.batch import PackedBatch
from inflight.training.data.scored_groups import Dropped, ScoredGroups
from inflight.training.data.shares import decode_share, encode_share, split
from inflight.training.data.staleness_filter import StalenessRule
from inflight.training.model.forward import TokenScores
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import PRESETS, Objective
from inflight.training.objective.statistics import LossStats

TRAINER_VERSION = 8
RULES = {
    "no rule": (),
    "tokens masked": (StalenessRule(max_version_lag=5, unit="token"),),
    "rollouts masked": (StalenessRule(max_version_lag=6),),
    "rejected": (StalenessRule(max_version_lag=6, action="reject"),),
    "both": (StalenessRule(max_version_lag=5, unit="token"), StalenessRule(max_version_lag=7, action="reject")),
}
AGGREGATIONS = ("token", "sequence", "group", "constant")
Gradient = dict[int, np.ndarray]
"""f64[tokens] of each rollout, by its request id."""


def make_groups() -> list[list[Rollout]]:
    """Groups with and without an advantage, with and without old tokens and answers that were cut off. The samples of
    the last group have two or three token sequences."""
    rng = np.random.default_rng(5)
    groups = []
    of_groups = [[1, 0, 0, 1], [1, 1, 1], [0, 3, 1], [0, 0, 0], [2, 2], [5, 1, 2, 2], [3, 1, 3, 1, 0, 3, 0]]
    for index, rewards in enumerate(of_groups):
        group = make_group(rng, index, len(rewards), 4)
        for rollout, reward in zip(group, rewards, strict=True):
            rollout.reward = float(reward)
            rollout.finish_reason = "length" if rng.random() < 0.4 else "stop"
            rollout.weight_versions = np.sort(rng.integers(0, TRAINER_VERSION + 1, len(rollout.token_ids)))
            if rng.random() < 0.5:
                rollout.weight_versions[:] = TRAINER_VERSION
        groups.append(group)
    groups[4][0].weight_versions[:] = 0  # of a group of equal rewards one is rejected, and of the next all are
    for rollout in groups[3]:
        rollout.weight_versions[:] = 0
    groups[5][0].weight_versions[:], groups[5][0].finish_reason = 0, "length"
    reasons = ("stop", "stop", "length", "length", "length", "stop", "length")
    for rollout, sample, reason in zip(groups[6], (0, 1, 0, 1, 2, 0, 2), reasons, strict=True):
        rollout.sample, rollout.finish_reason = sample, reason
        rollout.turns = (Turn(0, len(rollout.token_ids), True, began_ns=1),)
    return groups


def current_logprobs(rollout: Rollout) -> np.ndarray:
    """log π_θ f64[tokens], at some distance from those recorded."""
    return rollout.logprobs.astype(np.float64) + 0.6 * np.sin(
        1.7 * np.arange(len(rollout.token_ids)) + rollout.request_id
    )


def by_product(batches: list[PackedBatch], objective: Objective) -> tuple[float, Gradient, LossStats]:
    """The mean over batches, as ranks average them."""
    found: Gradient = {}
    losses, stats = [], []
    for batch in batches:
        values = [current_logprobs(rollout) for rollout in batch.rollouts]
        drawn = np.concatenate(values) if values else np.zeros(batch.num_drawn)
        leaf = torch.from_numpy(drawn).requires_grad_()
        loss, of_batch = loss_of_scores(objective, batch, TokenScores(leaf, None))
        loss.backward()
        losses.append(loss.item())
        stats.append(of_batch)
        ends = np.cumsum([len(rollout.token_ids) for rollout in batch.rollouts])[:-1]
        if values:
            parts = np.split(leaf.grad.numpy() / len(batches), ends)
            found |= {rollout.request_id: part for rollout, part in zip(batch.rollouts, parts, strict=True)}
    total = stats[0]
    for other in stats[1:]:
        total = total + other
    return float(np.mean(losses)), found, total


def restated(
    groups: list[list[Rollout]], rules: tuple[StalenessRule, ...], aggregation: str, mask_truncated: bool
) -> tuple[float, Gradient]:
    """Truncated importance sampling by loops, from the documentation."""
    there: list[tuple[int, Rollout, float, np.ndarray]] = []
    for index, group in enumerate(groups):
        rewards = np.array(list({rollout.sample: rollout.reward for rollout in group}.values()))
        for rollout in group:
            advantage = (rollout.reward - rewards.mean()) / (rewards.std() + 1e-4)
            lags = TRAINER_VERSION - rollout.weight_versions
            takes_part = np.ones(len(lags), bool)
            is_rejected = False
            for rule in rules:
                old = lags > rule.max_version_lag
                is_rejected |= rule.action == "reject" and bool(old.any())
                takes_part &= ~old if rule.unit == "token" else np.full(len(lags), not old.any())
            if mask_truncated and rollout.finish_reason == "length":
                takes_part[:] = False
            if not is_rejected:
                there.append((index, rollout, advantage, takes_part))
    tokens = sum(len(rollout.token_ids) for _, rollout, _, _ in there)
    of_group = {index: sum(len(r.token_ids) for other, r, _, _ in there if other == index) for index, *_ in there}
    of_sample = Counter[tuple[int, int]]()
    for index, rollout, _, _ in there:
        of_sample[index, rollout.sample] += len(rollout.token_ids)
    loss, gradient = 0.0, {}
    for index, rollout, advantage, takes_part in there:
        weight = {
            "token": 1 / tokens,
            "sequence": 1 / (len(of_sample) * of_sample[index, rollout.sample]),
            "group": 1 / (len(of_group) * of_group[index]),
            "constant": 1 / (len(of_sample) * 20),
        }[aggregation]
        ours = current_logprobs(rollout)
        ratios = np.minimum(np.exp(ours - rollout.logprobs.astype(np.float64)), 2.0)
        gradient[rollout.request_id] = -weight * np.float32(advantage).astype(np.float64) * ratios * takes_part
        loss += float((gradient[rollout.request_id] * ours).sum())
    return loss, gradient


def assert_same_gradient(found: Gradient, expected: Gradient) -> None:
    """Rollouts that one of them lacks have no gradient in the other."""
    largest = max(np.abs(part).max() for part in expected.values())
    assert largest > 1e-3
    for request_id in found.keys() | expected.keys():
        ours, theirs = found.get(request_id, np.zeros(1)), expected.get(request_id, np.zeros(1))
        np.testing.assert_allclose(*np.broadcast_arrays(ours, theirs), rtol=0, atol=1e-6 * largest)


@pytest.mark.medium
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_what_the_options_promise_in_every_combination(aggregation, rules):
    objective = replace(PRESETS["tis"], aggregation=aggregation, max_tokens=20)
    for skip_uniform, mask_truncated in product((False, True), repeat=2):
        batch = ScoredGroups(make_groups()).pack(
            trainer_version=TRAINER_VERSION,
            staleness=RULES[rules],
            skip_uniform=skip_uniform,
            mask_truncated=mask_truncated,
        )
        expected_loss, expected = restated(make_groups(), RULES[rules], aggregation, mask_truncated)
        for num_ranks in (1, 2, 5):
            shares = split(batch, num_ranks, dropped=Dropped())
            batches = [batch] if num_ranks == 1 else [decode_share(encode_share(share)).batch() for share in shares]
            loss, found, _ = by_product(batches, objective)
            assert_same_gradient(found, expected)
            assert loss == pytest.approx(expected_loss, rel=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    "preset", ["none", "tis", "ppo_clip", "gspo", "cispo", "sequence_mask", "dppo", "loglinear_ppo"]
)
def test_skipping_groups_of_equal_rewards_changes_neither_the_gradient_nor_what_scales_the_learning_rate(preset, rules):
    for aggregation, mask_truncated in product(AGGREGATIONS, (False, True)):
        objective = replace(PRESETS[preset], aggregation=aggregation, max_tokens=20)
        (_, with_all, all_stats), (_, skipped, stats) = (
            by_product(
                [
                    ScoredGroups(make_groups()).pack(
                        trainer_version=TRAINER_VERSION,
                        staleness=RULES[rules],
                        skip_uniform=skip_uniform,
                        mask_truncated=mask_truncated,
                    )
                ],
                objective,
            )
            for skip_uniform in (False, True)
        )
        assert_same_gradient(skipped, with_all)
        assert stats.sequences.num_tokens == all_stats.sequences.num_tokens > 1
        assert stats.sequences.ess == pytest.approx(all_stats.sequences.ess, rel=1e-9)
        assert stats.sequences.ess < 1


@pytest.mark.parametrize("rules", RULES)
def test_what_rules_take_out_is_counted_alike_with_and_without_skipping(rules):
    counts = []
    for skip_uniform, mask_truncated in product((False, True), repeat=2):
        scored = ScoredGroups(make_groups())
        scored.pack(
            trainer_version=TRAINER_VERSION,
            staleness=RULES[rules],
            skip_uniform=skip_uniform,
            mask_truncated=mask_truncated,
        )
        counts.append(replace(scored.dropped, num_uniform_groups=0, num_truncated_rollouts=0))
    assert counts == [counts[0]] * 4
    assert counts[0].num_rollouts == sum(map(len, make_groups()))
