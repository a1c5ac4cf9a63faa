"""The stream as the trainer sees it, also when frames are lost."""

import asyncio
import math
import time
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
from made_frames import ends, make_frame, starts

from inflight.core.errors import FrameError, StreamGapError
from inflight.core.frames import MAGIC, TokenFrame


def test_groups_end_when_all_that_was_submitted_was_handed_out(wire):
    wire.stream.ledger.expect([0, 1])
    wire.send(make_frame(2, 0, groups=starts(0, 1), finishes=ends(1)), make_frame(0, 1, finishes=ends(0)))
    assert [group[0].group_id for group in wire.stream.groups()] == [1, 0]
    assert list(wire.stream.groups()) == []


def test_a_caller_is_told_before_it_waits_and_only_then(wire):
    def send_the_rest():
        calls.append(len(taken))
        wire.send(make_frame(0, 1, finishes=ends(0)))

    calls, taken = [], []
    wire.stream.ledger.expect([0, 1])
    wire.send(make_frame(2, 0, groups=starts(0, 1), finishes=ends(1)))
    wire.stream.collect([1])
    for group in wire.stream.groups(before_waiting=send_the_rest):
        taken.append(group[0].group_id)
    assert (calls, taken) == ([0], [0])


def test_groups_by_id_are_looked_up_a_few_times_each_and_taken_one_by_one(wire, monkeypatch):
    ids, table, lookups = list(range(200)), wire.stream.ledger.table, []
    wire.stream.ledger.expect(ids)
    wire.send(make_frame(200, 0, groups=starts(*ids), finishes=ends(*ids)))
    known = table.known
    monkeypatch.setattr(table, "known", lambda group_ids: lookups.extend(group_ids) or known(group_ids))
    first = next(wire.stream.groups(ids))[0].group_id
    assert wire.stream.outstanding == sorted({*ids} - {first})
    assert len(list(wire.stream.groups(wire.stream.outstanding))) == 199
    assert len(lookups) < 10 * 200


def test_collect_leaves_other_groups_to_the_stream(wire):
    wire.stream.ledger.expect([0, 1, 2])
    wire.send(make_frame(3, 0, groups=starts(0, 1, 2), finishes=ends(2, 0, 1)))
    assert [group[0].group_id for group in wire.stream.collect([1, 2])] == [1, 2]
    with pytest.raises(ValueError, match=r"groups \[1\] are not outstanding"):
        wire.stream.collect([1])
    assert [group[0].group_id for group in wire.stream.groups()] == [0]


@pytest.mark.parametrize("damage", [[], [MAGIC + b"garbage"]], ids=["lost", "garbage"])
def test_after_lost_frames_what_was_in_flight_ends_as_an_error_and_the_rest_goes_on(wire, damage):
    wire.stream.ledger.expect([0, 1, 2, 3])
    wire.send(
        make_frame(2, 0, groups=starts(0, 1), finishes=ends(0), next_group_id=2),
        *damage,  # frame 1, which announced group 2
        make_frame(0, 2, groups=starts(3), next_group_id=4),
        TokenFrame(make_frame(1, 3, next_group_id=4, finishes=ends(3)).header, *(c for c in columns(3))),
    )
    groups, errors, seen = wire.stream.groups(), 0, {}
    while wire.stream.outstanding:
        try:
            for group in groups:
                seen[group[0].group_id] = group[0].finish_reason
        except (FrameError, StreamGapError):
            errors += 1
            groups = wire.stream.groups()
    assert seen == {0: "stop", 1: "error", 3: "stop"}
    assert errors == 1


def columns(request_id: int):
    frame = make_frame(1)
    yield frame.request_ids + request_id
    yield frame.token_ids
    yield frame.logprobs


@pytest.mark.parametrize(("state", "call"), [("paused", "resume"), ("asleep", "wake"), ("idle", "")])
def test_a_caller_of_a_stopped_engine_is_told_so(wire, monkeypatch, caplog, state, call):
    monkeypatch.setattr("inflight.core.waiting.LOG_EVERY_S", 0.0)
    wire.stream.thread.source.state = state
    wire.stream.ledger.expect([0])
    time.sleep(0.3)
    assert not caplog.text, "nobody waits"
    with pytest.raises(TimeoutError, match=f"groups 0 did not finish within 0.5 s; state of the engine: {state}"):
        wire.stream.collect([0], timeout_s=0.5)
    assert (f"an engine that is {state}; engine.{call}() continues it" in caplog.text) == bool(call)


@pytest.mark.parametrize("timeout_s", [None, math.inf, 1e12])
def test_collect_can_wait_without_a_limit(wire, monkeypatch, timeout_s):
    def end_first(*args, **options):
        wire.send(make_frame(1, 0, groups=starts(0), finishes=ends(0)))
        return wait(*args, **options)

    monkeypatch.setattr("inflight.training.data.rollout_stream.wait", end_first)
    wire.stream.ledger.expect([0])
    assert wire.stream.collect([0], timeout_s=timeout_s)[0][0].finish_reason == "stop"


def cancelled(wire):
    async def take():
        async for _ in wire.stream.agroups():
            pass

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(take(), 0.05))


def interrupted(take):
    def interrupt(futures, timeout=None):
        raise KeyboardInterrupt

    def run(wire):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("inflight.training.data.rollout_stream.wait", interrupt)
            patched.setattr(wire.stream, "sharing", SimpleNamespace(shares=lambda batches, stream: batches))
            with pytest.raises(KeyboardInterrupt):
                take(wire.stream)

    return run


@pytest.mark.parametrize(
    "give_up",
    [
        cancelled,
        interrupted(lambda stream: next(stream.groups())),
        interrupted(lambda stream: next(stream.groups([0]))),
        interrupted(lambda stream: next(stream.batches(rollouts=1))),
        interrupted(lambda stream: stream.collect([0])),
    ],
    ids=["agroups", "groups", "groups by id", "batches", "collect"],
)
def test_a_caller_that_gave_up_does_not_swallow_the_next_error(wire, give_up):
    wire.stream.ledger.expect([0, 1])
    give_up(wire)
    assert not wire.stream.ledger.held_of(None).waits
    wire.stream.ledger.frames.lose(StreamGapError("frames 0 to 1 are lost"))
    with pytest.raises(StreamGapError):
        next(wire.stream.groups())


def test_an_interrupted_collect_loses_nothing(wire):
    wire.stream.ledger.expect([0, 1, 2])
    wire.send(make_frame(3, 0, groups=starts(0, 1, 2), finishes=ends(0, 2)))
    with pytest.raises(TimeoutError, match=r"groups 1, 2 did not finish within 0.05 s; state of the engine: "):
        wire.stream.collect([1, 2], timeout_s=0.05)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(wire.stream.acollect([1, 2]), 0.05))
    assert not wire.stream.ledger.held_of(None).waits, "nobody does any more"
    wire.send(make_frame(0, 1, finishes=ends(1)))
    assert sorted(group[0].group_id for group in wire.stream.groups()) == [0, 1, 2]
