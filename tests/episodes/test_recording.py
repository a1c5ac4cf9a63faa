"""The record of a run has its episodes."""

import asyncio

import pytest
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
