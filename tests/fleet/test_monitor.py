"""The last calls to an engine that is removed from a fleet, without engines."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.fleet.fleet import Fleet
from inflight.fleet.monitor import EngineMonitor


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
