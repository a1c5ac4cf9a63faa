"""How a capture that fails is ended, with CUDA's own calls replaced by notes of them."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from inflight.engine.model import graphs
from inflight.engine.model.graphs import Recorder


@pytest.fixture
def calls(monkeypatch):
    """What was called, in order; `torch.cuda.graph` is as it is where CUDA refuses to end a capture."""
    calls: list[str] = []

    @contextmanager
    def capture(*_, **__):
        calls.append("begin")
        yield
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def ended(what):
        return lambda index, pool: calls.append(f"{what} {index} {pool}")

    graphs._stream.cache_clear()
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fakes = {
        "graph_pool_handle": lambda: (0, 7),
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "set_stream": lambda _: calls.append("back to the stream before"),
        "stream": lambda _: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "graph": capture,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: calls.append(f"waiting: {mode}"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended("end"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", ended("release"), raising=False)
    yield calls
    graphs._stream.cache_clear()


def test_a_capture_that_fails_leaves_the_allocator_as_it_was(calls):
    record = Recorder(torch.device("cuda", 1))
    with pytest.raises(RuntimeError, match="previous error during capture"):
        record(lambda: torch.zeros(1))
    assert calls == [
        *("waiting: error", "waiting: 0"),
        *("begin", "end 1 (0, 7)", "release 1 (0, 7)", "back to the stream before"),
    ]


def test_an_allocator_that_was_told_is_not_told_twice_and_the_failure_is_the_first_one(calls, monkeypatch):
    def refuse(*_):
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        Recorder(torch.device("cuda", 1))(lambda: torch.zeros(1), proven=True)
    assert calls == ["begin", "back to the stream before"]


def test_a_pass_that_waits_is_told_before_a_capture_begins(calls):
    def waits():
        if calls:
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="synchronizing"):
        Recorder(torch.device("cuda", 1))(waits)
    assert calls == ["waiting: error", "waiting: 0"]


def test_recording_again_takes_no_stream_and_computes_a_proven_pass_twice(calls, monkeypatch):
    """Once to load its kernels, and once while it is recorded."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: calls.append("stream") or SimpleNamespace(wait_stream=id))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    for proven in (False, True):
        Recorder(torch.device("cuda", 1))(lambda: calls.append("compute"), proven=proven)
    assert calls == [
        *("stream", "compute", "waiting: error", "compute", "waiting: 0", "compute", "back to the stream before"),
        *("compute", "compute", "back to the stream before"),
    ]
