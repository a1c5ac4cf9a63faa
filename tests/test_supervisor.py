"""When a successor is started, how long that is waited for, and who is told of it: with processes that are none."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from inflight import supervisor as supervisor_module
from inflight.core.errors import EngineDiedError
from inflight.core.options import EngineOptions
from inflight.supervisor import Supervisor

DEATH = EngineDiedError("it was killed")


class Process:
    """Stands in for an EngineLauncher."""

    made: list["Process"]
    events: list[str]
    fails: set[int]
    """Numbers of processes that do not start."""
    may_start: threading.Event

    def __init__(self, options: EngineOptions):
        self.pid, self.dead = len(self.made), False
        self.name = f"process {self.pid}"
        self.made.append(self)
        assert self.may_start.wait(10)
        if self.pid in self.fails:
            raise EngineDiedError("it did not start")
        self.client = SimpleNamespace(endpoint=f"control {self.pid}", call=self._call)
        self.welcome = SimpleNamespace(stream_endpoint=f"stream {self.pid}")

    def check(self) -> None:
        if self.dead:
            raise DEATH

    def remove(self) -> None:
        self.events.append(f"removed {self.pid}")

    def close(self) -> None:
        self.events.append(f"closed {self.pid}")

    def _call(self, verb: str, arguments: Any = None, returns: Any = None, **_: Any) -> Any:
        return SimpleNamespace(version=0) if verb == "status" else {}


class Stream:
    """Stands in for a Ledger of which nothing is unfinished."""

    num_tokens = 0
    outstanding: list[int] = []

    def unfinished(self) -> tuple[dict, int]:
        return {}, 0

    def fail(self, group_ids: Any) -> None:
        assert not group_ids


class Follower:
    """Stands in for a Publisher."""

    closed, sent_version = False, 0

    def __init__(self) -> None:
        self.told: list[str] = []

    def let_go(self, endpoints: Any) -> None:
        self.told.append(f"let go of {', '.join(sorted(endpoints))}")

    def replace(self, endpoints: Any, successor: str) -> None:
        self.told.append(successor)


class Waits(threading.Event):
    """Notes how long is waited, and does not wait."""

    def __init__(self, events: list[str]):
        super().__init__()
        self._events = events

    def wait(self, timeout: float | None = None) -> bool:
        self._events.append(f"waited {timeout:g} s")
        return self.is_set()


@pytest.fixture
def make(monkeypatch):
    """A supervisor over such processes."""
    Process.made, Process.events, Process.fails, Process.may_start = [], [], set(), threading.Event()
    Process.may_start.set()
    monkeypatch.setattr(supervisor_module, "EngineLauncher", Process)

    def make(restarts: int) -> Supervisor:
        supervisor = Supervisor(EngineOptions("tiny", restarts=restarts))
        supervisor._closing = Waits(Process.events)
        return supervisor

    return make


def die(supervisor: Supervisor, stream: Stream) -> str:
    Process.made[-1].dead = True
    return supervisor.succeed(DEATH, stream.num_tokens, 0, stream)  # pyright: ignore


def test_what_nobody_expects_keeps_no_caller_waiting(make, monkeypatch):
    supervisor, stream = make(restarts=2), Stream()
    monkeypatch.setattr(stream, "unfinished", lambda: {}["missing"])
    with pytest.raises(EngineDiedError, match=r"(?s)ended 3 times.*KeyError: 'missing'"):
        die(supervisor, stream)
    with pytest.raises(EngineDiedError, match="KeyError"):
        supervisor.check()
    assert Process.events.count("closed 1") == Process.events.count("closed 2") == 1


def waits() -> list[str]:
    return [event.removeprefix("waited ") for event in Process.events if event.startswith("waited")]


def test_restarts_are_further_apart_until_a_token_has_come(make):
    supervisor, stream = make(restarts=20), Stream()
    for _ in range(3):
        die(supervisor, stream)
    assert waits() == ["0.2 s", "0.4 s", "0.8 s"]
    stream.num_tokens = 5
    die(supervisor, stream)
    die(supervisor, stream)
    assert waits()[3:] == ["0.2 s", "0.4 s"]
    for _ in range(9):
        die(supervisor, stream)
    assert waits()[-2:] == ["30 s", "30 s"]


def test_a_successor_that_does_not_start_has_one_after_a_longer_while(make):
    supervisor = make(restarts=5)
    Process.fails = {1, 2}
    assert die(supervisor, Stream()) == "stream 3"
    assert waits() == ["0.2 s", "0.4 s", "0.8 s"]


def test_what_an_engine_left_is_removed_before_anything_else(make):
    """A trainer that is killed while it waits, or while the successor loads, leaves nothing then."""
    die(make(restarts=1), Stream())
    assert Process.events == ["removed 0", "waited 0.2 s", "closed 0"]


def test_who_asks_for_the_process_that_serves_waits_for_the_successor(make):
    supervisor, found = make(restarts=1), []
    assert supervisor.living() == "control 0"
    Process.may_start.clear()
    succession = threading.Thread(target=die, args=(supervisor, Stream()))
    succession.start()
    while len(Process.made) < 2:
        pass
    assert not supervisor.follow(Follower(), "control 0")
    asking = threading.Thread(target=lambda: found.append(supervisor.living("control 0")))
    asking.start()
    asking.join(0.2)
    assert not found
    Process.may_start.set()
    asking.join(10)
    succession.join(10)
    assert found == ["control 1"]
    with pytest.raises(EngineDiedError, match="it was killed"):
        supervisor.check_process("control 0")
    supervisor.check_process("control 1")


def test_a_successor_that_starts_while_the_engine_is_closed_is_ended(make):
    supervisor, told = make(restarts=3), []

    def succeed():
        try:
            die(supervisor, Stream())
        except EngineDiedError as error:
            told.append(str(error))

    Process.may_start.clear()
    succession = threading.Thread(target=succeed)
    succession.start()
    while len(Process.made) < 2:
        pass
    supervisor.close()
    Process.may_start.set()
    succession.join(10)
    assert told == ["it was killed"]
    assert len(Process.made) == 2
    assert Process.events[-1] == "closed 1"


def test_who_asks_for_the_process_that_serves_is_told_that_there_will_be_none(make):
    supervisor = make(restarts=1)
    die(supervisor, Stream())
    with pytest.raises(EngineDiedError, match="ended 2 times"):
        die(supervisor, Stream())
    with pytest.raises(EngineDiedError, match="ended 2 times"):
        supervisor.living("control 0")


def test_those_who_follow_a_process_that_serves_are_told_of_its_successors(make):
    supervisor, follower, closed = make(restarts=2), Follower(), Follower()
    assert supervisor.follow(follower, "control 0")
    assert supervisor.follow(closed, "control 0")
    closed.closed = True
    die(supervisor, Stream())
    die(supervisor, Stream())
    assert follower.told == ["let go of control 0", "control 1", "let go of control 0, control 1", "control 2"]
    assert not closed.told
    assert not supervisor.follow(Follower(), "control 0")
    assert supervisor.follow(Follower(), "control 2")


def test_processes_come_from_where_the_supervisor_is_told_and_keys_are_those_of_each(make):
    make(restarts=1)  # has processes noted
    told = []

    def start(closing: threading.Event) -> Any:
        told.append(closing)
        process = Process(EngineOptions("tiny"))
        process.client.keys = f"keys of {process.pid}"
        return process

    supervisor, follower = Supervisor(EngineOptions("tiny", restarts=1), start), Follower()
    first, second = (f"control {process}" for process in (len(Process.made) - 1, len(Process.made)))
    assert supervisor.follow(follower, first)
    die(supervisor, Stream())
    assert follower.told[-1] == second
    assert [supervisor.keys_of(endpoint)[-1] for endpoint in (first, second)] == [first[-1], second[-1]]
    supervisor.close()
    assert len(told) == 2
    assert all(closing.is_set() for closing in told)
