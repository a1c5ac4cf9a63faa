"""The record of a fork lets another engine continue it as its own engine would, without engines."""

from typing import Any

import pytest
from made_frames import make_frame

from inflight.core.frames import GroupStart
from inflight.core.messages import LIVE_VERSION, Prompt
from inflight.core.sampling import SamplingParams
from inflight.fleet.calls import FleetCalls
from inflight.fleet.fleet import Fleet
from inflight.fleet.rescheduler import unfinished_of
from inflight.fleet.submissions import Submissions


class Frames:
    """A connection to an engine that accepts each call."""

    given_up, engine_id = False, "engine"

    def __init__(self) -> None:
        self.client, self.calls = self, list[str]()

    def start_call(self, verb: str, arguments: Any, returns: Any) -> Any:
        self.calls.append(verb)
        return lambda: None


class Member:
    """An engine that serves."""

    usable, load, num_given = True, 0.0, 0

    def __init__(self) -> None:
        self.frames = Frames()


@pytest.fixture
def fleet():
    """One engine that serves, and no process."""
    made = Fleet()
    made.members.append(Member())  # type: ignore[arg-type]
    yield made
    made.members.clear()
    made.close()


def test_another_engine_continues_a_fork_with_the_adapter_and_the_pin_of_its_request(fleet):
    calls = FleetCalls(fleet)
    submissions = Submissions(fleet, calls)
    params = SamplingParams(max_tokens=4)
    try:
        [group_id] = submissions.submit([Prompt([1, 2], params, version=3, adapter="a")], reserved=False)
        request_id = fleet.ledger.table.records[group_id].ids.first_request_id
        arguments = {"request_id": request_id, "at": 1, "metadata": {}}
        fork = fleet.ledger.table.records[submissions.fork(arguments, Prompt([1, 2, 7], params))]
    finally:
        submissions.close()
        calls.close()
    assert fleet.members[0].frames.calls == ["submit", "fork"]
    prompt = unfinished_of(fork).prompt
    assert (prompt.token_ids, prompt.version, prompt.adapter) == ([1, 2, 7], 3, "a")
    assert fork.pin == 3


def test_a_fork_of_a_prompt_of_the_live_version_keeps_the_version_that_has_drawn(fleet):
    calls = FleetCalls(fleet)
    submissions = Submissions(fleet, calls)
    try:
        submissions.submit([Prompt([1], SamplingParams(), version=LIVE_VERSION)], reserved=False)
        forks = []
        for _ in range(2):
            group_id = submissions.fork({"request_id": 0, "at": 0, "metadata": {}}, Prompt([1], SamplingParams()))
            forks.append(fleet.ledger.table.records[group_id])
            pinned = [GroupStart(0, 0, [1], SamplingParams(), pin=2)]
            fleet.ledger.table.assembler.add(make_frame(1, groups=pinned if len(forks) == 1 else []))
    finally:
        submissions.close()
        calls.close()
    assert [fork.pin for fork in forks] == [LIVE_VERSION, 2]
