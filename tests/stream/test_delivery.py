"""Every frame arrives once and in order, whatever happens to the connection, the reader and the writer's memory."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from made_frames import make_frame
from waiting import wait_until

from inflight.core.errors import EngineDiedError, ProtocolError, StreamGapError
from inflight.core.frames import Finish
from inflight.stream import reader as reader_module
from inflight.stream import writer as writer_module
from inflight.stream.reader import StreamReader
from inflight.stream.wire import Ack, Beat, Held, Subscribe, encode, to_reader
from inflight.stream.writer import StreamWriter


@pytest.fixture
def writer(tmp_path):
    writer = StreamWriter(f"ipc://{tmp_path}/stream", spill_directory=tmp_path)
    yield writer
    writer.close()


def until(true: Callable[[], object], *writers: StreamWriter) -> None:
    """Let the writers work until something is true."""

    def asked() -> object:
        answer = true()
        for writer in writers:
            writer.flush()
        return answer

    wait_until(asked)


def receive(reader: StreamReader, writer: StreamWriter) -> int:
    """The number of the next frame."""
    frames = []
    until(lambda: frames.append(reader.receive(0)) or frames[-1] is not None, writer)
    return frames[-1].header.sequence


def reconnect(reader: StreamReader, endpoint: str) -> None:
    """Break the connection, with all that is on its way, and make another one, as ZeroMQ does by itself."""
    reader.socket.disconnect(reader.socket.getsockopt_string(zmq.LAST_ENDPOINT))
    reader.socket.connect(endpoint)


@pytest.mark.parametrize("seed", range(4))
def test_frames_arrive_once_and_in_order_over_connections_that_break(writer, monkeypatch, seed):
    """With a small window, frames in files, and acknowledgements that are lost with their connection."""
    monkeypatch.setattr(reader_module, "_SILENCE_NS", 20_000_000)
    monkeypatch.setattr(reader_module, "_FRAMES_PER_ACK", 5)
    monkeypatch.setattr(writer_module, "_WINDOW_BYTES", 3000)
    writer.kept._memory_bytes = 5000
    draw, count, arrived, most_in_files = random.Random(seed), 600, [], 0
    breaks = sorted(draw.sample(range(count), 8))
    reader, sent = StreamReader(writer.endpoint, begin=0), 0
    deadline = time.monotonic() + 120
    while len(arrived) < count:
        assert time.monotonic() < deadline
        for _ in range(draw.randrange(20)):
            if sent < count:
                writer.send(make_frame(draw.randrange(30), sent))
                sent += 1
        writer.flush()
        most_in_files = max(most_in_files, writer.kept.bytes_in_files)
        for _ in range(draw.randrange(20)):
            if (frame := reader.receive(0)) is not None:
                arrived.append(frame.header.sequence)
        if len(arrived) >= breaks[0]:
            reconnect(reader, writer.endpoint)
            breaks = [place for place in breaks if place > len(arrived)] or [count + 1]
    assert arrived == list(range(count))
    assert breaks == [count + 1]
    assert most_in_files
    until(lambda: reader.receive(0) or writer.kept.oldest == count, writer)
    assert writer.kept.bytes_in_memory == writer.kept.bytes_in_files == 0
    reader.close()


def test_a_frame_is_kept_until_the_next_one_is_asked_for(writer):
    reader = StreamReader(writer.endpoint)
    for number in range(3):
        writer.send(make_frame(sequence=number))
    assert receive(reader, writer) == 0
    time.sleep(0.1)
    writer.flush()
    assert writer.kept.oldest == 0
    assert receive(reader, writer) == 1
    assert receive(reader, writer) == 2
    assert reader.receive(10) is None
    until(lambda: writer.kept.oldest == 3, writer)
    reader.close()


@pytest.fixture
def reader_of_held_back(writer, monkeypatch) -> Iterator[StreamReader]:
    """Of a writer that holds back what may wait for as long as the test lasts."""
    monkeypatch.setattr(writer_module, "_FLUSH_SHARE", 1e-12)
    monkeypatch.setattr(writer_module, "_MOST_HELD_BACK_NS", 600_000_000_000)
    reader = StreamReader(writer.endpoint)
    until(lambda: reader.receive(0) or writer._reader, writer)
    yield reader
    reader.close()


def numbers(reader: StreamReader, count: int) -> list[int | None]:
    """Of the next frames, without help of the writer; None where none comes."""
    frames = [reader.receive(500) for _ in range(count)]
    return [frame and frame.header.sequence for frame in frames]


@pytest.mark.parametrize("how", ["another", "close", "flush"])
def test_frames_that_follow_closely_go_together(writer, reader_of_held_back, how):
    for number in range(3):
        writer.send(make_frame(3, number), at_once=False)
    assert numbers(reader_of_held_back, 2) == [0, None]  # which had none before it
    writer.send(make_frame(3, 3)) if how == "another" else getattr(writer, how)()
    assert numbers(reader_of_held_back, 3) == [1, 2, 3 if how == "another" else None]


def test_first_tokens_wait_for_nothing(writer, reader_of_held_back):
    """Neither signs of life nor news without tokens hold them back, and news pass nobody."""
    for _ in range(3):
        writer.flush()
    writer.send(make_frame(0, 0), at_once=False)
    writer.send(make_frame(3, 1), at_once=False)
    assert numbers(reader_of_held_back, 2) == [0, 1]
    writer.send(make_frame(3, 2), at_once=False)
    writer.send(make_frame(0, 3), at_once=False)
    assert numbers(reader_of_held_back, 2) == [2, 3]


def test_the_first_tokens_of_who_asks_again_wait_for_nothing(writer, reader_of_held_back):
    writer.send(make_frame(3, 0), at_once=False)
    writer.send(make_frame(3, 1))  # after which the engine is idle
    for number in (2, 3):
        writer.send(make_frame(3, number), at_once=False)
    assert numbers(reader_of_held_back, 4) == [0, 1, 2, None]


def test_a_reader_of_whom_tokens_are_followed_gets_them_sooner(writer, monkeypatch):
    monkeypatch.setattr(writer_module, "_FLUSH_SHARE", 1e-12)
    monkeypatch.setattr(writer_module, "_MOST_HELD_BACK_NS", 600_000_000_000)
    monkeypatch.setattr(writer_module, "_MOST_FOLLOWED_NS", 0)
    follows = []
    with closing(StreamReader(writer.endpoint, held=lambda: Held(follows=bool(follows)))) as reader:
        until(lambda: reader.receive(0) or writer._reader, writer)
        for number in range(2):
            writer.send(make_frame(3, number), at_once=False)
        assert numbers(reader, 2) == [0, None]
        follows.append("a server")
        until(lambda: (reader.receive(10), writer.trainer.follows)[1], writer)
        for number in range(2, 5):
            writer.send(make_frame(3, number), at_once=number == 2)
        assert numbers(reader, 4) == [2, 3, 4, None]


def test_tokens_that_nobody_follows_wait_although_sending_them_costs_little(writer, reader_of_held_back, monkeypatch):
    """The reader would have to wake for them; the end of a request is told, with what came before it."""
    monkeypatch.setattr(writer_module, "_FLUSH_SHARE", 1e12)
    monkeypatch.setattr(writer_module, "_PASSES_PER_MESSAGE", 1 << 30)
    for number in range(3):
        writer.send(make_frame(3, number), at_once=False)
    assert numbers(reader_of_held_back, 2) == [0, None]
    writer.send(make_frame(3, 3, finishes=[Finish(0, "stop", 3)]), at_once=False)
    writer.send(make_frame(3, 4), at_once=False)
    assert numbers(reader_of_held_back, 4) == [1, 2, 3, None]


@pytest.mark.parametrize("waits", ["follows", "awaits_ends"])
def test_the_end_of_a_request_that_somebody_waits_for_is_told_soon(writer, monkeypatch, waits):
    monkeypatch.setattr(writer_module, "_FLUSH_SHARE", 1e-12)
    for name in ("_MOST_HELD_BACK_NS", "_MOST_FOLLOWED_NS"):
        monkeypatch.setattr(writer_module, name, 600_000_000_000)
    monkeypatch.setattr(writer_module, "_MOST_ENDED_NS", 0)
    end, told = [Finish(0, "stop", 3)], []
    with closing(StreamReader(writer.endpoint, held=lambda: Held(**dict.fromkeys(told, True)))) as reader:
        until(lambda: reader.receive(0) or writer._reader, writer)
        for number in range(2):
            writer.send(make_frame(3, number, finishes=end), at_once=False)
        assert numbers(reader, 2) == [0, None]
        told.append(waits)
        until(lambda: (reader.receive(10), getattr(writer.trainer, waits))[1], writer)
        for number in range(2, 6):
            writer.send(make_frame(3, number, finishes=end if number == 4 else []), at_once=False)
        assert numbers(reader, 4) == [2, 3, 4, None]


def test_a_frame_waits_for_none_that_would_come_too_late(writer, monkeypatch):
    """Of an engine whose passes take more than half of the time for which a frame may wait."""
    monkeypatch.setattr(writer_module, "_FLUSH_SHARE", 1e-12)
    monkeypatch.setattr(writer_module, "_MOST_HELD_BACK_NS", 150_000_000)
    with closing(StreamReader(writer.endpoint)) as reader:
        until(lambda: reader.receive(0) or writer._reader, writer)
        for number in range(2):
            writer.send(make_frame(3, number), at_once=False)
            time.sleep(0.1)
        assert numbers(reader, 2) == [0, 1]


def test_a_new_reader_goes_on_where_the_one_before_was_killed(writer):
    """What that one acknowledged is gone with it, which a reader learns that wants all from the first frame on."""
    for number in range(100):
        writer.send(make_frame(sequence=number))
    first = StreamReader(writer.endpoint)
    for number in range(40):
        assert receive(first, writer) == number
    until(lambda: writer.kept.oldest > 0, writer)
    first.socket.close(linger=0)
    second = StreamReader(writer.endpoint)
    oldest = receive(second, writer)
    assert 0 < oldest <= 40  # acknowledgements can be on their way when a reader ends
    assert [receive(second, writer) for _ in range(oldest + 1, 100)] == list(range(oldest + 1, 100))
    second.socket.close(linger=0)
    third = StreamReader(writer.endpoint, begin=0)
    with pytest.raises(StreamGapError, match=r"frames 0 to \d+ of the engine are lost"):
        receive(third, writer)
    third.close()


@pytest.mark.parametrize("knows", [True, False], ids=["from the start", "from the first answer"])
def test_a_reader_notices_another_engine_at_its_address_and_takes_no_frame_from_it(tmp_path, monkeypatch, knows):
    monkeypatch.setattr(reader_module, "_SILENCE_NS", 20_000_000)
    endpoint = f"ipc://{tmp_path}/stream"
    first = StreamWriter(endpoint)
    first.engine_id = "first"
    reader = StreamReader(endpoint, begin=0, engine_id="first" if knows else "")
    for number in range(5):
        first.send(make_frame(sequence=number))
        assert receive(reader, first) == number
    first._socket.close(linger=0)
    with closing(StreamWriter(endpoint)) as second, closing(reader):
        second.engine_id = "second"
        for number in range(7):  # more than the first one has sent
            second.send(make_frame(sequence=number))
        with pytest.raises(EngineDiedError, match=r"another engine answers .* engine first, .* by engine second"):
            receive(reader, second)
        assert (second.kept.oldest, second.kept.next) == (0, 7)
        with closing(StreamReader(endpoint)) as own:
            assert [receive(own, second) for _ in range(7)] == list(range(7))


def test_a_frame_behind_a_gap_is_kept_for_the_next_reader(writer, monkeypatch):
    """If the one that was told of the gap leaves before it asks for the frame; so its journal has it once."""
    told, written = [], []
    journal = SimpleNamespace(append=written.append)
    data = make_frame(sequence=5).encode()
    for asks in (False, True):
        with closing(StreamReader(writer.endpoint, begin=0, journal=journal)) as reader:
            monkeypatch.setattr(reader, "_tell", told.append)
            reader._resent = True
            with pytest.raises(StreamGapError, match="frames 0 to 4"):
                reader._take(data)
            assert written == []
            if asks:
                assert reader.receive(0).header.sequence == 5
    assert [message.next for message in told if isinstance(message, Ack)] == [5, 6]
    assert written == [data]


def test_messages_that_are_no_frames_do_not_keep_a_reader_for_ever(writer, monkeypatch):
    with closing(StreamReader(writer.endpoint, begin=0)) as reader:
        monkeypatch.setattr(reader, "_take_message", lambda: reader._parts.append(encode(Beat("idle"))) or True)
        assert reader.receive(0) is None
    assert reader.state == "idle"


def test_little_is_on_its_way_to_a_reader_that_does_not_read(writer, monkeypatch):
    monkeypatch.setattr(writer_module, "_WINDOW_BYTES", 10_000)
    reader = StreamReader(writer.endpoint)
    until(lambda: writer._reader, writer)
    size = len(make_frame(50, 0).encode())
    for number in range(200):
        writer.send(make_frame(50, number))
    assert writer.num_unsent > 200 - 10_000 / size - 2
    assert [receive(reader, writer) for _ in range(200)] == list(range(200))
    reader.close()


def test_the_engine_says_what_it_does_while_there_is_no_frame(writer, monkeypatch):
    monkeypatch.setattr(writer_module, "_BEAT_NS", 10_000_000)
    reader, writer.state = StreamReader(writer.endpoint), "paused"
    until(lambda: reader.receive(1) or reader.state == "paused", writer)
    assert reader.silent_s < 5
    time.sleep(0.2)  # it says nothing
    while reader.socket.poll(0):
        reader.receive(0)
    time.sleep(0.1)
    assert reader.receive(0) is None
    assert reader.silent_s > 0.1
    reader.close()


@pytest.mark.parametrize("garbage", [[b""], [b"x", b"y"], [os.urandom(100)], [encode(Ack(5))], [b"\xc1"]])
def test_what_strangers_send_changes_nothing(writer, garbage):
    reader = StreamReader(writer.endpoint)
    for number in range(9):
        writer.send(make_frame(sequence=number))
    assert receive(reader, writer) == 0
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.connect(writer.endpoint)
        stranger.send_multipart(garbage)
        time.sleep(0.1)
        writer.flush()
        assert writer.kept.oldest == 0
        assert not stranger.poll(50)
    assert [receive(reader, writer) for _ in range(8)] == list(range(1, 9))
    reader.close()


def test_acknowledgements_of_frames_that_were_never_sent_are_no_harm(writer):
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(writer.endpoint)
        socket.send(encode(Subscribe("me", 0)))
        until(lambda: socket.poll(0), writer)
        assert to_reader(socket.recv()).next == 0
        socket.send(encode(Ack(2**60)))
        time.sleep(0.1)
        writer.send(make_frame(sequence=0))
        assert socket.poll(2000)
        assert writer.kept.oldest == 0
        socket.send(encode(Subscribe("me", 2**60)))  # nor are subscriptions of frames that there are not yet
        time.sleep(0.1)
        writer.send(make_frame(sequence=1))
        assert writer.kept.next == 2


@pytest.mark.parametrize("value", [-1, 2**63, "x", None])
def test_numbers_that_no_frame_has_are_refused(value):
    data = msgspec.msgpack.encode({"type": "Subscribed", "next": value})
    with pytest.raises(ProtocolError):
        to_reader(data)


@pytest.mark.medium
def test_two_threads_one_that_writes_and_one_that_reads(tmp_path):
    """The real thing: 20,000 frames between two threads, with a connection that breaks all the time."""
    count, arrived, stop = 20_000, [], threading.Event()
    endpoints = []

    def write() -> None:
        writer = StreamWriter(f"ipc://{tmp_path}/stream")
        endpoints.append(writer.endpoint)
        for number in range(count):
            writer.send(make_frame(3, number))
        while not stop.is_set():
            writer.wait(5)
            writer.flush()
        writer.close()

    thread = threading.Thread(target=write)
    thread.start()
    until(lambda: endpoints)
    reader, breaks = StreamReader(endpoints[0], begin=0), 0
    try:
        while len(arrived) < count:
            frame = reader.receive(5000)
            assert frame is not None
            arrived.append(frame.header.sequence)
            if len(arrived) % 4000 == 0:
                reconnect(reader, endpoints[0])
                reader._subscribe()
                breaks += 1
    finally:
        stop.set()
        thread.join()
        reader.close()
    assert arrived == list(range(count))
    assert breaks >= 4
