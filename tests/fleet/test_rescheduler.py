"""Who may go on with a group that another engine began."""

import msgspec
import pytest

from inflight.core.messages import Ids, Prompt, Status
from inflight.core.sampling import SamplingParams
from inflight.fleet.rescheduler import can_continue, is_past, unfinished_of
from inflight.stream.group_table import GroupRecord


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


def test_what_had_not_begun_is_submitted_whole_under_its_ids():
    left = GroupRecord(7, ids=Ids(7, 20), prompt=Prompt([1], SamplingParams(n=2)))
    assert unfinished_of(left).drawn == {20: [], 21: []}
    left.drawn = {21: [5, 6]}
    assert (unfinished_of(left).first_request_id, unfinished_of(left).drawn) == (20, {21: [5, 6]})
    assert left.num_unfinished == 1
