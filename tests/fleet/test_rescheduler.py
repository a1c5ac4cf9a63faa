"""Who may go on with a group that another engine began."""

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.messages import MAX_MESSAGE_BYTES, Call, Ids, Prompt, Status, encode, to_raw
from inflight.core.sampling import SamplingParams
from inflight.fleet.rescheduler import Rescheduler, adopt, can_continue, is_past, unfinished_of
from inflight.stream.assignments import Assignments
from inflight.stream.group_table import GroupRecord, GroupTable, Owner, State


def status(version: int, *others: int) -> Status:
    counts = {field.name: 0 for field in msgspec.structs.fields(Status)}
    return Status(**{**counts, "version": version, "versions": [*others, version], "paused": False, "asleep": False})


def group(version: int = 0, pin: int | None = None) -> GroupRecord:
    return GroupRecord(0, prompt=Prompt([1], SamplingParams(n=2), version=pin), version=version)


@pytest.mark.parametrize(
    ("left", "engine", "can"),
    [
        (group(version=2), status(1), False),
        (group(version=2), status(2), True),
        (group(version=2), status(3), True),
        (group(version=2, pin=2), status(3), False),
        (group(version=2, pin=2), status(3, 2), True),
        (group(pin=-1), status(3), True),
    ],
)
def test_an_engine_goes_on_with_weights_that_are_not_older_or_with_those_that_are_asked_for(left, engine, can):
    assert can_continue(left, engine) == can


def test_a_pinned_group_is_given_up_when_all_engines_are_past_its_version():
    def engines(*versions: int):
        return {number: (None, status(version)) for number, version in enumerate(versions)}

    assert is_past(group(pin=2), engines(3, 4))
    assert not is_past(group(pin=2), engines(3, 1))
    assert not is_past(group(pin=2), {})
    assert not is_past(group(version=2), engines(3))


def test_another_engine_goes_on_with_a_group_that_one_refuses(monkeypatch):
    table = GroupTable()
    left = table.records[7] = GroupRecord(7, Owner.CALLER, State.UNASSIGNED, prompt=Prompt([1], SamplingParams(n=2)))
    frames = {name: SimpleNamespace(name=name) for name in ("a", "b")}
    members = [
        Hashed(name=name, usable=True, frames=frames[name], load=load, num_given=0, death=None)
        for load, name in enumerate(frames)
    ]
    failed: dict[int, str] = {}
    assignments = Assignments(table, None)  # type: ignore[arg-type]
    ledger = SimpleNamespace(engines=assignments, frames=SimpleNamespace(fail=failed.update))
    fleet = SimpleNamespace(
        lock=table.changed, ledger=ledger, members=members, usable=members, closing=threading.Event()
    )
    engines = {member: (member.frames, status(0)) for member in members}
    asked: list[str] = []

    def reach(member, frames, call):
        asked.append(member.name)
        return {7: f"{member.name} has no such parameter"} if member.name in refusing else {}

    calls = SimpleNamespace(reach=reach, later=lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    rescheduler: Any = Rescheduler(fleet, calls, 60.0)  # type: ignore[arg-type]
    refusing = {"a"}
    rescheduler._place(engines, 0.1)
    rescheduler._place(engines, 0.1)
    assert asked == ["a", "b"]
    assert left.at is frames["b"]
    assert not failed
    assert not left.refusals
    left.at, left.state, refusing = None, State.UNASSIGNED, {"a", "b"}
    for _ in range(3):
        rescheduler._place(engines, 0.1)
    assert failed == {7: "a has no such parameter; b has no such parameter"}
    assert [member.num_given for member in members] == [0, 2]
    failed.clear()
    left.refusals, left.waited_s, fleet.usable = {}, 0.0, members[:1]  # the other one is being restarted
    alone = {members[0]: engines[members[0]]}
    for passed_s in (0.1, 0.1, 59.0):
        rescheduler._place(alone, passed_s)
        assert not failed
    rescheduler._place(alone, 1.0)
    assert failed == {7: "a has no such parameter; no other has version 0 or a newer one"}


def test_no_other_engine_gets_a_group_that_one_might_draw(monkeypatch):
    """An engine that fails during the call could have accepted it."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    failed: dict[int, str] = {}
    fleet = SimpleNamespace(ledger=SimpleNamespace(engines=None, frames=SimpleNamespace(fail=failed.update)))

    def reach(member, frames, call):
        raise InflightError("broken")

    rescheduler = Rescheduler(fleet, SimpleNamespace(reach=reach), 60.0)  # type: ignore[arg-type]
    left = group(version=2)
    rescheduler._adopt(SimpleNamespace(), SimpleNamespace(), [left])  # type: ignore[arg-type]
    assert failed == {left.group_id: "broken"}
    assert not left.refusals


def test_only_the_part_that_an_engine_refuses_is_refused(monkeypatch):
    monkeypatch.setattr("inflight.fleet.rescheduler._BYTES_PER_CALL", 1)

    def call(verb, arguments, returns):
        if [each.group_id for each in arguments["groups"]] == [8]:
            raise InvalidRequestError("taken")
        return {}

    groups = [unfinished_of(GroupRecord(group_id, prompt=Prompt([1], SamplingParams()))) for group_id in (7, 8, 9)]
    assert adopt(SimpleNamespace(call=call), groups, Ids(10, 10)) == {8: "taken"}  # type: ignore[arg-type]


def test_groups_with_large_metadata_fit_into_messages():
    sizes: list[int] = []

    def call(verb, arguments, returns):
        sizes.append(len(encode(Call(verb=verb, arguments=to_raw(arguments, verb)))))
        return {}

    prompt = Prompt([1], SamplingParams(), {"cases": "x" * (5 << 20)})
    groups = [unfinished_of(GroupRecord(group_id, prompt=prompt)) for group_id in range(8)]
    assert adopt(SimpleNamespace(call=call), groups, Ids(8, 8)) == {}  # type: ignore[arg-type]
    assert sum(sizes) > MAX_MESSAGE_BYTES


class Hashed(SimpleNamespace):
    """A member, by its identity."""

    def __hash__(self) -> int:
        return id(self)


def test_what_had_not_begun_is_submitted_whole_under_its_ids():
    left = GroupRecord(7, ids=Ids(7, 20), prompt=Prompt([1], SamplingParams(n=2)))
    assert unfinished_of(left).drawn == {20: [], 21: []}
    left.drawn = {21: [5, 6]}
    assert (unfinished_of(left).first_request_id, unfinished_of(left).drawn) == (20, {21: [5, 6]})
    assert left.num_unfinished == 1
