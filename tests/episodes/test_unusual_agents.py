"""Agents and tools that do something unusual get a right result or an error that names the mistake."""

import asyncio
import functools
import json

import pytest
from episode_functions import collect

import inflight
from inflight.episodes.playing import finish_reason
from inflight.episodes.reply import Reply


def outcome(engine, play, *, n):
    params = inflight.SamplingParams(n=n, max_tokens=5, ignore_eos=True)
    episodes = inflight.Episodes(engine, play)
    [group] = collect(engine, episodes, [[1, 2, 3]], params)
    return group, episodes.counts


def reply_of(*names: str) -> Reply:
    calls = [{"id": name, "function": {"name": name, "arguments": json.dumps({"x": 1})}} for name in names]
    return Reply({"role": "assistant", "tool_calls": calls}, "", [], "stop", None, None, 0)


def wrapped(function):
    @functools.wraps(function)
    def call(*arguments, **keywords):
        return function(*arguments, **keywords)

    return call


async def search(x: int) -> str:
    await asyncio.sleep(0)
    return f"found {x}"


def with_keys(x: int) -> dict:
    return {("a", x): 2}


def add(x: int, y: int) -> int:
    return x + y


def test_results_of_unusual_tools_become_text(engine):
    contents = []

    async def play(session, row):
        two = functools.partial(add, y=2)
        messages = await session.use_tools(reply_of("search", "with_keys", "add"), [wrapped(search), with_keys, two])
        contents.extend(message["content"] for message in messages)
        with pytest.raises(TypeError, match="tools must be functions"):
            await session.use_tools(reply_of("add"), [{"type": "function"}])
        await session.complete(row)
        return 1.0

    [rollout], _ = outcome(engine, play, n=1)
    assert rollout.reward == 1.0
    assert contents[0] == "found 1"
    assert contents[1].startswith("error: TypeError")
    assert contents[2] == "3"


@pytest.mark.parametrize(
    ("reason", "reward", "ended"),
    [
        ("completed", 1.0, None),  # each sequence ends as its last turn does
        ("max_turns", 1.0, "length"),
        ("max_turns", None, "cancelled"),
        ("error: ValueError", None, "error"),
    ],
)
def test_the_end_of_an_episode_is_the_end_of_its_sequences(reason, reward, ended):
    assert finish_reason(reason, reward) == ended


def test_fewer_tokens_than_min_tokens_can_be_left(engine):
    params = inflight.SamplingParams(n=1, max_tokens=10, min_tokens=8, ignore_eos=True)
    lengths = []

    async def play(session, row):
        first = await session.complete(row)
        [branch] = await session.fork(first, 5)
        lengths.append(len(branch.token_ids))
        with pytest.raises(ValueError, match="max_tokens"):
            await session.complete([7, 7], max_tokens=0)
        lengths.append(len((await session.complete([7, 7], max_tokens=3)).token_ids))
        await session.complete([8, 8])
        return 1.0

    episodes = inflight.Episodes(engine, play, limits=inflight.Limits(max_tokens=20, at_limit="keep"))
    [group] = collect(engine, episodes, [[1, 2, 3]], params)
    assert lengths == [10, 3]
    assert episodes.counts["completed"] == 1, episodes.counts
    assert all(rollout.reward is not None for rollout in group)


def test_a_call_that_raises_a_cancellation_is_an_error(engine):
    async def tool():
        raise asyncio.CancelledError

    async def play(session, row):
        await session.complete(row)
        await session.call(tool)

    group, counts = outcome(engine, play, n=2)
    assert counts["error: CancelledError"] == 2
    assert {rollout.finish_reason for rollout in group} == {"error"}


def test_an_id_of_another_episode_is_refused(engine):
    pytest.importorskip("uvicorn")
    refused = []

    async def play(session, row):
        endpoint = await session.endpoint()
        try:
            endpoint.accept("task-7")
        except ValueError as error:
            refused.append(str(error))
        await session.complete(row)
        while not refused:
            await asyncio.sleep(0.01)
        return 1.0

    _, counts = outcome(engine, play, n=2)
    assert counts["completed"] == 2, counts
    assert len(refused) == 1
    assert "was accepted already, for an episode in progress" in refused[0]


def test_messages_that_are_no_list_are_refused(engine):
    refused = []

    async def play(session, row):
        for messages in ("hi", {"role": "user", "content": "hi"}, ["hi"]):
            with pytest.raises(TypeError, match="must be a list of messages"):
                await session.chat(messages)
            refused.append(messages)
        await session.complete(row)
        return 1.0

    outcome(engine, play, n=1)
    assert len(refused) == 3


def test_a_cleanup_that_raises_a_cancellation_keeps_the_episode(engine, caplog):
    async def close():
        raise asyncio.CancelledError

    async def play(session, row):
        try:
            await session.complete(row)
            return 1.0
        finally:
            await session.clean_up(close)

    group, counts = outcome(engine, play, n=2)
    assert counts["completed"] == 2, counts
    assert [rollout.reward for rollout in group] == [1.0, 1.0]
    assert "close has failed at the end of an episode: CancelledError" in caplog.text
