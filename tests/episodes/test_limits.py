"""Limits, failures and cancellations of episodes end by a stated rule and are counted by name."""

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from episode_functions import PARAMS, collect, three_turns
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.core.errors import InflightError
from inflight.core.failures import Failures
from inflight.episodes.playing import settle


def outcome(engine, rollout, *, limits=None, n=4, **options):
    params = inflight.SamplingParams(n=n, max_tokens=5, ignore_eos=True)
    episodes = inflight.Episodes(engine, rollout, limits=limits, **options)
    [group] = collect(engine, episodes, [[1, 2, 3]], params)
    return group, episodes.counts


async def endless(session, row):
    tokens = list(row)
    while True:
        reply = await session.complete(tokens)
        session.reward(1.0)
        tokens += [*reply.token_ids, 3]


@pytest.mark.parametrize(
    ("limits", "reason", "turns", "drawn"),
    [
        ({"max_turns": 3}, "max_turns", 3, 15),
        ({"max_tokens": 12}, "max_tokens", 3, 12),
        ({}, "context", 21, 105),
    ],
)
@pytest.mark.parametrize(("at_limit", "reward"), [("keep", 0.0), ("exclude", None), (-2.0, -2.0)])
def test_a_limit_ends_an_episode_by_a_stated_rule(engine, limits, reason, turns, drawn, at_limit, reward):
    group, counts = outcome(engine, endless, limits=inflight.Limits(at_limit=at_limit, **limits), n=2)
    assert counts[reason] == 2
    for rollout in group:
        assert sum(turn.drawn for turn in rollout.turns) == turns
        assert rollout.num_drawn in (drawn, drawn - 2)
        assert rollout.reward == (None if reward is None else turns + reward)
        assert rollout.finish_reason == ("cancelled" if reward is None else "length")


def test_a_rollout_function_can_catch_a_limit_and_return_a_reward(engine):
    async def careful(session, row):
        try:
            await endless(session, row)
        except inflight.EpisodeEnd as end:
            with pytest.raises(inflight.EpisodeEnd, match="max_turns"):
                await session.complete(row)
            return -1.0 if end.reason == "max_turns" else None

    group, counts = outcome(engine, careful, limits=inflight.Limits(max_turns=2))
    assert [rollout.reward for rollout in group] == [1.0] * 4
    assert counts["max_turns"] == 4


def test_a_task_group_ends_as_the_exception_in_it(engine):
    """Also if several of its tasks reach the limit, and with retries of the class of the exception."""
    tries = Counter()

    async def play(session, row):
        tries[session.sample] += 1
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(endless(session, row))
            tasks.create_task(endless(session, [*row, 4]))
            async with asyncio.TaskGroup() as inner:
                inner.create_task(endless(session, [*row, 5]))
                if session.sample == 1 and tries[1] == 1:
                    raise ConnectionError("try again")

    limits = inflight.Limits(max_turns=4)
    group, counts = outcome(engine, play, limits=limits, n=2, retries={ConnectionError: 1})
    assert (counts["max_turns"], counts["retries: ConnectionError"]) == (2, 1), counts
    for sample in (0, 1):
        of_sample = [rollout for rollout in group if rollout.sample == sample]
        drawn = sum(turn.drawn for rollout in of_sample for turn in rollout.turns)
        assert {rollout.reward for rollout in of_sample} == {float(drawn)}


@pytest.mark.medium
def test_slow_tools_and_episodes_end_at_their_limits(engine):
    async def slow(session, row):
        await session.complete(row)
        if session.sample == 0:
            with pytest.raises(TimeoutError, match=r"sleep did not return within 0\.05 s"):
                await session.call(time.sleep, 1.0, timeout_s=0.05)
            with pytest.raises(TimeoutError, match="sleep did not return"):
                await session.call(asyncio.sleep, 1.0)
        if session.sample == 1:
            await asyncio.sleep(100)
        if session.sample == 2:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(100)
        return 1.0

    limits = inflight.Limits(call_s=0.1, episode_s=4.0, cleanup_s=0.2)  # a turn can take a second on a busy machine
    group, counts = outcome(engine, slow, limits=limits, min_share=0.5)
    assert [rollout.reward for rollout in group] == [1.0, None, None, 1.0]
    assert counts["calls that timed out"] == 2
    assert counts["episode_timeout"] == 2
    assert counts["episodes left behind"] == 1


def test_exceptions_are_counted_by_name_and_retried_where_that_is_asked_for(engine, caplog):
    tries = Counter()

    async def fails(session, row):
        tries[session.sample] += 1
        if session.sample == 0:
            raise KeyError("no such key")
        if session.sample == 1 and tries[1] < 3:
            raise ConnectionError("try again")
        await session.complete(row)
        return 1.0

    group, counts = outcome(engine, fails, retries={ConnectionError: 2})
    assert [rollout.reward for rollout in group] == [None, 1.0, 1.0, 1.0]
    assert group[0].finish_reason == "error"
    assert (counts["error: KeyError"], counts["completed"], counts["retries: ConnectionError"]) == (1, 3, 2)
    assert "no such key" in caplog.text


def test_training_ends_if_all_episodes_of_a_step_fail_and_reports_name_those_that_do(own_engine):
    async def fails(session, row):
        await session.complete(row)
        if row[0] or session.sample == 0:
            raise KeyError("no such key")
        return float(session.sample)

    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = inflight.GRPOConfig(steps=3, groups_per_step=1, sampling=PARAMS, schedule="sync")
    with own_engine.publisher(model) as publisher, inflight.Episodes(own_engine, fails) as episodes:
        rows = ([min(index, 1), 3] for index in range(100))
        reports = inflight.grpo(episodes, publisher, model, optimizer, rows, None, config)
        assert next(reports).failures == {"error: KeyError": 1}
        with pytest.raises(InflightError, match=r"2 groups failed .*exceptions: {'error: KeyError': 9}"):
            next(reports)


def test_a_group_needs_a_share_of_its_episodes(engine):
    async def half(session, row):
        await session.complete(row)
        return 1.0 if session.sample % 2 else None

    group, counts = outcome(engine, half)
    assert {rollout.reward for rollout in group} == {None}
    assert counts["groups with too few episodes"] == 1
    group, counts = outcome(engine, half, min_share=0.5)
    assert [rollout.reward for rollout in group] == [None, 1.0, None, 1.0]


def test_a_share_of_a_group_is_not_rounded_up(engine):
    async def some(session, row):
        await session.complete(row)
        return 1.0 if session.sample < 7 else None

    group, counts = outcome(engine, some, n=25, min_share=0.28)
    assert 0.28 * 25 > 7  # in floating point
    assert sum(rollout.reward == 1.0 for rollout in group) == 7
    assert counts["groups with too few episodes"] == 0


@pytest.mark.parametrize("value", [float("nan"), "high", {"a": float("inf")}])
def test_rewards_that_are_no_finite_numbers_fail_the_episode(engine, value):
    async def odd(session, row):
        await session.complete(row)
        return value

    group, counts = outcome(engine, odd)
    assert counts["error: reward"] == 4
    assert {rollout.reward for rollout in group} == {None}


def test_rewards_at_limits_can_be_of_numpy():
    assert inflight.Limits(at_limit=np.float32(0.5), at_timeout=np.int64(-1)).at_limit == 0.5
    with pytest.raises(ValueError, match="a finite number, got"):
        inflight.Limits(at_limit=np.float32("nan"))


def test_named_parts_add_up(engine):
    async def parts(session, row):
        await session.complete(row)
        return {"right": 1.0, "short": 0.25}

    group, _ = outcome(engine, parts)
    assert [rollout.reward for rollout in group] == [1.25] * 4
    assert group[0].rewards == {"right": 1.0, "short": 0.25}


def test_an_episode_that_is_cancelled_before_its_first_turn_is_cancelled(engine):
    async def waits(session, row):
        await asyncio.sleep(100)

    with inflight.Episodes(engine, waits, max_running=2) as episodes:
        ids = episodes.submit([[1]], PARAMS, train=False)
        wait_until(lambda: episodes.counts["attempts"] >= 2)
        episodes.cancel(ids)
        [group] = engine.stream.collect(ids, timeout_s=10)
    assert [rollout.finish_reason for rollout in group] == ["cancelled"] * 4


def test_a_group_that_is_cancelled_before_it_begins_arrives(engine):
    with inflight.Episodes(engine, three_turns) as episodes:
        for _ in range(20):
            ids = episodes.submit([[1]], PARAMS, train=False)
            episodes.cancel(ids)
            [group] = engine.stream.collect(ids, timeout_s=10)
            assert len(group) == 4
            assert {rollout.finish_reason for rollout in group} <= {"cancelled", "length"}


def test_cancelled_groups_arrive_as_cancelled_and_dropped_ones_never(engine):
    async def waits(session, row):
        await session.complete(row)
        await asyncio.sleep(100)

    with inflight.Episodes(engine, waits) as episodes:
        kept, dropped = episodes.submit([[1], [2]], PARAMS, train=False)
        wait_until(lambda: episodes.counts["turns"] >= 8)
        engine.stream.ledger.drop([dropped])
        episodes.cancel()
        [group] = engine.stream.collect([kept], timeout_s=10)
        assert {rollout.finish_reason for rollout in group} == {"cancelled"}
        assert [rollout.num_drawn for rollout in group] == [5] * 4
    assert engine.stream.outstanding == []
    with pytest.raises(inflight.InflightError, match="closed"):
        episodes.submit([[1]], PARAMS)


@pytest.mark.parametrize("reason", ["max_turns", "max_calls", "context", "turn_timeout"])
def test_a_caught_limit_has_the_returned_reward(reason):
    given = []
    session = SimpleNamespace(last=("segment", 0), reward=given.append, total_reward=0.75)
    failures = Failures("an episode", logging.getLogger(), None, Counter())
    assert settle(session, 0.25, reason, inflight.Limits(at_limit=-1.0, at_timeout=-1.0), failures)[0] == 0.75
    assert settle(session, None, reason, inflight.Limits(at_limit=-1.0, at_timeout=-2.0), failures)[0] == 0.75
    assert given == [0.25, -2.0 if reason == "turn_timeout" else -1.0]


def test_an_exit_in_a_rollout_function_or_a_tool_ends_its_episode_alone(engine):
    async def tool():
        raise SystemExit(3)

    async def exits(session, row):
        await session.complete(row)
        if session.sample == 0:
            raise KeyboardInterrupt
        if session.sample == 1:
            await session.call(tool)
        return 1.0

    group, counts = outcome(engine, exits, min_share=0)
    assert [rollout.reward for rollout in group] == [None, None, 1.0, 1.0]
    assert counts["error: RuntimeError"] == 2


def test_turns_in_progress_end_with_their_episode(engine):
    """Also when the rollout function does not wait for them."""
    ends = []

    async def draw(session, row):
        try:
            await session.complete(row)
        finally:
            ends.append(session.sample)

    async def ended(session, row):
        tasks = [asyncio.ensure_future(draw(session, [*row, index])) for index in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        return 1.0

    params = inflight.SamplingParams(n=2, max_tokens=90, ignore_eos=True)
    engine.pause()
    with inflight.Episodes(engine, ended) as episodes:
        ids = episodes.submit([[1, 2, 3]], params, train=False)
        engine.stream.collect(ids, timeout_s=60)
        wait_until(lambda: len(ends) == 6)
        assert episodes.turns._drawn == {}
        engine.resume()
        wait_until(lambda: engine.stream.outstanding == [])
    assert episodes.counts["turns"] == 0


def test_arguments_of_the_model_reach_the_tool_and_nothing_else(engine):
    """Also with the names of the parameters of `Session.call`."""

    def look_up(function: str, self: str, timeout_s: float) -> str:
        return f"{function} {self} {timeout_s}"

    replies = []

    async def calls(session, row):
        reply = await session.complete(row)
        arguments = {"function": "f", "self": "s", "timeout_s": 90}
        request = {"function": {"name": "look_up", "arguments": arguments}}
        named = dataclasses.replace(reply, message={"tool_calls": [request]})
        replies.append(await session.use_tools(named, [look_up]))
        return 1.0

    outcome(engine, calls, n=1)
    assert [message["content"] for [message] in replies] == ["f s 90"]


def test_a_function_that_catches_everything_and_tries_again_ends_at_its_time_limit(engine):
    async def stubborn(session, row):
        while True:
            try:
                await session.complete(row)
            except Exception:
                continue

    limits = inflight.Limits(max_turns=2, episode_s=1.0, cleanup_s=1.0)
    group, counts = outcome(engine, stubborn, limits=limits, n=2)
    assert {rollout.finish_reason for rollout in group} <= {"cancelled", "length"}
    assert sum(counts[reason] for reason in ("episode_timeout", "max_turns")) == 2


@pytest.mark.parametrize("order", [("stop", "length"), ("length", "stop")])
def test_each_sequence_of_an_episode_ends_as_its_own_last_turn(engine, order):
    async def answers(session, row):
        for reason in order:  # half of the first tokens end an answer
            for _ in range(60):
                reply = await session.complete(row, max_tokens=1 if reason == "length" else 40)
                if reply.finish_reason == reason:
                    break
        return float(session.sample)

    params = inflight.SamplingParams(n=2, max_tokens=40, stop_token_ids=tuple(range(0, 199, 2)))
    [group] = collect(engine, inflight.Episodes(engine, answers), [[1, 2, 3]], params)
    for rollout in group:
        assert rollout.finish_reason == rollout.turns[-1].finish_reason
    assert {rollout.finish_reason for rollout in group} == {"length", "stop"}


def test_turns_that_are_cancelled_do_not_count(engine):
    """As when an agent's client gives up and tries again."""

    async def tries_again(session, row):
        engine.pause()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.complete(row), 0.05)
        engine.resume()
        await session.complete(row)
        await session.complete(row)

    group, counts = outcome(engine, tries_again, limits=inflight.Limits(max_turns=1, at_limit=2.0), n=1)
    assert counts["max_turns"] == counts["turns"] == 1, counts
    assert [rollout.reward for rollout in group] == [2.0]
