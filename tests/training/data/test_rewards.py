"""Several score functions: what each gave, their weighted sum, and who has no reward."""

import asyncio
import math
import threading

import pytest
from made_batches import make_rollouts
from made_frames import Wire, ends, make_frame, starts
from waiting import wait_until

from inflight.core.errors import ScoreError
from inflight.core.messages import Prompt
from inflight.core.rollout import Turn
from inflight.core.sampling import SamplingParams
from inflight.stream.rollout_codec import header_of, make_rollout
from inflight.training.data.rewards import Rewards, mean_parts
from inflight.training.data.scoring import Scorer


@pytest.fixture
def wire(tmp_path):
    made = Wire(tmp_path)
    yield made
    made.close()


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


def steps(rollout):
    rollout.turns = (Turn(0, len(rollout.token_ids), True, 1.0),)
    return 1.0


def finish_groups(wire):
    """Groups 0 and 1 of one sample finish."""
    wire.stream.ledger.expect([0, 1])
    wire.send(make_frame(2, 0, groups=starts(0, 1), finishes=ends(0, 1), next_group_id=2))


def rewards_of_batches(wire, score):
    batches = wire.stream.batches(rollouts=2, score=score, advantages="reinforce++")
    return [rollout.reward for batch in batches for rollout in batch.rollouts]


def test_rollouts_whose_turns_a_part_has_set_are_scored_again_after_a_failure(wire):
    is_down = True

    def judge(rollout):
        if is_down:
            raise ConnectionError("down")
        return float(rollout.group_id)

    finish_groups(wire)
    score = Rewards({"steps": steps, "judge": judge})
    with pytest.raises(ScoreError, match="down"):
        rewards_of_batches(wire, score)
    is_down = False
    assert sorted(rewards_of_batches(wire, score)) == [1.0, 2.0]
    score.close()


def test_rollouts_whose_turns_a_part_has_set_are_scored_again_after_a_save(wire, tmp_path_factory):
    judged, go = threading.Barrier(3), threading.Event()

    def judge(rollout):
        judged.wait(20)
        go.wait(20)
        return 0.5

    engines = wire.stream.ledger.engines
    with wire.stream.ledger.table.lock:
        for _ in range(2):
            engines.begin(Prompt([1], SamplingParams()), None)
    in_progress = Rewards({"steps": steps, "judge": judge})
    wire.stream.scoring.score_with(in_progress)
    finish_groups(wire)
    judged.wait(20)
    wait_until(lambda: all(r.turns for record in wire.stream.ledger.table.records.values() for r in record.rollouts))
    saved = engines.snapshot()
    assert [rollout.reward for group in saved for rollout in group.rollouts] == [None, None]
    other = Wire(tmp_path_factory.mktemp("other"))
    other.stream.ledger.engines.restore(saved, engines.next_ids)
    score = Rewards({"steps": steps, "judge": lambda rollout: 2.0})
    assert rewards_of_batches(other, score) == [3.0, 3.0]
    go.set()
    for each in (in_progress, score, other):
        each.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "at least one score function"),
        (({"a": half, 0: half},), r"names of score functions must be strings, got \[0\]"),
        (({"a": half}, {"b": 1.0}), "weights names b; the score functions are a"),
        (({"a": half}, {"a": math.nan}), "weights must be finite, got {'a': nan}"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    scores, *weights = arguments
    with pytest.raises((TypeError, ValueError), match=message):
        Rewards(scores, weights=weights[0] if weights else None)


def test_parts_of_an_episode_count_once_however_many_sequences_it_has():
    rollouts = make_rollouts(3)
    for rollout, sample, correct in zip(rollouts, (0, 0, 1), (1.0, 1.0, 0.0), strict=True):
        rollout.group_id, rollout.sample, rollout.rewards = 0, sample, {"correct": correct}
        rollout.turns = (Turn(0, len(rollout.token_ids), True, None),)
    assert mean_parts(rollouts) == {"correct": 0.5}
