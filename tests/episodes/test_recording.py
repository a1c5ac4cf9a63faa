"""The record of a run has its episodes."""

import asyncio

import pytest
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.observability import events
from inflight.training.recording import RunRecorder

PARAMS = inflight.SamplingParams(n=2, max_tokens=3, ignore_eos=True)


@pytest.mark.medium
def test_a_recorder_writes_the_counts_of_episodes_while_they_wait_for_tools(engine, tmp_path):
    may_return = asyncio.Event()

    async def tool():
        await may_return.wait()

    async def rollout(session, row):
        await session.complete(row)
        await session.call(tool)
        return 1.0 / session.sample

    def recorded():
        return [event for event in events.read_events(tmp_path) if isinstance(event, events.Episodes)]

    with RunRecorder(engine, tmp_path), inflight.Episodes(engine, rollout) as episodes:
        ids = episodes.submit([[1, 2, 3]], PARAMS, train=False)
        wait_until(lambda: any(event.num_calling == 2 for event in recorded()))
        assert recorded()[-1].num_running == 2
        episodes._loop.call_soon_threadsafe(may_return.set)
        engine.stream.collect(ids, timeout_s=60)
        wait_until(lambda: recorded()[-1].num_running == 0 and recorded()[-1].reward is not None)
        last = recorded()[-1]
    assert last.num_calling == 0
    assert last.reward == 1.0
    assert last.counts["error: ZeroDivisionError"] == last.counts["completed"] == 1
    assert last.counts["turns"] == 2
    assert last.seconds["calls"] > 0
    assert engine.stream.episodes == []


def test_a_recorded_episode_has_no_version_at_given_tokens(engine, tmp_path):
    async def rollout(session, row):
        reply = await session.complete(row)
        await session.complete([*row, *reply.token_ids, 7, 8])
        return float(session.sample)

    with RunRecorder(engine, tmp_path), inflight.Episodes(engine, rollout) as episodes:
        [batch] = engine.stream.batches(rollouts=2, prompts=iter([[1, 2, 3]]), params=PARAMS, episodes=episodes)
        inflight.policy_loss(make_model("qwen3"), batch)
    [samples] = [event for event in events.read_events(tmp_path) if isinstance(event, events.Samples)]
    for shown in samples.rollouts:
        assert [version is None for version in shown.versions] == [False] * 3 + [True] * 2 + [False] * 3
        assert [ratio is None for ratio in shown.log_ratios] == [False] * 3 + [True] * 2 + [False] * 3


def test_a_recorded_episode_has_its_turns_and_its_branch(engine, tmp_path):
    async def rollout(session, row):
        reply = await session.complete(row)
        session.reward(0.25)
        await session.complete([*row, *reply.token_ids, 7, 8])
        session.reward(0.5)
        await session.complete([*row, *reply.token_ids[:2]])
        return float(session.sample)

    with RunRecorder(engine, tmp_path) as recorder, inflight.Episodes(engine, rollout) as episodes:
        [batch] = engine.stream.batches(rollouts=2, prompts=iter([[1, 2, 3]]), params=PARAMS, episodes=episodes)
        for part in batch.micro_batches(12):
            inflight.policy_loss(make_model("qwen3"), part)
        recorder.log(1, {})
    [samples] = [event for event in events.read_events(tmp_path) if isinstance(event, events.Samples)]
    by_request = {rollout.request_id: rollout for rollout in batch.rollouts}
    whole = [one for one in samples.rollouts if one.sample == samples.rollouts[0].sample]
    assert {one.request_id for one in whole} == {r.request_id for r in batch.rollouts if r.sample == whole[0].sample}
    assert sorted(len(one.turns) for one in whole) == [1, 3]
    for one in whole:
        rollout = by_request[one.request_id]
        assert one.forked_from == rollout.forked_from
        assert [(turn.drawn, turn.reward, turn.finish_reason) for turn in one.turns] == [
            (turn.drawn, turn.reward, turn.finish_reason) for turn in rollout.turns
        ]
        for turn, own in zip(one.turns, rollout.turns, strict=True):
            assert turn.num_tokens == own.end - own.begin
            if own.drawn:
                assert turn.ended_s - turn.began_s == pytest.approx((own.ended_ns - own.began_ns) / 1e9, abs=0.0011)
    [branch] = [one for one in whole if one.forked_from]
    assert branch.forked_from == (next(one.request_id for one in whole if one is not branch), 2)
    assert min(turn.began_s for one in whole for turn in one.turns if turn.drawn) == 0.0
