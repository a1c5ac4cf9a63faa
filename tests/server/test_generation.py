"""Tokens as they come, from the stream of a running engine."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from made_frames import ends, make_frame, starts
from waiting import PATIENCE_S, wait_until

import inflight
from inflight.core.frames import Finish, GroupStart
from inflight.server.generation import Bell, Generation

LONG = inflight.SamplingParams(max_tokens=150, n=3, ignore_eos=True, seed=1, top_logprobs=2, return_entropy=True)


def follow(engine, prompts, params, interval_s=0.0):
    """All parts, by choice, and what `on_end` was told."""

    async def work():
        bell = Bell(engine.stream.ledger, interval_s)
        ended = []
        ids = await engine.asubmit(prompts, params)
        generation = Generation(engine.stream, bell, ids, lambda _, taken: ended.append(taken))
        parts: dict[int, list[inflight.Rollout]] = {}
        async for index, part in generation.parts():
            parts.setdefault(index, []).append(part)
        generation.end()
        generation.end()
        bell.close()
        return parts, ended

    return asyncio.run(work())


def test_parts_are_the_rollouts_piece_by_piece(served):
    prompts = [[1, 2, 3], [4]]
    whole = [rollout for group in served.engine.generate(prompts, LONG) for rollout in group]
    parts, ended = follow(served.engine, prompts, LONG)
    assert ended == [True]
    assert sorted(parts) == list(range(6))
    assert min(map(len, parts.values())) > 3
    for index, rollout in enumerate(whole):
        mine = parts[index]
        for name in ("token_ids", "logprobs", "weight_versions"):
            assert np.array_equal(np.concatenate([getattr(p, name) for p in mine]), getattr(rollout, name))
        for name in rollout.columns:
            assert np.allclose(np.concatenate([p.columns[name] for p in mine]), rollout.columns[name])
        assert [p.finish_reason for p in mine] == [""] * (len(mine) - 1) + ["length"]
        assert all(np.diff(p.sampled_at_ns).min(initial=1) > 0 for p in mine)


def test_a_rare_bell_makes_fewer_parts(served):
    few, _ = follow(served.engine, [[1]], LONG, interval_s=0.05)
    many, _ = follow(served.engine, [[1]], LONG)
    assert sum(map(len, few.values())) < sum(map(len, many.values()))


def test_samples_that_end_before_the_others_are_told_at_once(wire):
    """Their last part does not wait for the group."""

    async def work():
        bell = Bell(wire.stream.ledger, 0.0)
        generation = Generation(wire.stream, bell, [0], lambda *_: None)
        wire.stream.ledger.expect([0])
        group = GroupStart(0, 0, [1], inflight.SamplingParams(n=2))
        wire.send(make_frame(2, 0, groups=[group], finishes=[Finish(0, "stop", 1)]))
        parts = generation.parts()
        first = [await asyncio.wait_for(anext(parts), 60) for _ in range(2)]
        wire.send(make_frame(2, 1, finishes=[Finish(1, "length", 2)]))
        rest = [part async for part in parts]
        generation.end()
        bell.close()
        return [
            [(index, part.token_ids.tolist(), part.finish_reason) for index, part in some] for some in (first, rest)
        ]

    first, rest = asyncio.run(work())
    assert sorted(first) == [(0, [100], "stop"), (1, [101], "")]
    assert rest == [(1, [101], "length")]


def test_a_follower_whose_event_loop_is_closed_does_not_end_the_stream(wire):
    async def begin():
        bell = Bell(wire.stream.ledger, 0.0)
        bell.num_followers = 1  # a reply that was not closed
        return bell

    bell = asyncio.run(begin())
    wire.stream.ledger.expect([0])
    wire.send(make_frame(1, 0, groups=starts(0)), make_frame(1, 1, finishes=ends(0)))
    assert [group[0].group_id for group in wire.stream.collect([0], timeout_s=300)] == [0]
    assert bell._frame not in wire.stream.ledger.frames.listeners


def test_first_tokens_and_ends_wait_for_no_interval_and_wake_nobody_else(wire):
    """Two replies with ten minutes between later parts: each has its first part at once."""

    async def work():
        bell = Bell(wire.stream.ledger, 600.0)
        told: list[list[tuple[list[int], str]]] = [[], []]

        async def follow(which: int) -> None:
            generation = Generation(wire.stream, bell, [which], lambda *_: None)
            async for _, part in generation.parts():
                told[which].append((part.token_ids.tolist(), part.finish_reason))

        async def until(num_parts: list[int]) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while [len(parts) for parts in told] != num_parts:
                assert time.monotonic() < deadline, told
                await asyncio.sleep(0.01)

        wire.stream.ledger.expect([0, 1])
        tasks = [asyncio.create_task(follow(which)) for which in range(2)]
        one, other = (GroupStart(i, i, [1], inflight.SamplingParams()) for i in range(2))
        while bell.num_followers < 2:
            await asyncio.sleep(0.01)
        assert bell.num_waiting == 2
        wire.send(make_frame(1, 0, groups=[one, other]))
        await until([1, 0])
        assert bell.num_waiting == 1
        wire.send(make_frame(2, 1))
        await until([1, 1])
        wire.send(make_frame(2, 2))
        wire.send(make_frame(1, 3, finishes=[Finish(0, "stop", 4)]))
        await asyncio.wait_for(tasks[0], PATIENCE_S)
        await asyncio.sleep(0.3)
        assert told == [[([100], ""), ([100, 100, 100], "stop")], [([101], "")]]
        wire.send(make_frame(2, 4, finishes=[Finish(1, "stop", 3)]))
        await asyncio.wait_for(tasks[1], PATIENCE_S)
        assert (bell.num_followers, bell.num_waiting) == (0, 0)
        bell.close()
        return told[1]

    assert asyncio.run(work()) == [([101], ""), ([101, 101], "stop")]


def test_a_frame_that_arrives_while_a_part_is_sent_wakes_the_reply_again(wire):
    async def work():
        bell = Bell(wire.stream.ledger, 0.0)
        generation = Generation(wire.stream, bell, [0], lambda *_: None)
        wire.stream.ledger.expect([0])
        wire.send(make_frame(1, 0, groups=[GroupStart(0, 0, [1], inflight.SamplingParams())]))
        parts, tokens = generation.parts(), []
        for sequence in range(1, 4):
            _, part = await asyncio.wait_for(anext(parts), PATIENCE_S)
            tokens += part.token_ids.tolist()
            wire.send(make_frame(1, sequence))  # The reply is not awaited: its client reads slowly.
            await asyncio.sleep(0.05)
        _, part = await asyncio.wait_for(anext(parts), PATIENCE_S)
        bell.close()
        return tokens + part.token_ids.tolist()

    assert asyncio.run(work()) == [100] * 4


def test_an_end_before_the_end_cancels(served):
    async def work():
        bell = Bell(served.engine.stream.ledger, 0.0)
        ids = await served.engine.asubmit([[1]], LONG)
        ended = []

        def on_end(generation, taken):
            ended.append(taken)
            served.engine.abandon(generation.group_ids)

        generation = Generation(served.engine.stream, bell, ids, on_end)
        async for _ in generation.parts():
            break
        generation.end()
        bell.close()
        return ended

    assert asyncio.run(work()) == [False]
    assert served.engine.stream.outstanding == []


def test_what_is_not_outstanding_has_no_news(served):
    assert served.engine.stream.ledger.frames.news(10**9, {}) == []


@pytest.mark.parametrize("begin", [0, 1, 127, 128, 129, 300])
def test_columns_are_read_from_any_token_on(begin):
    from inflight.stream.token_store import TokenStore

    store = TokenStore()
    tokens, other = store.open([]), store.open([])
    for i in range(300):
        columns = {"token_ids": np.array([i, -i], np.int32), "logprobs": np.zeros(2, np.float32)}
        store.append(np.array([tokens.row, other.row]), 1, i, columns)
    assert store.read(tokens, begin)["token_ids"].tolist() == list(range(begin, 300))


def test_requests_of_clients_are_marked_as_such(served):
    """So that a saved run leaves them out."""
    engine = served.engine
    engine.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(served.client.completions.create, model="policy", prompt=[1, 2], max_tokens=2)
            wait_until(lambda: bool(engine.stream.ledger.table.records))
            assert engine.stream.ledger.engines.snapshot() == []
            engine.resume()
            assert answer.result(60).usage.completion_tokens
    finally:
        engine.resume()
