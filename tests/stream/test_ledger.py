"""Every group goes to exactly one taker, whoever asks for it, in whichever order, and whatever goes wrong meanwhile."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from made_frames import ends, make_frame, starts
from waiting import wait_until

from inflight.core.errors import InflightError, StreamGapError
from inflight.core.frames import Finish, GroupStart, TokenFrame
from inflight.core.messages import LIVE_VERSION, Ids, Prompt
from inflight.core.sampling import SamplingParams
from inflight.stream.group_table import GroupRecord, State
from inflight.stream.ledger import Ledger
from inflight.stream.open_groups import EPISODE
from inflight.stream.training_queue import TrainingQueue
from inflight.training.data.scoring import Scorer


def arrive(wire, group_ids, sequence):
    """These groups of one sample start and end with one frame."""
    frame = make_frame(max(group_ids) + 1, sequence, groups=starts(*group_ids), finishes=ends(*group_ids))
    wire.send(frame)


def from_engine(engine_id, sequence, request_ids, **header):
    """A frame of one of several engines, in which these requests draw a token each."""
    frame = make_frame(len(request_ids), sequence, **header)
    header = msgspec.structs.replace(frame.header, engine_id=engine_id)
    return TokenFrame(header, np.array(request_ids, np.uint64), frame.token_ids, frame.logprobs)


def test_what_is_held_is_told_to_the_engine_that_draws_it(wire):
    ledger = wire.stream.ledger
    wire.stream.ledger.expect([0, 1, 2])
    wire.send(
        from_engine("a", 0, [0, 1], groups=starts(0, 1)),
        from_engine("b", 1, [2], groups=starts(2)),
        from_engine("a", 2, [0, 1], finishes=[Finish(0, "stop", 2)]),
    )
    a, b = ledger.held_of("a"), ledger.held_of("b")
    assert (a.held_tokens, a.held_rollouts, a.oldest) == (4, 1, 5)
    assert (b.held_tokens, b.held_rollouts, b.oldest) == (1, 0, None)

    assert ledger.engines.unassign(object(), "a", 5) == 1
    [left] = ledger.engines.unassigned
    assert (left.group_id, left.drawn) == (1, {1: [101, 101]})
    wire.send(from_engine("b", 3, [1], groups=starts(1)))  # which goes on with what a has begun
    assert ledger.held_of("a").held_tokens == 2
    assert ledger.held_of("b").held_tokens == 4
    wire.send(from_engine("b", 4, [1], finishes=[Finish(1, "stop", 4)]))
    assert ledger.held_of("b").held_rollouts == 1
    assert len(wire.stream.collect([1])[0][0].token_ids) == 4
    assert ledger.held_of("b").held_tokens == 1
    wire.stream.collect([0])
    assert ledger.held_of("a").held_tokens == 0


def test_what_an_engine_leaves_and_nobody_wants_is_forgotten(wire):
    ledger = wire.stream.ledger
    wire.stream.ledger.expect([0, 1])
    wire.send(
        from_engine("a", 0, [0, 1, 2], groups=starts(0, 1, 2)),  # of 2, nobody has learned that it was accepted
        from_engine("b", 1, [3], groups=starts(3)),
    )
    wire.stream.ledger.drop([1])
    assert ledger.engines.unassign(object(), "a", 5) == 1
    [left] = ledger.engines.unassigned
    assert (left.group_id, left.drawn) == (0, {0: [100]})
    assert [i for i in range(4) if i in ledger.table.assembler.groups] == [0, 3]


def test_whoever_waits_for_a_group_that_no_engine_begins_is_told(wire):
    wire.stream.ledger.expect([0], reserved=True)
    errors = []

    def wait():
        with pytest.raises(StreamGapError, match=r"no engine goes on with groups \[0\]") as error:
            wire.stream.collect([0])
        errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not wire.stream.ledger.table.waiters:
        time.sleep(0.001)
    wire.stream.ledger.frames.fail([0])
    waiting.join(10)
    assert errors


@pytest.mark.medium
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
    wire.stream.ledger.expect(free)
    wire.stream.ledger.expect(named[0], reserved=True)
    seen, lock, failures = [], threading.Lock(), iter([True, False, False, True] * 1000)

    def take(groups):
        with lock:
            seen.extend(rollout.group_id for group in groups for rollout in group)

    def iterate():
        for group in wire.stream.groups():
            take([group])

    def train():
        for batch in wire.stream.batches(rollouts=3, score=Scorer(score, retries={ConnectionError: 100})):
            take([batch.rollouts])

    def score(rollout):
        if next(failures):
            raise ConnectionError
        return 1.0

    def by_name(ids, late):
        if late:
            time.sleep(0.05)  # some have finished by now, before anybody expects them
            wire.stream.ledger.expect(ids, reserved=True)
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
    wire.stream.ledger.expect([0, 1, 2])
    arrive(wire, [0], 0)
    wire.stream.ledger.drop([0, 1])
    arrive(wire, [1, 2], 1)
    assert [group[0].group_id for group in wire.stream.groups()] == [2]
    assert wire.stream.outstanding == []


def test_who_waits_for_named_groups_that_are_lost_is_told(wire):
    from inflight.core.errors import StreamGapError

    wire.stream.ledger.expect([0, 1], reserved=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wire.stream.collect, [0, 1])
        arrive(wire, [0], 0)
        wire.send(make_frame(0, 5, next_group_id=2))  # frames 1 to 4, one of which announced group 1, are lost
        with pytest.raises(StreamGapError):
            waiting.result(20)
    assert [group[0].group_id for group in wire.stream.collect([0])] == [0]
    with pytest.raises((StreamGapError, ValueError)):
        wire.stream.collect([1])


def test_a_group_that_is_registered_after_its_frames_were_lost_is_not_waited_for(wire):
    """Another thread submitted it, and had not been answered yet when the gap was noticed."""
    from inflight.core.errors import StreamGapError

    wire.stream.ledger.expect([0])
    arrive(wire, [0], 0)
    wire.send(make_frame(0, 5, next_group_id=2))
    wait_until(lambda: wire.stream.ledger.table.waiters._errors)
    with pytest.raises(StreamGapError):
        wire.stream.collect([0])
    wire.stream.ledger.expect([1])
    assert [group[0].group_id for group in wire.stream.groups()] == [0]


def test_little_is_kept_of_groups_that_were_taken_by_name_after_they_had_finished(wire):
    for sequence in range(30):
        group_ids = list(range(10 * sequence, 10 * sequence + 10))
        wire.stream.ledger.expect(group_ids)
        arrive(wire, group_ids, sequence)
        wait_until(lambda group_ids=group_ids: len(wire.stream.ledger.table.ready) == len(group_ids))
        wire.stream.collect(group_ids)
    assert not wire.stream.ledger.table.ready
    wire.stream.ledger.expect([300])
    arrive(wire, [300], 30)
    assert [group[0].group_id for group in wire.stream.groups()] == [300]


def test_an_engine_learns_whether_somebody_follows_the_tokens(wire):
    ledger, frames = wire.stream.ledger, []
    wire.stream.ledger.frames.listen(follower := lambda: frames.append(1))
    assert ledger.held_of("a").follows
    wire.stream.ledger.frames.unlisten(follower)
    assert not ledger.held_of("a").follows


def test_an_engine_learns_whether_somebody_waits_for_certain_groups(wire):
    ledger = wire.stream.ledger
    wire.stream.ledger.expect([0, 1])
    any_group = ledger.queue.next()
    assert (ledger.held_of("a").waits, ledger.held_of("a").awaits_ends) == (True, False)
    certain = ledger.take([1])
    assert (ledger.held_of("a").awaits_ends, ledger.held_of("a").follows) == (True, False)
    arrive(wire, [0, 1], 0)
    certain.result(timeout=10)
    any_group.result(timeout=10)
    assert not ledger.held_of("a").awaits_ends


def test_who_waits_for_a_group_that_is_dropped_learns_of_it(wire):
    """A waiter that stayed would tell the engine for ever that somebody waits."""
    ledger = wire.stream.ledger
    wire.stream.ledger.expect([0, 1], reserved=True)
    waiting = ledger.take([0])
    assert ledger.held_of("a").waits
    wire.stream.ledger.drop([0])
    waiting.result(timeout=10)
    assert not ledger.held_of("a").waits
    with pytest.raises(ValueError, match="not outstanding"):
        ledger.take([0])


def test_news_are_what_came_since(wire):
    rung = threading.Semaphore(0)
    wire.stream.ledger.frames.listen(rung.release)
    wire.stream.ledger.expect([0], reserved=True)
    wire.send(from_engine("a", 0, [0], groups=starts(0)), from_engine("a", 1, [0]))
    assert rung.acquire(timeout=10)
    assert rung.acquire(timeout=10)
    [part] = wire.stream.ledger.frames.news(0, {})
    assert (len(part.token_ids), part.finish_reason) == (2, "")
    [part] = wire.stream.ledger.frames.news(0, {0: 2})
    assert len(part.token_ids) == 0
    wire.send(from_engine("a", 2, [0], finishes=[Finish(0, "stop", 3)]))
    assert rung.acquire(timeout=10)
    [part] = wire.stream.ledger.frames.news(0, {0: 2})
    assert (len(part.token_ids), part.finish_reason) == (1, "stop")
    assert len(wire.stream.collect([0])[0][0].token_ids) == 3
    assert wire.stream.ledger.frames.news(0, {}) == []
    wire.stream.ledger.frames.unlisten(rung.release)
    wire.send(from_engine("a", 3, [1], groups=starts(1)))
    assert not rung.acquire(timeout=0.3)


def test_a_group_that_its_engine_left_and_that_is_dropped_leaves_nothing(wire):
    ledger, engine = wire.stream.ledger, object()
    with ledger.table.lock:
        records = [ledger.engines.begin(Prompt([1], SamplingParams()), engine) for _ in range(3)]
        kept, dropped, never_claimed = records
        assert ledger.claim([0, 1], reserved=True) == []
    assert [record.prompt.params.seed is not None for record in records] == [True] * 3
    assert ledger.engines.unassign(engine, "a", 0) == 2
    assert never_claimed.state is State.GONE
    ledger.drop([1])
    assert dropped.state is State.GONE
    assert ledger.engines.unassigned == [kept]
    assert ledger.outstanding == list(ledger.table.records) == [0]
    assert ledger.engines.next_ids == Ids(3, 3)


def test_a_ledger_that_was_saved_goes_on_in_another_one(wire):
    ledger, engine, other = wire.stream.ledger, object(), Ledger()
    with ledger.table.lock:
        for _ in range(3):
            ledger.engines.begin(Prompt([1], SamplingParams()), engine)
        ledger.claim([0, 1], reserved=False)
        ledger.claim([2], reserved=True)
    wire.send(from_engine("a", 0, [0, 1, 2], groups=starts(0, 1, 2), finishes=ends(1)))
    wait_until(lambda: ledger.table.records[1].is_finished)
    ledger.engines.note_cancelled([], [2])
    other.engines.restore(ledger.engines.snapshot(), ledger.engines.next_ids)
    assert other.outstanding == [0, 1, 2]
    assert {record.group_id: record.drawn for record in other.engines.unassigned} == {0: {0: [100]}, 2: {2: [102]}}
    assert {record.group_id: record.cancelled for record in other.engines.unassigned} == {0: set(), 2: {2}}
    ready = other.queue.next()
    assert isinstance(ready, GroupRecord)
    assert ready.rollouts[0].token_ids.tolist() == [101]
    assert other.engines.next_ids == Ids(3, 3)
    with pytest.raises(InflightError, match="submitted already"):
        other.engines.restore([], Ids(0, 0))


def test_turns_of_loaded_episodes_are_discarded_with_their_group():
    ledger, loaded = Ledger(), Ledger()
    with ledger.table.lock:
        groups = [ledger.episodes.open(Prompt([], SamplingParams(), {}), reserved=True).group_id for _ in range(2)]
        for group_id in groups:
            ledger.engines.begin(Prompt([1], SamplingParams(), {EPISODE: [group_id, 0, 0, ""]}), object())
        ledger.claim([2, 3], reserved=True)
    loaded.engines.restore(ledger.engines.snapshot(), ledger.engines.next_ids)
    assert loaded.outstanding == [0, 1, 2, 3]
    loaded.drop([0])
    assert loaded.outstanding == [1, 3]
    assert [record.group_id for record in loaded.engines.unassigned] == [3]
    loaded.episodes.claim(())
    loaded.drop([1])
    assert loaded.outstanding == [3], "an episode that is played ends its turns itself"


def test_a_pinned_group_keeps_its_version_if_the_samples_that_have_begun_have_all_ended():
    ledger, engine, params = Ledger(), object(), SamplingParams(n=2)
    with ledger.table.lock:
        records = [ledger.engines.begin(Prompt([1], params, version=LIVE_VERSION), engine) for _ in range(2)]
    ledger.expect([0, 1])
    groups = [GroupStart(r.group_id, r.ids.first_request_id, [1], params, pin=2) for r in records]
    # The version of the frame, 5, also counts publishes of adapters.
    ledger.frames.take_in(make_frame(1, 0, groups=groups, finishes=ends(0), next_group_id=2))
    assert [group.prompt.version for group in ledger.engines.snapshot()] == [2, LIVE_VERSION]
    ledger.engines.unassign(engine, "engine", 7)
    assert records[0].drawn == {1: []}
    assert [record.pin for record in records] == [2, LIVE_VERSION]


def test_a_pinned_group_without_tokens_gets_the_version_of_the_engine_that_continues_it():
    ledger, other = Ledger(), Ledger()
    with ledger.table.lock:
        ledger.engines.begin(Prompt([1], SamplingParams(), version=LIVE_VERSION), object())
    ledger.expect([0])
    for sequence, pin in enumerate((2, 3)):
        start = GroupStart(0, 0, [1], SamplingParams(), pin=pin)
        ledger.frames.take_in(make_frame(sequence, sequence, groups=[start], next_group_id=1))
    other.engines.restore(ledger.engines.snapshot(), ledger.engines.next_ids)
    assert [record.pin for record in other.engines.unassigned] == [3]


def test_a_group_that_finishes_while_its_submission_is_answered_is_offered_once(monkeypatch):
    """The reader finishes it, and the submitter claims it before the reader offers what has finished."""
    ledger, offered, offer = Ledger(), [], TrainingQueue.offer
    ledger.queue.on_finished = lambda record: offered.append(record.group_id) is None

    def offer_late(self, records):
        monkeypatch.setattr(TrainingQueue, "offer", offer)
        ledger.expect([0])
        assert self.next().state is State.LENT
        offer(self, records)

    monkeypatch.setattr(TrainingQueue, "offer", offer_late)
    ledger.frames.take_in(make_frame(1, 0, groups=starts(0), finishes=ends(0)))
    assert offered == [0]
    assert ledger.queue.next() is None
    assert [record.state for record in ledger.table.records.values()] == [State.LENT]


def test_a_group_that_has_finished_is_not_lost_when_no_engine_continues_others():
    ledger = Ledger()
    ledger.expect([0, 1], reserved=True)
    ledger.frames.take_in(make_frame(2, 0, groups=starts(0, 1), finishes=ends(0)))
    ledger.frames.fail([0, 1])
    groups = ledger.take([0, 1])
    assert [groups[n][0].finish_reason for n in (0, 1)] == ["stop", "error"]
