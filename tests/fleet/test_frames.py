"""The frames of several engines come as each engine sent them, and what is wrong with one leaves the others alone."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from made_frames import ends, make_frame
from waiting import wait_until

from inflight.core.errors import EngineDiedError
from inflight.fleet.fleet import Fleet
from inflight.fleet.fleet_stream import FleetStream
from inflight.fleet.frames import EngineFrames
from inflight.stream.writer import StreamWriter


class Engine:
    """The frames of one engine, without an engine."""

    def __init__(self, directory, name: str, **options: Any):
        self.name, self.count = name, 0
        self.writer = StreamWriter(f"ipc://{directory}/{name}")
        self.writer.engine_id = name
        welcome = SimpleNamespace(engine_id=name, stream_endpoint=self.writer.endpoint)
        process: Any = SimpleNamespace(welcome=welcome, client=SimpleNamespace(keys=None))
        self.frames = EngineFrames(process, **options)

    def send(self, count: int, **header) -> None:
        for _ in range(count):
            frame = make_frame(2, self.count, time_ns=ord(self.name), **header)
            self.writer.kept.append(frame.encode())
            self.count += 1
        self.writer.flush()


@pytest.fixture
def merged():
    merged = FleetStream(Fleet(), None)
    yield merged
    merged.close()


@pytest.fixture
def engines(tmp_path, merged):
    engines = [Engine(tmp_path, name) for name in "ab"]
    for engine in engines:
        merged._read(engine.frames, None)
    yield engines
    merged.close()
    for engine in engines:
        engine.writer.close()


def receive(merged: FleetStream, engines: list[Engine], count: int) -> list[tuple[str, int]]:
    """The engines and the numbers of so many frames."""
    received, deadline = [], time.monotonic() + 120
    while len(received) < count:
        assert time.monotonic() < deadline, f"only {received} came"
        for engine in engines:
            engine.writer.flush()
        if (frame := merged.receive(5)) is not None:
            received.append((chr(frame.header.time_ns), frame.header.sequence))
    return received


def test_engines_take_turns_and_the_frames_of_each_stay_in_order(merged, engines):
    a, b = engines
    receive_nothing(merged, engines)
    a.send(50)
    b.send(20)
    for engine in engines:
        assert engine.frames.reader.socket.poll(60_000)
    time.sleep(0.2)  # Other frames of an engine follow its first at once.
    received = receive(merged, engines, 70)
    for engine, count in ((a, 50), (b, 20)):
        assert [number for name, number in received if name == engine.name] == list(range(count))
        assert engine.frames.reader.num_tokens == 2 * count
    last_of_b = max(place for place, (name, _) in enumerate(received) if name == "b")
    assert last_of_b < 60  # the one that has more does not come first


def test_samples_that_end_and_versions_are_counted_by_engine(merged, engines):
    a, b = engines
    a.send(1, finishes=ends(0, 1))
    b.send(1, finishes=ends(2))
    receive(merged, engines, 2)
    assert (a.frames.reader.num_rollouts, b.frames.reader.num_rollouts) == (2, 1)
    assert a.frames.version == 5


def test_frames_that_cannot_be_read_are_that_engines_alone(merged, engines):
    a, b = engines
    a.send(1)
    receive(merged, engines, 1)
    a.writer.kept.append(b"IFF1 and then nonsense")
    a.send(3)
    b.send(3)
    assert receive(merged, engines, 3) == [("b", 0), ("b", 1), ("b", 2)]
    assert a.frames.error is not None
    assert b.frames.error is None
    a.frames.leave()
    b.send(1)
    assert receive(merged, engines, 1) == [("b", 3)]
    until_read(merged, a)
    assert not b.frames.read.is_set()


def test_an_engine_that_was_replaced_counts_as_ended_also_if_it_was_the_only_one(tmp_path, merged):
    engine = Engine(tmp_path, "a", can_spare=lambda: False)
    merged._read(engine.frames, None)
    engine.writer.engine_id = "b"

    def ended() -> object:
        engine.writer.flush()
        assert merged.receive(5) is None
        return engine.frames.error

    assert isinstance(wait_until(ended), EngineDiedError)
    engine.writer.close()


def test_what_an_engine_sent_before_it_ended_is_read_while_another_is_busy(merged, engines):
    a, b = engines
    receive_nothing(merged, engines)
    a.send(30)
    b.send(30)
    a.frames.leave()
    assert sorted(receive(merged, engines, 60)) == [(name, i) for name in "ab" for i in range(30)]
    assert not a.frames.read.is_set()  # the last one may still be in somebody's hands
    assert merged.is_urgent
    deadline = time.monotonic() + 120
    while not a.frames.read.is_set():
        assert time.monotonic() < deadline
        b.send(1)
        merged.receive(1)
    assert merged.state == ""  # b lives, and has not said what it does
    assert not merged.is_urgent


def receive_nothing(merged: FleetStream, engines: list[Engine]) -> None:
    for _ in range(20):
        for engine in engines:
            engine.writer.flush()
        assert merged.receive(5) is None


def until_read(merged: FleetStream, engine: Engine) -> None:
    deadline = time.monotonic() + 120
    while not engine.frames.read.is_set():
        assert time.monotonic() < deadline
        merged.receive(1)


def test_without_engines_nothing_comes_and_they_are_being_restarted(merged, tmp_path):
    assert merged.receive(1) is None
    assert merged.state == "restarting"
    engine = Engine(tmp_path, "c")
    merged._read(engine.frames, None)
    engine.send(1)
    assert receive(merged, [engine], 1) == [("c", 0)]
    merged.close()
    late = Engine(tmp_path, "d")
    merged._read(late.frames, None)
    assert late.frames.read.is_set()
    for each in (engine, late):
        each.writer.close()
