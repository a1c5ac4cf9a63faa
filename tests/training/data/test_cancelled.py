"""Samples that were cancelled or failed: their group continues without them, and no loop ends without a word."""

import warnings

import pytest
from made_frames import Wire, make_frame

from inflight.core.frames import Finish, GroupStart
from inflight.core.sampling import SamplingParams
from inflight.training.data.rewards import Rewards
from inflight.training.data.scored_groups import Dropped
from inflight.training.data.scoring import Scorer
from inflight.training.data.staleness_filter import StalenessRule


def send(wire: Wire, *reasons: list[str], **params: float) -> None:
    """One group for each list of finish reasons. Its samples have one token each."""
    starts, finishes, count = [], [], 0
    for group_id, of_group in enumerate(reasons):
        starts.append(GroupStart(group_id, count, [1], SamplingParams(n=len(of_group), **params)))
        finishes += [Finish(count + sample, reason, 1) for sample, reason in enumerate(of_group)]
        count += len(of_group)
    wire.stream.ledger.expect(range(len(reasons)))
    wire.send(make_frame(count, 0, groups=starts, finishes=finishes, next_group_id=len(reasons)))


def by_request(rollout):
    return float(rollout.request_id)


def quietly(batches):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(batches)


def test_a_group_continues_without_a_cancelled_sample(wire):
    seen = []
    send(wire, ["stop", "cancelled", "length", "stop"], ["stop", "stop", "stop", "cancelled"])
    score = lambda rollout: seen.append(rollout.request_id) or by_request(rollout)  # noqa: E731
    [batch] = quietly(wire.stream.batches(rollouts=6, score=score))
    assert [rollout.request_id for rollout in batch.rollouts] == [0, 2, 3, 4, 5, 6]
    assert sorted(seen) == [0, 2, 3, 4, 5, 6]  # no score of a sample without an end
    assert batch.advantages[batch.drawn].tolist()[:3] == pytest.approx([-1.336, 0.267, 1.069], abs=1e-3)
    assert (batch.totals.num_sequences, wire.stream.dropped) == (6, Dropped(num_failed_rollouts=2, **counted(6)))
    assert str(wire.stream.dropped) == "2 rollouts failed"


def counted(tokens: int) -> dict[str, int]:
    return {"num_rollouts": tokens, "num_tokens": tokens, "sum_lengths": tokens, "sum_kept_lengths": tokens}


def test_a_sample_that_ended_with_an_error_is_named_and_never_trained_on(wire, caplog):
    send(wire, ["stop", "error", "stop"])
    [batch] = quietly(wire.stream.batches(rollouts=3, score=Scorer(by_request, cancelled=True)))
    assert [rollout.request_id for rollout in batch.rollouts] == [0, 2]
    assert "group 0 continues without samples that ended with an error: requests [1]" in caplog.text


@pytest.mark.parametrize("batched", [False, True])
def test_cancelled_samples_have_a_reward_where_that_is_wanted(wire, batched):
    function = (lambda rollouts: [by_request(r) for r in rollouts]) if batched else by_request
    send(wire, ["stop", "cancelled", "cancelled"], ["cancelled", "cancelled", "error"])
    scorer = Scorer(function, batched=batched, cancelled=True)
    [batch] = quietly(wire.stream.batches(rollouts=5, score=scorer))
    assert [rollout.reward for rollout in batch.rollouts] == [0, 1, 2, 3, 4]
    assert {rollout.finish_reason for rollout in batch.rollouts[1:]} == {"cancelled"}


def test_one_of_several_score_functions_takes_cancelled_samples(wire):
    send(wire, ["stop", "cancelled", "stop"])
    scores = Rewards({"process": Scorer(lambda r: 10.0 + r.request_id, cancelled=True), "result": by_request})
    [batch] = quietly(wire.stream.batches(rollouts=3, score=scores))
    assert [rollout.reward for rollout in batch.rollouts] == [10, 11, 14]
    assert batch.rollouts[1].rewards == {"process": 11}


def test_fewer_than_two_members_are_no_group(wire):
    send(wire, ["stop", "cancelled", "cancelled"], ["stop", "stop", "cancelled"], ["cancelled"] * 3)
    [batch] = wire.stream.batches(rollouts=9, score=by_request)
    assert [rollout.request_id for rollout in batch.rollouts] == [3, 4]
    dropped = wire.stream.dropped
    assert (dropped.num_failed_groups, dropped.num_failed_rollouts) == (2, 1)


def test_a_group_of_one_sample_needs_no_other(wire):
    send(wire, ["stop"], ["cancelled"], ["stop"])
    [batch] = quietly(wire.stream.batches(rollouts=9, score=by_request, advantages="reinforce++"))
    assert [rollout.request_id for rollout in batch.rollouts] == [0, 2]


def test_cancelled_samples_that_have_no_reward_fail_their_group_by_name(wire):
    send(wire, ["cancelled", "cancelled"], ["stop", "cancelled"])
    with pytest.warns(UserWarning, match=r"ended without a batch: all .* was left out: 2 groups failed$"):
        assert list(wire.stream.batches(rollouts=4, score=by_request)) == []
    assert "nan" not in str(wire.stream.dropped)


def test_an_end_without_a_batch_says_why(wire):
    with pytest.warns(UserWarning, match=r"batches\(\) ended without a batch: nothing was submitted for training"):
        assert list(wire.stream.batches(rollouts=4, score=by_request)) == []
    send(wire, ["stop", "stop"])
    with pytest.warns(UserWarning, match="1 groups had no reward, 2 rollouts had no reward$"):
        assert list(wire.stream.batches(rollouts=4, score=lambda rollout: None)) == []


def test_an_end_without_a_batch_because_of_rules_or_greedy_prompts_says_so(tmp_path):
    for name, params, options, message in (
        (
            "old",
            {},
            {"staleness": [StalenessRule(max_age_ms=1e-6, action="reject")]},
            "100.0% of 2 tokens were too old",
        ),
        ("greedy", {"temperature": 0.0}, {}, r"1 groups were drawn greedily \(temperature 0\)"),
    ):
        (tmp_path / name).mkdir()
        wire = Wire(tmp_path / name)
        send(wire, ["stop", "stop"], **params)
        with pytest.warns(UserWarning, match=message):
            assert list(wire.stream.batches(rollouts=2, score=by_request, **options)) == []
        wire.close()


def test_an_end_after_a_batch_is_the_end(wire):
    send(wire, ["stop", "stop"], ["cancelled", "stop"])
    assert len(quietly(wire.stream.batches(rollouts=2, score=by_request))) == 1


def test_nothing_left_out_is_a_word():
    assert str(Dropped()) == "nothing"
    everything = Dropped(num_stale_tokens=4, num_tokens=4, num_rollouts=1, num_stale_rollouts=1, sum_lengths=16)
    assert str(everything) == "100.0% of 4 tokens were too old (0 masked, 1 of 1 rollouts rejected)"


@pytest.mark.parametrize(
    ("reasons", "score", "message"),
    [
        ([["stop"]] * 4, by_request, r"every group has one sample \(n=1\), .*SamplingParams\(n=8\)"),
        ([["stop", "stop"]] * 2, lambda r: 0.25, "all 4 rewards of a batch are 0.25. All advantages are 0"),
        ([["stop"]] * 4, lambda r: 1.0, "all 4 rewards of a batch are 1.0, and every group has one sample"),
    ],
    ids=["n=1", "equal", "both"],
)
def test_a_batch_without_an_advantage_is_told_once(wire, reasons, score, message):
    send(wire, *reasons)
    batches = wire.stream.batches(rollouts=4, score=score)
    with pytest.warns(UserWarning, match=message):
        batch = next(batches)
    assert not batch.advantages.any()


def test_groups_of_equal_rewards_are_told_after_three_batches_and_again_after_others(wire):
    rewards = iter([0, 0, 1, 1] * 4 + [0, 1, 1, 1] + [1, 1, 0, 0] * 3)
    send(wire, *[["stop", "stop"]] * 16)
    batches = wire.stream.batches(rollouts=4, score=Scorer(lambda group: [next(rewards) for _ in group], batched=True))
    warned = []
    for _ in range(8):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            next(batches)
        warned.append(len(found))
    assert warned == [0, 0, 1, 0, 0, 0, 0, 1]


def test_advantages_that_need_no_group_are_no_reason_to_warn(wire):
    send(wire, *[["stop"]] * 4)
    [batch] = quietly(wire.stream.batches(rollouts=4, score=by_request, advantages="reinforce++"))
    assert batch.advantages.any()


def test_rewards_by_no_name_are_refused_with_what_to_write():
    with pytest.raises(TypeError, match=r'got list: write Rewards\(\{"name": function'):
        Rewards([by_request])
