"""Turns that a function watches while they are drawn."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from episode_functions import collect
from tiny_models import make_model
from waiting import wait_until

import inflight
import inflight.episodes.session
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs


@pytest.mark.parametrize("is_async", [False, True])
def test_a_watched_turn_ends_when_its_function_says_so(chat_engine, is_async):
    """The tokens up to there are trained on; the episode continues with another turn."""
    seen = Counter()

    def judge(part):
        assert part.finish_reason == ""
        assert len(part.logprobs) == len(part.token_ids)
        seen[part.request_id] += 1
        chat_engine.pause()  # the tiny model would draw all tokens before it is cancelled
        return True

    async def slow_judge(part):
        await asyncio.sleep(0.01)
        return judge(part)

    async def watched(session, row):
        first = await session.complete(row, watch=slow_judge if is_async else judge, every=4)
        chat_engine.resume()
        second = await session.complete([*row, *first.token_ids, 5], max_tokens=3, watch=lambda part: False, every=1)
        assert second.finish_reason == "length"
        session.reward(-1.0, first)
        return float(len(first.token_ids))

    params = inflight.SamplingParams(n=1, max_tokens=4000, ignore_eos=True)
    episodes = inflight.Episodes(chat_engine, watched)
    groups = collect(chat_engine, episodes, [[1, 2, 3]], params)
    [[rollout]] = groups
    first, given, second = rollout.turns
    assert first.finish_reason == "stopped"
    assert 4 <= first.end < 4000
    assert (given.end - given.begin, second.end - second.begin) == (1, 3)
    assert rollout.reward == first.end - 1
    assert episodes.counts["turns stopped"] == 1
    assert list(seen.values()) == [1]
    with torch.no_grad():
        batch = pack([rollout], [1.0])
        tokenizer = chat_engine.tokenizer
        model = make_model("qwen3", vocab_size=len(tokenizer))
        scored = token_logprobs(model, batch)
    torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=1e-4, rtol=0)


def test_a_share_of_the_turns_is_spared_and_weighed(chat_engine):
    """All are judged hopeless after some tokens; each is ended or drawn to its end."""

    async def watched(session, row):
        reply = await session.complete(row, watch=session.spare(lambda part: True, 0.25), every=4)
        return float(reply.finish_reason == "length")

    params = inflight.SamplingParams(n=32, max_tokens=1500, ignore_eos=True)
    [group] = collect(chat_engine, inflight.Episodes(chat_engine, watched), [[1, 2, 3]], params)
    weights = [rollout.metadata["inflight.weight"] for rollout in group]
    assert set(weights) == {0.0, 4.0}
    assert 2 <= weights.count(4.0) <= 16
    assert all(rollout.num_drawn == 1500 for rollout, weight in zip(group, weights, strict=True) if weight)
    advantages = inflight.spared_advantages([group])
    assert {a for a, weight in zip(advantages, weights, strict=True) if not weight} == {0.0}
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 0"):
        inflight.episodes.session.Session.spare(None, lambda part: True, 0)  # type: ignore[arg-type]


def test_an_exception_of_a_watching_function_fails_the_episode_and_frees_the_engine(chat_engine):
    async def broken(session, row):
        await session.complete(row, watch=lambda part: 1 / 0, every=1)

    params = inflight.SamplingParams(n=2, max_tokens=4000, ignore_eos=True)
    episodes = inflight.Episodes(chat_engine, broken)
    [group] = collect(chat_engine, episodes, [[1, 2, 3]], params)
    assert episodes.counts["error: ZeroDivisionError"] == 2
    assert {rollout.finish_reason for rollout in group} == {"error"}
    wait_until(lambda: not chat_engine.status().num_running)


@pytest.mark.parametrize("answer", [np.True_, torch.tensor(True), lambda turn: inflight.Feedback(stop=np.True_)])
def test_answers_and_numbers_can_be_of_numpy_and_pytorch(chat_engine, answer):
    """Comparisons of log-probabilities and of entropies are such numbers."""

    async def watched(session, row):
        def watch(turn):
            chat_engine.pause()
            return answer(turn) if callable(answer) else answer

        reply = await session.complete(row, watch=watch, every=np.int64(2))
        chat_engine.resume()
        assert reply.finish_reason == "stopped"
        with pytest.raises(TypeError, match="must return a bool, None or Feedback"):
            await session.complete(row, watch=lambda turn: turn.logprobs < 0)
        return 1.0

    params = inflight.SamplingParams(n=1, max_tokens=4000, ignore_eos=True)
    episodes = inflight.Episodes(chat_engine, watched)
    collect(chat_engine, episodes, [[1, 2, 3]], params)
    assert episodes.counts["completed"] == 1, episodes.counts
