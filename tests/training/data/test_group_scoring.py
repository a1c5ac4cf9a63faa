"""Which scorer scores which group, and that nothing is remembered of groups that have left the stream."""

import threading

import pytest
from made_frames import ends, make_frame, starts

from inflight.training.data.scoring import Scorer


def arrive(wire, group_ids, sequence=0):
    """These groups of one sample start and end with one frame."""
    frame = make_frame(max(group_ids) + 1, sequence, groups=starts(*group_ids), finishes=ends(*group_ids))
    wire.send(frame)


def by_group(rollout):
    return float(rollout.group_id)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_remembered_of_groups_that_were_dropped_or_taken_by_name(wire, when):
    """Before and after they have been scored."""
    begun, may_end, calls = threading.Event(), threading.Event(), []

    def score(rollout):
        calls.append(rollout.group_id)
        begun.set()
        may_end.wait(20)
        return by_group(rollout)

    wire.stream.expect([0, 1, 2, 3])
    batches = wire.stream.batches(rollouts=1, score=Scorer(score, workers=4))
    if when == "after":
        may_end.set()
    arrive(wire, [3], 0)
    if when == "after":
        assert next(batches).rollouts[0].reward == 3
    else:
        wire.stream._scoring.score_with(score)
    arrive(wire, [0, 1, 2], 1)
    begun.wait(20)
    wire.stream.drop([0])
    assert wire.stream.collect([1])[0][0].group_id == 1
    may_end.set()
    assert {rollout.group_id for batch in batches for rollout in batch.rollouts} <= {2, 3}
    assert wire.stream.outstanding == []
    assert wire.stream._scoring._scorings == {}


def test_a_group_that_another_scorer_is_busy_with_is_scored_by_the_one_that_was_asked_for_last(wire):
    may_end = threading.Event()
    wire.stream.expect([0])
    slow, quick = Scorer(lambda rollout: may_end.wait(20) and -1.0), Scorer(by_group)
    wire.stream._scoring.score_with(slow)
    arrive(wire, [0])
    [group] = wire.stream.groups(score=quick)
    may_end.set()
    assert group[0].reward == 0


def test_a_score_function_that_raised_is_called_again_and_what_it_raised_is_raised_once(wire):
    errors = [ConnectionError("the judge is away")]

    def score(rollout):
        if errors:
            raise errors.pop()
        return 1.0

    wire.stream.expect([0])
    arrive(wire, [0])
    scorer = Scorer(score)
    with pytest.raises(ConnectionError):
        next(wire.stream.groups(score=scorer))
    assert wire.stream.outstanding == [0]
    assert [group[0].reward for group in wire.stream.groups(score=scorer)] == [1.0]
