"""When a successor is started, how long that is waited for, and who is told of it: with processes that are none."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.core.errors import EngineDiedError
from inflight.core.options import EngineOptions
from inflight.fleet.member import Member
from inflight.fleet.process.base import lives

DEATH = EngineDiedError("it was killed")


class Process:
    """Stands in for an LocalProcess."""

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


class Waits(threading.Event):
    """Notes how long is waited, and does not wait."""

    def __init__(self, events: list[str]):
        super().__init__()
        self._events = events

    def wait(self, timeout: float | None = None) -> bool:
        self._events.append(f"waited {timeout:g} s")
        return self.is_set()


@pytest.fixture
def make():
    """A member over such processes."""
    Process.made, Process.events, Process.fails, Process.may_start = [], [], set(), threading.Event()
    Process.may_start.set()
    placement: Any = SimpleNamespace(start=lambda options, closing: Process(options))

    def make(restarts: int) -> Member:
        member = Member(EngineOptions("tiny", restarts=restarts), placement)
        member._closing = Waits(Process.events)
        return member

    return make


def die(member: Member) -> str:
    Process.made[-1].dead = True
    member.restart(DEATH)
    return member.process.welcome.stream_endpoint


def test_what_nobody_expects_keeps_no_caller_waiting(make, monkeypatch):
    member = make(restarts=2)
    monkeypatch.setattr(member.placement, "start", lambda *_: {}["missing"])
    with pytest.raises(EngineDiedError, match=r"(?s)ended 3 times.*KeyError: 'missing'"):
        die(member)
    with pytest.raises(EngineDiedError, match="KeyError"):
        member.living()


def waits() -> list[str]:
    return [event.removeprefix("waited ") for event in Process.events if event.startswith("waited")]


def test_restarts_are_further_apart_until_a_token_has_come(make):
    member = make(restarts=20)
    for _ in range(3):
        die(member)
    assert waits() == ["0.2 s", "0.4 s", "0.8 s"]
    member.num_past_tokens = 5
    die(member)
    die(member)
    assert waits()[3:] == ["0.2 s", "0.4 s"]
    for _ in range(9):
        die(member)
    assert waits()[-2:] == ["30 s", "30 s"]


def test_a_successor_that_does_not_start_has_one_after_a_longer_while(make):
    member = make(restarts=5)
    Process.fails = {1, 2}
    assert die(member) == "stream 3"
    assert waits() == ["0.2 s", "0.4 s", "0.8 s"]


def test_what_an_engine_left_is_removed_before_anything_else(make):
    """A trainer that is killed while it waits, or while the successor loads, leaves nothing then."""
    die(make(restarts=1))
    assert Process.events == ["removed 0", "waited 0.2 s", "closed 0"]


def test_who_asks_for_the_process_that_serves_waits_for_the_successor(make):
    member, found = make(restarts=1), []
    assert member.living() is Process.made[0]
    Process.may_start.clear()
    succession = threading.Thread(target=die, args=(member,))
    succession.start()
    while len(Process.made) < 2:
        pass
    assert not lives(member.process)
    asking = threading.Thread(target=lambda: found.append(member.living().name))
    asking.start()
    asking.join(0.2)
    assert not found
    Process.may_start.set()
    asking.join(10)
    succession.join(10)
    assert found == ["process 1"]
    assert lives(member.process)


def test_a_successor_that_starts_while_the_engine_is_closed_is_ended(make):
    member, told = make(restarts=3), []

    def succeed():
        try:
            die(member)
        except EngineDiedError as error:
            told.append(str(error))

    Process.may_start.clear()
    succession = threading.Thread(target=succeed)
    succession.start()
    while len(Process.made) < 2:
        pass
    member.close()
    Process.may_start.set()
    succession.join(10)
    assert told == ["it was killed"]
    assert len(Process.made) == 2
    assert Process.events[-1] == "closed 1"


def test_who_asks_for_the_process_that_serves_is_told_that_there_will_be_none(make):
    member = make(restarts=1)
    die(member)
    with pytest.raises(EngineDiedError, match="ended 2 times"):
        die(member)
    with pytest.raises(EngineDiedError, match="ended 2 times"):
        member.living()


def test_processes_come_from_the_placement_which_learns_of_the_end(make):
    make(restarts=1)  # has processes noted
    told = []

    def start(options: EngineOptions, closing: threading.Event) -> Any:
        told.append(closing)
        return Process(options)

    placement: Any = SimpleNamespace(start=start)
    member = Member(EngineOptions("tiny", restarts=1), placement)
    die(member)
    assert member.process is Process.made[-1]
    member.close()
    assert len(told) == 2
    assert all(closing.is_set() for closing in told)
