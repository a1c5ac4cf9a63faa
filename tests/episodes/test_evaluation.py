"""Held-out episodes next to training."""

import asyncio

import pytest
import torch
from tiny_models import VOCABULARY, make_model

import inflight

SAMPLING = inflight.SamplingParams(n=4, max_tokens=4, ignore_eos=True)
GREEDY = inflight.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
HELD_OUT = [[7, index] for index in range(3)]


async def two_turns(session, row):
    first = await session.complete(row)
    second = await session.complete([*row, *first.token_ids, 9])
    return float(sum(second.token_ids) % 3)


def test_grpo_evaluates_held_out_episodes_and_does_not_train_on_them(own_engine):
    model = make_model("qwen3")
    config = inflight.GRPOConfig(steps=4, groups_per_step=2, sampling=SAMPLING)
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.5), ([i % VOCABULARY, 3] for i in range(100))
    with own_engine.publisher(model) as publisher, inflight.Episodes(own_engine, two_turns) as episodes:
        evaluation = inflight.Evaluation(episodes, HELD_OUT, None, sampling=GREEDY, every=2)
        reports = list(inflight.grpo(episodes, publisher, model, optimizer, rows, None, config, evaluation=evaluation))
    results = evaluation.results
    assert (results[0].step, results[-1].step) == (0, 4)
    for result in results:
        rewards = [float(sum(r.token_ids[4:].tolist()) % 3) for r in result.rollouts]
        assert [rollout.reward for rollout in result.rollouts] == rewards
        assert (result.reward, result.num_failed) == (sum(rewards) / 3, 0)
        versions = [version for r in result.rollouts for version in r.weight_versions[r.drawn].tolist()]
        assert min(versions) >= result.version
        assert max(versions) == result.newest_version
    assert results[-1].newest_version == results[-1].version == reports[-1].version
    assert results[-1].as_dict()["eval/mean_length"] == 6
    trained = {rollout.group_id for report in reports for rollout in report.rollouts}
    assert trained.isdisjoint(rollout.group_id for result in results for rollout in result.rollouts)
    assert own_engine.stream.outstanding == []


def test_a_result_names_the_versions_of_its_tokens_and_counts_each_episode_once(own_engine):
    """Between its turns the version changes. The second turn branches off: two rollouts are one episode."""
    has_begun, may_go_on = [], asyncio.Event()

    async def waits(session, row):
        await session.complete(row)
        has_begun.append(session)
        await asyncio.wait_for(may_go_on.wait(), 20)
        await session.complete(row)
        return 1.0 if row[1] else None

    model = make_model("qwen3")
    with own_engine.publisher(model) as publisher, inflight.Episodes(own_engine, waits) as episodes:
        evaluation = inflight.Evaluation(episodes, HELD_OUT, None, sampling=GREEDY)
        version = publisher.publish()
        evaluation.start(0, version)
        while len(has_begun) < 3 and not evaluation.finished():
            own_engine.status()
        own_engine.wait_for_version(newest := publisher.publish())
        episodes._loop.call_soon_threadsafe(may_go_on.set)
        evaluation.wait()
        [result] = evaluation.finished()
    assert (result.version, result.newest_version) == (version, newest)
    assert newest == version + 1
    assert (len(result.rollouts), result.num_failed, result.reward) == (6, 1, 1.0)
    assert result.as_dict()["eval/newest_version"] == newest


def test_episodes_have_rewards_and_prompts_need_a_score(engine):
    with inflight.Episodes(engine, two_turns) as episodes:
        for source, score in ((episodes, lambda rollout: 1.0), (engine, None)):
            with pytest.raises(ValueError, match="give score=None for episodes alone"):
                inflight.Evaluation(source, HELD_OUT, score)
