"""Episodes in progress outlive their engine and their trainer: drawn turns are not drawn again, and a turn in progress
continues from its tokens."""

import asyncio
import os
import signal
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
import torch
from tiny_models import make_model
from waiting import wait_until

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


@pytest.mark.slow
def test_no_token_is_lost_or_doubled_when_engines_are_killed(model_dir):
    """SIGKILLs of the engine while episodes are in progress: another process continues their turns."""
    model, rows = make_model("qwen3"), [{"tokens": [1, 2, index % 50]} for index in range(400)]
    play, rng = Play(), np.random.default_rng(0)
    with launch(model_dir, restarts=100) as engine, inflight.Episodes(engine, play) as episodes:
        publisher = engine.publisher(model)
        engine.wait_for_version(publisher.publish())
        ids = episodes.submit(rows, PARAMS)
        num_kills = 0
        while len(episodes._groups) and num_kills < 50:
            time.sleep(float(rng.uniform(0.02, 0.15)))
            if engine.status().num_running:
                os.kill(engine.pid, signal.SIGKILL)
                num_kills += 1
            engine.status()
        groups = engine.stream.collect(ids, timeout_s=300)
        assert episodes.counts["completed"] == len(ids) * PARAMS.n
    assert num_kills > 10
    check(groups, model)
    for group in groups:
        for rollout in group:
            found = [rollout.token_ids[t.begin : t.end].tolist() for t in rollout.turns if t.drawn]
            assert found == play.seen[rollout.group_id, rollout.sample]
