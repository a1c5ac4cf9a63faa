"""Workers elsewhere ask for episodes, play them over HTTP and end them."""

import asyncio
import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from http_calls import call
from waiting import PATIENCE_S, wait_until

import inflight
from inflight.core.errors import ListenError
from inflight.episodes import agent_server
from inflight.episodes.remote import AgentError, RemoteAgents

WORKER = Path(__file__).parents[2] / "examples" / "episode_worker.py"
HERE = "127.0.0.1:0"
PARAMS = inflight.SamplingParams(n=1, max_tokens=8, ignore_eos=True, seed=7)
KEY = "0123456789abcdef"


def post(url, key, body=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return call(SimpleNamespace(url=url), "POST", "", {} if body is None else body, headers)


def claim(episodes, key=KEY, wait_s=20.0):
    """Ask for an episode once, at the port of this machine."""
    port = episodes._address[0].getsockname()[1]
    return post(f"http://127.0.0.1:{port}/sessions", key, {"wait_s": wait_s})


def take(episodes):
    """The next episode."""
    status, task = wait_until(lambda: (answer := claim(episodes))[0] != 204 and answer)
    assert status == 200
    return task


def end(task, **body):
    return post(f"{task['root']}/end", task["key"], body)


def ask(task, messages, **options):
    with openai.OpenAI(base_url=task["base_url"], api_key=task["key"], max_retries=0) as client:
        return client.chat.completions.create(model="any", messages=messages, **options).choices[0].message


def user(text):
    return {"role": "user", "content": text}


def play(task):
    """Three turns and a branch, as `in_process`."""
    messages = [user(task["row"]["question"])]
    for turn in range(3):
        messages += [ask(task, messages), user(f"And in {turn}?")]
    ask(task, messages[:-2])


async def in_process(session, row):
    messages = [user(row["question"])]
    for turn in range(3):
        reply = await session.chat(messages)
        messages += [reply.message, user(f"And in {turn}?")]
    await session.chat(messages[:-2])
    return 1.0


@contextlib.contextmanager
def offering(engine, rows, *, params=PARAMS, agents=HERE, idle_s=PATIENCE_S, **options):
    """Episodes that wait for workers, and a function that returns their groups."""
    with inflight.Episodes(engine, RemoteAgents(key=KEY, idle_s=idle_s), agents=agents, **options) as episodes:
        ids = episodes.submit(rows, params, train=False)
        yield episodes, lambda: engine.stream.collect(ids, timeout_s=PATIENCE_S)


def collect(engine, rollout, rows, params):
    with inflight.Episodes(engine, rollout) as episodes:
        return engine.stream.collect(episodes.submit(rows, params, train=False), timeout_s=PATIENCE_S)


@pytest.mark.medium
def test_two_workers_complete_groups_with_the_tokens_drawn_in_process(chat_engine):
    rows = [{"question": "What time is it?"}, {"question": "Where are you?"}]
    params = inflight.SamplingParams(n=3, max_tokens=8, ignore_eos=True, seed=7)
    expected = collect(chat_engine, in_process, rows, params)
    played = []

    both = threading.Barrier(2)

    def work():
        task = take(episodes)
        both.wait(PATIENCE_S)
        while task is not None:
            play(task)
            assert end(task, reward=1)[0] == 204
            played.append((threading.current_thread().name, task))
            status, task = claim(episodes, wait_s=0)
            task = task if status == 200 else None

    with offering(chat_engine, rows, params=params) as (episodes, groups):
        workers = [threading.Thread(target=work, name=name) for name in "ab"]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE_S)
            assert not worker.is_alive()
        captured = groups()
    assert {name for name, _ in played} == {"a", "b"}
    assert len({task["id"] for _, task in played}) == len({task["key"] for _, task in played}) == 6
    assert episodes.counts["completed"] == 6
    assert episodes.counts["conversations rendered again"] == 0
    for ours, theirs in zip(captured, expected, strict=True):
        assert [r.token_ids.tolist() for r in ours] == [r.token_ids.tolist() for r in theirs]
        assert [r.prompt_token_ids.tolist() for r in ours] == [r.prompt_token_ids.tolist() for r in theirs]
        assert [r.sample for r in ours] == [r.sample for r in theirs]
        assert [r.reward for r in ours] == [1.0] * 6
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-5)
            assert [turn.reward for turn in mine.turns] == [turn.reward for turn in other.turns]


@pytest.mark.medium
def test_the_worker_of_the_page_plays_in_other_processes(chat_engine):
    rows = [{"question": f"Name {n}.", "answer": ""} for n in range(2)]
    params = inflight.SamplingParams(n=2, max_tokens=8, ignore_eos=True)
    with offering(chat_engine, rows, params=params) as (episodes, groups):
        command = [sys.executable, str(WORKER), episodes.agents_url, KEY]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            rollouts = [rollout for group in groups() for rollout in group]
            episodes.close()
            printed = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    assert [(rollout.reward, len(rollout.token_ids)) for rollout in rollouts] == [(1.0, 8)] * 4
    assert [worker.returncode for worker in workers] == [0, 0]
    assert all(text.startswith("no more episodes: ") for text in printed)


def test_a_task_has_all_that_unchanged_clients_need(chat_engine):
    with offering(chat_engine, [{"nested": [1, None, "é"]}]) as (episodes, groups):
        task = take(episodes)
        assert task["row"] == {"nested": [1, None, "é"]}
        assert task["root"] == f"{episodes.agents_url}/sessions/{task['id']}"
        assert task["environment"] == {
            "OPENAI_BASE_URL": task["base_url"],
            "ANTHROPIC_BASE_URL": task["root"],
            "INFLIGHT_REWARD_URL": f"{task['root']}/reward",
            "OPENAI_API_KEY": task["key"],
            "ANTHROPIC_API_KEY": task["key"],
        }
        ask(task, [user("Hello")])
        assert post(task["environment"]["INFLIGHT_REWARD_URL"], task["key"], {"reward": 0.5})[0] == 200
        assert end(task, reward={"right": 1, "short": 0.25})[0] == 204
        [[rollout]] = groups()
    assert rollout.reward == 1.75
    assert rollout.rewards == {"right": 1.0, "short": 0.25}


def test_an_episode_has_one_worker(chat_engine):
    """The second one gets none, and mistakes at the end do not end it."""
    with offering(chat_engine, ["row"]) as (episodes, groups):
        task = take(episodes)
        assert claim(episodes, wait_s=0) == claim(episodes, wait_s=0.1) == (204, "")
        assert end(task, reward=1.0)[0] == 400  # without a turn
        ask(task, [user("Hello")])
        assert end(task, rewards=1.0)[0] == end(task, reward="1")[0] == end(task, reward=1.0, error="no")[0] == 400
        assert end(task, reward=1.0) == (204, "")
        [[rollout]] = groups()
    assert rollout.reward == 1.0


def test_an_episode_that_a_worker_has_ended_takes_no_request(chat_engine):
    """Also while a rollout function around the wait is still running."""
    agents, tasks, late = RemoteAgents(key=KEY), [], []

    def requests():
        [task] = tasks
        late.append(end(task, reward=1.0))
        late.append(post(f"{task['root']}/reward", task["key"], {"reward": 1.0}))
        late.append(post(f"{task['base_url']}/chat/completions", task["key"], {"messages": [user("Hello")]}))

    async def around(session, row):
        value = await agents(session, row)
        await session.call(requests)
        return value * 2

    with inflight.Episodes(chat_engine, around, agents=HERE) as episodes:
        ids = episodes.submit([0], PARAMS, train=False)
        tasks.append(take(episodes))
        ask(tasks[0], [user("Hello")])
        assert end(tasks[0], reward=1.5)[0] == 204
        [[rollout]] = chat_engine.stream.collect(ids, timeout_s=PATIENCE_S)
        late.append(end(tasks[0], reward=1.0))
    assert [(status, answer["error"]["type"]) for status, answer in late] == [(404, "not_found_error")] * 4
    assert rollout.reward == 3.0
    assert sum(turn.drawn for turn in rollout.turns) == 1


def test_each_request_needs_its_key(chat_engine):
    """Also at an address that other machines reach."""
    url = "http://trainer.example/of/agents"
    with offering(chat_engine, [0, 1], agents="0.0.0.0:0", agents_url=f"{url}/") as (episodes, groups):
        port = episodes._address[0].getsockname()[1]
        here = f"http://127.0.0.1:{port}"
        task, other = take(episodes), take(episodes)
        assert episodes.agents_url == url
        for each in (task, other):
            assert each["root"] == f"{url}/sessions/{each['id']}"
            each |= {name: each[name].replace(url, here) for name in ("root", "base_url")}
        paths = ["/v1/chat/completions", "/v1/messages", "/reward", "/end"]
        wrong = [None, "", KEY, other["key"], f"{task['key']}a", "é"]
        refused = [post(f"{task['root']}{path}", key, {"reward": 1.0}) for path in paths for key in wrong]
        refused += [claim(episodes, key, wait_s=0) for key in [None, "", "0" * 16, task["key"]]]
        shared = f"{here}/sessions/{KEY}/v1/chat/completions"
        lost = [call(SimpleNamespace(url=shared), "POST", "", {}, {"X-Session-ID": task["id"]})]
        lost.append(post(f"{here}/sessions/{task['id']}a/end", task["key"]))
        lost.append(post(f"{here}/", KEY))
        for each in (task, other):
            ask(each, [user("Hello")])
            assert end(each, reward=1.0)[0] == 204
        assert [rollout.reward for [rollout] in groups()] == [1.0, 1.0]
    kinds = {(status, answer["error"]["type"]) for status, answer in refused}
    assert kinds == {(401, "authentication_error")}
    assert {status for status, _ in lost} == {404}


def test_an_agent_of_a_rollout_function_is_reached_at_the_address(chat_engine):
    """It cannot end the episode."""
    seen = []

    async def over_http(session, row):
        endpoint = await session.endpoint()
        task = {"root": endpoint.root, "base_url": endpoint.url, "key": endpoint.token}
        await session.call(ask, task, [user("Hello")])
        seen.append(endpoint.root)
        seen.append((await session.call(lambda: end(task)))[0])
        seen.append((await session.call(lambda: claim(episodes)))[0])
        return 1.0

    with inflight.Episodes(chat_engine, over_http, agents="localhost:0") as episodes:
        [[rollout]] = chat_engine.stream.collect(episodes.submit([None], PARAMS, train=False), timeout_s=PATIENCE_S)
    assert rollout.reward == 1.0
    assert seen[0].startswith(f"{episodes.agents_url}/sessions/")
    assert episodes.agents_url.startswith("http://localhost:")
    assert seen[1:] == [403, 401]


def test_an_episode_whose_worker_dies_goes_to_the_next_one(chat_engine):
    with offering(chat_engine, ["row"], idle_s=0.01, retries={AgentError: 1}) as (episodes, groups):
        first = take(episodes)
        wait_until(lambda: episodes.counts["attempts"] == 2)
        episodes._player._rollout.idle_s = PATIENCE_S
        second = take(episodes)
        assert (first["row"], second["row"]) == ("row", "row")
        ask(second, [user("Hello")])
        assert end(first, reward=3.0)[0] == 404
        assert end(second, reward=1.0)[0] == 204
        [[rollout]] = groups()
    assert rollout.reward == 1.0
    assert episodes.counts["completed"] == 1


def test_an_episode_that_fails_or_is_left_has_no_reward(chat_engine):
    with offering(chat_engine, [0, 1], idle_s=0.01) as (episodes, groups):
        take(episodes)
        wait_until(lambda: episodes.counts["error: AgentError"] == 1)
        episodes._player._rollout.idle_s = PATIENCE_S
        task = take(episodes)
        ask(task, [user("Hello")])
        assert end(task, error="a tool has failed")[0] == 204
        rollouts = [rollout for [rollout] in groups()]
    assert [(rollout.reward, rollout.finish_reason) for rollout in rollouts] == [(None, "error")] * 2
    assert episodes.counts["error: AgentError"] == 2


def test_a_turn_in_progress_is_no_silence(chat_engine):
    during = []
    with offering(chat_engine, ["row"]) as (episodes, groups):
        draw, task = episodes.turns.draw, take(episodes)
        offer = episodes.turns.agents._open[task["id"]].offer

        async def watched(*arguments):
            await asyncio.sleep(0.01)
            during.append(offer.idle_s)
            return await draw(*arguments)

        episodes.turns.draw = watched
        assert wait_until(lambda: offer.idle_s) > 0
        ask(task, [user("Hello")])
        assert wait_until(lambda: offer.idle_s) > 0
        assert end(task, reward=1.0)[0] == 204
        groups()
    assert during == [0.0]


def test_an_episode_at_its_limit_takes_the_reward_of_its_worker(chat_engine):
    limits = inflight.Limits(max_turns=1)
    with offering(chat_engine, ["keeps", "ends"], limits=limits) as (episodes, groups):
        for ending in ({"error": "refused"}, {"reward": 2.0}):
            task = take(episodes)
            ask(task, [user("Hello")])
            with pytest.raises(openai.APIStatusError) as refused:
                ask(task, [user("Hello")])
            assert (refused.value.status_code, refused.value.code) == (410, "max_turns")
            assert end(task, **ending)[0] == 204
        [[first], [second]] = groups()
    assert (first.reward, second.reward) == (0.0, 2.0)
    assert episodes.counts["max_turns"] == 2


def test_closing_answers_workers_and_ends_their_episodes(chat_engine):
    answers = []
    with offering(chat_engine, ["row"]) as (episodes, groups):
        task = take(episodes)
        waiting = threading.Thread(target=lambda: answers.append(claim(episodes)))
        waiting.start()
        wait_until(lambda: episodes.turns.agents._offers._claims)
        episodes.close()
        waiting.join(PATIENCE_S)
        [[rollout]] = groups()
    assert [(status, answer["error"]["code"]) for status, answer in answers] == [(410, "closed")]
    assert (rollout.reward, rollout.finish_reason) == (None, "cancelled")
    with pytest.raises(urllib.error.URLError, match="refused"):
        end(task)


def test_an_episode_that_was_cancelled_is_not_offered(chat_engine):
    with offering(chat_engine, ["first"]) as (episodes, groups):
        wait_until(lambda: (server := episodes.turns.agents) and server._offers._waiting.get(KEY))
        episodes.cancel()
        [[rollout]] = groups()
        later = episodes.submit(["second"], PARAMS, train=False)
        task = take(episodes)
        assert task["row"] == "second"
        assert end(task)[0] == 204
        [[last]] = chat_engine.stream.collect(later, timeout_s=PATIENCE_S)
    assert rollout.finish_reason == "cancelled"
    assert last.reward is None
    assert episodes.counts["completed: no reward"] == 1


@pytest.mark.parametrize(
    ("agents", "rows", "why"),
    [(HERE, [{"image": object()}], "rows for RemoteAgents must be JSON-like"), (None, [0], "workers need an address")],
)
def test_rows_and_addresses_that_workers_cannot_have_are_refused(chat_engine, agents, rows, why, caplog):
    with offering(chat_engine, rows, agents=agents) as (_, groups):
        [[rollout]] = groups()
    assert rollout.finish_reason == "error"
    assert why in caplog.text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"agents": "10.0.0.5"}, r'agents must be "HOST:PORT", such as "10.0.0.5:8700", got \'10.0.0.5\''),
        ({"agents": ":8700"}, "agents must be"),
        ({"agents": "localhost:http"}, "agents must be"),
        ({"agents": "localhost:65536"}, "agents must be"),
        ({"agents": "::1:8700"}, "agents must be"),
        ({"agents": "0.0.0.0:0"}, r"agents cannot call 0.0.0.0; pass the address .* agents_url="),
        ({"agents": HERE, "agents_url": "trainer:8700"}, "agents_url must be an address such as"),
        ({"agents": HERE, "agents_url": "http://trainer?a=b"}, "agents_url must be an address such as"),
        ({"agents_url": "http://trainer:8700"}, r'agents_url needs agents="HOST:PORT"'),
    ],
)
def test_addresses_that_do_not_work_are_refused(chat_engine, options, why):
    with pytest.raises(ValueError, match=why):
        inflight.Episodes(chat_engine, in_process, **options)


def test_a_port_in_use_is_named_and_closing_frees_it(chat_engine):
    first = inflight.Episodes(chat_engine, in_process, agents=HERE)
    address = first.agents_url.removeprefix("http://")
    with pytest.raises(ListenError, match=r"127\.0\.0\.1 port \d+: .*; choose another port"):
        inflight.Episodes(chat_engine, in_process, agents=address)
    first.close()
    first.close()
    inflight.Episodes(chat_engine, in_process, agents=address).close()
    with pytest.raises(ListenError, match=r"192\.0\.2\.1 .*takes an address of this machine, and agents_url"):
        inflight.Episodes(chat_engine, in_process, agents="192.0.2.1:0")


@pytest.mark.parametrize("options", [{"key": ""}, {"key": "short"}, {"key": "a key with blanks"}, {"idle_s": 0.0}])
def test_keys_and_times_of_workers_are_checked(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must"):
        RemoteAgents(**options)
    assert RemoteAgents().key != RemoteAgents().key


def test_connections_are_bounded(engine, monkeypatch):
    """Further ones get 503 until others end."""
    monkeypatch.setattr(agent_server, "uvicorn_options", lambda _: {"limit_concurrency": 5})
    with inflight.Episodes(engine, RemoteAgents(), agents=HERE) as episodes, contextlib.ExitStack() as open_ones:
        ids = episodes.submit([[1]], PARAMS, train=False)
        host, port = episodes._address[0].getsockname()

        def status():
            with contextlib.closing(http.client.HTTPConnection(host, port, timeout=PATIENCE_S)) as connection:
                connection.request("POST", "/sessions", "{}", {"Authorization": "Bearer wrong"})
                return connection.getresponse().status

        wait_until(lambda: status() == 401)
        for _ in range(5):
            open_ones.enter_context(socket.create_connection((host, port)))
        wait_until(lambda: status() == 503)
        open_ones.close()
        wait_until(lambda: status() == 401)
        episodes.cancel()
        engine.stream.collect(ids, timeout_s=PATIENCE_S)


def test_after_a_restart_another_worker_gets_the_turns_that_were_drawn(chat_engine, tmp_path):
    """The worker begins the episode again. Turns of the saved run are not drawn twice."""
    questions = [user("What time is it?")]
    params = inflight.SamplingParams(n=1, max_tokens=8, ignore_eos=True, seed=7)
    run = inflight.Run(chat_engine, SimpleNamespace(version=0))
    with offering(chat_engine, [{"number": 1}], params=params) as (episodes, groups):
        task = take(episodes)
        first = ask(task, questions)
        run.save(tmp_path)
        episodes.cancel()
        groups()
    with inflight.Episodes(chat_engine, RemoteAgents(key=KEY), agents=HERE) as episodes:
        run.load(tmp_path)
        ids = episodes.continue_saved()
        again = take(episodes)
        assert (again["row"], again["id"] == task["id"]) == ({"number": 1}, False)
        before = again | {"root": again["root"].replace(again["id"], task["id"]), "key": task["key"]}
        assert end(before, reward=9.0)[0] == 404
        repeated = ask(again, questions)
        assert repeated.content == first.content
        assert episodes.counts["turns drawn before"] == 1
        ask(again, [*questions, repeated, user("And now?")])
        assert end(again, reward=1.0)[0] == 204
        [[rollout]] = chat_engine.stream.collect(ids, timeout_s=PATIENCE_S)
    assert rollout.reward == 1.0
    assert sum(turn.drawn for turn in rollout.turns) == 2
    assert sum(turn.end - turn.begin for turn in rollout.turns if turn.drawn) == rollout.num_drawn == 16
