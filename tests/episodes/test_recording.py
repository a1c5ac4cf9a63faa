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
        wait_until(lambda: recorded()[-1].num_running == 0)
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
