"""Rank 0 gives every rank its share of every batch, and whoever waits for a rank that is gone is told which."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq
from made_batches import make_rollouts
from waiting import wait_until

import inflight
from inflight.core.errors import InflightError, InvalidRequestError, ListenError, ProtocolError, RankLostError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.ranks import attached
from inflight.ranks import rank_server as rank_server_module
from inflight.ranks.attached import AttachedEngine
from inflight.ranks.meeting import Outside, this_host
from inflight.ranks.rank_server import RankServer
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import Dropped

STREAM = SimpleNamespace(last_reward=0.5, dropped=Dropped(num_failed_groups=2))
PROGRAM = Path(__file__).parents[1] / "helpers" / "rank_process.py"
BOUND_S = 20.0
"""For what takes a moment; longer than that is a hang."""


class Trainer:
    """A server and the engines of other ranks, each with a thread to call it in."""

    def __init__(self, num_ranks: int, outside: Outside | None = None, **options: float):
        self.submitted: list[Prompt] = []
        self.first_versions: dict[int, int] = {}
        self.server = RankServer(
            EngineOptions("tiny", **options),
            num_ranks,
            submit=self.submit,
            status=lambda: None,
            first_version=self.first_versions.get,
            outside=outside,
        )
        self.threads = ThreadPoolExecutor(max_workers=num_ranks + 1)
        self.engines: list[AttachedEngine] = []

    def submit(self, prompts: list[Prompt]) -> list[int]:
        if any(prompt.token_ids == [] for prompt in prompts):
            raise InvalidRequestError("prompt 0 is empty")
        self.submitted += prompts
        return list(range(len(prompts)))

    def attach(self, rank: int | None) -> AttachedEngine:
        self.engines.append(AttachedEngine(self.server.own_address, rank))
        return self.engines[-1]

    def shares(self, batches: Iterator[PackedBatch]) -> Iterator[PackedBatch]:
        return self.server.shares(batches, STREAM)

    def start(self, function: Callable, *arguments) -> Future:
        return self.threads.submit(function, *arguments)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.server.close()
        self.threads.shutdown()


@pytest.fixture
def trainer():
    made = []

    def make(num_ranks: int, outside: Outside | None = None, **options: float) -> Trainer:
        made.append(Trainer(num_ranks, outside, **options))
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


def test_a_share_of_many_parts_arrives_as_it_was(trainer, monkeypatch):
    monkeypatch.setattr(rank_server_module, "_PART_BYTES", 100)
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
    two.first_versions[0] = 4
    publisher = running.result(BOUND_S)
    assert [publisher.publish(), publisher.publish(), publisher.version] == [5, 6, 6]
    two.first_versions[1] = 6
    gathered = []
    handed = engine.publisher()
    assert handed.publish((gathered.append(name), None) for name in "ab") == 7
    assert gathered == ["a", "b"]


def test_a_rank_that_takes_nothing_is_named_within_the_bound(trainer):
    three = trainer(3, rank_timeout_s=0.5)
    three.attach(1)
    running = three.start(next, three.engines[0].stream.batches())
    began = time.monotonic()
    with pytest.raises(RankLostError, match=r"rank 2 has not taken its share of batch 1 within 0\.5 s.*not attached"):
        list(three.shares(three_batches()))
    assert time.monotonic() - began < 5
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
    wire.stream.sharing = two.server
    engine = two.attach(1)
    running = two.start(next, wire.stream.batches(rollouts=1, score=lambda rollout: 0.0))
    asking = two.start(next, engine.stream.batches())
    time.sleep(0.3)
    assert not running.done()
    two.server._lose(RankLostError("rank 7 has ended"))
    for waiting in (running, asking):
        with pytest.raises(RankLostError, match="rank 7 has ended"):
            waiting.result(BOUND_S)
    assert wire.stream.outstanding == [0]  # nothing is lost


def test_rank_0_that_asks_for_nothing_is_named_within_the_bound(trainer):
    two = trainer(2, rank_timeout_s=0.5, answer_timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(RankLostError, match=r"rank 0 lives and has not asked for a batch within 0\.5 s"):
        next(two.attach(1).stream.batches())
    assert time.monotonic() - began < 5


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
    wait_until(lambda: two.server._asking)
    two.server.close()
    with pytest.raises(RankLostError, match="rank 0 has closed its engine"):
        running.result(BOUND_S)
    with pytest.raises(RankLostError, match="rank 0 has closed its engine"):
        engine.submit([[1]])


def test_ranks_that_cannot_be_are_refused(trainer):
    two = trainer(2)
    with pytest.raises(AttributeError, match="generate is not there on an engine that rank 0 launched"):
        two.attach(1).generate([[1]])
    with pytest.raises(ProtocolError, match="rank 1 is attached already, as process"):
        two.attach(1)
    with pytest.raises(ProtocolError, match="rank 2 cannot attach: the trainer has ranks 0 to 1"):
        two.attach(2)
    with pytest.raises(RankLostError, match="on another machine"):
        AttachedEngine(msgspec.structs.replace(two.server.own_address, host="elsewhere"), 1)


def test_an_engine_that_is_not_let_in_leaves_no_file_open(trainer, monkeypatch):
    opened = []

    class Noted(attached.Process):
        def __init__(self, pid: int):
            super().__init__(pid)
            opened.append(self)

    monkeypatch.setattr(attached, "Process", Noted)
    two = trainer(2)
    two.attach(1)
    with pytest.raises(ProtocolError, match="is attached already"):
        two.attach(1)
    assert [process._file is None for process in opened] == [False, True]


def test_other_ranks_take_the_tokenizer_that_rank_0_takes(trainer, monkeypatch):
    monkeypatch.setattr(attached, "load_tokenizer", lambda model, *, trust=False: (model, trust))
    assert trainer(2, trust_remote_code=True).attach(1).tokenizer == ("tiny", True)


def test_nonsense_is_refused_and_the_server_goes_on(trainer):
    three = trainer(3)
    engine = three.attach(1)
    for verb, arguments in (("take", {"client": "nobody", "number": 1}), ("take", {}), ("no", {}), ("read", {"at": 1})):
        with pytest.raises(ProtocolError):
            engine._call(verb, arguments)
    with pytest.raises(InflightError, match="rank 0 failed: OSError"):
        engine._call("join", {"client": "x", "rank": 2, "pid": -1, "host": this_host()}, timeout_s=BOUND_S)
    running = [three.start(list, each.stream.batches()) for each in (engine, three.attach(2))]
    assert len(list(three.shares(three_batches()))) == 3
    assert [len(each.result(BOUND_S)) for each in running] == [3, 3]


@pytest.fixture
def spawn():
    processes = []

    def start(server: RankServer, rank: int, batches: int) -> subprocess.Popen:
        address = msgspec.json.encode(server.own_address).decode()
        processes.append(
            subprocess.Popen(
                [sys.executable, PROGRAM, address, str(rank), str(batches)], stdout=subprocess.PIPE, text=True
            )
        )
        assert processes[-1].stdout.readline() == "attached\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(10)


@pytest.fixture
def elsewhere(monkeypatch):
    """Whoever attaches is on another machine. Returns its keys."""
    monkeypatch.setattr(attached, "this_host", lambda: "another machine")
    return zmq.curve_keypair()


def test_a_rank_of_another_machine_takes_its_share_and_nobody_without_its_key(trainer, elsewhere):
    two = trainer(2, Outside("localhost", elsewhere[0].__eq__), answer_timeout_s=1.0)
    with AttachedEngine(two.server.own_address, 1, elsewhere) as engine:
        engine.submit([[1, 2]])
        assert [prompt.token_ids for prompt in two.submitted] == [[1, 2]]
        running = two.start(list, engine.stream.batches())
        own = list(two.shares(three_batches()))
        pairs = zip(own, running.result(BOUND_S), strict=True)
        assert [sorted(ids_of(one) + ids_of(other)) for one, other in pairs] == [ids_of(b) for b in three_batches()]
    with pytest.raises(RankLostError, match=r"rank 0, on another machine, did not answer join within 1 s"):
        AttachedEngine(two.server.own_address, 1, zmq.curve_keypair())
    with pytest.raises(RankLostError, match="listens to its own machine alone"):
        two.attach(1)


def test_a_rank_of_another_machine_that_ends_is_named(trainer, elsewhere, monkeypatch):
    monkeypatch.setattr(rank_server_module, "_GONE_NS", 0)
    two = trainer(2, Outside("127.0.0.1", elsewhere[0].__eq__), rank_timeout_s=600.0)
    engine = AttachedEngine(two.server.own_address, 1, elsewhere)
    shares = two.shares(three_batches())
    next(shares)
    waiting = two.start(next, shares)
    engine._client.close()  # as the kernel closes its connection
    with pytest.raises(RankLostError, match=r"rank 1 \(process \d+ of another machine\) has ended"):
        waiting.result(BOUND_S)


def test_a_connection_that_breaks_loses_no_rank_of_another_machine(trainer, elsewhere, monkeypatch):
    monkeypatch.setattr(rank_server_module, "_LOOK_EVERY_NS", 0)
    two = trainer(2, Outside("127.0.0.1", elsewhere[0].__eq__))
    with AttachedEngine(two.server.own_address, 1, elsewhere) as engine:
        [client] = two.server._clients.values()
        client.address = b"of the connection that broke"
        wait_until(lambda: client.missed_ns)
        running = two.start(next, engine.stream.batches())
        next(two.shares(three_batches()))
        running.result(BOUND_S)
        wait_until(lambda: not client.missed_ns)
        two.server.check()


def test_a_container_of_the_same_machine_comes_in_as_from_another_one(trainer):
    """It shares the kernel, and neither files nor processes."""
    keys = zmq.curve_keypair()
    two = trainer(2, Outside("127.0.0.1", keys[0].__eq__))
    with AttachedEngine(
        msgspec.structs.replace(two.server.own_address, directory="/nowhere", pid=1), 1, keys
    ) as engine:
        assert engine.submit([[1, 2]]) == [0]
        [client] = two.server._clients.values()
        assert client.process is None


def test_a_name_that_is_the_loopback_here_is_told_to_others_as_it_is(trainer, monkeypatch):
    """Where Debian has 127.0.1.1 for the name of the machine, others have a number for it that they reach."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *more, **kinds: resolve("127.0.1.1", *more, **kinds))
    two = trainer(2, Outside("a-machine", bytes.isdigit))
    assert two.server.own_address.endpoint.startswith("tcp://a-machine:")
    assert two.server._socket._socket.getsockopt_string(zmq.LAST_ENDPOINT).startswith("tcp://0.0.0.0:")


def test_an_address_that_is_not_this_machines_is_named():
    with pytest.raises(ListenError, match=r"on '192\.0\.2\.77', its MASTER_ADDR"):
        Trainer(2, Outside("192.0.2.77", bytes.isdigit))


@pytest.mark.slow
def test_a_rank_that_dies_gives_all_others_an_error_that_names_it(trainer, spawn):
    three = trainer(3, rank_timeout_s=600.0)
    other = three.attach(1)
    doomed = spawn(three.server, 2, 1)
    batches = other.stream.batches()

    def never() -> Iterator[PackedBatch]:
        """Waits for rollouts as `RolloutStream.batches` does."""
        yield make_packed(8)
        while True:
            three.server.check()
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
    began = time.monotonic()
    for waiting in (rank_0, rank_1):
        with pytest.raises(RankLostError, match=rf"rank 2 \(process {doomed.pid}\) has ended"):
            waiting.result(BOUND_S)
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_the_death_of_rank_0_is_seen_at_once(trainer, spawn):
    program = (
        "import sys, time, msgspec\n"
        "from inflight.core.options import EngineOptions\n"
        "from inflight.ranks.rank_server import RankServer\n"
        "server = RankServer(EngineOptions('tiny'), 2, submit=None, status=None, first_version=None)\n"
        "print(msgspec.json.encode(server.own_address).decode(), flush=True)\n"
        "time.sleep(600)\n"
    )
    rank_0 = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    address = msgspec.json.decode(rank_0.stdout.readline().encode(), type=type(trainer(2).server.own_address))
    engine = AttachedEngine(address, 1)
    threading.Timer(0.5, rank_0.kill).start()
    began = time.monotonic()
    with pytest.raises(RankLostError, match=rf"rank 0 \(process {rank_0.pid}\), which holds the engine, has ended"):
        next(engine.stream.batches())
    assert time.monotonic() - began < 5
    rank_0.wait(10)
    engine.close()
