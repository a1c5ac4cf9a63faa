"""Digests of weights: those of the tensors that are live, of one version, and beside the generator."""

import hashlib
import threading
import time

import pytest
import torch
from truth_teller import make_truth_teller, teach
from waiting import wait_until

import inflight
from inflight.core.errors import ProtocolError
from inflight.core.layout import WeightLayout
from inflight.core.messages import SlotReady
from inflight.weights.engine import digests
from inflight.weights.engine.digests import Digester
from inflight.weights.engine.slot_table import SlotTable
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.tensors import fill, published_tensors, slot_views

DTYPES = ("float32", "bfloat16", "float16", "int64", "uint8", "bool")


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


@pytest.fixture
def table():
    layout = WeightLayout.build(
        [(f"{dtype}.{shape}", shape, dtype) for dtype in DTYPES for shape in ((3, 5), (7,), ())]
    )
    slots = [SharedMemorySlot.create(layout.total_bytes) for _ in range(2)]
    for slot in slots:
        slot.buffer.random_(0, 2, generator=torch.Generator().manual_seed(0))
    yield SlotTable(layout, slots)
    for slot in slots:
        slot.unlink()


def answered(digester: Digester, least: int):
    return wait_until(lambda: digester.ask(least))[0]


def test_they_are_those_of_the_tensors_and_any_bit_shows(table):
    views = slot_views(table.slots[0].buffer, table.layout)
    before = answered(Digester(table), 0)
    assert before.tensors == {name: sha256(view) for name, view in views.items()}
    for spec in table.layout.tensors:
        at = spec.offset + spec.nbytes - 1
        table.slots[0].buffer[at] ^= 1
        after = answered(Digester(table), 0)
        assert [name for name in views if after.tensors[name] != before.tensors[name]] == [spec.name]
        table.slots[0].buffer[at] ^= 1


def test_a_version_keeps_its_slot_until_it_was_read(table, monkeypatch):
    go_on, read = threading.Event(), digests.sha256
    monkeypatch.setattr(digests, "sha256", lambda part: go_on.wait(20) and read(part))
    digester = Digester(table)
    assert digester.ask(0) == []
    [slot] = table.lend()
    table.ready(SlotReady(slot, 1, table.layout.fingerprint, 0))
    table.take()
    assert table.lend() == []  # the one that is read is kept
    assert digester.ask(0) == []
    go_on.set()
    assert answered(digester, 0).version == 0
    wait_until(lambda: digester.settle() or table.versions == [1])  # its thread ends after the answer
    assert table.lend() == [0]
    assert digester.ask(2) == []
    assert answered(digester, 1).version == 1
    assert digester.ask(2) == []  # which is not live yet, so that nothing is computed


def test_what_fails_is_told_and_tried_again(table, monkeypatch):
    def fail(part):
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(digests, "sha256", fail)
        digester = Digester(table)
        with pytest.raises(ProtocolError, match="of version 0 could not be computed: MemoryError: no more"):
            answered(digester, 0)
    assert answered(digester, 0).version == 0
    digester.settle()
    assert not table.readable.pins


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 2])
def test_what_an_engine_or_a_pool_tells_is_of_the_version_that_it_names(count, tmp_path):
    """While versions are published as fast as they go live."""
    model, expected = make_truth_teller(), {}
    model.save_pretrained(tmp_path)
    stop = threading.Event()
    options = inflight.EngineOptions(str(tmp_path), device="cpu", threads=1, max_sequences=4)
    with inflight.launch([options] * count) if count > 1 else inflight.Engine(options) as engine:
        layout = engine.info.layout

        def note(version: int) -> None:
            buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
            views = slot_views(buffer, layout)
            fill(views, published_tensors(model))
            expected[version] = {name: sha256(view) for name, view in views.items()}

        def publish() -> None:
            with engine.publisher(model) as publisher:
                while not stop.is_set():
                    version = publisher.version + 1
                    teach(model, version, before=version - 1)
                    note(version)
                    assert publisher.publish() == version
                    engine.wait_for_version(version)

        note(0)
        assert engine.digests().tensors == expected[0]
        thread = threading.Thread(target=publish)
        thread.start()
        found, deadline = {}, time.monotonic() + 120
        try:
            while len(found) < 5:
                assert time.monotonic() < deadline
                each = engine.digests()
                found[each.version] = each.tensors
        finally:
            stop.set()
            thread.join(30)
        assert found == {version: expected[version] for version in found}
