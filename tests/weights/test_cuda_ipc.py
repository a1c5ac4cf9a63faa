"""Slots in device memory, seen from two processes. Run by `make gpu-check`."""

import subprocess
import sys

import msgspec
import pytest
import torch

from inflight.core.errors import DeviceMemoryError
from inflight.core.messages import CudaIpcDescriptor
from inflight.weights.cuda_ipc import CudaSlot

pytestmark = pytest.mark.gpu

WRITER = """
import sys, msgspec, torch
from inflight.core.messages import CudaIpcDescriptor
from inflight.weights.cuda_ipc import CudaSlot
buffer = CudaSlot.attach(msgspec.json.decode(sys.stdin.read(), type=CudaIpcDescriptor))
buffer.copy_(torch.arange(len(buffer), device=buffer.device) % 251)
torch.cuda.synchronize()
"""


def test_what_another_process_writes_is_seen_without_another_export():
    slot = CudaSlot.create(1 << 20, torch.device("cuda:0"))
    slot.buffer.zero_()
    torch.cuda.synchronize()
    sent = msgspec.json.encode(slot.descriptor())
    assert msgspec.json.decode(sent, type=CudaIpcDescriptor).nbytes == 1 << 20
    subprocess.run([sys.executable, "-c", WRITER], input=sent, check=True)
    expected = (torch.arange(1 << 20, device="cuda:0") % 251).to(torch.uint8)
    assert torch.equal(slot.buffer, expected)


def test_a_slot_that_does_not_fit_names_both_sizes():
    with pytest.raises(DeviceMemoryError, match=r"a weight slot needs [\d,.]+ MiB and cuda:0 has [\d,.]+ MiB left"):
        CudaSlot.create(1 << 50, torch.device("cuda:0"))


def test_expandable_segments_are_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(DeviceMemoryError, match="cannot be shared by CUDA IPC"):
        CudaSlot.create(1 << 20, torch.device("cuda:0"))


def test_a_part_of_a_slot_is_seen_as_that_part():
    whole = CudaSlot.create(1 << 20, torch.device("cuda:0"))
    whole.buffer.zero_()
    torch.cuda.synchronize()
    first, second = whole.split(2)
    sent = [msgspec.json.encode(slot.descriptor()) for slot in (first, second)]
    subprocess.run([sys.executable, "-c", WRITER], input=sent[1], check=True)
    expected = (torch.arange(1 << 19, device="cuda:0") % 251).to(torch.uint8)
    assert torch.equal(second.buffer, expected)
    assert not first.buffer.any()


def test_a_freed_slot_leaves_its_memory_to_others_until_it_is_restored():
    slot = CudaSlot.create(256 << 20, torch.device("cuda:0"))
    sent = msgspec.json.encode(slot.descriptor())
    subprocess.run([sys.executable, "-c", WRITER], input=sent, check=True)
    before, _ = torch.cuda.mem_get_info()
    view = slot.buffer[1:5]
    slot.free()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before + (192 << 20)  # others use the GPU, too
    slot.restore()
    assert not view.any()
    subprocess.run([sys.executable, "-c", WRITER], input=msgspec.json.encode(slot.descriptor()), check=True)
    assert view.tolist() == [1, 2, 3, 4]
