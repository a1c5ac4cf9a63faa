"""Episodes reach the trainer as groups of rollouts with explicit turns: drawn tokens exactly once, given tokens as
context."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from episode_functions import PARAMS, TOOL, collect, three_turns
from tiny_models import VOCABULARY, make_model

import inflight
from inflight.core.errors import InvalidRequestError
from inflight.core.rollout import samples_of
from inflight.fleet.ranks.attached import AttachedEngine
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs
from inflight.training.model.packing import pack_input
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective


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


def test_micro_batches_must_hold_the_longest_sequence(engine):
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampling = inflight.SamplingParams(n=2, max_tokens=3)
    with engine.publisher(model) as publisher, inflight.Episodes(engine, three_turns) as episodes:
        config = inflight.GRPOConfig(sampling=sampling, micro_batch_tokens=127)
        with pytest.raises(ValueError, match="sequences of 128 tokens, the engine's context, and micro_batch_tokens"):
            next(inflight.grpo(episodes, publisher, model, optimizer, [[1, 2]], None, config))


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


def test_ranks_other_than_0_have_episodes_that_rank_0_plays():
    """They open no address for agents."""
    engine = object.__new__(AttachedEngine)
    engine.rank, engine._shares = 1, SimpleNamespace()
    with inflight.Episodes(engine, three_turns, agents="127.0.0.1:1") as episodes:
        assert episodes.stream is engine.stream
        assert episodes.agents_url is None
        assert not episodes.can_pin
        inflight.Evaluation(episodes, [[1]], None).close()
        with pytest.raises(inflight.InflightError, match="rank 0 plays the episodes of all ranks, and this is rank 1"):
            episodes.submit([[1]], PARAMS)


def test_grpo_learns_from_the_turn_that_was_rewarded(own_engine):
    """The second turn is rewarded for tokens that end like one that the tool has named; grpo takes episodes like an
    engine."""

    async def echo(session, row):
        first = await session.complete(row)
        wanted = 5 + session.group_id % 2
        second = await session.complete([*row, *first.token_ids, wanted], max_tokens=2)
        return float(np.mean([token % 8 == wanted for token in second.token_ids]))

    model = make_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = inflight.GRPOConfig(
        steps=60,
        groups_per_step=4,
        sampling=inflight.SamplingParams(n=8, max_tokens=3, ignore_eos=True),
        advantages=inflight.turn_advantages("rloo"),
        skip_uniform_groups=False,
        schedule="sync",
    )
    rows = ([index % VOCABULARY, 3] for index in range(1000))
    with own_engine.publisher(model) as publisher, inflight.Episodes(own_engine, echo) as episodes:
        reports = list(inflight.grpo(episodes, publisher, model, optimizer, rows, None, config))
    assert len(reports) == 60
    rewards = [report.reward for report in reports]
    assert np.mean(rewards[-10:]) > 0.3 > 0.22 > np.mean(rewards[:3]), "1/8 by chance, with a deviation below 0.03"
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


def test_a_single_row_is_refused(engine):
    with inflight.Episodes(engine, three_turns) as episodes:
        for row in ({"question": "a", "answer": "b"}, "abc"):
            with pytest.raises(InvalidRequestError, match="wrap it in a list"):
                episodes.submit(row, PARAMS)


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
