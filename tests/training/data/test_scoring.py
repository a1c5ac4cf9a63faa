"""Rewards beside training: who calls the score function, when, and what becomes of those that fail; which scorer scores
which group, and that nothing is remembered of groups that have left the stream."""

import asyncio
import gc
import logging
import re
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from made_frames import Wire, ends, make_frame, starts
from waiting import wait_until

from inflight.core.errors import ScoreError
from inflight.core.frames import Finish
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.stream.group_table import GroupRecord, Owner, State
from inflight.training.data.group_scoring import GroupScoring
from inflight.training.data.scored_groups import Dropped
from inflight.training.data.scoring import _REMEMBERED, Scorer


def send_groups(wire, count):
    """Groups 0 … count − 1 of one sample of one token, in one frame."""
    ids = list(range(count))
    wire.stream.ledger.expect(ids)
    wire.send(make_frame(count, 0, groups=starts(*ids), finishes=ends(*ids), next_group_id=count))


def batches(wire, score, rollouts=2):
    return wire.stream.batches(rollouts=rollouts, score=score)


def rewards(batches):
    return sorted(rollout.reward for batch in batches for rollout in batch.rollouts)


def by_group(rollout):
    return float(rollout.group_id)


async def awaited(rollout):
    await asyncio.sleep(0.001)
    return float(rollout.group_id)


class Callable:
    async def __call__(self, rollout):
        return float(rollout.group_id)


@pytest.mark.parametrize(
    "score",
    [
        by_group,
        awaited,
        Callable(),
        Scorer(by_group),
        Scorer(lambda rollouts: [by_group(rollout) for rollout in rollouts], batched=True),
    ],
    ids=["function", "coroutine", "object", "scorer", "batched"],
)
def test_every_rollout_gets_its_own_reward(wire, score):
    send_groups(wire, 5)
    assert rewards(batches(wire, score)) == [0, 1, 2, 3, 4]
    assert wire.stream.dropped.num_unscored_rollouts == 0


def test_scores_are_computed_at_the_same_time_and_while_the_trainer_is_busy(wire):
    together = threading.Barrier(6)  # returns when six calls are under way

    def score(rollout):
        together.wait(20)
        return 1.0

    send_groups(wire, 6)
    iterator = batches(wire, score, rollouts=1)
    assert next(iterator).rollouts[0].reward == 1.0
    assert len(list(iterator)) == 5

    seen = []
    wire.stream.ledger.expect([6, 7])
    iterator = batches(wire, lambda rollout: seen.append(rollout.group_id) or 1.0, rollouts=1)
    wire.send(make_frame(7, 1, groups=starts(6), finishes=ends(6), next_group_id=7))
    next(iterator)
    wire.send(make_frame(8, 2, groups=starts(7), finishes=ends(7), next_group_id=8))
    wait_until(lambda: seen == [6, 7])  # nobody asks for the next batch
    assert len(list(iterator)) == 1


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")], ids=str)
def test_a_rollout_without_a_reward_is_left_out_and_counted(wire, missing):
    send_groups(wire, 5)
    assert rewards(batches(wire, lambda r: missing if r.group_id == 2 else by_group(r))) == [0, 1, 3, 4]
    dropped = wire.stream.dropped
    assert (dropped.num_unscored_rollouts, dropped.num_unscored_groups, dropped.num_failed_groups) == (1, 1, 0)


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "task"])
def test_a_score_that_takes_too_long_costs_its_rollout_alone(wire, caplog, is_async):
    never = threading.Event()

    def hang(rollout):
        return never.wait() if rollout.group_id == 1 else by_group(rollout)

    async def ahang(rollout):
        await asyncio.sleep(3600 if rollout.group_id == 1 else 0)
        return by_group(rollout)

    send_groups(wire, 4)
    with caplog.at_level(logging.WARNING):
        assert rewards(batches(wire, Scorer(ahang if is_async else hang, timeout_s=0.3))) == [0, 2, 3]
    assert "a score took longer than 0.3 s" in caplog.text
    assert wire.stream.failures == {"error: TimeoutError": 1}
    assert wire.stream.dropped.num_unscored_rollouts == 1
    never.set()


def test_advantages_of_batches_are_a_choice(wire):
    send_groups(wire, 4)
    [batch] = wire.stream.batches(rollouts=4, score=by_group, advantages="reinforce++")
    assert sorted(batch.advantages[batch.drawn].tolist()) == pytest.approx([-1.3415, -0.4472, 0.4472, 1.3415], abs=1e-3)
    with pytest.raises(ValueError, match="unknown advantages 'best'"):
        next(wire.stream.batches(rollouts=4, score=by_group, advantages="best"))


def scorer_of(score, kind):
    """A scorer that calls the function in a thread, as a task, one call at a time, or for whole groups."""

    async def ascore(rollout):
        return score(rollout)

    functions = {"task": ascore, "batched": lambda group: [score(rollout) for rollout in group]}
    scorer = Scorer(functions.get(kind, score), batched=kind == "batched")
    if kind == "in turn":
        scorer._seconds.extend([0.0] * _REMEMBERED)
    return scorer


@pytest.mark.parametrize("kind", ["thread", "task", "in turn", "batched"])
def test_a_score_that_raises_costs_its_rollout_alone(wire, caplog, kind):
    def score(rollout):
        if rollout.group_id in (1, 3):
            raise ConnectionError("the judge is away")
        return by_group(rollout)

    scorer = scorer_of(score, kind)
    send_groups(wire, 6)
    assert rewards(batches(wire, scorer)) == [0, 2, 4, 5]
    assert wire.stream.outstanding == []
    assert wire.stream.dropped.num_unscored_rollouts == 2
    assert wire.stream.failures == {"error: ConnectionError": 2}
    assert caplog.text.count("ConnectionError: the judge is away") == 1  # the second is logged at INFO


@pytest.mark.parametrize("kind", ["thread", "task", "in turn", "batched"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StopIteration, "raised StopIteration"),
        (asyncio.CancelledError, r"raised CancelledError\(\)|was cancelled"),
        (CancelledError, "was cancelled"),
        (SystemExit, "raised SystemExit"),
        (KeyboardInterrupt, "raised KeyboardInterrupt"),
    ],
)
def test_an_exception_that_a_future_cannot_hold_costs_its_rollout_alone(caplog, kind, error, reason):
    def score(rollout):
        if rollout.sample == 1:
            raise error
        return float(rollout.sample)

    scorer = scorer_of(score, kind)
    assert scorer.start(group_of(0, 3)).result(300) == ([None] * 3 if kind == "batched" else [0.0, None, 2.0])
    assert scorer.failures == {"error: RuntimeError": 1}
    assert re.search(reason, caplog.text)
    scorer.close()


def test_a_scorer_that_is_closed_cancels_the_scores_in_progress():
    async def never(rollout):
        await asyncio.sleep(3600)

    scorer = Scorer(never)
    rewards = scorer.start(group_of(0, 2))
    scorer.close()
    with pytest.raises(CancelledError):
        rewards.result(300)
    assert not scorer.failures


def test_calls_in_turn_go_on_after_one_that_raises():
    def score(rollout):
        return 1 / rollout.sample

    scorer = Scorer(score)
    scorer._seconds.extend([0.0] * _REMEMBERED)
    assert scorer.start(group_of(0, 3)).result(20) == [None, 1.0, 0.5]
    assert scorer.failures == {"error: ZeroDivisionError": 1}
    scorer.close()


def test_scores_are_computed_again_after_exceptions_that_allow_it(wire):
    calls = []

    def score(rollout):
        calls.append(rollout.group_id)
        if rollout.group_id == 0 or calls.count(1) == 1 == rollout.group_id:
            raise ConnectionError("try again")
        return by_group(rollout)

    send_groups(wire, 3)
    assert rewards(batches(wire, Scorer(score, retries={OSError: 2}))) == [1, 2]
    assert sorted(calls) == [0, 0, 0, 1, 1, 2]
    assert wire.stream.failures == {"error: ConnectionError": 1, "retries: ConnectionError": 3}


@pytest.mark.parametrize(("retries", "error"), [({int: 1}, TypeError), ({OSError: -1}, ValueError)])
def test_retries_that_cannot_be(retries, error):
    with pytest.raises(error, match="retries must"):
        Scorer(by_group, retries=retries)


def test_a_batch_without_a_score_raises_and_loses_nothing(wire):
    """Of four groups the first batch takes two, and the others are taken after it."""
    away = [True]

    def score(rollout):
        if away:
            raise ConnectionError("the judge is away")
        return by_group(rollout)

    send_groups(wire, 4)
    scorer = Scorer(score)
    for _ in range(2):
        with pytest.raises(ScoreError, match=r"ConnectionError: the judge is away.*'error: ConnectionError'"):
            next(batches(wire, scorer))
        wait_until(lambda: not wire.stream.scoring._busy)
    away.clear()
    assert rewards(batches(wire, scorer)) == [0, 1, 2, 3]
    assert wire.stream.outstanding == []
    assert wire.stream.dropped.num_unscored_groups == 0


def test_failures_after_the_last_whole_batch_do_not_raise(wire):
    def score(rollout):
        return 1 / (rollout.group_id < 2)

    send_groups(wire, 3)
    assert rewards(batches(wire, score)) == [1, 1]
    assert wire.stream.dropped.num_unscored_groups == 1


def test_an_interrupt_while_a_batch_is_put_together_loses_nothing(wire, monkeypatch):
    def score(rollout):
        return None if rollout.group_id == 0 else by_group(rollout)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    send_groups(wire, 4)
    with monkeypatch.context() as patched:
        patched.setattr("inflight.training.data.scored_groups.pack", interrupt)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                next(batches(wire, score, rollouts=3))
    assert wire.stream.dropped == Dropped()
    assert rewards(batches(wire, score, rollouts=3)) == [1, 2, 3]
    assert wire.stream.dropped.num_unscored_groups == 1  # counted once, when it was left out


def test_rewards_of_another_function_are_not_taken_for_those_that_were_asked_for(wire):
    send_groups(wire, 6)
    first = batches(wire, by_group, rollouts=2)
    assert rewards([next(first)]) == [0, 1]
    time.sleep(0.1)  # the others are scored by now
    assert rewards(batches(wire, lambda rollout: -by_group(rollout), rollouts=2)) == [-5, -4, -3, -2]


def test_what_is_not_submitted_for_training_is_not_trained_on(wire):
    wire.stream.ledger.expect([0, 2])
    wire.stream.ledger.expect([1, 3], reserved=True)
    wire.send(make_frame(4, 0, groups=starts(0, 1, 2, 3), finishes=ends(0, 1, 2, 3), next_group_id=4))
    assert rewards(batches(wire, by_group)) == [0, 2]
    assert wire.stream.outstanding == [1, 3]
    assert sorted(group[0].group_id for group in wire.stream.groups([3, 1])) == [1, 3]
    assert wire.stream.outstanding == []


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda rollout: "good", "the score function returned 'good', expected a number or None"),
        (Scorer(lambda rollouts: [1.0, 2.0], batched=True), "returned 2 rewards for the 1 rollouts of a group"),
    ],
)
def test_what_is_no_reward_is_named(wire, score, message):
    send_groups(wire, 1)
    with pytest.raises(ScoreError, match=message):
        next(batches(wire, score))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"workers": 0}, "workers must be at least 1, got 0"), ({"timeout_s": 0}, "timeout_s must be positive, got 0")],
)
def test_settings_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scorer(by_group, **arguments)
    with pytest.raises(TypeError, match=r"Scorer\.score must be a function, got 3"):
        Scorer(3)
    with pytest.raises(ValueError, match="processes must be at least 0, got -1"):
        Scorer(by_group, processes=-1)
    with pytest.raises(ValueError, match="an async score function waits rather than computes"):
        Scorer(awaited, processes=1)


def test_quick_functions_score_a_group_in_one_thread_and_a_slow_call_among_them_costs_one_rollout(monkeypatch):
    """Once the function has been quick for some calls, and until it is slow. No rollout is scored twice."""
    monkeypatch.setattr("inflight.training.data.scoring._IN_TURN_S", 100.0)
    monkeypatch.setattr("inflight.core.workers._IDLE_S", 0.05)
    threads, never = [], threading.Event()

    def score(rollout):
        threads.append(threading.current_thread())
        if rollout.group_id == 100 and rollout.sample == 2:
            never.wait()
        return float(rollout.sample)

    scorer = Scorer(score, timeout_s=0.5)
    for group_id in (0, 1, 2, 100):
        scores = scorer.start(group_of(group_id, _REMEMBERED)).result(20)
        expected = [None if (group_id, sample) == (100, 2) else sample for sample in range(_REMEMBERED)]
        assert scores == expected
    assert len(set(threads[2 * _REMEMBERED : 3 * _REMEMBERED])) == 1
    assert scorer.failures == {"error: TimeoutError": 1}
    never.set()
    for thread in set(threads):
        thread.join(300)
    assert len(threads) == 4 * _REMEMBERED
    scorer.close()


def test_quick_functions_that_become_slow_score_the_rest_of_a_group_at_the_same_time():
    together = threading.Barrier(_REMEMBERED - 1)

    def score(rollout):
        time.sleep(0.05) if rollout.sample == 0 else together.wait(20)
        return 1.0

    scorer = scorer_of(score, "in turn")
    assert scorer.start(group_of(0, _REMEMBERED)).result(300) == [1.0] * _REMEMBERED
    scorer.close()


def group_of(group_id, count):
    nothing = np.empty(0)
    return [
        Rollout(
            index, group_id, index, SamplingParams(n=count), {}, nothing, nothing, nothing, nothing, nothing, "stop"
        )
        for index in range(count)
    ]


def arrive(wire, group_ids, sequence=0):
    """These groups of one sample start and end with one frame."""
    frame = make_frame(max(group_ids) + 1, sequence, groups=starts(*group_ids), finishes=ends(*group_ids))
    wire.send(frame)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_remembered_of_groups_that_were_dropped_or_taken_by_name(wire, when):
    """Before and after they have been scored."""
    begun, may_end, calls = threading.Event(), threading.Event(), []

    def score(rollout):
        calls.append(rollout.group_id)
        begun.set()
        may_end.wait(20)
        return by_group(rollout)

    wire.stream.ledger.expect([0, 1, 2, 3])
    batches = wire.stream.batches(rollouts=1, score=Scorer(score, workers=4))
    if when == "after":
        may_end.set()
    arrive(wire, [3], 0)
    if when == "after":
        assert next(batches).rollouts[0].reward == 3
    else:
        wire.stream.scoring.score_with(score)
    arrive(wire, [0, 1, 2], 1)
    begun.wait(20)
    wire.stream.ledger.drop([0])
    assert wire.stream.collect([1])[0][0].group_id == 1
    may_end.set()
    assert {rollout.group_id for batch in batches for rollout in batch.rollouts} <= {2, 3}
    assert wire.stream.outstanding == []
    wait_until(lambda: not wire.stream.scoring._busy)


def test_a_group_that_another_scorer_is_busy_with_is_scored_by_the_one_that_was_asked_for_last(wire):
    may_end = threading.Event()
    wire.stream.ledger.expect([0])
    slow, quick = Scorer(lambda rollout: may_end.wait(20) and -1.0), Scorer(by_group)
    wire.stream.scoring.score_with(slow)
    arrive(wire, [0])
    [group] = wire.stream.groups(score=quick)
    may_end.set()
    assert group[0].reward == 0


class SlowAfterwards:
    """A lock after whose release one thread sleeps: whatever waits for it goes first."""

    def __init__(self):
        self._lock, self._sleeper = threading.Lock(), threading.current_thread()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()
        if threading.current_thread() is self._sleeper:
            time.sleep(0.2)


@pytest.mark.medium
def test_a_scoring_that_is_cancelled_while_another_scorer_takes_over_does_not_make_its_group_ready():
    ready, never = [], threading.Event()
    group = GroupRecord(0, Owner.TRAINING, State.FINISHED, group_of(0, 1))
    queue = SimpleNamespace(ready=lambda record: ready.append(record.rollouts[0].reward))
    ledger = SimpleNamespace(queue=queue)
    scoring = GroupScoring(ledger, prepare=lambda group: None)
    try:
        scoring.score_with(lambda rollout: never.wait() and -1.0)
        scoring.start_if_wanted(group)
        scoring._lock = SlowAfterwards()
        scorer = scoring.score_with(lambda rollout: 1.0)  # which closes the first scorer
        wait_until(lambda: ready)
        assert ready == [1.0]
        assert scoring.has_rewards(group, scorer)
    finally:
        never.set()
        scoring.close()


def test_groups_in_order_wait_for_those_before_them_but_not_for_what_nobody_wants(tmp_path):
    """Group 0 is dropped while it is scored; group 2 has failed and gets no rewards, and comes in its turn."""
    wire, may_end = Wire(tmp_path, in_order=True), [threading.Event() for _ in range(5)]

    def score(rollout):
        may_end[rollout.group_id].wait(20)
        return by_group(rollout)

    try:
        wire.stream.ledger.expect(range(5))
        groups = wire.stream.groups(score=score)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(next, groups)
            arrive(wire, [0, 1])
            wire.send(make_frame(3, 1, groups=starts(2), finishes=[Finish(2, "error", 1)]))
            arrive(wire, [3, 4], 2)
            for number in (4, 3, 0):
                wire.stream.ledger.drop([0] if number == 0 else [])
                may_end[number].set()
            time.sleep(0.1)
            assert not first.done()
            may_end[1].set()
            assert first.result(20)[0].group_id == 1
        assert [(group[0].group_id, group[0].reward) for group in groups] == [(2, None), (3, 3.0), (4, 4.0)]
        assert not wire.stream.scoring._queue
        wait_until(lambda: not wire.stream.scoring._busy)
    finally:
        wire.close()


def test_a_taken_group_is_freed_at_once(wire):
    """Its scoring refers to its record, which the garbage collector might find minutes later."""
    wire.stream.ledger.expect([0])
    arrive(wire, [0], 0)
    gc.disable()
    try:
        taken = wire.stream.batches(rollouts=1, score=by_group)
        batch = next(taken)
        tokens = weakref.ref(batch.rollouts[0].token_ids)
        del batch
        taken.close()
        wait_until(lambda: tokens() is None)
    finally:
        gc.enable()
