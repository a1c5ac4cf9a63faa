"""Versions from the staging buffer are copied to an engine's slots and announced."""

import errno
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import inflight
from inflight.core.errors import SharedMemoryError
from inflight.weights import shared_memory
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.transports.base import StagedVersion
from inflight.weights.transports.slots import SlotSender


def test_every_slot_gets_the_whole_version():
    data = torch.randint(256, (20_005,), dtype=torch.uint8)
    sender, told = inflight.Slots().sender(), []
    assert isinstance(sender, SlotSender)
    sender._buffers = [torch.zeros_like(data) for _ in range(2)]

    class Engine:
        def announce(self, slot, published, checksum):
            told.append((slot, published.version, checksum))

    engine = Engine()
    for slot in (0, 1):
        sender.deliver({engine: slot}, StagedVersion(1 + slot, 0, data), None)
    assert all(torch.equal(buffer, data) for buffer in sender._buffers)
    assert told == [(0, 1, None), (1, 2, None)]
    assert sender.sent_bytes == 2 * len(data)


def test_a_pinned_slot_is_unpinned_before_it_is_unmapped(monkeypatch):
    """CUDA holds the pages by their address."""
    calls = []

    def mapped(address: int) -> bool:
        ranges = [line.split(" ")[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)

    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append((address, nbytes, flags)) or 0,
        cudaHostUnregister=lambda address: calls.append((address, mapped(address))),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    slot = SharedMemorySlot.create(1 << 20)
    pinned = SharedMemorySlot.attach(slot.descriptor(), pinned=True)
    address = pinned.data_ptr()
    assert calls == [(address, 1 << 20, 1)]
    view = pinned[:4]
    del pinned
    assert len(calls) == 1  # the view keeps it
    del view
    assert calls[1:] == [(address, True)]
    SharedMemorySlot.attach(slot.descriptor())
    assert len(calls) == 2


def test_a_slot_that_cuda_cannot_pin_is_used_as_it_is(monkeypatch, caplog):
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 2)  # and no cudaHostUnregister
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    slot = SharedMemorySlot.create(4096)
    slot.buffer[7] = 5
    assert SharedMemorySlot.attach(slot.descriptor(), pinned=True)[7] == 5
    assert "CUDA cannot pin 4096 bytes of weights (error 2)" in caplog.text


def refuse(*_):
    raise OSError(errno.ENOSYS, "")


def test_a_slot_is_freed_after_its_name_was_removed():
    slot = SharedMemorySlot.create(1 << 20)
    slot.path.unlink()
    slot.buffer.fill_(7)
    slot.free()
    slot.restore()
    assert not slot.buffer.any()


def test_a_freed_slot_has_no_pages_until_it_is_restored(monkeypatch):
    slot = SharedMemorySlot.create(1 << 20)
    slot.buffer.fill_(7)

    def allocated() -> int:
        return slot.path.stat().st_blocks * 512

    slot.restore()
    assert (allocated(), int(slot.buffer[-1])) == (1 << 20, 7)
    slot.free()
    assert allocated() == 0
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "bytes_left", lambda directory: 1 << 19)
        with pytest.raises(SharedMemoryError, match=r"needs 1.0 MiB and .* 0.5 MiB left"):
            slot.restore()
    slot.restore()
    assert allocated() == 1 << 20
    with monkeypatch.context() as patch:  # as where the file system cannot free pages
        patch.setattr(mmap, "mmap", refuse)
        slot.free()
    assert allocated() == 1 << 20
    attached = SharedMemorySlot.attach(slot.descriptor())
    attached.fill_(3)
    assert (slot.buffer == 3).all()
