"""Episodes in progress outlive their engine and their trainer: drawn turns are not drawn again, and a turn in progress
continues from its tokens."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import killed_trainer
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from policies import NAMES, Policies
from tiny_models import make_model
from waiting import PATIENCE_S, wait_until

import inflight
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs

PARAMS = inflight.SamplingParams(n=3, max_tokens=6, ignore_eos=True)
TOOL = [7, 8]


def launch(model_dir, **options):
    return inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=8, max_context=128, **options)


class Play:
    """Plays four turns. After the third one waits while the episode's group is in `held`, and notes all that it
    received."""

    def __init__(self, held=()):
        self.held, self.seen, self.last_turns = set(held), defaultdict(list), threading.Event()

    async def __call__(self, session, row):
        tokens = list(row["tokens"])
        for turn in range(4):
            reply = await session.complete(tokens)
            self.seen[session.group_id, session.sample].append(reply.token_ids)
            tokens += [*reply.token_ids, *TOOL]
            while turn == 2 and row["tokens"][-1] in self.held:
                await asyncio.sleep(0.01)
            if turn == 2:
                self.last_turns.set()
        return float(sum(tokens) % 3)


def check(groups, model):
    """Every token is drawn by the model, and none is missing."""
    for group in groups:
        assert [rollout.sample for rollout in group] == list(range(PARAMS.n))
        for rollout in group:
            assert [(t.begin, t.end) for t in rollout.turns if t.drawn] == [(0, 6), (8, 14), (16, 22), (24, 30)]
            assert all(rollout.token_ids[t.begin : t.end].tolist() == TOOL for t in rollout.turns if not t.drawn)
    rollouts = [rollout for group in groups for rollout in group]
    batch = pack(rollouts, [1.0] * len(rollouts))
    with torch.no_grad():
        scored = token_logprobs(model, batch)
    torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=1e-4, rtol=0)


def test_a_saved_run_continues_its_episodes_within_a_turn(model_dir, tmp_path):
    model, rows = make_model("qwen3"), [{"tokens": [1, 2, index]} for index in range(4)]
    first, second = Play(held=range(4)), Play()
    with launch(model_dir) as engine, inflight.Episodes(engine, first) as episodes:
        publisher = engine.publisher(model)
        engine.wait_for_version(publisher.publish())
        ids = episodes.submit(rows, PARAMS)
        run = inflight.Run(engine, publisher)
        wait_until(lambda: min((len(t) for t in first.seen.values()), default=0) == 3 and len(first.seen) == 12)
        first.held -= {0, 1}
        assert first.last_turns.wait(20)
        engine.pause()  # the episodes of two groups are in their fourth turn, or have ended
        run.save(tmp_path)
        before = {place: list(turns) for place, turns in first.seen.items()}
    with launch(model_dir) as engine, inflight.Episodes(engine, second) as episodes:
        publisher = engine.publisher(model)
        inflight.Run(engine, publisher).load(tmp_path)
        assert set(episodes.continue_saved()) <= set(ids)
        groups = list(engine.stream.groups())
        assert sorted(group[0].group_id for group in groups) == sorted(ids)
        assert engine.stream.outstanding == []
        drawn, total = episodes.counts["turns drawn before"], sum(map(len, before.values()))
        num_whole = len(ids) - len({place[0] for place in second.seen})
        assert drawn >= total - 4 * PARAMS.n * num_whole - PARAMS.n * 4
        assert drawn >= 2 * PARAMS.n * 3, "the groups that were held back continue with three turns"
    check(groups, model)
    of_place = {(r.group_id, r.sample): r for group in groups for r in group}
    for place, turns in before.items():
        rollout = of_place[place]
        found = [rollout.token_ids[t.begin : t.end].tolist() for t in rollout.turns if t.drawn]
        assert found[: len(turns)] == turns


@pytest.mark.parametrize("has_same_name", [False, True])
def test_episodes_in_progress_are_played_by_those_that_began_them(model_dir, tmp_path, has_same_name):
    """Also if two `Episodes` of an engine continue a saved run, and while no run was loaded. Functions of one name are
    told apart by the order of the `Episodes`."""
    held = [True]

    async def train(session, row, factor=1.0):
        await session.complete(row)
        while held[0]:
            await asyncio.sleep(0.01)
        return factor

    async def evaluate(session, row):
        return await train(session, row, 10.0)

    if has_same_name:
        train, evaluate = partial(train, factor=1.0), partial(train, factor=10.0)

    async def renamed(session, row):
        return 100 * await train(session, row)

    rows, rewards = [[1, 2], [1, 3]], {}
    with launch(model_dir) as engine:
        run = inflight.Run(engine, SimpleNamespace(version=0))
        with inflight.Episodes(engine, train) as one, inflight.Episodes(engine, evaluate) as other:
            for episodes in (one, other):
                rewards[episodes.submit(rows[:1], PARAMS, train=False)[0]] = 10.0 if episodes is other else 1.0
            wait_until(lambda: one.counts["turns"] + other.counts["turns"] == 6)
            assert one.continue_saved() == other.continue_saved() == []
            run.save(tmp_path)
            held[0] = False
            groups = engine.stream.collect(list(rewards), timeout_s=60)
            assert {group[0].group_id: group[0].reward for group in groups} == rewards
            assert one.counts["completed"] == other.counts["completed"] == 3
        with inflight.Episodes(engine, train) as one, inflight.Episodes(engine, evaluate) as other:
            run.load(tmp_path)
            continued = [one.continue_saved(), other.continue_saved()]
            assert [one.continue_saved(), other.continue_saved()] == [[], []]
            assert continued == [[group_id] for group_id in rewards]
            groups = engine.stream.collect(list(rewards), timeout_s=60)
            assert {group[0].group_id: group[0].reward for group in groups} == rewards
        with inflight.Episodes(engine, renamed) as one:
            run.load(tmp_path)
            assert one.continue_saved() == list(rewards), "nobody else has the functions"
            assert [group[0].reward for group in engine.stream.collect(list(rewards), timeout_s=60)] == [100.0] * 2


def test_turns_end_with_episodes_that_are_cancelled_before_they_continue(model_dir, tmp_path):
    """As the ones of an evaluation that begins again."""

    async def play(session, row):
        await session.complete(row)
        return 1.0

    with launch(model_dir) as engine, inflight.Episodes(engine, play) as episodes:
        engine.pause()
        ids = episodes.submit([[1, 2]], PARAMS, train=False)
        wait_until(lambda: len(engine.stream.outstanding) == 1 + PARAMS.n)
        inflight.Run(engine, SimpleNamespace(version=0)).save(tmp_path)
    with launch(model_dir) as engine, inflight.Episodes(engine, play) as episodes:
        inflight.Run(engine, SimpleNamespace(version=0)).load(tmp_path)
        held = threading.Event()
        episodes._running_loop().call_soon_threadsafe(held.wait, 60)
        assert episodes.continue_saved() == ids
        episodes.cancel(ids)
        held.set()
        [group] = engine.stream.collect(ids, timeout_s=60)
        assert {rollout.finish_reason for rollout in group} == {"cancelled"}
        wait_until(lambda: engine.stream.outstanding == [])
        assert episodes.turns.saved == {}


def test_grpo_goes_on_with_the_episodes_of_a_saved_run(model_dir, tmp_path):
    model = make_model("qwen3")
    config = inflight.GRPOConfig(steps=4, groups_per_step=2, sampling=PARAMS, ahead=1, skip_uniform_groups=False)
    examples = [{"tokens": [1, index]} for index in range(100)]
    played = []
    for attempt in range(2):
        play = Play()
        with launch(model_dir) as engine, inflight.Episodes(engine, play) as episodes:
            publisher = engine.publisher(model)
            run = inflight.Run(engine, publisher)
            if attempt:
                model.load_state_dict(torch.load(tmp_path / "model.pt"))
                run.load(tmp_path)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for report in inflight.grpo(episodes, publisher, model, optimizer, examples, None, config, run=run):
                played.append([group[0].group_id for group in report.groups])
                if report.step == 2 and not attempt:
                    torch.save(model.state_dict(), tmp_path / "model.pt")
                    run.save(tmp_path)
                    break
    assert [len(groups) for groups in played] == [2, 2, 2, 2]
    assert len({group for groups in played for group in groups}) == 8


@pytest.mark.parametrize(
    "num_kills", [pytest.param(3, marks=pytest.mark.medium), pytest.param(50, marks=pytest.mark.long)]
)
def test_killed_engines_lose_double_and_misattribute_no_token_of_an_episode(model_dir, num_kills):
    """SIGKILLs of the engine while two policies play episodes and are published by turns: another process continues
    their turns. Every token is of the weights that its policy had at the version of the token."""
    policies, seen, rng, params = Policies(), defaultdict(list), np.random.default_rng(0), replace(PARAMS, max_tokens=9)
    options = {"lora_rank": 4, "adapters": NAMES, "kv_on_swap": "recompute", "restarts": num_kills}

    async def debate(session, row):
        tokens = list(row)
        for policy in (*NAMES, *NAMES):
            reply = await session.complete(tokens, adapter=policy)
            seen[session.group_id, session.sample, policy].append(reply.token_ids)
            tokens += reply.token_ids
        return 1.0

    with (
        launch(model_dir, **options) as engine,
        engine.publisher(policies.model) as publisher,
        inflight.Episodes(engine, debate, prefix_across_versions=0) as episodes,
    ):
        policies.note(publisher.publish(), *NAMES)
        policies.publish(publisher, "two")
        engine.wait_for_version(2)
        ids, killed = [], []
        while len(killed) < num_kills:
            if len(episodes._groups) < 8:
                ids += episodes.submit([[1, 2, len(ids) % 50]] * 8, params)
            policies.publish(publisher, str(rng.choice(NAMES)))
            time.sleep(float(rng.uniform(0.02, 0.15)))
            if engine.status().num_running and engine.pid not in killed:
                killed.append(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)
        groups = engine.stream.collect(ids, timeout_s=300)
        assert episodes.counts["completed"] == len(ids) * params.n
        assert engine.stream.outstanding == []
    assert sorted(group[0].group_id for group in groups) == sorted(ids)
    rollouts = [rollout for group in groups for rollout in group]
    assert len(rollouts) == len(seen) == len(ids) * params.n * len(NAMES)
    for rollout in rollouts:
        drawn = [rollout.token_ids[turn.begin : turn.end].tolist() for turn in rollout.turns if turn.drawn]
        assert drawn == seen[rollout.group_id, rollout.sample, rollout.adapter]
        assert [len(turn) for turn in drawn] == [9, 9]
    policies.check(rollouts)
    assert len({version for rollout in rollouts for version in rollout.weight_versions[rollout.drawn]}) > 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "num_kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)]
)
def test_killed_trainers_lose_double_and_misattribute_no_saved_token_of_an_episode(model_dir, tmp_path, num_kills):
    """SIGKILLs of the trainer between two saves, at random events of its episodes. Another process continues the last
    save. Every row is trained once, with the tokens and the results of tools from before the save."""
    command = [sys.executable, killed_trainer.__file__, model_dir("qwen3"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    journal, output, rng = killed_trainer.Journal(tmp_path / "journal"), tmp_path / "output", random.Random(num_kills)

    def start(*arguments: object) -> subprocess.Popen:
        with open(output, "w") as file:
            return subprocess.Popen([*command, *map(str, arguments)], env=environment, stdout=file, stderr=file)

    for attempt in range(num_kills):
        begin, num_more = len(journal.events()), rng.randrange(60)
        process = start(attempt)

        def is_reached(begin=begin, num_more=num_more, process=process) -> bool:
            assert process.poll() is None, output.read_text()
            kinds = [kind for kind, *_ in journal.events()[begin:]]
            return "saved" in kinds and len(kinds) > kinds.index("saved") + num_more

        try:
            wait_until(is_reached, "the trainer has not saved", seconds=PATIENCE_S)
            time.sleep(rng.uniform(0, 0.02))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
    process = start(num_kills, "finish")
    try:
        assert process.wait(PATIENCE_S) == 0, output.read_text()
    finally:
        process.kill()
    assert sum(kind == "loaded" for kind, *_ in journal.events()) == num_kills
    killed_trainer.check(tmp_path)
