"""The last calls to an engine that is removed from a fleet, without engines."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.core.errors import EngineHungError, InflightError
from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.fleet.fleet import Fleet
from inflight.fleet.fleet_stream import FleetStream
from inflight.fleet.monitor import EngineMonitor


@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize(("held_back", "last"), [(frozenset(), ["resume"]), (frozenset({"pause"}), [])])
def test_an_engine_that_is_removed_draws_for_its_next_trainer(held_back, last, drains):
    fleet, calls, urgent = Fleet(), [], set()

    def call(verb: str, *arguments: Any, returns: Any = None) -> Any:
        if verb == "status":
            urgent.add(FleetStream.is_urgent.fget(SimpleNamespace(_parts=[frames])))  # type: ignore[misc]
            return SimpleNamespace(num_unacknowledged_bytes=0 if drains else 1, num_spilled_bytes=0)
        return calls.append((verb, *arguments))

    client = SimpleNamespace(endpoint="there", call=call)
    frames: Any = SimpleNamespace(
        client=client, given_up=False, leave=lambda: None, read=threading.Event(), reader=object(),
        is_leaving=False, is_draining=False,
    )  # fmt: skip
    frames.read.set()

    def release(released: Any) -> int:
        released.given_up = True
        calls.append(("release",))
        return 0

    member: Any = SimpleNamespace(
        options=SimpleNamespace(answer_timeout_s=0.05), frames=frames, failure=None, name="a member",
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
    assert urgent == {True}
    assert not frames.is_draining
    fleet.close()


@pytest.mark.parametrize(
    ("is_sending", "lost", "joins"), [(True, {}, True), (False, {}, False), (True, {"there": InflightError()}, False)]
)
def test_a_restarted_engine_is_waited_for_as_long_as_a_publisher_sends_it_the_weights(is_sending, lost, joins):
    versions = iter([0] * 20 + [1])  # 20 calls take longer than answer_timeout_s
    client = SimpleNamespace(call=lambda verb, returns: SimpleNamespace(version=next(versions)))
    publisher = SimpleNamespace(endpoints={"there"}, sent_version=1, is_sending=is_sending, lost=lost)
    member: Any = SimpleNamespace(
        options=SimpleNamespace(answer_timeout_s=0.05),
        frames=None,
        num_past_tokens=0,
        process=SimpleNamespace(client=client),
    )
    published: Any = SimpleNamespace(
        address_of=lambda process: SimpleNamespace(endpoint="there"), open_publishers=[publisher], lost_kinds=[]
    )
    fleet, stream = Fleet(), SimpleNamespace(connect=lambda member: SimpleNamespace(leave=lambda: None))
    monitor = EngineMonitor(member, fleet, published, stream)  # type: ignore[arg-type]
    with nullcontext() if joins else pytest.raises(EngineHungError, match="did not reach the engine"):
        monitor.begin(1)
    assert (member.frames is not None) == joins
    fleet.close()
