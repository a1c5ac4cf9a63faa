"""Environments of other packages are played by their published methods, and closed in any case."""

import threading
import time
from collections import Counter

import pytest
from openenv_server import OpenEnvServer, serving
from waiting import wait_until

import inflight
from inflight.episodes import environments
from inflight.episodes.environments import (
    gym_rollout,
    openenv_rollout,
    player_advantages,
    skyrl_rollout,
    textarena_rollout,
)

PARAMS = inflight.SamplingParams(n=2, max_tokens=4, ignore_eos=True)


def collect(engine, rollout, *, rows=({"seed": 7},), params=PARAMS, limits=None):
    episodes = inflight.Episodes(engine, rollout, limits=limits)
    with episodes:
        groups = engine.stream.collect(episodes.submit(rows, params, train=False), timeout_s=60)
    return groups, episodes.counts


class Steps:
    """An environment of Gymnasium. It ends after `length` steps, each with its number as the reward."""

    made: list["Steps"]

    def __init__(self, length=3, truncates=False, step_s=0.0, fails_at_end=False):
        self.length, self.truncates, self.step_s, self.fails_at_end = length, truncates, step_s, fails_at_end
        self.actions, self.closed, self.threads = [], 0, set()
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        self.threads.add(threading.current_thread())
        self.given = seed, options
        return "start", {}

    def step(self, action):
        self.threads.add(threading.current_thread())
        time.sleep(self.step_s)
        self.actions.append(action)
        number = len(self.actions)
        ends = number == self.length
        return f"step {number}", float(number), ends and not self.truncates, ends and self.truncates, {}

    def close(self):
        self.closed += 1
        if self.fails_at_end:
            raise RuntimeError("cannot close")


@pytest.fixture(autouse=True)
def _no_environments():
    Steps.made = []


def test_gymnasium_rewards_each_turn(chat_engine):
    rows = [{"seed": 7, "options": {"level": 2}}, {}]
    groups, counts = collect(chat_engine, gym_rollout(lambda row: Steps()), rows=rows)
    assert counts["completed"] == 4
    for group in groups:
        for rollout in group:
            assert [turn.reward for turn in rollout.turns if turn.drawn] == [1.0, 2.0, 3.0]
            assert rollout.reward == 6.0
            assert rollout.finish_reason == "length"  # of the last turn, after 4 tokens
            assert rollout.prompt.count("start") == 1
            assert "step 2" in rollout.text
            assert "step 3" not in rollout.text  # nobody answers it
    assert Counter(env.given for env in Steps.made if env.given[1] is None).most_common() == [
        ((groups[1][0].group_id, None), 2)
    ]
    assert [env.given for env in Steps.made if env.given[1]] == [(7, {"level": 2})] * 2
    assert [env.closed for env in Steps.made] == [1] * 4
    assert all(threading.main_thread() not in env.threads for env in Steps.made)
    assert all("inflight-episodes" not in {thread.name for thread in env.threads} for env in Steps.made)


@pytest.mark.parametrize(("at_limit", "reward"), [("keep", 6.0), ("exclude", None), (-1.0, 5.0)])
def test_truncated_is_a_limit_and_not_the_end(chat_engine, at_limit, reward):
    rollout = gym_rollout(lambda row: Steps(truncates=True))
    [group], counts = collect(chat_engine, rollout, limits=inflight.Limits(at_limit=at_limit))
    assert counts["max_steps"] == 2
    assert [rollout.reward for rollout in group] == [reward] * 2
    assert [env.closed for env in Steps.made] == [1, 1]


def test_observations_and_actions_are_converted(chat_engine):
    made = []

    class Numbers(Steps):
        def reset(self, **_):
            made.append(self)
            return {"x": 1}, {}

    rollout = gym_rollout(
        lambda row: Numbers(length=1),
        to_messages=lambda observation: [{"role": "user", "content": f"x is {observation['x']}"}],
        to_action=lambda reply: len(reply.token_ids),
    )
    [group], _ = collect(chat_engine, rollout)
    assert "x is 1" in group[0].prompt
    assert [env.actions for env in made] == [[4], [4]]
    with_default, counts = collect(chat_engine, gym_rollout(lambda row: Numbers()))
    assert counts["error: TypeError"] == 2
    assert [rollout.reward for rollout in with_default[0]] == [None, None]
    assert all(env.closed == 1 for env in made)


def test_environments_are_closed_after_a_failure_a_limit_and_a_cancellation(chat_engine, caplog):
    limits = inflight.Limits(max_turns=1)
    collect(chat_engine, gym_rollout(lambda row: Steps(fails_at_end=True)), limits=limits)
    assert [env.closed for env in Steps.made] == [1, 1]
    assert "close has failed at the end of an episode: RuntimeError: cannot close" in caplog.text
    Steps.made = []
    limits = inflight.Limits(call_s=0.5)  # the other calls take no time, unless the machine is busy
    _, counts = collect(chat_engine, gym_rollout(lambda row: Steps(step_s=1.0)), limits=limits)
    assert counts["error: TimeoutError"] == counts["calls that timed out"] == 2
    assert [(env.closed, len(env.actions)) for env in Steps.made] == [(1, 1), (1, 1)]  # after the late step
    Steps.made = []
    with inflight.Episodes(chat_engine, gym_rollout(lambda row: Steps(step_s=0.3))) as episodes:
        ids = episodes.submit([{}], PARAMS, train=False)
        while not any(env.threads for env in Steps.made):
            time.sleep(0.01)
        time.sleep(0.05)
        episodes.cancel(ids)
        [group] = chat_engine.stream.collect(ids, timeout_s=60)
    assert {rollout.finish_reason for rollout in group} == {"cancelled"}
    assert [env.closed for env in Steps.made] == [1] * len(Steps.made)


def test_an_environment_that_is_made_too_late_is_closed_too(chat_engine):
    def slow(row):
        time.sleep(0.3)
        return Steps()

    _, counts = collect(chat_engine, gym_rollout(slow), limits=inflight.Limits(call_s=0.05))
    assert counts["error: TimeoutError"] == 2
    assert [env.closed for env in Steps.made] == [1, 1]


class Text:
    """An environment of skyrl-gym."""

    def __init__(self, extras, rewrites=False):
        self.extras, self.rewrites, self.actions, self.closed = extras, rewrites, [], 0

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "Begin."}], {}

    def step(self, action):
        self.actions.append(action)
        done = len(self.actions) == 2
        observations = [] if done else [{"role": "user", "content": "Try again."}]
        step = {"observations": observations, "reward": 0.5 * done, "done": done, "metadata": {}}
        return step | {"postprocessed_action": action[:1] if self.rewrites else action}

    def close(self):
        self.closed += 1


def test_skyrl_gym(chat_engine):
    made = []

    def make(row):
        made.append(Text(row))
        return made[-1]

    row = {"prompt": [{"role": "system", "content": "Be brief."}], "answer": 3}
    [group], counts = collect(chat_engine, skyrl_rollout(make), rows=[row])
    assert counts["completed"] == 2
    for rollout in group:
        assert [turn.reward for turn in rollout.turns if turn.drawn] == [0.0, 0.5]
        assert "Be brief." in rollout.prompt
        assert "Begin." in rollout.prompt
        assert "Try again." in rollout.text
    assert [(env.closed, env.extras) for env in made] == [(1, row)] * 2


def test_skyrl_gym_that_rewrites_what_was_drawn_is_refused(chat_engine, caplog):
    rollout = skyrl_rollout(lambda row: Text(row, rewrites=True))
    [group], counts = collect(chat_engine, rollout, rows=[{"prompt": []}])
    assert counts["error: InflightError"] == 2
    assert "Text has changed the drawn text: postprocessed_action is" in caplog.text
    assert [rollout.reward for rollout in group] == [None, None]


class Game:
    """A game of TextArena: two players move in turn, and see each other's moves. The second wins after two moves
    each."""

    def __init__(self, full_text=False):
        self.full_text, self.closed = full_text, 0

    def reset(self, num_players, seed=None):
        self.seed, self.player, self.moves = seed, 0, 0
        self.new = [[(-1, f"You are player {player}.", "PROMPT")] for player in range(num_players)]
        self.all = [[] for _ in range(num_players)]

    def get_observation(self):
        new, self.new[self.player] = self.new[self.player], []
        self.all[self.player] += new
        if not self.full_text:
            return self.player, new
        return self.player, "".join(f"\n[{sender}] {text}" for sender, text, _ in self.all[self.player])

    def step(self, action):
        for new in self.new:
            new.append((self.player, f"move {self.moves}", "PLAYER_ACTION"))
        self.moves += 1
        self.player = 1 - self.player
        return self.moves == 4, {}

    def close(self):
        self.closed += 1
        return {0: -1, 1: 1}, {}


@pytest.mark.parametrize("full_text", [False, True])
def test_textarena_players_have_their_own_conversations_and_rewards(chat_engine, full_text):
    made = []

    def make(row):
        made.append(Game(full_text))
        return made[-1]

    [group], counts = collect(chat_engine, textarena_rollout(make))
    assert counts["completed"] == 2
    assert counts["conversations rendered again"] == 0
    assert [rollout.sample for rollout in group] == [0, 0, 1, 1]
    for player, rollout in zip([0, 1, 0, 1], group, strict=True):
        assert f"You are player {player}." in rollout.prompt
        assert [turn.reward for turn in rollout.turns if turn.drawn] == [None, (-1.0, 1.0)[player]]
        assert rollout.reward == 0.0
        assert rollout.text.count(f"move {1 + player}") == 1
        assert "You are player" not in rollout.text
    assert "[Player 0] move 0" in group[1].prompt or full_text
    assert [(game.closed, game.seed) for game in made] == [(1, 7)] * 2
    assert player_advantages([group]) == [0.0] * 4
    group[0].turns = (*group[0].turns[:-1], group[0].turns[-1].__class__(0, 4, True, 3.0))
    assert player_advantages([group]) == [4.0, 0.0, -4.0, 0.0]


def test_cleanup_works_after_the_end_and_is_bounded(chat_engine, caplog):
    released = []

    async def release(name):
        released.append(name)

    async def play(session, row):
        try:
            await session.chat([{"role": "user", "content": "Begin."}])
            await session.chat([{"role": "user", "content": "Continue."}])  # a second turn is not allowed
        finally:
            await session.clean_up(release, session.sample)
            await session.clean_up(time.sleep, 0.5)

    limits = inflight.Limits(max_turns=1, cleanup_s=0.1)
    _, counts = collect(chat_engine, play, limits=limits)
    assert sorted(released) == [0, 1]
    assert counts["max_turns"] == counts["calls that timed out"] == 2
    assert "sleep did not return within 0.1 s, and is left behind" in caplog.text


def test_a_reward_can_be_of_an_earlier_reply(chat_engine):
    async def play(session, row):
        first = await session.complete([1, 2, 3])
        await session.complete([1, 2, 3, *first.token_ids, 4])
        session.reward(2.0, first)
        with pytest.raises(ValueError, match="must be finite"):
            session.reward(float("inf"), first)
        return 1.0

    [group], counts = collect(chat_engine, play)
    assert counts["completed"] == 2
    assert [[turn.reward for turn in rollout.turns if turn.drawn] for rollout in group] == [[2.0, 1.0]] * 2


def play_openenv(url):
    return openenv_rollout(
        url,
        to_messages=lambda observation: [{"role": "user", "content": observation["prompt"]}],
        to_action=lambda reply: {"message": reply.content},
    )


def test_openenv_has_an_environment_for_each_episode(chat_engine):
    server = OpenEnvServer()
    with serving(server) as url:
        rows = [{"seed": 3, "options": {"level": 2}}]
        [group], counts = collect(chat_engine, play_openenv(url), rows=rows)
    assert counts["completed"] == 2
    for rollout in group:
        assert [turn.reward for turn in rollout.turns if turn.drawn] == [1.0, 2.0]
        assert rollout.prompt.count("start") == 1
        assert "step 1" in rollout.text
    assert [[message["type"] for message in received] for received in server.received] == [
        ["reset", "step", "step", "close"]
    ] * 2
    assert [received[0]["data"] for received in server.received] == [{"seed": 3, "level": 2}] * 2
    texts = {received[1]["data"]["message"] for received in server.received}
    assert len(texts) == 2  # the actions of two samples


def test_openenv_waits_for_a_free_environment(chat_engine, monkeypatch):
    monkeypatch.setattr(environments, "_CAPACITY_S", 0.02)
    server = OpenEnvServer(capacity=1)
    with serving(server) as url:
        _, counts = collect(chat_engine, play_openenv(lambda row: url))
    assert counts["completed"] == 2
    assert server.num_refused > 0
    assert len(server.received) == 2


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("error", "InflightError", "step: EXECUTION_ERROR: it broke"),
        ("text", "InflightError", "answered step by TEXT, not an observation"),
        ("end", "InflightError", "answered step by CLOSE, not an observation"),
        ("hangs", "TimeoutError", "request did not return within 0.2 s"),
    ],
)
def test_an_openenv_that_fails_ends_its_episodes(chat_engine, caplog, fault, error, message):
    server = OpenEnvServer(fault=fault)
    with serving(server) as url:
        [group], counts = collect(chat_engine, play_openenv(url), limits=inflight.Limits(call_s=0.2))
        wait_until(lambda: server.num_open == 0)
    assert counts[f"error: {error}"] == 2
    assert message in caplog.text
    assert [rollout.reward for rollout in group] == [None, None]
