"""Episodes reach the trainer as groups of rollouts with explicit turns: drawn tokens exactly once, given tokens as
context, and failures by name."""

import asyncio
import time
from collections import Counter

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, make_model

import inflight
import inflight.episodes.session
from inflight.core.errors import InflightError
from inflight.core.rollout import samples_of
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs
from inflight.training.model.packing import pack_input
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective

PARAMS = inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True)
TOOL = [7, 8, 9]


async def three_turns(session, row):
    """Two outputs of a tool between three drawn turns; a reward for each turn."""
    tokens = list(row)
    for turn in range(3):
        reply = await session.complete(tokens)
        session.reward(turn + 0.5)
        tokens += [*reply.token_ids, *TOOL]
    return float(session.sample)


def collect(engine, episodes, rows, params=PARAMS):
    with episodes:
        return engine.stream.collect(episodes.submit(rows, params, train=False), timeout_s=60)


def test_turns_are_drawn_and_given_and_nothing_is_tokenized_again(engine):
    model = make_model("qwen3")
    episodes = inflight.Episodes(engine, three_turns)
    groups = collect(engine, episodes, [[1, 2, 3], [4, 5]])
    assert [len(group) for group in groups] == [4, 4]
    for group, prompt in zip(groups, ([1, 2, 3], [4, 5]), strict=True):
        for sample, rollout in enumerate(group):
            assert rollout.sample == sample
            assert rollout.prompt_token_ids.tolist() == prompt
            assert [(t.begin, t.end, t.drawn) for t in rollout.turns] == [
                *[(0, 5, True), (5, 8, False), (8, 13, True), (13, 16, False), (16, 21, True)]
            ]
            assert [t.reward for t in rollout.turns if t.drawn] == [0.5, 1.5, 2.5 + sample]
            assert rollout.reward == 4.5 + sample
            assert rollout.token_ids[5:8].tolist() == rollout.token_ids[13:16].tolist() == TOOL
            assert rollout.num_drawn == rollout.drawn.sum() == 15
            times = [(t.began_ns, t.ended_ns) for t in rollout.turns if t.drawn]
            assert all(a < b for a, b in times)
            assert times == sorted(times)
    rollouts = [rollout for group in groups for rollout in group]
    assert len({tuple(r.token_ids.tolist()) for r in rollouts}) == 8
    batch = pack(rollouts, [1.0] * 8, trainer_version=0)
    with torch.no_grad():
        scored = token_logprobs(model, batch)
    torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=1e-4, rtol=0)
    assert episodes.counts["completed"] == 8
    assert episodes.counts["turns"] == 24
    assert episodes.counts["conversations rendered again"] == 0


@pytest.mark.parametrize("aggregation", ["token", "sequence", "group", "constant"])
def test_given_tokens_have_no_gradient_and_no_part_in_averages(engine, aggregation):
    """Only drawn tokens contribute to the gradient, with weights counted by hand."""
    [group] = collect(engine, inflight.Episodes(engine, three_turns), [[1, 2, 3]])
    objective = Objective(aggregation=aggregation, max_tokens=15)
    advantages = [1.0, -0.5, 0.25, 2.0]
    gradients = []
    for by_hand in (False, True):
        model = make_model("qwen3").double()
        batch = pack(group, advantages, trainer_version=0)
        if by_hand:
            logprobs = token_logprobs(model, batch)
            (-(logprobs * batch.advantages[batch.drawn]).sum() / 60).backward()
        else:
            batch.behavior_logprobs[batch.drawn] = token_logprobs(model, batch).detach().float()
            policy_loss(model, batch, objective=objective)[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


async def two_branches(session, row):
    """Two answers to one beginning, and a second turn after the first answer."""
    first = await session.complete(row)
    other = await session.complete(row)
    assert first.token_ids != other.token_ids
    await session.complete([*row, *first.token_ids, *TOOL])
    again, last = await asyncio.gather(
        session.complete([*row, *other.token_ids, 1]), session.complete([*row, *other.token_ids, 2])
    )
    assert again.token_ids != last.token_ids
    return 1.0


def test_branches_share_their_beginning_and_each_drawn_token_is_in_one_rollout(engine):
    params = inflight.SamplingParams(n=1, max_tokens=5, ignore_eos=True)
    [group] = collect(engine, inflight.Episodes(engine, two_branches), [[1, 2, 3]], params)
    assert [rollout.sample for rollout in group] == [0, 0, 0]
    main, second, third = group
    assert sum(rollout.num_drawn for rollout in group) == 25
    assert [len(rollout.turns) for rollout in group] == [3, 3, 2]
    assert second.forked_from == (main.request_id, 0)
    assert second.prompt_token_ids.tolist() == [1, 2, 3]
    assert third.forked_from == (second.request_id, 5)
    assert third.prompt_token_ids.tolist() == [1, 2, 3, *second.token_ids[:5].tolist()]
    assert len(samples_of(group)) == 1
    batch = pack(group, [1.0] * 3)
    assert batch.totals.num_sequences == 1
    assert batch.sample_tokens.tolist() == [25, 25, 25]
    with torch.no_grad():
        scored = token_logprobs(make_model("qwen3"), batch)
    torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=1e-4, rtol=0)


def test_a_branch_can_leave_a_turn_at_any_token(engine):
    """A pivot: from the third token of a finished turn, of the first sequence and of a branch."""

    async def pivots(session, row):
        first = await session.complete(row)
        second = await session.complete([*row, *first.token_ids[:3]])
        third = await session.complete([*row, *first.token_ids[:3], *second.token_ids[:2], 9])
        session.reward(2.0, first)
        session.reward(3.0, second)
        session.reward(5.0, third)

    params = inflight.SamplingParams(n=1, max_tokens=5, ignore_eos=True)
    [[first, second, third]] = collect(engine, inflight.Episodes(engine, pivots), [[1, 2, 3]], params)
    assert second.forked_from == (first.request_id, 3)
    assert second.prompt_token_ids.tolist() == [1, 2, 3, *first.token_ids[:3].tolist()]
    assert third.forked_from == (second.request_id, 2)
    assert third.token_ids[0] == 9
    assert [r.num_drawn for r in (first, second, third)] == [5, 5, 5]
    assert [[t.reward for t in r.turns if t.drawn] for r in (first, second, third)] == [[2.0], [3.0], [5.0]]
    assert first.reward == 10.0
    batch = pack([first, second, third], [1.0] * 3)
    assert pack_input(batch).input_ids.shape[1] <= 3 + 5 + 5 + 6, "the trainer computes tokens before a branch once"
    with torch.no_grad():
        scored = token_logprobs(make_model("qwen3"), batch)
    torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=1e-4, rtol=0)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "group", "constant"])
def test_an_episode_of_several_sequences_weighs_as_much_as_one(engine, aggregation):
    """The drawn tokens of an episode weigh as much as any other sample, in whole and micro-batches."""

    async def branches(session, row):
        await asyncio.gather(*(session.complete(row) for _ in range(1 + 2 * session.sample)))
        return float(session.sample)

    params = inflight.SamplingParams(n=2, max_tokens=5, ignore_eos=True)
    groups = collect(engine, inflight.Episodes(engine, branches), [[1, 2, 3], [4]], params)
    batch = pack([r for group in groups for r in group], [1.0] * 8)
    objective = Objective(aggregation=aggregation, max_tokens=15)
    model = make_model("qwen3")
    batch.behavior_logprobs[batch.drawn] = token_logprobs(model, batch).detach()
    shares = {"token": [1 / 8, 3 / 8] * 2, "sequence": [1 / 4] * 4, "constant": [1 / 12, 1 / 4] * 2}
    shares["group"] = shares["token"]
    for parts in ([batch], batch.micro_batches(16)):
        found = Counter()
        for part in parts:
            for index, rollout in enumerate(part.rollouts):
                one = part.select([index])
                loss, _ = policy_loss(model, one, objective=objective)
                found[rollout.group_id, rollout.sample] -= loss.item()
        assert sorted(found.values()) == pytest.approx(sorted(shares[aggregation]), rel=1e-4)


# ---- scores on growing turns ------------------------------------------------------------------------------------


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
    deadline = time.monotonic() + 20
    while chat_engine.status().num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not chat_engine.status().num_running


# ---- limits and failures ----------------------------------------------------------------------------------------


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

    limits = inflight.Limits(call_s=0.1, episode_s=0.5, cleanup_s=0.2)
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


@pytest.mark.parametrize("value", [float("nan"), "high", {"a": float("inf")}])
def test_rewards_that_are_no_finite_numbers_fail_the_episode(engine, value):
    async def odd(session, row):
        await session.complete(row)
        return value

    group, counts = outcome(engine, odd)
    assert counts["error: reward"] == 4
    assert {rollout.reward for rollout in group} == {None}


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
        while episodes.counts["attempts"] < 2:
            time.sleep(0.01)
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


def test_micro_batches_must_hold_the_longest_sequence(engine):
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampling = inflight.SamplingParams(n=2, max_tokens=3)
    with engine.publisher(model) as publisher, inflight.Episodes(engine, three_turns) as episodes:
        config = inflight.GRPOConfig(sampling=sampling, micro_batch_tokens=127)
        with pytest.raises(ValueError, match="sequences of 128 tokens, the engine's context, and micro_batch_tokens"):
            next(inflight.grpo(episodes, publisher, model, optimizer, [[1, 2]], None, config))


def test_cancelled_groups_arrive_as_cancelled_and_dropped_ones_never(engine):
    async def waits(session, row):
        await session.complete(row)
        await asyncio.sleep(100)

    with inflight.Episodes(engine, waits) as episodes:
        kept, dropped = episodes.submit([[1], [2]], PARAMS, train=False)
        while episodes.counts["turns"] < 8:
            time.sleep(0.01)
        engine.stream.ledger.drop([dropped])
        episodes.cancel()
        [group] = engine.stream.collect([kept], timeout_s=10)
        assert {rollout.finish_reason for rollout in group} == {"cancelled"}
        assert [rollout.num_drawn for rollout in group] == [5] * 4
    assert engine.stream.outstanding == []
    with pytest.raises(inflight.InflightError, match="closed"):
        episodes.submit([[1]], PARAMS)


def test_wrong_arguments_are_named(engine):
    with pytest.raises(TypeError, match="must be an async function"):
        inflight.Episodes(engine, lambda session, row: 1.0)
    with pytest.raises(ValueError, match="min_share"):
        inflight.Episodes(engine, three_turns, min_share=2)
    with inflight.Episodes(engine, three_turns) as episodes, pytest.raises(ValueError, match="cannot be pinned"):
        episodes.submit([[1]], PARAMS, version=3)
    with pytest.raises(ValueError, match="max_turns must be at least 0"):
        inflight.Limits(max_turns=-1)
    with pytest.raises(ValueError, match="call_s must be positive"):
        inflight.Limits(call_s=0)
    with pytest.raises(ValueError, match='at_limit must be "keep"'):
        inflight.Limits(at_limit="mask")


# ---- training ---------------------------------------------------------------------------------------------------


def test_grpo_learns_from_the_turn_that_was_rewarded(own_engine):
    """The second turn is rewarded for a token that the tool has named; grpo takes episodes like an engine."""

    async def echo(session, row):
        first = await session.complete(row)
        wanted = 5 + session.group_id % 2
        second = await session.complete([*row, *first.token_ids, wanted], max_tokens=2)
        return float(np.mean([token == wanted for token in second.token_ids]))

    model = make_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = inflight.GRPOConfig(
        steps=30,
        groups_per_step=4,
        sampling=inflight.SamplingParams(n=8, max_tokens=3, ignore_eos=True),
        advantages=inflight.turn_advantages("rloo"),
        skip_uniform_groups=False,
        schedule="sync",
    )
    rows = ([index % VOCABULARY, 3] for index in range(1000))
    with own_engine.publisher(model) as publisher, inflight.Episodes(own_engine, echo) as episodes:
        reports = list(inflight.grpo(episodes, publisher, model, optimizer, rows, None, config))
    assert len(reports) == 30
    rewards = [report.reward for report in reports]
    assert np.mean(rewards[-5:]) > 0.2 > 0.1 > np.mean(rewards[:3])
    assert reports[0].num_tokens == 4 * 8 * 5
    assert max(report.stats.as_dict()["mismatch/logprob_diff"] for report in reports[:1]) < 1e-3
    assert own_engine.stream.outstanding == []


def test_the_stream_runs_episodes_for_prompts(engine):
    rows = [[index % VOCABULARY, 3] for index in range(6)]
    with inflight.Episodes(engine, three_turns) as episodes:
        batches = list(engine.stream.batches(rollouts=8, prompts=rows, params=PARAMS, episodes=episodes))
    assert [batch.num_sequences for batch in batches] == [8, 8, 8]
    assert [batch.num_drawn for batch in batches] == [120] * 3
    assert engine.stream.outstanding == []


def test_prompts_without_a_score_are_refused(engine):
    with pytest.raises(ValueError, match="prompts need a score; only episodes have rewards"):
        next(engine.stream.batches(rollouts=2, prompts=[[1]], params=PARAMS))
    assert engine.stream.outstanding == []


def test_a_rollout_function_that_forgets_its_reward_is_named(engine, caplog):
    async def forgetful(session, row):
        await session.complete([5, 6, 7])

    with inflight.Episodes(engine, forgetful) as episodes:
        ids = episodes.submit([None], inflight.SamplingParams(n=2, max_tokens=2), train=False)
        engine.stream.collect(ids, timeout_s=60)
        assert episodes.failures == {"completed: no reward": 2}
    assert caplog.text.count("returned None and has set no reward") == 1
