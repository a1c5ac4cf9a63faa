"""Environments of verifiers are played unchanged, and their agents draw the tokens of an episode."""

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pretend_verifiers
import pytest
from scripted_turns import CALL, scripted
from waiting import wait_until

import inflight
from inflight.core.errors import MissingPackageError
from inflight.episodes.verifiers import verifiers_rollout

PARAMS = inflight.SamplingParams(n=2, max_tokens=6, ignore_eos=True)
ROWS = ({"prompt": "What time is it?"},)
HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture
def pretended(monkeypatch):
    """The stand-in replaces verifiers."""
    package = ModuleType("verifiers")
    package.v1 = pretend_verifiers
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", pretend_verifiers)


def collect(engine, env, *, rows=ROWS, params=PARAMS, draw=None, **options):
    episodes = inflight.Episodes(engine, verifiers_rollout(env), **options)
    if draw is not None:
        episodes.turns.draw = draw(episodes.turns.draw)
    with episodes:
        groups = engine.stream.collect(episodes.submit(rows, params, train=False), timeout_s=240)
    return groups, episodes


async def three_turns(task, agent):
    messages, player = [{"role": "user", "content": task.data.prompt}], agent()
    for _ in range(3):
        await player.say(messages)
        messages.append({"role": "user", "content": "And now?"})
    player.reward(correct=1.0, brief=-0.25)


def test_the_turns_of_an_agent_are_one_token_sequence_with_the_rewards_by_name(pretended, chat_engine):
    groups, episodes = collect(chat_engine, pretend_verifiers.Env(three_turns), rows=ROWS * 3)
    assert episodes.counts["completed"] == 6
    assert episodes.counts["conversations rendered again"] == 0
    for rollout in (rollout for group in groups for rollout in group):
        assert [(turn.drawn, turn.reward) for turn in rollout.turns] == [
            *[(True, None), (False, None)] * 2,
            (True, 0.75),
        ]
        assert rollout.rewards == {"correct": 1.0, "brief": -0.25}
        drawn = np.concatenate([np.arange(turn.begin, turn.end) for turn in rollout.turns if turn.drawn])
        assert len(drawn) == 18
        assert (rollout.logprobs[drawn] < 0).all()
    assert [len(group) for group in groups] == [2, 2, 2]


def test_the_agents_of_an_episode_have_a_sequence_and_a_reward_each(pretended, chat_engine):
    async def debate(task, agent):
        pro, contra = agent("pro"), agent("contra")
        ours, theirs = [{"role": "user", "content": "For."}], [{"role": "user", "content": "Against."}]
        for _ in range(2):
            theirs.append({"role": "user", "content": await pro.say(ours)})
            ours.append({"role": "user", "content": await contra.say(theirs)})
        agent("judge", trainable=False).reward(sure=5.0)  # another client has drawn
        pro.reward(won=1.0)
        contra.reward(won=-1.0, polite=0.25)

    [group], episodes = collect(chat_engine, pretend_verifiers.Env(debate))
    assert episodes.counts["completed"] == 2
    last = [rollout.turns[-1].reward for rollout in group]
    assert last == [1.0, -0.75] * 2
    assert all(rollout.reward == 0.25 for rollout in group)


def test_weights_change_within_an_episode(pretended, own_chat_engine, chat_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(chat_dir)
    publisher = own_chat_engine.publisher(model)

    async def long(task, agent):
        messages, player = [{"role": "user", "content": "Go."}], agent()
        for _ in range(6):
            await player.say(messages)
            publisher.publish()
            messages.append({"role": "user", "content": "On."})
        player.reward(correct=1.0)

    [group], _ = collect(own_chat_engine, pretend_verifiers.Env(long))
    for rollout in group:
        drawn = [rollout.weight_versions[turn.begin : turn.end] for turn in rollout.turns if turn.drawn]
        assert max(map(max, drawn)) > min(map(min, drawn))


def test_errors_are_counted_by_their_names_and_repeated(pretended, chat_engine, caplog):
    tried = []

    async def failing(task, agent):
        await agent().say([{"role": "user", "content": "Go."}])
        tried.append(task)
        raise pretend_verifiers.TaskError("the rubric has failed")

    retries = {pretend_verifiers.TaskError: 2}
    [group], episodes = collect(chat_engine, pretend_verifiers.Env(failing), retries=retries)
    assert episodes.counts["error: TaskError"] == 2
    assert episodes.counts["retries: TaskError"] == 4
    assert len(tried) == 6
    assert {rollout.finish_reason for rollout in group} == {"error"}
    assert "in failing" in caplog.text  # the traceback of the environment


def test_a_limit_ends_the_episode_by_its_name(pretended, chat_engine):
    limits = inflight.Limits(max_turns=2, at_limit=-1.0)
    [group], episodes = collect(chat_engine, pretend_verifiers.Env(three_turns), limits=limits)
    assert episodes.counts["max_turns"] == 2
    assert [rollout.reward for rollout in group] == [-1.0, -1.0]


async def frozen(task, agent):
    await agent("judge", trainable=False).say([{"role": "user", "content": "Right?"}])


async def unrewarded(task, agent):
    await agent().say([{"role": "user", "content": "Right?"}])


@pytest.mark.parametrize(("play", "why"), [(frozen, "'judge' is not trainable"), (unrewarded, "has no reward")])
def test_an_episode_that_cannot_be_trained_is_refused(pretended, chat_engine, caplog, play, why):
    _, episodes = collect(chat_engine, pretend_verifiers.Env(play))
    assert episodes.counts["error: InflightError"] == 2
    assert why in caplog.text


def test_the_tokens_of_a_repeated_run_are_not_trained(pretended, chat_engine, caplog):
    async def repeated(task, agent):
        first = agent()
        await first.say([{"role": "user", "content": "Go."}])
        agent.discard(first)
        await three_turns(task, agent)

    _, episodes = collect(chat_engine, pretend_verifiers.Env(repeated))
    assert episodes.counts["error: InflightError"] == 2
    assert "an agent has repeated its run" in caplog.text


def test_the_environment_serves_until_its_episodes_are_closed(pretended, chat_engine, caplog):
    env = pretend_verifiers.Env(three_turns)
    rollout = verifiers_rollout(env)
    with inflight.Episodes(chat_engine, rollout) as episodes, inflight.Episodes(chat_engine, rollout) as others:
        chat_engine.stream.collect(episodes.submit(ROWS, PARAMS, train=False), timeout_s=60)
        chat_engine.stream.collect(others.submit(ROWS, PARAMS, train=False), timeout_s=60)
        assert others.counts["error: InflightError"] == 2
        assert "load it again for the other one" in caplog.text
        assert env.serves
    assert not env.serves
    assert env.starts == 1
    with inflight.Episodes(chat_engine, rollout) as episodes:
        chat_engine.stream.collect(episodes.submit(ROWS, PARAMS, train=False), timeout_s=60)
        assert episodes.counts["completed"] == 2
    wait_until(lambda: not env.serves)


def test_a_start_that_fails_is_an_error_of_its_episodes_and_is_tried_again(pretended, chat_engine):
    env = pretend_verifiers.Env(three_turns, fails_to_start=1)
    params = inflight.SamplingParams(n=1, max_tokens=4)
    _, episodes = collect(chat_engine, env, params=params, retries={pretend_verifiers.TaskError: 1})
    assert episodes.counts["retries: TaskError"] == 1
    assert episodes.counts["completed"] == 1


def test_a_row_is_a_task_or_its_data(pretended, chat_engine):
    rows = (pretend_verifiers.Task(pretend_verifiers.Data("Who?")), {"prompt": "Who?"}, {"question": "Who?"})
    groups, episodes = collect(chat_engine, pretend_verifiers.Env(three_turns), rows=rows)
    assert ["Who?" in group[0].prompt for group in groups] == [True, True, False]
    assert episodes.counts["error: TypeError"] == 2


def test_without_verifiers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MissingPackageError, match=r"inflight-rl\[verifiers\]"):
        verifiers_rollout(pretend_verifiers.Env(three_turns))


@pytest.mark.slow
def test_verifiers_itself(chat_engine, monkeypatch, caplog):
    """A taskset with a tool, a reward that fails for its second task, and verifiers' own chat loop in a process."""
    assert find_spec("verifiers"), "`make test-slow` installs verifiers: pip install 'inflight-rl[verifiers]' uv"
    vf = importlib.import_module("verifiers.v1")
    path = [str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))  # for the process of the tool
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "verifiers_sums"}, "agent": agent}))
    rows = [task.data.model_dump(mode="json") for task in env.taskset]
    params = inflight.SamplingParams(n=1, max_tokens=64)
    draw = scripted(chat_engine.tokenizer, *[CALL, "It is 3.<|im_end|>"] * 2)
    [[right], [failed]], episodes = collect(chat_engine, env, rows=rows, params=params, draw=draw, max_running=1)
    assert right.rewards == {"correct": 1.0, "turns": 0.5}
    assert [(turn.drawn, turn.reward) for turn in right.turns] == [(True, None), (False, None), (True, 1.5)]
    assert failed.finish_reason == "error"
    assert episodes.counts["error: TaskError"] == 1
    assert "no luck" in caplog.text
    assert episodes.counts["conversations rendered again"] == 0
