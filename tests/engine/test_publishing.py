"""The engine's side of a publisher that cannot have its slots: it is told so, and the engine serves on."""

import threading

import pytest
import torch
from tiny_models import make_model

from inflight.core.errors import ProtocolError
from inflight.core.messages import Status
from inflight.engine.process.client import EngineClient
from inflight.engine.process.control_socket import ControlSocket
from inflight.engine.process.process import EngineProcess
from inflight.stream.writer import StreamWriter
from inflight.weights import cuda_ipc
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.trainer.publisher import Publisher
from inflight.weights.transports import AcceptedTransports


def refuse(*_: object) -> None:
    raise RuntimeError("CUDA error: operation not supported\nmore")


def test_slots_that_cannot_be_exported_refuse_the_publisher_and_end_nothing(make_engine, tmp_path, monkeypatch):
    endpoint = f"ipc://{tmp_path}/control"
    control, stream = ControlSocket(endpoint), StreamWriter(f"ipc://{tmp_path}/stream")
    process = EngineProcess(make_engine(), control, stream, tmp_path, AcceptedTransports())
    serving = threading.Thread(target=process.run)
    serving.start()
    client = EngineClient(endpoint, answer_timeout_s=20)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(cuda_ipc, "reduce_tensor", refuse)
            patch.setattr(
                SharedMemorySlot,
                "descriptor",
                lambda _: cuda_ipc.CudaSlot(torch.zeros(8, dtype=torch.uint8)).descriptor(),
            )
            with pytest.raises(ProtocolError, match=r"CUDA IPC \(CUDA error: operation not supported\).*Broadcast"):
                Publisher(endpoint, make_model("qwen3"), timeout_s=10)
        assert client.call("status", returns=Status).version == 0
        with Publisher(endpoint, make_model("qwen3", seed=1), timeout_s=10) as publisher:  # the seat was given up
            assert publisher.publish() == 1
    finally:
        process.shutdown()
        serving.join()
        client.close()
        stream.close()
        control.close()
