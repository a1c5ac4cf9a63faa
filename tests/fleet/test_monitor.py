"""The last calls to an engine that is removed from a fleet, without engines."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.fleet.calls import FleetCalls
from inflight.fleet.fleet import Fleet
from inflight.fleet.monitor import EngineMonitor


class _Member(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize(("held_back", "last"), [(frozenset(), ["resume"]), (frozenset({"pause"}), [])])
def test_an_engine_that_is_removed_draws_for_its_next_trainer(held_back, last):
    fleet, calls = Fleet(), []
    client = SimpleNamespace(endpoint="there", call=lambda verb, *arguments: calls.append((verb, *arguments)))
    frames: Any = SimpleNamespace(
        client=client, given_up=False, leave=lambda: None, read=threading.Event(), reader=None
    )
    frames.read.set()

    def release(released: Any) -> int:
        released.given_up = True
        calls.append(("release",))
        return 0

    member: Any = SimpleNamespace(
        options=SimpleNamespace(answer_timeout_s=1.0), frames=frames, failure=None, name="a member",
        process=SimpleNamespace(client=client),
    )  # fmt: skip
    published: Any = SimpleNamespace(forget_process=lambda endpoint: None)
    stream: Any = SimpleNamespace(release=release)
    fleet.held_back = held_back
    for at in (frames, None):
        fleet.ledger.engines.begin(Prompt([1], SamplingParams()), at)
    EngineMonitor(member, fleet, published, stream).stop()
    cancelled = ("cancel", {"group_ids": [0], "request_ids": []})
    assert calls == [("pause",), ("release",), cancelled, *((verb,) for verb in last)]
    fleet.close()


def test_an_engine_that_wakes_has_the_time_of_wake_for_other_answers():
    fleet, bounds = Fleet(), []
    member: Any = _Member(options=SimpleNamespace(answer_timeout_s=1.0), usable=True)
    frames: Any = SimpleNamespace(silent_s=0.0)
    monitor: Any = EngineMonitor(member, fleet, SimpleNamespace(), SimpleNamespace())

    def call(verb: str, *arguments: Any, timeout_s: float | None = None, **options: Any) -> Any:
        bounds.append((verb, timeout_s))
        if verb == "wake":
            monitor._ask(frames)  # as the thread of the monitor does after a silence

    frames.client, member.frames = SimpleNamespace(call=call), frames
    fleet.members.append(member)
    calls = FleetCalls(fleet)
    calls.call("wake", timeout_s=600.0)
    monitor._ask(frames)
    assert bounds == [("wake", 600.0), ("status", 600.0), ("status", None)]
    fleet.members.clear()
    fleet.close()
