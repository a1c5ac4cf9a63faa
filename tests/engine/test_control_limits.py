"""What a client that is mistaken, of another version or a nuisance can do to an engine, and what it cannot."""

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq
from made_frames import make_frame, with_header
from transformers import AutoModelForCausalLM
from waiting import wait_until

import inflight
from inflight.core.errors import (
    FrameError,
    InflightError,
    InvalidRequestError,
    ProtocolError,
    PublisherConflictError,
    QueueFullError,
)
from inflight.core.frames import FrameHeader, GroupStart, TokenFrame
from inflight.core.messages import (
    PROTOCOL,
    Attach,
    Attached,
    Call,
    Failed,
    Hello,
    Prompt,
    Result,
    SlotReady,
    decode_from_engine,
    encode,
    to_raw,
)
from inflight.engine.model.shapes import shape_config
from inflight.engine.process import directory
from inflight.engine.process.control_socket import ControlSocket
from inflight.engine.process.process import EngineProcess
from inflight.engine.process.publishing import PublisherLease
from inflight.stream.writer import StreamWriter
from inflight.weights.engine.slot_table import MAX_VERSIONS_AT_ONCE
from inflight.weights.trainer.engine_link import EngineLink
from inflight.weights.trainer.publisher_lock import TOKEN_BYTES, PublisherLock
from inflight.weights.trainer.sources import ModelSource, classify
from inflight.weights.transports import AcceptedTransports

SLOTS = inflight.Slots.name()


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)


@pytest.fixture(scope="module")
def engine() -> Iterator[inflight.Engine]:
    with inflight.launch("tiny", max_sequences=8, max_context=256, threads=1, device="cpu") as engine:
        yield engine


@pytest.fixture(autouse=True)
def serves_on(request):
    """After each test the engine still draws tokens and takes weights."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=5, ignore_eos=True))
        with engine.publisher(tiny()) as publisher:
            engine.wait_for_version(publisher.publish())


@pytest.fixture
def socket(engine) -> Iterator[zmq.Socket]:
    """To the engine's control socket."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(engine.address.endpoint)
        yield socket


def call(verb: str, **arguments: object) -> Call:
    return Call(ticket=1, verb=verb, arguments=to_raw(arguments, "a test"))


def ask(socket: zmq.Socket, message) -> object:
    socket.send(message if isinstance(message, bytes) else encode(message))
    assert socket.poll(10_000), "the engine did not answer"
    return decode_from_engine(socket.recv())


def peak_mib(pid: int) -> float:
    return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1)) / 1024


def repeat(call: Callable[[], object]) -> None:
    """Until it raises."""
    while True:
        call()
        time.sleep(0.02)


def log_of(engine: inflight.Engine) -> Path:
    return engine.members[0].process.directory / "engine.log"


# ---- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_message_beyond_all_measure_is_never_taken_into_memory(engine, socket):
    before = peak_mib(engine.pid)
    socket.send(bytes(600 << 20))
    assert not socket.poll(1000)
    engine.status()
    assert peak_mib(engine.pid) < before + 200


def test_prompts_that_make_too_large_a_message_are_refused_before_they_are_sent(engine):
    before = engine.status()
    with pytest.raises(InvalidRequestError, match=r"at most 32 MiB, got 4\d.\d MiB; submit fewer prompts at a time"):
        engine.submit([[1]], metadata=[{"text": "x" * (42 << 20)}])
    assert engine.status().bad_messages == before.bad_messages


def test_refusals_and_the_log_quote_only_so_much(engine, socket):
    size = log_of(engine).stat().st_size
    prompt = Prompt([1], inflight.SamplingParams(), adapter="x" * (20 << 20))
    answer = ask(socket, call("submit", prompts=[prompt]))
    assert isinstance(answer, Failed)
    assert answer.kind == "InvalidRequestError"
    assert len(answer.message) < 1000
    answer = ask(socket, msgspec.msgpack.encode({"type": "y" * (20 << 20)}))
    assert isinstance(answer, Failed)
    assert len(answer.message) < 3000
    assert log_of(engine).stat().st_size < size + 10_000


@pytest.mark.medium
def test_a_flood_of_garbage_leaves_the_log_short(engine, socket):
    size, bad = log_of(engine).stat().st_size, engine.status().bad_messages
    for _ in range(20_000):
        socket.send(b"garbage")
        while socket.poll(0):
            socket.recv()
    while engine.status().bad_messages < bad + 20_000:
        while socket.poll(0):
            socket.recv()
    time.sleep(1.1)
    ask(socket, b"once more")
    # The answer may be one to a message before.
    wait_until(lambda: "messages before this one were left out" in log_of(engine).read_text())
    assert log_of(engine).stat().st_size < size + 200_000


def test_a_log_that_is_too_long_is_cut_down_to_its_end(tmp_path, monkeypatch):
    path = tmp_path / directory.LOG_NAME
    path.write_bytes(b"early\n" + b"x" * directory.MAX_LOG_BYTES + b"late\n")
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda file, data: written.append(data))
    directory.trim_log(tmp_path)
    assert path.stat().st_size == 0
    assert written[0].endswith(b"xlate\n")
    assert len(written[0]) < directory.MAX_LOG_BYTES // 4
    directory.trim_log(tmp_path / "missing")


def test_what_comes_too_fast_is_counted_and_not_written(monkeypatch):
    now = [10**12]
    monkeypatch.setattr(directory, "now_ns", lambda: now[0])
    flood = directory._Flood()
    records = [logging.LogRecord("x", logging.INFO, "", 0, "message %d", (i,), None) for i in range(1001)]
    assert sum(flood.filter(record) for record in records[:1000]) == 20
    now[0] += 2 * 10**9
    assert flood.filter(records[1000])
    assert records[1000].getMessage() == "(980 messages before this one were left out) message 1000"


@pytest.mark.medium
def test_who_never_reads_its_answers_costs_a_bounded_memory(engine, socket):
    socket.rcvhwm = 1
    before = peak_mib(engine.pid)
    for _ in range(30_000):
        socket.send(encode(call("status")))
    with zmq.Context.instance().socket(zmq.DEALER) as other:
        other.connect(engine.address.endpoint)
        assert isinstance(ask(other, call("status")), Result)
    assert peak_mib(engine.pid) < before + 100


def test_too_many_samples_in_one_call_are_refused(engine):
    with pytest.raises(InvalidRequestError, match="131072 samples in one call; submit at most 65536"):
        engine.submit([[1]] * 2, inflight.SamplingParams(n=65536))


def test_samples_beyond_the_bound_are_refused_by_name_until_others_have_ended(make_engine):
    engine = make_engine(max_queued=10)
    long, short = (inflight.SamplingParams(n=8, max_tokens=count, ignore_eos=True) for count in (50, 2))
    [group] = engine.requests.submit([Prompt([1, 2], long)])
    for _ in range(2):  # a refusal leaves nothing behind
        with pytest.raises(QueueFullError, match=r"8 samples do not fit beside the 8 .* at most 10.*max_queued"):
            engine.requests.submit([Prompt([1, 2], short)])
    engine.requests.submit([Prompt([1, 2], inflight.SamplingParams(n=2, max_tokens=50))])
    engine.step()
    with pytest.raises(QueueFullError, match="1 samples do not fit beside the 10"):
        engine.requests.fork(0, None, inflight.SamplingParams(), None)
    engine.requests.cancel([group], [])
    engine.requests.submit([Prompt([1, 2], short)])


def test_questions_take_a_share_of_the_generators_time_and_work_is_taken_at_once(make_engine, tmp_path, monkeypatch):
    """Of many messages that wait between two passes."""
    waiting: list[tuple[bytes, list[bytes]]] = []
    control = ControlSocket(f"ipc://{tmp_path}/control")
    stream = StreamWriter(f"ipc://{tmp_path}/stream")
    serving = EngineProcess(make_engine(), control, stream, tmp_path, AcceptedTransports())
    receive = control.receive
    monkeypatch.setattr(control, "receive", lambda: waiting.pop(0) if waiting else None)
    with zmq.Context.instance().socket(zmq.DEALER) as client:
        client.connect(f"ipc://{tmp_path}/control")

        def num_answered(message) -> int:
            for _ in range(10):
                client.send(encode(message))
            waiting[:] = [wait_until(receive) for _ in range(10)]
            serving._answer(wait=False)
            return 10 - len(waiting)

        assert num_answered(call("status")) == 1  # a pass took no time yet
        assert num_answered(call("submit", prompts=[Prompt([1], inflight.SamplingParams())])) == 10
        serving._step_ns = 10**12
        assert num_answered(call("status")) == 10
    serving.close()
    control.close()


def test_one_client_too_many_is_refused_until_another_one_leaves_and_changes_nothing_for_the_others(
    make_engine, tmp_path
):
    control = ControlSocket(f"ipc://{tmp_path}/control", max_clients=2)
    stream = StreamWriter(f"ipc://{tmp_path}/stream")
    serving = EngineProcess(make_engine(), control, stream, tmp_path, AcceptedTransports())
    first, second, third = clients = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(3)]

    def answer_to(client: zmq.Socket) -> object:
        client.send(encode(call("status")))
        for _ in range(100):
            serving._answer(wait=True)
            while client.poll(20):
                answer = decode_from_engine(client.recv())
                if answer.ticket:  # else it was asked whether it is there
                    return answer
        raise AssertionError("there was no answer")

    for client in clients:
        client.linger = 0
        client.connect(f"ipc://{tmp_path}/control")
    assert isinstance(answer_to(first), Result)
    assert isinstance(answer_to(second), Result)
    refused = answer_to(third)
    assert isinstance(refused, Failed)
    assert refused.kind == "TooManyClientsError"
    assert "the engine has 2 clients" in refused.message
    assert isinstance(answer_to(first), Result)
    second.close()
    wait_until(lambda: not isinstance(answer_to(third), Failed), "the place of a client that left is not given away")
    assert isinstance(answer_to(first), Result)
    for client in clients:
        client.close()
    serving.close()
    control.close()


# ---- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2**63 - 1, 2**63, 2**64 - 1])
def test_a_version_beyond_all_measure_is_refused_so_that_others_can_follow(engine, version):
    link = EngineLink(engine.address, ModelSource(classify(tiny())), transport=inflight.Files.name(), timeout_s=10)
    slot = link.acquire(10)
    ready = SlotReady(slot=slot, version=version, fingerprint=link.layout.fingerprint, published_ns=0)
    link.messages.send(ready)
    with pytest.raises(ProtocolError, match=f"is more than {MAX_VERSIONS_AT_ONCE} above version|cannot be read"):
        link.acquire(10)
    link.detach()


@pytest.mark.parametrize("version", [2**63 - 1, 2**64 - 1])
def test_prompts_pinned_to_a_version_beyond_all_measure_are_refused_by_name(engine, version):
    with pytest.raises(InvalidRequestError, match=f"prompt 0 is pinned to version {version}, which no slot holds"):
        engine.members[0].process.client.call(
            "submit", {"prompts": [Prompt([1], inflight.SamplingParams(), version=version)]}
        )


@pytest.mark.parametrize("field", ["version", "time_ns", "sequence", "step"])
@pytest.mark.parametrize("value", [2**63, 2**64 - 1, -1])
def test_frames_whose_numbers_no_column_can_hold_are_refused(field, value):
    data = with_header(make_frame().encode(), lambda header: header.update({field: value}))
    with pytest.raises(FrameError, match="header cannot be read"):
        TokenFrame.decode(data)


@pytest.mark.parametrize("token", [2**31, 2**64 - 1, -1])
def test_frames_whose_prompts_hold_no_token_ids_are_refused(token):
    header = FrameHeader("engine", 0, 0, 0, 0, 0, groups=[GroupStart(0, 0, [1], inflight.SamplingParams())])
    empty = TokenFrame(header, np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.float32))
    data = empty.encode()
    assert TokenFrame.decode(data).header.groups[0].prompt_token_ids == [1]
    data = with_header(data, lambda header: header["groups"][0].update(prompt_token_ids=[token]))
    with pytest.raises(FrameError, match="header cannot be read"):
        TokenFrame.decode(data)


# ---- who may publish --------------------------------------------------------------------------------------------


def test_who_attaches_without_the_lock_does_not_take_the_publishers_place(engine, socket):
    with engine.publisher(tiny()) as publisher:
        for token in ("", "0" * 32):
            answer = ask(socket, Attach(ticket=5, layout=engine.info.layout, transport=SLOTS, lock_token=token))
            assert isinstance(answer, Failed)
            assert answer.kind == "PublisherConflictError"
        for _ in range(3):
            engine.wait_for_version(publisher.publish())


def test_a_publisher_on_another_machine_keeps_its_place_while_it_is_there(engine, socket):
    """It has no lock to take."""
    attach = Attach(ticket=5, layout=engine.info.layout, transport=inflight.Files.name())
    assert isinstance(ask(socket, attach), Attached)
    with pytest.raises(PublisherConflictError):
        engine.publisher(tiny())
    socket.close()


def test_the_place_is_free_when_its_holder_is_gone(tmp_path):
    reachable = {b"a"}
    lease = PublisherLease(tmp_path / "lock", lambda holder: holder in reachable)
    assert lease.take(b"a", "") is None
    with pytest.raises(PublisherConflictError):
        lease.take(b"b", "")
    reachable.clear()
    assert lease.take(b"b", "") == b"a"
    lease.leave(b"a")
    assert lease.holder == b"b"
    lease.check(b"b")
    with pytest.raises(ProtocolError, match="not attached"):
        lease.check(b"a")
    lease.leave(b"b")
    assert lease.holder is None


def test_a_publisher_takes_its_place_where_the_disk_is_full(tmp_path, monkeypatch):
    """The engine has made room for what the publisher writes, so that overwriting it takes no new block."""
    path = tmp_path / "lock"
    lease = PublisherLease(path, lambda holder: True)
    assert path.stat().st_size == TOKEN_BYTES
    lock = PublisherLock()
    token = lock.take(str(path), "nowhere")
    assert len(token) == TOKEN_BYTES == path.stat().st_size
    assert lease.take(b"a", token) is None
    lock.close()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InflightError, match=r"cannot be written into .*lock.*No space left"):
        lock.take(str(path), "nowhere")
    lock.close()
    lease = PublisherLease(path, lambda holder: True)  # that an engine starts does not depend on it
    monkeypatch.undo()
    token = lock.take(str(path), "nowhere")  # nobody holds it
    assert lease.take(b"a", token) is None
    lock.close()


def test_a_publisher_that_lost_its_place_learns_it_at_once(engine):
    first = engine.publisher(tiny())
    engine.wait_for_version(first.publish())
    first._target._engine.lock.unlock()  # as if somebody had removed the lock
    with engine.publisher(tiny()) as second:
        with pytest.raises(PublisherConflictError, match="took this one's place"):
            repeat(first.check)
        first.close()
        engine.wait_for_version(second.publish())


# ---- versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hello", "theirs"),
    [
        (
            Hello(ticket=3, version="0.0.9", package="/somewhere/else"),
            f"inflight 0.0.9 with protocol {PROTOCOL} from /somewhere",
        ),
        (Hello(ticket=3, protocol=PROTOCOL + 1), rf"inflight {inflight.__version__} with protocol {PROTOCOL + 1}"),
    ],
)
def test_an_engine_refuses_who_runs_another_version_and_names_both(engine, socket, hello, theirs):
    answer = ask(socket, hello)
    assert isinstance(answer, Failed)
    assert answer.kind == "VersionMismatchError"
    assert re.search(theirs, answer.message)
    assert f"this process {inflight.__version__} with protocol {PROTOCOL} from {engine.info.package}" in answer.message
