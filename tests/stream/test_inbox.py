"""Every group goes to exactly one taker, whoever asks for it, in whichever order, and whatever goes wrong meanwhile."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from made_frames import ends, make_frame, starts


def arrive(wire, group_ids, sequence):
    """These groups of one sample start and end with one frame."""
    frame = make_frame(max(group_ids) + 1, sequence, groups=starts(*group_ids), finishes=ends(*group_ids))
    wire.send(frame)


@pytest.mark.parametrize("seed", range(6))
def test_threads_that_train_name_groups_and_fail_at_random_share_all_groups(wire, seed):
    """Five takers on one stream: two that iterate, one that trains on batches and fails now and then, two that name
    groups, of which one does so after they have finished."""
    draw, count = random.Random(seed), 120
    named = [[], []]
    for group_id in range(count):
        if draw.random() < 0.4:
            named[draw.randrange(2)].append(group_id)
    free = sorted(set(range(count)) - set(named[0]) - set(named[1]))
    wire.stream.expect(free)
    wire.stream.expect(named[0], reserved=True)
    seen, lock, failures = [], threading.Lock(), iter([True, False, False, True] * 1000)

    def take(groups):
        with lock:
            seen.extend(rollout.group_id for group in groups for rollout in group)

    def iterate():
        for group in wire.stream.groups():
            take([group])

    def train():
        while True:
            try:
                for batch in wire.stream.batches(rollouts=3, score=score):
                    take([batch.rollouts])
                return
            except ConnectionError:
                continue

    def score(rollout):
        if next(failures):
            raise ConnectionError
        return 1.0

    def by_name(ids, late):
        if late:
            time.sleep(0.05)  # some have finished by now, before anybody expects them
            wire.stream.expect(ids, reserved=True)
        half = len(ids) // 2
        take(wire.stream.collect(ids[:half]))
        for group in wire.stream.groups(ids[half:]):
            take([group])

    with ThreadPoolExecutor(5) as pool:
        takers = [pool.submit(train), pool.submit(by_name, named[0], False), pool.submit(by_name, named[1], True)]
        takers += [pool.submit(iterate) for _ in range(2)]
        order = list(range(count))
        draw.shuffle(order)
        sequence = 0
        while order:
            part = [order.pop() for _ in range(min(len(order), draw.randrange(1, 9)))]
            arrive(wire, part, sequence)
            sequence += 1
            time.sleep(draw.random() * 0.004)
        for taker in takers:
            taker.result(30)
    assert sorted(seen) == list(range(count))
    assert wire.stream.outstanding == []


def test_groups_that_nobody_wants_any_more_are_thrown_away(wire):
    wire.stream.expect([0, 1, 2])
    arrive(wire, [0], 0)
    wire.stream.drop([0, 1])
    arrive(wire, [1, 2], 1)
    assert [group[0].group_id for group in wire.stream.groups()] == [2]
    assert wire.stream.outstanding == []


def test_who_waits_for_named_groups_that_are_lost_is_told(wire):
    from inflight.core.errors import StreamGapError

    wire.stream.expect([0, 1], reserved=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wire.stream.collect, [0, 1])
        arrive(wire, [0], 0)
        wire.send(make_frame(0, 5, next_group_id=2))  # frames 1 to 4, one of which announced group 1, are lost
        with pytest.raises(StreamGapError):
            waiting.result(20)
    assert [group[0].group_id for group in wire.stream.collect([0])] == [0]
    with pytest.raises((StreamGapError, ValueError)):
        wire.stream.collect([1])


def notices(wire):
    """Whether the stream has seen all frames that were sent."""
    deadline = time.monotonic() + 20
    while not wire.stream._inbox._errors and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(wire.stream._inbox._errors)


def test_a_group_that_is_registered_after_its_frames_were_lost_is_not_waited_for(wire):
    """Another thread submitted it, and had not been answered yet when the gap was noticed."""
    from inflight.core.errors import StreamGapError

    wire.stream.expect([0])
    arrive(wire, [0], 0)
    wire.send(make_frame(0, 5, next_group_id=2))
    assert notices(wire)
    with pytest.raises(StreamGapError):
        wire.stream.collect([0])
    wire.stream.expect([1])
    assert [group[0].group_id for group in wire.stream.groups()] == [0]
