"""Old tokens are taken out as the rules say, and everything that was taken out is counted."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_batches import make_group
from tiny_models import make_model

from inflight.core.clock import NS_PER_MS
from inflight.core.rollout import Rollout
from inflight.training.data.batch import pack
from inflight.training.data.scored_groups import Dropped, take_out_stale
from inflight.training.data.staleness_filter import StalenessRule
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective

TRAINER_VERSION = 10
NOW_NS = 10**12


def make_rollouts(seed: int = 0, samples: int = 6) -> list[Rollout]:
    """Longer rollouts began under older versions and at earlier times."""
    rollouts = make_group(np.random.default_rng(seed), 0, samples, 5)
    for rollout in rollouts:
        lags = np.arange(len(rollout.token_ids))[::-1] // 3
        rollout.weight_versions = TRAINER_VERSION - lags
        rollout.sampled_at_ns = NOW_NS - lags * 100 * NS_PER_MS
        rollout.reward = float(rollout.sample % 2)
    return rollouts


RULES = [
    StalenessRule(max_version_lag=lag, max_age_ms=age, unit=unit, action=action)
    for lag, age in ((2, None), (None, 250.0), (4, 150.0))
    for unit, action in (("token", "mask"), ("rollout", "mask"), ("rollout", "reject"))
]


@given(rules=st.lists(st.sampled_from(RULES), max_size=3), seed=st.integers(0, 30))
def test_what_rules_take_out_is_what_they_say_and_is_counted(rules, seed):
    rollouts = make_rollouts(seed)
    counts = Dropped()
    included = take_out_stale(rollouts, rules, TRAINER_VERSION, NOW_NS, counts)

    expected: dict[int, list[bool]] = {}
    for index, rollout in enumerate(rollouts):
        keep = [True] * len(rollout.token_ids)
        rejected = False
        for rule in rules:
            old = [
                (rule.max_version_lag is not None and TRAINER_VERSION - version > rule.max_version_lag)
                or (rule.max_age_ms is not None and (NOW_NS - drawn_ns) / 1e6 > rule.max_age_ms)
                for version, drawn_ns in zip(rollout.weight_versions, rollout.sampled_at_ns, strict=True)
            ]
            rejected |= rule.action == "reject" and any(old)
            for token, is_old in enumerate(old):
                keep[token] &= not (any(old) if rule.unit == "rollout" else is_old)
        if not rejected:
            expected[index] = keep
    assert {i: list(mask) for i, mask in included.items()} == expected

    lengths = [len(r.token_ids) for r in rollouts]
    trained = sum(map(sum, expected.values()))
    assert counts.num_tokens == sum(lengths) == trained + counts.num_stale_tokens
    assert counts.num_masked_tokens == sum(lengths[index] for index in expected) - trained
    assert (counts.num_rollouts, counts.num_stale_rollouts) == (len(rollouts), len(rollouts) - len(expected))
    assert counts.stale_share == pytest.approx(1 - trained / sum(lengths))
    kept = [lengths[i] for i, mask in expected.items() for is_kept in mask if is_kept]
    if kept:
        assert counts.length_bias == pytest.approx(np.mean(kept) / np.mean(np.repeat(lengths, lengths)))
    else:
        assert math.isnan(counts.length_bias)


@pytest.mark.parametrize(("unit", "action"), [("rollout", "reject"), ("token", "mask")])
def test_leaving_out_what_is_old_favors_short_rollouts_and_says_so(unit, action):
    rules, counts = [StalenessRule(max_version_lag=2, unit=unit, action=action)], Dropped()
    for seed in range(10):
        take_out_stale(make_rollouts(seed), rules, TRAINER_VERSION, NOW_NS, counts)
    assert counts.stale_share > 0
    assert counts.length_bias < 0.95


def test_masked_tokens_have_no_gradient_and_leave_the_weight_of_others_alone():
    rollouts = make_rollouts()
    objective = Objective(kl_weight=0.1, entropy_weight=0.1)
    included = [~RULES[0].too_old(rollout, TRAINER_VERSION, NOW_NS) for rollout in rollouts]
    assert 0 < sum(mask.sum() for mask in included) < sum(map(len, included))
    gradients = []
    for advantages_of_masked in (1.0, -5.0):
        model = make_model("qwen3")
        advantages = [np.where(mask, 1.0, advantages_of_masked).astype(np.float32) for mask in included]
        batch = pack(rollouts, advantages, included=included)
        batch = batch.with_column("reference_logprobs", batch.behavior_logprobs[batch.loss_mask])
        loss, _ = policy_loss(model, batch, objective=objective)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)

    model = make_model("qwen3")
    batch = pack(rollouts, [1.0] * len(rollouts))
    logprobs = token_logprobs(model, batch)
    taken = torch.from_numpy(np.concatenate(included))
    expected = -(logprobs * (logprobs.detach() - batch.behavior_logprobs[batch.loss_mask]).exp().clamp(max=2))[taken]
    loss, _ = policy_loss(model, pack(rollouts, [1.0] * len(rollouts), included=included), objective="tis")
    assert loss.item() == pytest.approx(expected.sum().item() / len(taken), rel=1e-5)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "needs max_version_lag, max_age_ms or both"),
        ({"max_version_lag": -1}, "max_version_lag must be 0 or more, got -1"),
        ({"max_age_ms": math.nan}, "max_age_ms must be 0 or more"),
        ({"max_age_ms": 1, "unit": "group"}, "unit is 'token' or 'rollout'"),
        ({"max_age_ms": 1, "unit": "token", "action": "reject"}, "cannot be rejected out of its sequence"),
    ],
)
def test_rules_that_make_no_sense_are_named(rule, message):
    with pytest.raises(ValueError, match=message):
        StalenessRule(**rule)
