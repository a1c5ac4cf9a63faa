"""Rewards, stops and forks of turns while they are drawn, and forks of finished turns."""

import asyncio
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from episode_functions import collect
from tiny_models import make_model

import inflight
from inflight.core.rollout import Turn
from inflight.episodes.segment import _split
from inflight.episodes.turns import Place
from inflight.episodes.watching import Watcher, parts_of
from inflight.stream.open_groups import EPISODE
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs

LONG = inflight.SamplingParams(n=2, max_tokens=600, ignore_eos=True)
USER = {"role": "user", "content": "Count."}


def assert_trained_tokens_are_the_drawn_ones(engine, rollouts):
    """The trainer's log-probabilities are the recorded ones, and no drawn token is in two rollouts."""
    with torch.no_grad():
        batch = pack(rollouts, [1.0] * len(rollouts))
        model = make_model("qwen3", vocab_size=len(engine.tokenizer))
        scored = token_logprobs(model, batch)
    torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=1e-4, rtol=0)
    times = np.concatenate([rollout.sampled_at_ns[rollout.drawn] for rollout in rollouts])
    assert (times > 0).all()


def test_rewards_of_parts_become_turns(chat_engine):
    looks = []

    async def watched(session, row):
        mine = []
        looks.append(mine)

        def watch(turn):
            mine.append(len(turn.token_ids))
            return inflight.Feedback(reward=float(len(mine)))

        first = await session.complete(row, watch=watch, every=50)
        tokens = [*row, *first.token_ids, 5]
        await session.complete(tokens, max_tokens=3)
        session.reward(0.25, first)
        return 0.5

    [group] = collect(chat_engine, inflight.Episodes(chat_engine, watched), [[1, 2, 3]], LONG)
    for rollout, ends in zip(group, sorted(looks, key=lambda mine: mine != looks[group[0].sample]), strict=True):
        *parts, given, last = rollout.turns
        inner = [end for end in ends if end < 600]
        assert [turn.end for turn in parts] == [*inner, 600]
        assert [turn.begin for turn in parts] == [0, *inner]
        assert [turn.finish_reason for turn in parts] == [*[""] * len(inner), "length"]
        rewards = [i + 1.0 for i in range(len(inner))]
        last_reward = 0.25 + (len(ends) if ends[-1] == 600 else 0.0)
        assert [turn.reward for turn in parts] == [*rewards, last_reward]
        assert (given.drawn, last.reward, last.end - last.begin) == (False, 0.5, 3)
        assert rollout.reward == pytest.approx(sum(turn.reward or 0.0 for turn in rollout.turns))
        assert all(a.ended_ns <= b.began_ns for a, b in pairwise(parts))
    columns = inflight.turn_advantages("rloo")([group])
    for rollout, column in zip(group, columns, strict=True):
        for turn in rollout.turns:
            assert len(set(column[turn.begin : turn.end].tolist())) <= 1
    assert_trained_tokens_are_the_drawn_ones(chat_engine, group)


def test_a_watched_turn_is_forked_while_it_is_drawn(chat_engine):
    async def watched(session, row):
        asked = False

        def watch(turn):
            nonlocal asked
            if asked:
                return None
            asked = True
            return inflight.Feedback(forks=2, at=3)

        reply = await session.chat([USER], watch=watch, every=8)
        assert len(reply.forks) == 2
        for index, fork in enumerate(reply.forks):
            assert fork.token_ids[:3] == reply.token_ids[:3]
            assert fork.prompt_tokens == reply.prompt_tokens
            assert len(fork.token_ids) <= 40
            session.reward(float(index), fork)
        # A conversation continues with a fork as with any reply.
        again = await session.chat([USER, reply.forks[0].message, USER], max_tokens=4)
        assert again.prompt_tokens > len(reply.forks[0].token_ids)
        session.reward(0.0, reply)

    params = inflight.SamplingParams(n=2, max_tokens=40)
    episodes = inflight.Episodes(chat_engine, watched)
    [group] = collect(chat_engine, episodes, [{}], params)
    assert not episodes.failures
    for sample in (0, 1):
        parent, *forks = [rollout for rollout in group if rollout.sample == sample]
        assert len(forks) == 2
        for fork in forks:
            assert fork.forked_from == (parent.request_id, 3)
            shared = [*parent.prompt_token_ids, *parent.token_ids[:3]]
            assert fork.prompt_token_ids.tolist() == shared
        assert forks[0].turns[-1].end - forks[0].turns[-1].begin <= 4
        assert forks[0].token_ids.tolist() != forks[1].token_ids.tolist()
    assert_trained_tokens_are_the_drawn_ones(chat_engine, group)
    columns = inflight.tree_advantages("rloo")([group])
    assert all(np.isfinite(column).all() for column in columns)


def test_parts_keep_their_order_after_a_restart():
    """The turn begins again, at 100 ns, and its tokens are older."""
    turn = Turn(begin=0, end=4, drawn=True, began_ns=100, ended_ns=110)
    parts = _split(turn, [(1, 1.0), (3, 2.0)], np.array([5, 6, 7, 8]))
    assert [(part.begin, part.end, part.reward) for part in parts] == [(0, 1, 1.0), (1, 3, 2.0), (3, 4, None)]
    assert [part.began_ns for part in parts] == [100] * 3
    assert [part.ended_ns for part in parts] == [100, 100, 110]


@pytest.mark.parametrize("is_async", [False, True])
def test_exits_and_time_limits_of_watch_functions_are_failures_of_the_episode(chat_engine, is_async):
    """Other episodes go on, and a time limit of a judge is not the one of the turn."""

    def fail(number):
        raise SystemExit(2) if number else TimeoutError("the judge is slow")

    async def watched(session, row):
        async def later(turn):
            await asyncio.sleep(0)
            fail(session.sample)

        if session.sample < 2:
            await session.chat([USER], watch=later if is_async else lambda turn: fail(session.sample), every=4)
        await session.chat([USER])
        return 1.0

    episodes = inflight.Episodes(chat_engine, watched, min_share=0)
    [group] = collect(chat_engine, episodes, [{}], inflight.SamplingParams(n=4, max_tokens=20, ignore_eos=True))
    assert [rollout.reward for rollout in group] == [None, None, 1.0, 1.0]
    assert episodes.counts["error: TimeoutError"] == episodes.counts["error: RuntimeError"] == 1


def test_forks_of_finished_turns_at_any_token(chat_engine):
    """Also of forks, before and after the token where they were forked."""

    async def forked(session, row):
        reply = await session.chat([USER])
        [fork] = await session.fork(reply, 10)
        before, again = await session.fork(fork, 4, 2)
        [after] = await session.fork(fork, 14)
        assert before.token_ids[:4] == again.token_ids[:4] == reply.token_ids[:4]
        assert after.token_ids[:14] == fork.token_ids[:14]
        assert {len(each.token_ids) for each in (reply, fork, before, again, after)} == {30}
        assert all(each.message["content"] == each.content for each in (reply, fork, before, again, after))
        for at, n in ((-1, 1), (30, 1), (3, 0)):
            with pytest.raises(ValueError, match=r"at must be in \[0, 29\]"):
                await session.fork(reply, at, n)
        return 1.0

    params = inflight.SamplingParams(n=1, max_tokens=30, ignore_eos=True)
    episodes = inflight.Episodes(chat_engine, forked)
    [group] = collect(chat_engine, episodes, [{}], params)
    assert not episodes.failures
    parent, fork, before, again, after = group
    assert [each.forked_from for each in group] == [
        None,
        (parent.request_id, 10),
        (parent.request_id, 4),
        (parent.request_id, 4),
        (fork.request_id, 4),
    ]
    assert (len(fork.token_ids), len(before.token_ids), len(again.token_ids), len(after.token_ids)) == (20, 26, 26, 16)
    assert_trained_tokens_are_the_drawn_ones(chat_engine, group)


def test_forks_have_at_most_as_many_tokens_as_the_reply(chat_engine):
    lengths = []

    async def forked(session, row):
        seen = []

        def watch(turn):
            seen.append(turn)
            return inflight.Feedback(forks=1, at=1) if len(seen) == 1 else None

        reply = await session.complete(row, max_tokens=12, watch=watch, every=2)
        forks = [*reply.forks, *await session.fork(reply, 5, 2)]
        lengths.extend(len(fork.token_ids) for fork in forks)
        return 1.0

    params = inflight.SamplingParams(n=1, max_tokens=30, ignore_eos=True)
    episodes = inflight.Episodes(chat_engine, forked)
    collect(chat_engine, episodes, [[1, 2, 3]], params)
    assert not episodes.failures
    assert lengths == [12, 12, 12]


def test_a_function_sees_each_line(chat_engine):
    seen = {}

    async def watched(session, row):
        mine = seen[session.sample] = []
        texts = []

        def look(turn):
            mine.append(turn.token_ids.tolist())
            texts.append((turn.text, turn.finish_reason))

        reply = await session.complete(row, watch=look, every="line")
        assert texts[-1] == (reply.text, reply.finish_reason)
        assert reply.text
        return 1.0

    params = inflight.SamplingParams(n=6, max_tokens=1500, ignore_eos=True, seed=1)
    [group] = collect(chat_engine, inflight.Episodes(chat_engine, watched), [[1, 2, 3]], params)
    decode, num_lines = chat_engine.tokenizer.decode, 0
    for rollout in group:
        tokens = rollout.token_ids.tolist()
        ends = [place + 1 for place, token in enumerate(tokens) if "\n" in decode([token])]
        assert seen[rollout.sample] == [tokens[:end] for end in dict.fromkeys([*ends, len(tokens)])]
        num_lines += len(ends)
    assert num_lines > 6


def test_a_limit_of_turns_also_ends_forks(chat_engine):
    async def forked(session, row):
        reply = await session.chat([USER])
        await session.fork(reply, 2, 5)

    params = inflight.SamplingParams(n=1, max_tokens=20)
    episodes = inflight.Episodes(chat_engine, forked, limits=inflight.Limits(max_turns=3))
    collect(chat_engine, episodes, [{}], params)
    assert episodes.counts["max_turns"] == 1


def test_a_stop_with_a_reward_and_a_share_that_is_spared(chat_engine):
    """`spare` passes rewards on."""

    async def watched(session, row):
        watch = session.spare(lambda turn: inflight.Feedback(reward=-1.0, stop=True), 1.0)
        reply = await session.complete(row, watch=watch, every=100)
        return float(reply.finish_reason == "length")

    [group] = collect(chat_engine, inflight.Episodes(chat_engine, watched), [[1, 2, 3]], LONG)
    for rollout in group:
        assert rollout.metadata["inflight.weight"] == 1.0
        assert rollout.reward == 1.0 - sum(turn.reward is not None and turn.reward < 1 for turn in rollout.turns)
        assert rollout.reward < 1.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda turn: 0.5, "must return a bool, None or Feedback, got 0.5"),
        (lambda turn: inflight.Feedback(reward=math.nan), "a reward must be finite, got nan"),
        (lambda turn: inflight.Feedback(forks=-1), "forks and at must be at least 0, got -1 and None"),
        (lambda turn: inflight.Feedback(forks=1, at=601), "a fork of this turn can begin at token"),
    ],
)
def test_a_wrong_answer_fails_its_episode(chat_engine, caplog, answer, message):
    async def watched(session, row):
        await session.complete(row, watch=answer, every=1)

    episodes = inflight.Episodes(chat_engine, watched)
    [group] = collect(chat_engine, episodes, [[1, 2, 3]], LONG)
    assert {rollout.finish_reason for rollout in group} == {"error"}
    assert message in caplog.text


@pytest.mark.parametrize("every", [0, "word", 1.5, True])
def test_a_wrong_place_is_refused(every):
    with pytest.raises(ValueError, match=r'every must be at least 1, or "line", got'):
        Watcher(lambda turn: None, every, lambda tokens, n: None)  # type: ignore[arg-type,return-value]


def test_lines_need_a_tokenizer(engine, caplog):
    async def watched(session, row):
        await session.complete(row, watch=lambda turn: None, every="line")

    params = inflight.SamplingParams(n=1, max_tokens=20, ignore_eos=True)
    collect(engine, inflight.Episodes(engine, watched), [[1, 2, 3]], params)
    assert 'the model has no tokenizer, which every="line" needs' in caplog.text


def test_parts_of_a_finished_turn(chat_engine):
    [[turn]] = chat_engine.stream.collect(
        chat_engine.submit([[1, 2, 3]], inflight.SamplingParams(max_tokens=10, ignore_eos=True), train=False)
    )
    assert [len(part.token_ids) for part in parts_of(turn, 4, str)] == [10]
    assert [len(part.token_ids) for part in parts_of(turn, 4, str, 7)] == [10]
    assert [len(part.token_ids) for part in parts_of(turn, 4, str, 10)] == []
    unfinished = replace(turn, finish_reason="")
    assert [len(part.token_ids) for part in parts_of(unfinished, 4, str, 7)] == []
    texts = iter("ab\nc\n\nxy\nz")
    assert [len(part.token_ids) for part in parts_of(turn, "line", lambda token: next(texts))] == [3, 5, 6, 9, 10]
    texts = iter("ab\nc\n\nxy\n")
    assert [part.finish_reason for part in parts_of(turn, "line", lambda token: next(texts, "\n"))] == [
        "",
        "",
        "",
        "",
        "length",
    ]


def test_forks_of_a_turn_that_has_ended_begin_at_one_of_its_tokens(chat_engine):
    [[turn]] = chat_engine.stream.collect(
        chat_engine.submit([[1, 2, 3]], inflight.SamplingParams(max_tokens=4, ignore_eos=True), train=False)
    )
    begun = []

    def look(part, at):
        feedback = inflight.Feedback(forks=2, at=at)
        asyncio.run(Watcher(lambda part: feedback, 1, lambda tokens, n: begun.append((len(tokens), n))).look(part))  # type: ignore[arg-type,func-returns-value]

    for part, at in ((turn, None), (turn, 3), (turn.until(2), None), (turn.until(2), 2), (turn.until(2), 0)):
        look(part, at)
    assert begun == [(3, 2), (2, 2), (2, 2), (0, 2)]
    with pytest.raises(ValueError, match="can begin at token 3 or before, got at=4"):
        look(turn, 4)


def test_a_turn_that_was_drawn_before_gets_its_rewards_again(chat_engine):
    """Its function sees it again, because rewards are not saved."""
    place = Place(7, 0, 0, "digest")
    ids = chat_engine.submit([[1, 2, 3]], inflight.SamplingParams(max_tokens=10, ignore_eos=True), train=False)
    [[drawn]] = chat_engine.stream.collect(ids)
    watcher = Watcher(lambda turn: inflight.Feedback(reward=2.0, stop=True), 4, lambda tokens, n: None)  # type: ignore[arg-type,return-value]
    with inflight.Episodes(chat_engine, never) as episodes:
        episodes.turns.saved[place] = drawn
        turn = asyncio.run(episodes.turns.draw([1, 2, 3], drawn.params, place, 0, watcher, None))
    assert turn.token_ids.tolist() == drawn.token_ids.tolist()
    assert turn.finish_reason == "length"
    assert watcher.rewards == [(10, 2.0)]


def test_a_turn_that_was_drawn_before_is_shown_in_the_same_parts(chat_engine):
    """Otherwise a function could decide differently after a restart."""
    params = inflight.SamplingParams(n=1, max_tokens=200, ignore_eos=True)
    seen, noted = [], []

    async def watched(session, row):
        await session.complete(row, watch=lambda turn: seen.append(len(turn.token_ids)), every=16)
        [record] = chat_engine.stream.ledger.episodes._table.records.values()
        noted.extend(record.rollouts)
        return 1.0

    collect(chat_engine, inflight.Episodes(chat_engine, watched), [[1, 2, 3]], params)
    assert seen[-1] == 200
    [turn] = noted
    again, place = [], Place(*turn.metadata[EPISODE])
    watcher = Watcher(lambda turn: again.append((len(turn.token_ids), turn.finish_reason)), 16, lambda tokens, n: None)  # type: ignore[arg-type,return-value,func-returns-value]
    with inflight.Episodes(chat_engine, never) as episodes:
        episodes.turns.saved[place] = turn
        asyncio.run(episodes.turns.draw([1, 2, 3], params, place, 0, watcher, None))
    assert again == [*((count, "") for count in seen[:-1]), (200, "length")]


async def never(session, row):
    raise AssertionError
