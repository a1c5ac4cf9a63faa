"""What a fleet keeps for members that join later, without engines."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from inflight.core.errors import BackendError, EngineHungError
from inflight.core.options import EngineOptions
from inflight.fleet.calls import FleetCalls
from inflight.fleet.engine import Engine
from inflight.fleet.fleet import Fleet


@pytest.fixture
def fleet():
    made = Fleet()
    yield made
    made.close()


@pytest.fixture
def calls(fleet, monkeypatch):
    made = FleetCalls(fleet)
    monkeypatch.setattr(made, "call_all", lambda call: {None: None})
    yield made
    made.close()


def test_a_member_that_joins_is_paused_and_asleep_as_the_others_are(fleet, calls):
    for verb, held_back in (
        ("pause", {"pause"}), ("sleep", {"pause", "sleep"}), ("wake", {"pause"}), ("status", {"pause"}),
        ("resume", set()),
    ):  # fmt: skip
        calls.call(verb)
        assert fleet.held_back == held_back


def test_what_the_engines_refuse_holds_nothing_back(fleet, calls, monkeypatch):
    def refuse(call):
        raise BackendError("this backend cannot sleep")

    monkeypatch.setattr(calls, "call_all", refuse)
    with pytest.raises(BackendError):
        calls.call("sleep")
    assert fleet.held_back == set()


def test_calls_that_wait_in_a_queue_end_when_the_fleet_is_closed(calls):
    may_end = threading.Event()
    running = [calls.later(may_end.wait, 20) for _ in range(64)]
    queued = calls.later(lambda: "ran")
    calls.close()
    may_end.set()
    assert queued.result(20) == "ran"
    assert all(future.result(20) for future in running)


@pytest.mark.parametrize("can_restart", [False, True])
def test_of_two_engines_that_hang_at_once_one_is_spared(fleet, can_restart):
    """It might answer again. The groups of the other one continue there."""
    for _ in range(2):
        frames = SimpleNamespace()
        member = SimpleNamespace(
            frames=frames, failure=None, death=None, can_restart=can_restart, options=SimpleNamespace(restarts=0),
            stop_restarting=lambda: None, close=lambda: None,
        )  # fmt: skip
        fleet.members.append(member)
    lost = [fleet.lose_if_spared(m, m.frames, EngineHungError("it does not answer")) for m in fleet.members]
    assert lost == [member.failure is not None for member in fleet.members] == [True, can_restart]


def test_the_tokenizer_is_loaded_before_the_stream_opens(monkeypatch):
    """Loading can take longer than the silence that a stream bears."""
    order: list[str] = []

    class Made:
        _lock, _stream, _tokenizer_lock, staleness = nullcontext(), None, None, None
        _fleet = SimpleNamespace(ledger=None, check=None)
        _frames = SimpleNamespace(open=lambda: order.append("open"), merged=None)
        _membership = SimpleNamespace(monitors=[SimpleNamespace(silence_s=1.0)])
        options = EngineOptions("tiny")
        tokenizer = property(lambda engine: order.append("tokenizer"))

    monkeypatch.setattr("inflight.training.data.rollout_stream.RolloutStream", lambda *_, **__: SimpleNamespace())
    assert Engine.stream.fget is not None
    Engine.stream.fget(Made())  # type: ignore[arg-type]
    assert order == ["tokenizer", "open"]
