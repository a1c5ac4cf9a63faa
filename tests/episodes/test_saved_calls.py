"""After a restart of the trainer an episode gets the saved results of its calls, and its environment continues as it
declares."""

import asyncio
import json
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from openenv_server import OpenEnvServer, serving
from waiting import wait_until

import inflight
from inflight.episodes.environments import gym_rollout, openenv_rollout, skyrl_rollout, textarena_rollout
from inflight.episodes.stored_values import decode, encode, encode_error

PARAMS = inflight.SamplingParams(n=1, max_tokens=4, ignore_eos=True)
RESULTS = {
    "tuple": ("a", (1, [2, (3,)]), {"b": None, 4: b"\x00"}),
    "array": [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.5)],
    "number": float("inf"),
}


class CodeError(Exception):
    """Its arguments are not the ones of its constructor."""

    def __init__(self, code):
        super().__init__(f"code {code:d}")


class ArrayError(Exception):
    """It has a field without a truth value."""

    def __init__(self, text):
        super().__init__(text)
        self.array = np.zeros(3)


class World:
    """A process before a restart, `number` 0, and the process after it, `number` 1."""

    def __init__(self):
        self.number, self.num_held, self.released = 0, 0, threading.Event()
        self.calls, self.seen = ([], []), ([], [])

    def note(self, *call):
        self.calls[self.number].append(call)

    async def hold(self):
        """Before the restart, wait until the episode is cancelled."""
        if not self.number:
            self.num_held += 1
            await asyncio.Event().wait()

    def block(self):
        """Do the same in a thread."""
        if not self.number:
            self.num_held += 1
            self.released.wait(60)


WORLD = World()


@pytest.fixture(autouse=True)
def world():
    global WORLD
    WORLD = World()
    return WORLD


def look_up(key):
    WORLD.note("look_up", key)
    return RESULTS.get(key, key)


def fail(key):
    WORLD.note("fail", key)
    raise KeyError(key, len(key))


def block():
    WORLD.note("block")
    WORLD.block()
    return "done"


def make_handle():
    WORLD.note("make_handle")
    return threading.Lock()


def restart(engine, directory, rollout, *, n=1, num_held=None, called=(), **options):
    """Play a row until episodes are held and these calls have begun, save the run, and continue it with new `Episodes`.
    Returns the group and the counts of the new ones."""
    publisher = SimpleNamespace(version=0)
    with inflight.Episodes(engine, rollout, **options) as episodes:
        ids = episodes.submit([{"seed": 7, "prompt": []}], replace(PARAMS, n=n), train=False)
        wait_until(lambda: WORLD.num_held == (num_held or n) and {*called} <= {*WORLD.calls[0]})
        inflight.Run(engine, publisher).save(directory)
        episodes.cancel(ids)
        WORLD.released.set()
        engine.stream.collect(ids, timeout_s=60)
    WORLD.number = 1
    with inflight.Episodes(engine, rollout, **options) as episodes:
        inflight.Run(engine, publisher).load(directory)
        assert episodes.continue_saved() == ids
        [group] = engine.stream.collect(ids, timeout_s=60)
        return group, episodes.counts


def test_tools_are_not_called_twice(chat_engine, tmp_path, world):
    async def play(session, row):
        seen = world.seen[world.number]
        for key in RESULTS:
            seen.append(await session.call(look_up, key))
        with pytest.raises(KeyError) as raised:
            await session.call(fail, key="no such key")
        seen.append(raised.value.args)
        reply = await session.chat([{"role": "user", "content": "Begin."}])
        calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("block", "look_up", "fail")]
        calls[1]["function"]["arguments"] = calls[2]["function"]["arguments"] = json.dumps({"key": "k"})
        reply.message["tool_calls"] = calls
        contents = [message["content"] for message in await session.use_tools(reply, [block, look_up, fail])]
        assert contents == ["done", "k", "error: KeyError: ('k', 1)"]
        return 1.0

    group, counts = restart(chat_engine, tmp_path, play, called=AT_ONCE)
    assert [rollout.reward for rollout in group] == [1.0]
    assert world.calls[0] == [*(("look_up", key) for key in RESULTS), ("fail", "no such key"), ("block",), *AT_ONCE]
    # The other calls of the turn run at the same time, so that some have not returned at the save.
    again = world.calls[1]
    assert again.count(("block",)) == 1
    assert set(again) <= {("block",), *AT_ONCE}
    assert counts["calls made before"] == 7 - len(again)
    assert counts["turns drawn before"] == 1
    assert repr(world.seen[0]) == repr(world.seen[1])
    assert len(world.seen[1]) == 4


AT_ONCE = [("look_up", "k"), ("fail", "k")]


def test_functions_are_called_from_the_first_request_on_that_differs(chat_engine, tmp_path, world):
    async def play(session, row):
        for key in "aXc" if world.number else "abcd":
            await session.call(look_up, key)
        left = [call.number for call in chat_engine.stream.ledger.episodes.calls(session.group_id, 0)]
        world.seen[world.number].append(left)
        await world.hold()

    _, counts = restart(chat_engine, tmp_path, play)
    assert world.calls[1] == [("look_up", "X"), ("look_up", "c")]
    assert counts["calls made before"] == 1
    assert world.seen == ([[0, 1, 2, 3]], [[0, 1, 2]])


def test_a_result_that_cannot_be_stored_is_made_again(chat_engine, tmp_path, world):
    async def play(session, row):
        handle = await session.call(make_handle)
        await session.call(look_up, "a")
        await session.call(str, handle)  # Its argument cannot be stored either.
        await session.call(look_up, "b")
        await world.hold()

    _, counts = restart(chat_engine, tmp_path, play)
    assert world.calls[1] == [("make_handle",)]
    assert counts["calls made before"] == 2
    assert counts["calls not stored"] == 1


class Counter:
    def count(self):
        WORLD.note("count")


def test_functions_that_might_have_a_state_are_called_again(chat_engine, tmp_path, world, monkeypatch):
    monkeypatch.setattr(look_up, "on_restart", "replay", raising=False)

    async def play(session, row):
        def inner(name):
            world.note(name)

        def stateless(name):
            world.note(name)

        stateless.on_restart = "load"
        for function in (inner, stateless, lambda name: world.note("lambda"), look_up):
            await session.call(function, function.__name__)
        await session.call(Counter().count)
        await world.hold()

    restart(chat_engine, tmp_path, play)
    assert world.calls[1] == [("inner",), ("lambda",), ("look_up", "look_up"), ("count",)]


def test_another_attempt_forgets_the_log(chat_engine, tmp_path, world):
    attempts = [0, 0]

    async def play(session, row):
        attempts[world.number] += 1
        await session.call(look_up, f"attempt {attempts[0]}")
        await session.call(look_up, "b")
        if attempts[world.number] == 1:
            raise ConnectionError
        await world.hold()

    _, counts = restart(chat_engine, tmp_path, play, retries={ConnectionError: 1})
    assert attempts == [2, 2]
    assert world.calls[0] == [("look_up", key) for key in ("attempt 1", "b", "attempt 2", "b")]
    assert world.calls[1] == [("look_up", "attempt 2"), ("look_up", "b")]
    assert counts["calls made before"] == 2, "by the first attempt after the restart"


# ---- environments ---------------------------------------------------------------------------------------------------


class Moves:
    """The state of an environment: the number of its moves. Before the restart the second move does not return."""

    def __init__(self, row=None):
        self.num_moves = 0

    def begin(self):
        WORLD.note("begin")

    def move(self):
        WORLD.note("move", self.num_moves + 1)
        if self.num_moves == 1:
            WORLD.block()
        self.num_moves += 1

    def close(self):
        WORLD.note("close")


class Gym(Moves):
    def reset(self, *, seed, options):
        self.begin()
        return "start", {}

    def step(self, action):
        self.move()
        return f"move {self.num_moves}", float(self.num_moves), self.num_moves == 3, False, {}


class Skyrl(Moves):
    def init(self, prompt):
        self.begin()
        return [{"role": "user", "content": "start"}], {}

    def step(self, action):
        self.move()
        observations = [{"role": "user", "content": f"move {self.num_moves}"}]
        return {"observations": observations, "reward": float(self.num_moves), "done": self.num_moves == 3}


class TextArena(Moves):
    def reset(self, num_players, seed):
        self.begin()

    def get_observation(self):
        return 0, [(-1, f"move {self.num_moves}", "")]

    def step(self, action):
        self.move()
        return self.num_moves == 3, {}

    def close(self):
        super().close()
        return {0: 2.0 * self.num_moves}, {}


class Keeps:
    """Methods of an environment whose state can be saved."""

    def save(self):
        return {"moves": self.num_moves}

    def load(self, state):
        WORLD.note("load", state)
        self.num_moves = state["moves"]


ADAPTERS = {"gym": (gym_rollout, Gym), "skyrl": (skyrl_rollout, Skyrl), "textarena": (textarena_rollout, TextArena)}
REPLAYED = [("begin",), ("move", 1), ("move", 2), ("move", 3), ("close",)]
LOADED = [("load", {"moves": 1}), ("move", 2), ("move", 3), ("close",)]


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("declared", "keeps", "calls"),
    [
        (None, False, REPLAYED),
        ("replay", True, REPLAYED),
        (None, True, LOADED),
        ("load", True, LOADED),
        ("drop", False, [("close",)]),
        ("drop", True, [("close",)]),
    ],
)
def test_an_environment_continues_as_it_declares(chat_engine, tmp_path, world, adapter, declared, keeps, calls):
    rollout, kind = ADAPTERS[adapter]
    bases = (Keeps, kind) if keeps else (kind,)
    environment = type("Environment", bases, {} if declared is None else {"on_restart": declared})
    group, counts = restart(chat_engine, tmp_path, rollout(environment))
    assert world.calls[0] == [("begin",), ("move", 1), ("move", 2), ("close",)]
    assert world.calls[1] == calls
    if declared == "drop":
        assert counts["dropped after a restart"] == 1
        assert [(rollout.reward, rollout.finish_reason) for rollout in group] == [(None, "cancelled")]
    else:
        assert counts["completed"] == 1
        assert group[0].reward == 6.0
        assert group[0].text.count("move 1") == group[0].text.count("move 2") == 1
        assert counts["turns drawn before"] == 2


@pytest.mark.parametrize("on_restart", ["replay", "drop"])
def test_an_openenv_server_replays_or_drops(chat_engine, tmp_path, world, on_restart):
    class Server(OpenEnvServer):
        async def answer(self, socket, received):
            world.note(received[-1]["type"])
            if len(received) == 3:
                await world.hold()
            await super().answer(socket, received)

    with serving(Server()) as url:
        converters = {
            "to_messages": lambda observation: [{"role": "user", "content": observation["prompt"]}],
            "to_action": lambda reply: {"message": reply.content},
        }
        group, counts = restart(chat_engine, tmp_path, openenv_rollout(url, **converters, on_restart=on_restart))
    assert world.calls[0] == [("reset",), ("step",), ("step",)]
    assert world.calls[1] == ([("reset",), ("step",), ("step",)] if on_restart == "replay" else [])
    assert (counts["completed"], counts["dropped after a restart"]) == ((1, 0) if on_restart == "replay" else (0, 1))
    assert group[0].reward == (3.0 if on_restart == "replay" else None)
    with pytest.raises(ValueError, match='must be "replay" or "drop", got \'load\''):
        openenv_rollout("", **converters, on_restart="load")


def test_an_episode_that_has_ended_is_not_dropped_with_its_group(chat_engine, tmp_path, world):
    ended, made = threading.Event(), []

    class Dropped(Gym):
        on_restart = "drop"

        def __init__(self, row):
            super().__init__(row)
            self.blocks = not made
            made.append(self)

        def begin(self):
            super().begin()
            if self.blocks:
                ended.wait(60)

        def move(self):
            world.note("move", self.num_moves + 1)
            if self.blocks:
                world.block()
            self.num_moves += 1

        def close(self):
            super().close()
            ended.set()

    options = {"limits": inflight.Limits(call_s=100.0), "min_share": 0.5}
    group, counts = restart(chat_engine, tmp_path, gym_rollout(Dropped), n=2, num_held=1, **options)
    assert sorted(str(rollout.reward) for rollout in group) == ["6.0", "None"]
    assert counts["completed"] == counts["dropped after a restart"] == 1
    assert world.calls[1] == [("close",), ("close",)]


def test_a_rollout_function_uses_environments_with_a_state(chat_engine, tmp_path, world):
    """Two environments that are called in turn. Each gets its own last state, and only this state is kept."""

    class Named(Keeps):
        def __init__(self, name):
            self.name, self.num_moves = name, 0

        def move(self, by):
            self.num_moves += by
            world.note(self.name, self.num_moves)
            return self.num_moves

        def fail(self):
            raise RuntimeError

    async def play(session, row):
        one, two = Named("one"), Named("two")
        await session.complete([1, 2])
        for _ in range(3):
            await session.call(one.move, 1)
            await session.call(two.move, by=10)
        with pytest.raises(RuntimeError):
            await session.call(two.fail)
        await session.call(two.move, 10)
        await world.hold()
        return float(await session.call(one.move, 1) + await session.call(two.move, 10))

    states = defaultdict(list)
    episodes_of = chat_engine.stream.ledger.episodes
    save = inflight.Run.save

    def note_states(run, directory):
        for record in episodes_of._table.records.values():
            for call in record.calls.values():
                if call.state is not None:
                    states[call.env].append(call.number)
        save(run, directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inflight.Run, "save", note_states)
        group, counts = restart(chat_engine, tmp_path, play)
    assert states == {1: [2], 2: [2, 4]}
    # `fail` of the second environment has no result, so that the environment itself gets it and all later calls.
    assert world.calls[1] == [("load", {"moves": 30}), ("two", 40), ("load", {"moves": 3}), ("one", 4), ("two", 50)]
    assert counts["completed"] == 1
    assert counts["calls made before"] == 6
    assert group[0].reward == 54.0


@pytest.mark.parametrize("declared", ["load", "restart"])
def test_another_declaration_is_refused(chat_engine, declared, caplog):
    environment = type("Environment", (Gym,), {"on_restart": declared})
    with inflight.Episodes(chat_engine, gym_rollout(environment)) as episodes:
        chat_engine.stream.collect(episodes.submit([{}], PARAMS, train=False), timeout_s=60)
    assert episodes.counts["error: ValueError"] == 1
    assert f"on_restart of Environment is '{declared}'; it must be" in caplog.text


def test_the_log_ends_with_its_group(chat_engine, world):
    async def play(session, row):
        await session.call(look_up, "a")
        if session.sample == 0:
            await session.call(block)
        return 1.0

    episodes_of = chat_engine.stream.ledger.episodes
    with inflight.Episodes(chat_engine, play) as episodes:
        [group_id] = ids = episodes.submit([{}], replace(PARAMS, n=2), train=False)
        wait_until(lambda: world.num_held == 1 and len(episodes_of.calls(group_id, 1)) == 1)
        record = chat_engine.stream.ledger.table.records[group_id]
        assert len(record.calls) == 2
        world.released.set()
        chat_engine.stream.collect(ids, timeout_s=60)
    assert record.calls == {}


def test_stored_values_keep_their_types():
    for value in RESULTS.values():
        assert repr(decode(encode(value))) == repr(value)
    for value in ({1, 2}, 1 << 70, object(), "\ud800", {(1, 2): 3}, np.array([None]), [RuntimeError()]):
        with pytest.raises(TypeError):
            encode(value)
    error = decode(encode_error(OSError(2, "not there")))
    assert (type(error), error.errno) == (FileNotFoundError, 2)

    class Local(Exception):
        pass

    with_field = ValueError("x")
    with_field.response = 404
    unusual = (CodeError(5), ArrayError("x"))
    for error in (Local(), with_field, ValueError(object()), inflight.EpisodeEnd("closed"), *unusual):
        with pytest.raises(TypeError):
            encode_error(error)
