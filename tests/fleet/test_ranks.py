"""Rank 0 gives every rank its share of every batch, and whoever waits for a rank that is gone is told which."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from made_batches import make_rollouts
from waiting import wait_until

import inflight
from inflight.core.errors import InflightError, InvalidRequestError, ProtocolError, RankLostError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.engine.model import loading
from inflight.fleet.ranks import store, watch
from inflight.fleet.ranks.attached import AttachedEngine
from inflight.fleet.ranks.sharing import RankSharing
from inflight.fleet.ranks.store import RankStore
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import Dropped

STREAM = SimpleNamespace(last_reward=0.5, dropped=Dropped(num_failed_groups=2))
PROGRAM = Path(__file__).parents[1] / "helpers" / "rank_process.py"
BOUND_S = 20.0
"""For what takes a moment; longer than that is a hang."""


class Trainer:
    """Rank 0's end and the engines of other ranks, each with a thread to call it in."""

    def __init__(self, num_ranks: int, opened: dist.Store | None = None, **options: float):
        self.submitted: list[Prompt] = []
        self.options, self.num_ranks = EngineOptions("tiny", **options), num_ranks
        self.store = opened or dist.HashStore()
        self.sharing = RankSharing(RankStore(0, num_ranks, self.store, 1), self.options, self.submit)
        self.threads = ThreadPoolExecutor(max_workers=num_ranks + 1)
        self.engines: list[AttachedEngine] = []

    def submit(self, prompts: list[Prompt]) -> list[int]:
        if any(prompt.token_ids == [] for prompt in prompts):
            raise InvalidRequestError("prompt 0 is empty")
        self.submitted += prompts
        return list(range(len(prompts)))

    def attach(self, rank: int) -> AttachedEngine:
        self.engines.append(AttachedEngine(RankStore(rank, self.num_ranks, self.store, 1), self.options))
        return self.engines[-1]

    def shares(self, batches: Iterator[PackedBatch]) -> Iterator[PackedBatch]:
        return self.sharing.shares(batches, STREAM)

    def start(self, function: Callable, *arguments) -> Future:
        return self.threads.submit(function, *arguments)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.sharing.close()
        self.threads.shutdown()


@pytest.fixture
def trainer():
    made = []

    def make(num_ranks: int, opened: dist.Store | None = None, **options: float) -> Trainer:
        made.append(Trainer(num_ranks, opened, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ids_of(batch: PackedBatch) -> list[int]:
    return [rollout.request_id for rollout in batch.rollouts]


def three_batches() -> Iterator[PackedBatch]:
    for seed, count in ((0, 8), (1, 12), (2, 2)):  # the last has one group
        yield pack(make_rollouts(count, seed), [0.5] * count, trainer_version=seed)


def test_all_ranks_take_every_step_and_end_together(trainer):
    three = trainer(3)
    others = [three.attach(rank) for rank in (1, 2)]
    running = [three.start(list, engine.stream.batches()) for engine in others]
    of_ranks = [list(three.shares(three_batches())), *(one.result(BOUND_S) for one in running)]
    assert [len(batches) for batches in of_ranks] == [3, 3, 3]
    for step, whole in enumerate(three_batches()):
        shares = [batches[step] for batches in of_ranks]
        assert sorted(i for share in shares for i in ids_of(share)) == sorted(ids_of(whole))
        assert {share.trainer_version for share in shares} == {step}
        assert {share.totals.num_tokens for share in shares} == {whole.num_drawn / 3}
    assert [len(batches[2].rollouts) for batches in of_ranks] == [2, 0, 0]
    assert all(engine.stream.last_reward == 0.5 for engine in others)
    assert all(engine.stream.dropped.num_failed_groups == 2 for engine in others)


def test_batches_can_be_asked_for_again_after_their_end(trainer):
    two = trainer(2, rank_timeout_s=5)
    stream = two.attach(1).stream

    def both_epochs() -> list[int]:
        return [len(list(stream.batches())) for _ in range(2)]

    running = two.start(both_epochs)
    assert [len(list(two.shares(three_batches()))) for _ in range(2)] == [3, 3]
    assert running.result(BOUND_S) == [3, 3]


def test_prompts_that_cannot_be_sent_are_refused_and_later_ones_arrive(trainer):
    two = trainer(2)
    engine = two.attach(1)
    with pytest.raises(InvalidRequestError, match="prompts cannot be sent"):
        engine.submit([[1]], metadata=[{"model": torch.nn.Linear(1, 1)}])
    assert two.start(engine.submit, [[1, 2]]).result(BOUND_S) == [0]


def test_rank_0_raises_its_own_error_though_the_store_is_gone(trainer):
    two = trainer(2)

    def failing() -> Iterator[PackedBatch]:
        two.sharing.close()
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        next(two.shares(failing()))


def test_a_share_that_a_signal_interrupts_is_read_again(trainer, monkeypatch):
    two = trainer(2)
    engine = two.attach(1)
    running = two.start(list, two.shares(iter([make_packed(6)])))
    read, calls = RankStore.read, []

    def interrupted(self, name):
        data = read(self, name)
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return data

    monkeypatch.setattr(RankStore, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(engine.stream.batches())
    [again] = list(engine.stream.batches())
    [own] = running.result(BOUND_S)
    assert sorted(ids_of(own) + ids_of(again)) == list(range(6))


def test_a_share_of_many_parts_arrives_as_it_was(trainer, monkeypatch):
    monkeypatch.setattr(store, "_PART_BYTES", 100)
    two = trainer(2)
    running = two.start(list, two.attach(1).stream.batches())
    [own] = list(two.shares(iter([make_packed(6)])))
    [other] = running.result(BOUND_S)
    by_id = {rollout.request_id: rollout for rollout in make_rollouts(6)}
    for rollout in [*own.rollouts, *other.rollouts]:
        assert rollout.logprobs.tolist() == by_id.pop(rollout.request_id).logprobs.tolist()
    assert not by_id


def make_packed(count: int, seed: int = 0) -> PackedBatch:
    return pack(make_rollouts(count, seed), [0.5] * count)


def test_a_late_rank_gets_the_share_that_nobody_took(trainer):
    two = trainer(2)
    shares = two.shares(three_batches())
    first = next(shares)
    waiting = two.start(list, shares)
    time.sleep(0.3)
    assert not waiting.done()  # the next batch is made when all have taken this one
    late = list(two.attach(1).stream.batches())
    assert len(waiting.result(BOUND_S)) == 2
    assert len(late) == 3
    assert sorted(ids_of(first) + ids_of(late[0])) == list(range(8))


def test_what_keeps_rank_0_from_a_batch_is_raised_on_every_rank_and_they_go_on_after_it(trainer):
    two = trainer(2)
    stream = two.attach(1).stream

    def broken() -> Iterator[PackedBatch]:
        yield make_packed(4)
        raise ValueError("the judge is ill")

    def take() -> tuple[int, str]:
        taken = 0
        try:
            for _ in stream.batches():
                taken += 1
        except InflightError as error:
            return taken, str(error)
        return taken, ""

    running = two.start(take)
    with pytest.raises(ValueError, match="the judge is ill"):
        list(two.shares(broken()))
    assert running.result(BOUND_S) == (1, "rank 0 could not make the batch: ValueError: the judge is ill")
    running = two.start(take)
    assert len(list(two.shares(three_batches()))) == 3
    assert running.result(BOUND_S) == (3, "")


def test_prompts_of_all_ranks_reach_the_engine(trainer):
    two = trainer(2)
    engine = two.attach(1)
    assert engine.submit([[1, 2], [3]], inflight.SamplingParams(n=4), metadata=[{"a": 1}, {}]) == [0, 1]
    assert [prompt.token_ids for prompt in two.submitted] == [[1, 2], [3]]
    assert two.submitted[0].metadata == {"a": 1}
    with pytest.raises(InvalidRequestError, match="prompt 0 is empty"):
        engine.submit([[]])


def test_where_rank_0_publishes_alone_the_others_count_with_it(trainer):
    two = trainer(2)
    engine = two.attach(1)
    running = two.start(engine.publisher, torch.nn.Linear(1, 1))
    time.sleep(0.2)
    assert not running.done()  # rank 0 has made none yet
    two.sharing.note_publisher(4)
    publisher = running.result(BOUND_S)
    assert [publisher.publish(), publisher.publish(), publisher.version] == [5, 6, 6]
    assert publisher.publish(adapter="default") == 7
    two.sharing.note_publisher(6)
    gathered = []
    handed = engine.publisher()
    assert handed.publish((gathered.append(name), None) for name in "ab") == 7
    assert gathered == ["a", "b"]


def test_a_rank_that_takes_nothing_is_named_within_the_bound(trainer):
    three = trainer(3, rank_timeout_s=0.5)
    three.attach(1)
    running = three.start(next, three.engines[0].stream.batches())
    with pytest.raises(RankLostError, match=r"rank 2 has not taken its share of batch 1 within 0\.5 s.*not attached"):
        list(three.shares(three_batches()))
    running.result(BOUND_S)
    with pytest.raises(RankLostError, match="rank 2 has not taken"):
        next(three.engines[0].stream.batches())


def test_a_rank_that_leaves_is_named(trainer):
    two = trainer(2)
    shares = two.shares(three_batches())
    next(shares)
    engine = two.attach(1)
    next(engine.stream.batches())
    engine.close()
    with pytest.raises(RankLostError, match="rank 1 has closed its engine"):
        list(shares)


def test_a_rank_that_has_left_needs_no_end(trainer):
    two = trainer(2)
    engine = two.attach(1)
    running = two.start(next, engine.stream.batches())
    shares = two.shares(iter([make_packed(4)]))
    next(shares)
    running.result(BOUND_S)
    engine.close()
    assert list(shares) == []


def test_rank_0_that_waits_for_rollouts_hears_of_a_lost_rank(trainer, wire):
    two = trainer(2)
    wire.stream.ledger.expect([0])
    wire.stream.sharing = two.sharing
    engine = two.attach(1)
    running = two.start(next, wire.stream.batches(rollouts=1, score=lambda rollout: 0.0))
    asking = two.start(next, engine.stream.batches())
    time.sleep(0.3)
    assert not running.done()
    two.sharing.watch.lose(RankLostError("rank 7 has ended"))
    for waiting in (running, asking):
        with pytest.raises(RankLostError, match="rank 7 has ended"):
            waiting.result(BOUND_S)
    assert wire.stream.outstanding == [0]  # nothing is lost


def test_rank_0_that_asks_for_nothing_is_named_within_the_bound(trainer):
    two = trainer(2, rank_timeout_s=0.5, answer_timeout_s=1.0)
    with pytest.raises(RankLostError, match=r"rank 0 lives and has not asked for a batch within 0\.5 s"):
        next(two.attach(1).stream.batches())


def test_a_slow_generator_is_waited_for_longer_than_the_bound(trainer):
    two = trainer(2, rank_timeout_s=0.3, answer_timeout_s=1.0)

    def slow() -> Iterator[PackedBatch]:
        time.sleep(1.5)
        yield make_packed(4)

    running = two.start(list, two.attach(1).stream.batches())
    assert len(list(two.shares(slow()))) == len(running.result(BOUND_S)) == 1


def test_rank_0_that_closes_its_engine_is_named(trainer):
    two = trainer(2)
    engine = two.attach(1)
    running = two.start(next, engine.stream.batches())
    time.sleep(0.3)
    two.sharing.close()
    with pytest.raises(RankLostError, match="rank 0 has closed its engine"):
        running.result(BOUND_S)
    with pytest.raises(RankLostError, match="rank 0 has closed its engine"):
        engine.submit([[1]])


def test_other_methods_are_for_rank_0(trainer):
    engine = trainer(2).attach(1)
    for call in (lambda: engine.generate([[1]]), engine.pause, lambda: engine.info, engine.check, engine.serve):
        with pytest.raises(AttributeError, match="only rank 0, which launched the engine, can do this"):
            call()


def test_other_ranks_take_the_tokenizer_that_rank_0_takes(trainer, monkeypatch):
    monkeypatch.setattr(loading, "load_tokenizer", lambda model, *, trust=False: (model, trust))
    assert trainer(2, trust_remote_code=True).attach(1).tokenizer == ("tiny", True)


def test_nonsense_is_refused_and_sharing_goes_on(trainer):
    three = trainer(3)
    engine = three.attach(1)
    speaker = RankStore(2, 3, three.store, 1)
    for number, nonsense in enumerate((b"nonsense", msgspec.msgpack.encode([1]))):
        speaker.put(f"call/2/{number}", nonsense)
        speaker.count("events", 1)
        wait_until(lambda number=number: speaker.has(f"answer/2/{number}"))
        assert b"ProtocolError" in speaker.take(f"answer/2/{number}")
    speaker.set("damaged", b"100")
    with pytest.raises(ProtocolError, match="0 of 100 bytes of damaged"):
        speaker.take("damaged")
    running = [three.start(list, each.stream.batches()) for each in (engine, three.attach(2))]
    assert len(list(three.shares(three_batches()))) == 3
    assert [len(each.result(BOUND_S)) for each in running] == [3, 3]


def test_a_store_that_does_not_answer_is_named_within_the_bound():
    class Stuck(dist.Store):
        def check(self, keys: list[str]) -> bool:
            released.wait(BOUND_S)
            return True

    class Lost(dist.Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset by peer")

    released = threading.Event()
    with pytest.raises(RankLostError, match=r"rank 0 cannot be reached: .* did not answer within 0\.2 s"):
        RankStore(1, 2, Stuck(), 1, 0.2).has("launched")
    released.set()
    with pytest.raises(RankLostError, match="rank 0 cannot be reached: connection reset by peer"):
        RankStore(1, 2, Lost(), 1).has("launched")


@pytest.fixture
def spawn(tmp_path):
    processes = []

    def start(path: Path, rank: int, size: int, batches: int) -> subprocess.Popen:
        command = [sys.executable, PROGRAM, path, str(rank), str(size), str(batches)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "attached\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(10)


@pytest.fixture
def elsewhere(monkeypatch):
    """Ranks treat each other as ranks of other machines."""
    hosts = iter(range(10**6))
    monkeypatch.setattr(watch, "this_host", lambda: f"machine {next(hosts)}")


def test_a_rank_of_another_machine_takes_its_share(trainer, elsewhere):
    two = trainer(2, dist.TCPStore("127.0.0.1", 0, is_master=True))
    engine = two.attach(1)
    engine.submit([[1, 2]])
    assert [prompt.token_ids for prompt in two.submitted] == [[1, 2]]
    running = two.start(list, engine.stream.batches())
    own = list(two.shares(three_batches()))
    pairs = zip(own, running.result(BOUND_S), strict=True)
    assert [sorted(ids_of(one) + ids_of(other)) for one, other in pairs] == [ids_of(b) for b in three_batches()]
    assert not any(peer.is_here for peer in two.sharing.watch.peers.values())


def test_a_rank_of_another_machine_that_ends_is_named(trainer, elsewhere, monkeypatch):
    monkeypatch.setattr(watch, "_BEAT_S", 0.05)
    monkeypatch.setattr(watch, "_GONE_S", 1.0)
    two = trainer(2, rank_timeout_s=600.0)
    engine = two.attach(1)
    shares = two.shares(three_batches())
    next(shares)
    waiting = two.start(next, shares)
    time.sleep(1.5)
    assert not waiting.done()
    engine._watch._closing.set()  # as if its process had ended
    with pytest.raises(RankLostError, match=r"rank 1 \(process \d+ of another machine\) has ended"):
        waiting.result(BOUND_S)


def test_signs_of_life_decide_where_the_kernel_watches_no_process(monkeypatch):
    def none_left(pid):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    store: Any = SimpleNamespace(count=lambda name: 1)
    peer = watch.Peer(store, 1, watch.RankProcess(os.getpid(), watch.this_host()))
    assert not peer.is_here
    assert not peer.ended
    peer.close()


@pytest.mark.slow
def test_a_rank_that_dies_gives_all_others_an_error_that_names_it(trainer, spawn, tmp_path):
    three = trainer(3, dist.FileStore(str(tmp_path / "store"), 3), rank_timeout_s=600.0)
    other = three.attach(1)
    doomed = spawn(tmp_path / "store", 2, 3, 1)
    batches = other.stream.batches()

    def never() -> Iterator[PackedBatch]:
        """Waits for rollouts as `RolloutStream.batches` does."""
        yield make_packed(8)
        while True:
            three.sharing.check()
            time.sleep(0.05)

    shares = three.shares(never())
    next(shares)
    next(batches)
    assert doomed.stdout.readline() == "took a share\n"
    rank_0, rank_1 = three.start(next, shares), three.start(next, batches)
    time.sleep(0.5)
    assert not rank_0.done()
    assert not rank_1.done()
    doomed.kill()
    for waiting in (rank_0, rank_1):
        with pytest.raises(RankLostError, match=rf"rank 2 \(process {doomed.pid}\) has ended"):
            waiting.result(BOUND_S)


@pytest.mark.slow
def test_the_death_of_rank_0_is_seen_at_once(spawn, tmp_path):
    rank_0 = spawn(tmp_path / "store", 0, 2, 0)
    opened = dist.FileStore(str(tmp_path / "store"), 2)
    engine = AttachedEngine(RankStore(1, 2, opened, 1), EngineOptions("tiny"))
    threading.Timer(0.5, rank_0.kill).start()
    with ThreadPoolExecutor(1) as pool, closing(engine):
        waiting = pool.submit(next, engine.stream.batches())
        with pytest.raises(RankLostError, match=rf"rank 0 \(process {rank_0.pid}\), which holds the engine, has ended"):
            waiting.result(BOUND_S)
