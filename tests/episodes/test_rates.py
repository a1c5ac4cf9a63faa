"""Tools and scorers wait for their rate limits, and the time is counted."""

import threading
import time
from dataclasses import dataclass, replace

import pytest

import inflight

PARAMS = inflight.SamplingParams(n=4, max_tokens=2, ignore_eos=True)


def collect(engine, rollout, limits, rows=(None, None)):
    with inflight.Episodes(engine, rollout, limits=limits) as episodes:
        groups = engine.stream.collect(episodes.submit(rows, PARAMS, train=False), timeout_s=60)
    return groups, episodes


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_begins_at_its_rate(engine, is_async):
    begun = []

    def look():
        begun.append(time.monotonic())
        return "found"

    async def look_async():
        return look()

    tool = look_async if is_async else look

    async def rollout(session, row):
        await session.complete([5, 6, 7])
        assert await session.call(tool) == "found"
        return 1.0

    limit = inflight.RateLimit(per_second=20, burst=2)
    _, episodes = collect(engine, rollout, inflight.Limits(rates={tool: limit}, call_s=5.0))
    assert episodes.counts["completed"] == 8
    begun.sort()
    assert begun[-1] - begun[0] > 5 / 20  # 8 calls: 2 at once, then 6 intervals, less what the first calls were late
    assert episodes.seconds["waits"] == pytest.approx(limit.waited_s, rel=0.2)
    assert limit.waited_s > 0.5  # 0.05 + 0.10 + … + 0.30 s, if all arrive at once
    assert episodes.seconds["calls"] < limit.waited_s


def test_a_wait_for_a_tool_has_the_limit_of_its_call(engine):
    async def rollout(session, row):
        await session.complete([5, 6, 7])
        await session.call(time.monotonic, timeout_s=0.3)
        return 1.0

    limits = inflight.Limits(rates={time.monotonic: inflight.RateLimit(per_second=0.001)})
    _, episodes = collect(engine, rollout, limits, rows=(None,))
    assert episodes.counts["completed"] == 1
    assert episodes.counts["error: TimeoutError"] == 3


def test_the_tools_of_a_reply_have_their_rates(engine):
    running, most, lock = 0, 0, threading.Lock()

    def look(place: int) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return f"room {place}"

    async def rollout(session, row):
        reply = await session.complete([5, 6, 7])
        calls = [{"id": str(i), "function": {"name": "look", "arguments": {"place": i}}} for i in range(4)]
        object.__setattr__(reply, "message", {"tool_calls": calls})
        messages = await session.use_tools(reply, [look])
        assert [message["content"] for message in messages] == [f"room {i}" for i in range(4)]
        return 1.0

    _, episodes = collect(engine, rollout, inflight.Limits(rates={look: inflight.RateLimit(concurrent=2)}))
    assert episodes.counts["completed"] == 8
    assert most == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_scorer_begins_its_calls_at_its_rate(engine, is_async):
    begun = []

    def judge(rollout):
        begun.append(time.monotonic())
        return 1.0

    async def judge_async(rollout):
        return judge(rollout)

    limit = inflight.RateLimit(per_second=40)
    scorer = inflight.Scorer(judge_async if is_async else judge, rate=limit)
    [group] = engine.stream.collect(
        engine.submit([[5, 6, 7]], inflight.SamplingParams(n=12, max_tokens=2), train=False), timeout_s=60
    )
    try:
        for _ in range(2):  # The second group would otherwise be scored in one thread.
            assert scorer.start(group).result(30) == [1.0] * 12
    finally:
        scorer.close()
    begun.sort()
    assert begun[-1] - begun[0] > 20 / 40
    assert begun[11] - begun[0] > 8 / 40
    assert begun[23] - begun[12] > 8 / 40
    assert limit.waited_s > 1


def test_a_score_that_waits_too_long_is_a_timeout(engine):
    scorer = inflight.Scorer(lambda rollout: 1.0, rate=inflight.RateLimit(per_second=0.01), timeout_s=0.2)
    [group] = engine.stream.collect(
        engine.submit([[5, 6, 7]], inflight.SamplingParams(n=2, max_tokens=2), train=False), timeout_s=60
    )
    try:
        assert sorted(scorer.start(group).result(30), key=str) == [1.0, None]
        assert scorer.failures == {"error: TimeoutError": 1}
    finally:
        scorer.close()


@pytest.mark.parametrize("rates", [{"look": inflight.RateLimit()}, {print: 5.0}])
def test_rates_that_are_no_limits_of_functions_are_refused(rates):
    with pytest.raises(TypeError, match=r"rates must (map|be)"):
        inflight.Limits(rates=rates)


def test_waits_of_simultaneous_calls_are_added_up(engine):
    async def look(place: int) -> str:
        return "found"

    @dataclass
    class Search:
        """An object with an equality has no hash."""

        found: str

        def __call__(self, place: int) -> str:
            return self.found

    async def rollout(session, row):
        reply = await session.complete([5, 6, 7])
        calls = [{"function": {"name": name, "arguments": {"place": 1}}} for name in ["look"] * 4 + ["Search"]]
        tools = [look, Search("everywhere")]
        *_, last = await session.use_tools(replace(reply, message={"tool_calls": calls}), tools)
        assert last["content"] == "everywhere"
        return 1.0

    limit = inflight.RateLimit(per_second=50)
    _, episodes = collect(engine, rollout, inflight.Limits(rates={look: limit}), rows=(None,))
    assert episodes.counts["completed"] == 4, episodes.counts
    assert episodes.seconds["waits"] == pytest.approx(limit.waited_s, rel=0.1)
