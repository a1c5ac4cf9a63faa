"""A training loop over prompts draws with the adapter that it trains, and not with the weights alone."""

import logging
from itertools import count

import pytest
import torch
from tiny_adapters import with_adapters
from tiny_models import make_model

import inflight

NAMES = ("one", "two")
SAMPLING = inflight.SamplingParams(n=4, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(model_dir):
    options = {"device": "cpu", "threads": 1, "max_sequences": 16, "max_context": 64, "slots": 3}
    with inflight.launch(model_dir("qwen3"), lora_rank=4, adapters=NAMES, **options) as engine:
        yield engine


def reward(rollout):
    return float(rollout.token_ids.sum() % 3 + rollout.sample)


def prompts():
    return ([number % 100 + 10, 3] for number in count())


def run(engine, model, *, source=None, evaluation=None, schedule="sync"):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    config = inflight.GRPOConfig(steps=2, groups_per_step=2, schedule=schedule, sampling=SAMPLING)
    with engine.publisher(model) as publisher:
        score = None if source is not None else reward
        loop = inflight.grpo(
            source or engine, publisher, model, optimizer, prompts(), score, config, evaluation=evaluation
        )
        return list(loop)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", ["sync", "inflight"])
def test_prompts_are_drawn_with_the_active_adapter(engine, name, schedule):
    model = with_adapters("qwen3", *NAMES)
    model.set_adapter(name)
    evaluation = inflight.Evaluation(engine, [[1, 2, 3]], reward, every=1)
    reports = run(engine, model, evaluation=evaluation, schedule=schedule)
    assert len(reports) == 2
    for report in reports:
        assert {rollout.adapter for rollout in report.rollouts} == {name}
    if schedule == "sync":  # Every token is of the weights that are trained.
        assert max(report.stats.mismatch.logprob_diff for report in reports) < 1e-3
    assert {0, 2} <= {result.step for result in evaluation.results}
    assert {rollout.adapter for result in evaluation.results for rollout in result.rollouts} == {name}


def test_an_evaluation_follows_the_model_of_each_run(engine):
    model = with_adapters("qwen3", *NAMES)
    evaluations = [
        inflight.Evaluation(engine, [[1, 2, 3]], reward, every=9),
        inflight.Evaluation(engine, [[1, 2, 3]], reward, every=9, adapter="two"),
    ]
    for evaluation, expected in zip(evaluations, ("one", "two"), strict=True):
        for name in NAMES:
            model.set_adapter(name)
            run(engine, model, evaluation=evaluation)
            drawn = {rollout.adapter for rollout in evaluation.results[-1].rollouts}
            assert drawn == {name if expected == "one" else "two"}
    with inflight.Episodes(engine, _play) as episodes, pytest.raises(ValueError, match="adapter is for prompts"):
        inflight.Evaluation(episodes, [[1]], None, adapter="one")


async def _play(session, row):
    await session.complete(row)


def test_versions_of_adapters_are_not_pinned(engine):
    model = with_adapters("qwen3", *NAMES)
    with pytest.raises(ValueError, match=r"one_step_off.*cannot be pinned"):
        run(engine, model, schedule="one_step_off")


@pytest.mark.parametrize(("named", "of_turns"), [("two", None), (None, None), ("one", None), (None, "one")])
def test_episodes_have_to_name_the_adapter_that_is_trained(engine, named, of_turns):
    async def play(session, row):
        turn = await session.complete(row, adapter=of_turns)
        return float(sum(turn.token_ids) % 3)

    model = with_adapters("qwen3", *NAMES)
    model.set_adapter("one")
    with inflight.Episodes(engine, play, adapter=named) as episodes:
        if named == "two":
            with pytest.raises(ValueError, match="trains the adapter 'one', and episodes draw with 'two'"):
                run(engine, model, source=episodes)
            with pytest.raises(ValueError, match="trains the weights, and episodes draw with 'two'"):
                run(engine, make_model("qwen3"), source=episodes)
            return
        if named is None and of_turns is None:
            with pytest.raises(inflight.InflightError, match="other weights have drawn all tokens of a step"):
                run(engine, model, source=episodes)
            return
        reports = run(engine, model, source=episodes)
    assert {rollout.adapter for report in reports for rollout in report.rollouts} == {"one"}


def test_a_stream_submits_prompts_with_the_adapter_that_it_is_given(engine):
    prompts_of_run = [[1, 2, 3], [4, 5]]
    batches = engine.stream.batches(rollouts=8, score=reward, prompts=prompts_of_run, params=SAMPLING, adapter="two")
    assert {rollout.adapter for batch in batches for rollout in batch.rollouts} == {"two"}
    with pytest.raises(ValueError, match=r"adapter is for prompts: give it to engine\.submit"):
        next(engine.stream.batches(rollouts=8, score=reward, adapter="two"))


def test_prompts_without_an_adapter_are_warned_of_once(model_dir, caplog):
    options = {"device": "cpu", "threads": 1, "max_sequences": 4, "max_context": 64}
    with (
        caplog.at_level(logging.WARNING, logger="inflight"),
        inflight.launch(model_dir("qwen3"), lora_rank=4, adapters=NAMES, **options) as engine,
    ):
        engine.submit([[1, 2]], SAMPLING)
        with engine.publisher(with_adapters("qwen3", *NAMES)):
            engine.submit([[1, 2]], SAMPLING, adapter="one")
            engine.submit([[1, 2]], SAMPLING, train=False)
            assert "name one in submit" not in caplog.text
            for _ in range(2):
                engine.submit([[1, 2]], SAMPLING)
    assert caplog.text.count("name one in submit") == 1


def test_tokens_of_other_adapters_are_not_trained(engine):
    """In step with the trainer, all tokens in the loss are of the weights that are trained."""

    async def play(session, row):
        mine = await session.complete(row, adapter="one")
        other = await session.complete(row, adapter="two")
        base = await session.complete(row)
        return float(sum(mine.token_ids) % 3 + len(other.token_ids) + len(base.token_ids))

    model = with_adapters("qwen3", *NAMES)
    model.set_adapter("one")
    with inflight.Episodes(engine, play) as episodes:
        reports = run(engine, model, source=episodes)
    for report in reports:
        assert {rollout.adapter for rollout in report.rollouts} == {"one", "two", None}
        assert report.stats.mismatch.logprob_diff < 1e-3


def test_a_score_function_is_refused_for_episodes(engine):
    model = with_adapters("qwen3", *NAMES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with engine.publisher(model) as publisher, inflight.Episodes(engine, _play, adapter="one") as episodes:
        config = inflight.GRPOConfig(steps=1)
        with pytest.raises(ValueError, match="episodes have rewards: leave score out"):
            inflight.grpo(episodes, publisher, model, optimizer, prompts(), reward, config)
