"""The cache keeps conversations that wait for a tool, and frees them when their episodes end."""

import asyncio
import random

import pytest
from tiny_models import VOCABULARY

import inflight

DRAW = random.Random(0)


def random_tokens(length: int) -> list[int]:
    return DRAW.choices(range(VOCABULARY), k=length)


@pytest.mark.parametrize(("protect_s", "reused"), [(None, [48] * 4), (0.0, [0] * 4)])
def test_a_turn_finds_the_earlier_one_after_other_requests_have_filled_the_cache(model_dir, protect_s, reused):
    """Of 16 blocks 8 can be protected. An episode protects up to 5, so that its end must free them for the next."""
    params = inflight.SamplingParams(n=1, max_tokens=24, ignore_eos=True, protect_s=protect_s)
    options = {"device": "cpu", "threads": 1, "max_sequences": 2, "max_context": 128, "kv_cache_tokens": 256}
    with inflight.launch(model_dir("qwen3"), **options) as engine:

        async def others() -> None:
            for _ in range(6):
                await engine.agenerate([random_tokens(60)], inflight.SamplingParams(max_tokens=20, ignore_eos=True))

        async def rollout(session, row):
            reply = await session.complete(row)
            await session.call(others)
            await session.complete([*row, *reply.token_ids, 1, 2, 3])
            return 1.0

        with inflight.Episodes(engine, rollout, max_running=1) as episodes:
            rows = [random_tokens(40) for _ in range(4)]
            groups = engine.stream.collect(episodes.submit(rows, params, train=False), timeout_s=120)
        assert engine.status().num_preemptions == 0
    turns = [[turn for turn in rollout.turns if turn.drawn] for [rollout] in groups]
    assert [second.prefix_tokens for _, second in turns] == reused


def test_a_later_turn_is_drawn_before_waiting_prompts(model_dir):
    params = inflight.SamplingParams(n=1, max_tokens=8, ignore_eos=True)
    others: list[int] = []

    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=1, max_context=128) as engine:

        async def rollout(session, row):
            reply = await session.complete(row)
            engine.pause()
            others.extend(await engine.asubmit([random_tokens(5)] * 2, params))
            later = asyncio.ensure_future(session.complete([*row, *reply.token_ids, 1]))
            while engine.status().num_waiting < 3:
                await asyncio.sleep(0.01)
            engine.resume()
            await later
            return 1.0

        with inflight.Episodes(engine, rollout) as episodes:
            [[drawn]] = engine.stream.collect(episodes.submit([[3, 4, 5]], params, train=False), timeout_s=60)
            of_others = engine.stream.collect(others, timeout_s=60)
    assert max(drawn.sampled_at_ns) < min(rollout.sampled_at_ns[0] for [rollout] in of_others)


@pytest.mark.medium
def test_of_two_engines_one_draws_all_turns_of_an_episode(model_dir):
    params = inflight.SamplingParams(n=1, max_tokens=24, ignore_eos=True)
    options = inflight.EngineOptions(
        model=model_dir("qwen3"), device="cpu", threads=1, max_sequences=8, max_context=256, prefix_across_versions=8
    )

    async def rollout(session, row):
        tokens = row
        for _ in range(4):
            reply = await session.complete(tokens)
            tokens = [*tokens, *reply.token_ids, *random_tokens(9)]
        return 1.0

    with inflight.launch([options] * 2) as engine, inflight.Episodes(engine, rollout, max_running=8) as episodes:
        rows = [random_tokens(40) for _ in range(8)]
        groups = engine.stream.collect(episodes.submit(rows, params, train=False), timeout_s=120)
    for [drawn] in groups:
        assert [turn.prefix_tokens for turn in drawn.turns if turn.drawn] == [0, 48, 96, 128]


@pytest.mark.medium
def test_a_turn_does_not_wait_for_a_full_engine(model_dir):
    options = inflight.EngineOptions(
        model=model_dir("qwen3"), device="cpu", threads=1, max_sequences=1, max_context=32768, kv_cache_tokens=65536
    )
    long, short = (inflight.SamplingParams(max_tokens=count, ignore_eos=True) for count in (30000, 8))
    with inflight.launch([options] * 2) as engine:
        occupied: list[int] = []

        async def rollout(session, row):
            tokens = [*row, *(await session.complete(row)).token_ids]
            occupied.extend(await engine.asubmit([random_tokens(5)], long))  # on the engine of the first turn
            await session.complete([*tokens, 1])
            return 1.0

        with inflight.Episodes(engine, rollout) as episodes:
            [[drawn]] = engine.stream.collect(episodes.submit([[3, 4, 5]], short, train=False), timeout_s=60)
        assert len(drawn.turns) == 3
        assert len(engine.partial(occupied[0])) == 1
        engine.abandon(occupied)
