"""The engine's side of a publisher that cannot have its slots: it is told so, and the engine serves on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_adapters import with_adapters
from tiny_models import make_model
from waiting import PATIENCE_S, wait_until

from inflight.core.errors import LayoutMismatchError, ProtocolError, WeightFileError
from inflight.core.messages import Status
from inflight.engine.process.client import EngineClient
from inflight.engine.process.control_socket import ControlSocket
from inflight.engine.process.process import EngineProcess
from inflight.stream.writer import StreamWriter
from inflight.weights import cuda_ipc
from inflight.weights.comparison import checksum
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.trainer.publisher import Publisher
from inflight.weights.transports import AcceptedTransports
from inflight.weights.transports.files import Files
from inflight.weights.transports.slots import Slots


def refuse(*_: object) -> None:
    raise RuntimeError("CUDA error: operation not supported\nmore")


@contextmanager
def serving(engine, directory: Path) -> Iterator[EngineClient]:
    """Run an engine's process in a thread of this one."""
    endpoint = f"ipc://{directory}/control"
    control, stream = ControlSocket(endpoint), StreamWriter(f"ipc://{directory}/stream")
    process = EngineProcess(engine, control, stream, directory, AcceptedTransports())
    thread = threading.Thread(target=process.run)
    thread.start()
    client = EngineClient(endpoint, answer_timeout_s=20)
    try:
        yield client
    finally:
        process.shutdown()
        thread.join()
        client.close()
        stream.close()
        control.close()


def test_slots_that_cannot_be_exported_refuse_the_publisher_and_end_nothing(make_engine, tmp_path, monkeypatch):
    with serving(make_engine(), tmp_path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(cuda_ipc, "reduce_tensor", refuse)
            patch.setattr(
                SharedMemorySlot,
                "descriptor",
                lambda _: cuda_ipc.CudaSlot(torch.zeros(8, dtype=torch.uint8)).descriptor(),
            )
            with pytest.raises(ProtocolError, match=r"CUDA IPC \(CUDA error: operation not supported\).*Broadcast"):
                Publisher(client.endpoint, make_model("qwen3"), timeout_s=10)
        assert client.call("status", returns=Status).version == 0
        with Publisher(client.endpoint, make_model("qwen3", seed=1), timeout_s=10) as publisher:  # the lease is free
            assert publisher.publish() == 1


@pytest.mark.parametrize("slots", [1, 2])
def test_a_version_whose_publisher_closes_before_its_checksum_is_compared_goes_live(
    make_engine, tmp_path, monkeypatch, slots
):
    may_compare = threading.Event()

    def checksum_later(data: torch.Tensor) -> int:
        assert may_compare.wait(PATIENCE_S)
        return checksum(data)

    monkeypatch.setattr("inflight.weights.engine.slot_filler.checksum", checksum_later)
    engine = make_engine(slots=slots)
    with serving(engine, tmp_path) as client:
        try:
            with Publisher(client.endpoint, make_model("qwen3", seed=1), transport=Slots(checksum=True)) as publisher:
                publisher.publish()
            wait_until(lambda: not engine.slot_table.is_attached)
        finally:
            may_compare.set()
        wait_until(lambda: client.call("status", returns=Status).versions == [1])


def versions(client: EngineClient) -> list[int]:
    return client.call("status", returns=Status).versions


def test_an_engine_with_one_slot_goes_on_after_a_version_that_was_not_sent(make_engine, tmp_path, monkeypatch):
    transport = Files(directory=tmp_path / "weights")
    with (
        serving(make_engine(slots=1), tmp_path) as client,
        Publisher(client.endpoint, make_model("qwen3", seed=1), transport=transport) as publisher,
    ):
        with monkeypatch.context() as patch:
            patch.setattr("inflight.weights.transports.files.bytes_left", lambda directory: 0)
            publisher.publish()
            with pytest.raises(WeightFileError, match="version 1 could not be written"):
                wait_until(publisher.check)
        wait_until(lambda: versions(client) == [0], "it has no weights", seconds=20)
        publisher.publish()
        wait_until(lambda: versions(client) == [2])


def test_an_engine_that_does_not_fit_leaves_the_publisher_to_the_others(make_engine, tmp_path):
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()
    with (
        serving(make_engine("llama", lora_rank=4), directories[0]) as first,
        serving(make_engine("llama"), directories[1]) as second,
        Publisher(
            [first.endpoint], with_adapters("llama", "default"), transport=Files(directory=tmp_path)
        ) as publisher,
    ):
        with pytest.raises(LayoutMismatchError, match="all engines of a publisher hold the same tensors"):
            publisher.add(second.endpoint)
        publisher.publish()
        wait_until(lambda: publisher.check() or first.call("status", returns=Status).version == 1)
