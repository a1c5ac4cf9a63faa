"""Versions from the staging buffer are copied to an engine's slots and announced."""

import torch

import inflight
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
