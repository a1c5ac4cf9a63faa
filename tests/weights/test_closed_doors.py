"""What a transport opens to others, and what it waits for: an address of the user's choice, and regular files."""

import os
import socket
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_models import make_model

import inflight
from inflight.core.errors import BroadcastError, WeightFileError
from inflight.core.messages import Fill
from inflight.weights.comparison import checksum
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views
from inflight.weights.trainer.engine_link import EngineLink
from inflight.weights.trainer.sources import ModelSource, classify
from inflight.weights.transports.broadcast import BroadcastGroup, Join, make_store
from inflight.weights.transports.files import FileOrigin, read_version, write_version


def listeners(pid: int | str) -> set[str]:
    """Local addresses with ports, in hexadecimal, on which a process listens for TCP."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(file))
        except FileNotFoundError:
            continue
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def addresses(sockets: set[str]) -> set[str]:
    """The addresses without ports."""
    return {one.split(":")[0] for one in sockets}


def test_the_store_listens_on_its_host_alone():
    before = listeners("self")
    store = make_store("127.0.0.1", 5)
    with socket.socket() as friend:
        friend.connect(("127.0.0.1", store.port))
    with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
        stranger.connect(("127.0.0.2", store.port))
    assert addresses(listeners("self") - before) <= {"0100007F"}


def test_a_host_that_is_not_of_this_machine_is_named():
    with pytest.raises(BroadcastError, match=r"cannot listen on '192\.0\.2\.1'.*an address of the trainer's machine"):
        make_store("192.0.2.1", 5)


def test_a_publisher_tells_of_a_host_that_is_not_of_this_machine(engine):
    def until_it_raises() -> None:
        while True:
            publisher.check()

    transport = inflight.Broadcast(host="192.0.2.1", allow_unencrypted=True)
    with engine.publisher(make_model("qwen3"), transport=transport) as publisher:
        publisher.publish()
        with pytest.raises(BroadcastError, match="cannot listen on"):
            until_it_raises()
    with engine.publisher(make_model("qwen3")) as publisher:  # the place is free again
        engine.wait_for_version(publisher.publish())


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "trainer.example", "localhost.example"])
def test_weights_leave_the_machine_unencrypted_only_where_that_is_said(host):
    with pytest.raises(ValueError, match=rf"host '{host}' is not this machine's loopback.*allow_unencrypted=True"):
        inflight.Broadcast(host=host)
    assert inflight.Broadcast(host=host, allow_unencrypted=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "::1", "localhost"])
def test_a_broadcast_within_the_machine_needs_no_leave(host):
    assert inflight.Broadcast(host=host).host == host


def test_the_ranks_of_a_broadcast_listen_where_they_reach_its_host_alone():
    """Another address of the loopback stands for that of a network."""
    before = listeners("self")  # stores of other tests
    store = make_store("127.0.0.3", 10)
    joins = [Join("name", "gloo", "127.0.0.3", store.port, rank, 2, 10.0) for rank in (0, 1)]
    groups: dict[int, BroadcastGroup] = {}

    def join(rank: int) -> None:
        groups[rank] = BroadcastGroup(joins[rank], torch.device("cpu"), store if rank == 0 else None)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    buffers = [torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)]
    other = threading.Thread(target=groups[1].broadcast, args=(buffers[1], 64))
    other.start()
    groups[0].broadcast(buffers[0], 64)
    other.join()
    assert torch.equal(*buffers)
    assert "00000000" not in addresses(listeners("self") - before)
    for group in groups.values():
        group.close()


@pytest.fixture(scope="module")
def engine(model_dir):
    with inflight.launch(model_dir("qwen3"), max_sequences=2, max_context=256, threads=1, device="cpu") as engine:
        yield engine


def test_an_engine_that_takes_a_broadcast_listens_on_no_other_address(engine):
    before = listeners("self")  # stores of other tests
    with engine.publisher(make_model("qwen3"), transport=inflight.Broadcast()) as publisher:
        engine.wait_for_version(publisher.publish())
        assert addresses(listeners(engine.pid)) <= {"0100007F"}
        assert addresses(listeners("self") - before) <= {"0100007F"}


def test_an_engine_that_is_told_to_read_a_pipe_generates_on(engine, tmp_path):
    pipe, device = tmp_path / "pipe", Path("/dev/zero")
    os.mkfifo(pipe)
    link = EngineLink(
        engine.address, ModelSource(classify(make_model("qwen3"))), transport=inflight.Files.name(), timeout_s=10
    )
    slot = link.acquire(10)
    for path in (pipe, device):
        origin = msgspec.Raw(msgspec.msgpack.encode(FileOrigin(str(path))))
        numbers = {"ticket": link.messages.ticket(), "slot": slot, "version": link.version + 1, "checksum": 0}
        answer = link.messages.send(Fill(**numbers, fingerprint=link.layout.fingerprint, origin=origin, base=None))
        with pytest.raises(WeightFileError, match="cannot be read: it is no regular file"):
            link.messages.wait_for(answer, 10)
        engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=20, ignore_eos=True))
    link.detach()


def layout_and_slot():
    model = make_model("qwen3")
    layout = layout_of(model)
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fill(slot_views(slot, layout), published_tensors(model))
    return layout, slot


def test_a_file_is_read_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("inflight.weights.transports.files._CHUNK_BYTES", 1000)  # tensors in many parts
    layout, slot = layout_and_slot()
    path = write_version(tmp_path, layout, 7, slot)
    read = torch.zeros_like(slot)
    read_version(str(path), layout, 7, read)
    assert torch.equal(read, slot)
    assert checksum(read) == checksum(slot)


def rewrite_header(path: Path, change) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + size])
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes((2**63).to_bytes(8, "little") + b"{}"),
        lambda path: rewrite_header(path, lambda header: b"[" * len(header)),
        lambda path: rewrite_header(path, lambda header: header.replace(b'"data_offsets":[0,', b'"data_offsets":[8,')),
        lambda path: rewrite_header(path, lambda header: header.replace(b'"shape":[64', b'"shape":[-4')),
        lambda path: rewrite_header(path, lambda header: header.replace(b'"shape":[64', b'"shape":[%d' % (2**63 - 1))),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
    ],
)
def test_headers_that_lie_are_refused_before_anything_is_written(tmp_path, damage):
    layout, slot = layout_and_slot()
    path = write_version(tmp_path, layout, 1, slot)
    damage(path)
    read = torch.zeros_like(slot)
    with pytest.raises(WeightFileError, match="cannot be read"):
        read_version(str(path), layout, 1, read)
    assert not read.any()
