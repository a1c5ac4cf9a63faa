"""Several score functions: what each gave, their weighted sum, and who has no reward."""

import asyncio
import math
import threading

import pytest
from made_batches import make_rollouts

from inflight.stream.rollout_codec import header_of, make_rollout
from inflight.training.data.rewards import Rewards, mean_parts
from inflight.training.data.scoring import Scorer


def rewards_of(scorer, rollouts):
    try:
        return scorer.start(rollouts).result(20)
    finally:
        scorer.close()


def by_request(values):
    return lambda rollout: values[rollout.request_id]


async def half(rollout):
    await asyncio.sleep(0)
    return 0.5 * rollout.request_id


def test_the_reward_is_the_weighted_sum_and_every_part_stays_with_its_rollout():
    """Of a function, a coroutine function and one that takes the whole group."""
    rollouts = make_rollouts(4)
    scores = {
        "correct": by_request([1, 0, 1, 0]),
        "judge": half,
        "length": Scorer(lambda group: [len(rollout.token_ids) for rollout in group], batched=True),
    }
    rewards = rewards_of(Rewards(scores, weights={"length": -0.01, "judge": 2}), rollouts)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    assert rewards == pytest.approx([1 - i % 2 + i - 0.01 * length for i, length in enumerate(lengths)])
    assert [r.rewards for r in rollouts] == [
        {"correct": 1 - i % 2, "judge": 0.5 * i, "length": length} for i, length in enumerate(lengths)
    ]
    assert mean_parts(rollouts) == {"correct": 0.5, "judge": 0.75, "length": sum(lengths) / 4}
    assert make_rollout(header_of(rollouts[3]), vars_of(rollouts[3])).rewards == rollouts[3].rewards


def vars_of(rollout):
    names = ("prompt_token_ids", "token_ids", "logprobs", "weight_versions", "sampled_at_ns")
    return {name: getattr(rollout, name) for name in names}


def test_none_does_not_concern_a_rollout_and_what_is_not_finite_leaves_it_without_a_reward():
    rollouts = make_rollouts(4)
    first, second = by_request([1, None, None, 3]), by_request([2, 5, None, math.inf])
    assert rewards_of(Rewards({"first": first, "second": second}), rollouts) == [3, 5, None, None]
    assert [r.rewards for r in rollouts] == [{"first": 1, "second": 2}, {"second": 5}, {}, {"first": 3}]
    assert mean_parts(rollouts) == {"first": 2, "second": 3.5}


@pytest.mark.parametrize("batched", [False, True])
def test_a_part_that_takes_too_long_leaves_its_rollouts_without_a_reward(batched):
    never = threading.Event()

    def slow(given):
        return never.wait() if batched or given.request_id == 0 else 1.0

    rollouts, quick = make_rollouts(2), by_request([1, 1])
    rewards = Rewards({"slow": Scorer(slow, batched=batched, timeout_s=0.2), "quick": quick})
    assert rewards_of(rewards, rollouts) == [None, None if batched else 2]
    assert [rollout.rewards.get("quick") for rollout in rollouts] == [1, 1]
    never.set()


def test_all_parts_are_computed_at_the_same_time():
    together = threading.Barrier(2)
    part = lambda rollout: together.wait(20) * 0 + 1.0  # noqa: E731
    assert rewards_of(Rewards({"a": part, "b": part}), make_rollouts(1)) == [2]


def test_a_part_that_raises_leaves_its_rollout_without_a_reward():
    def broken(rollout):
        return 1.0 / rollout.request_id

    rollouts = make_rollouts(2)
    rewards = Rewards({"a": by_request([1, 1]), "b": broken})
    assert rewards_of(rewards, rollouts) == [None, 2]
    assert [rollout.rewards for rollout in rollouts] == [{"a": 1}, {"a": 1, "b": 1}]
    assert rewards.failures == {"error: ZeroDivisionError": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "at least one score function"),
        (({"a": half}, {"b": 1.0}), "weights names b; the score functions are a"),
        (({"a": half}, {"a": math.nan}), "weights must be finite, got {'a': nan}"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    scores, *weights = arguments
    with pytest.raises(ValueError, match=message):
        Rewards(scores, weights=weights[0] if weights else None)
