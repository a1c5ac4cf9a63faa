"""Slots change hands by message only; no version becomes visible by halves. Random histories against a model."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.core.errors import ProtocolError
from inflight.core.layout import WeightLayout
from inflight.core.messages import SlotReady
from inflight.weights.cuda_ipc import CudaSlot
from inflight.weights.engine.slot_table import SlotState, SlotTable

LAYOUT = WeightLayout.build([("w", (4,), "float32")])


def make_receiver(num_slots: int) -> SlotTable:
    return SlotTable(LAYOUT, [CudaSlot(torch.empty(LAYOUT.total_bytes, dtype=torch.uint8)) for _ in range(num_slots)])


def ready(slot: int, version: int, fingerprint: str = LAYOUT.fingerprint) -> SlotReady:
    return SlotReady(slot=slot, version=version, fingerprint=fingerprint, published_ns=0)


class SlotHistory(RuleBasedStateMachine):
    """The publisher writes garbage into what it was lent, then a whole version, then gives it back; or it dies."""

    @initialize(num_slots=st.integers(1, 4))
    def start(self, num_slots: int) -> None:
        self.slot_table = make_receiver(num_slots)
        self.contents: list[int | None] = [0] + [None] * (num_slots - 1)  # None: half-written
        self.lent: set[int] = set(self.slot_table.attach())
        self.attached, self.published = True, 0

    @rule()
    def publisher_dies_or_detached_and_another_attaches(self) -> None:
        self.slot_table.restore()
        self.lent, self.attached = set(self.slot_table.attach()), True

    @precondition(lambda self: self.attached)
    @rule()
    def publisher_detaches(self) -> None:
        self.slot_table.withdraw(sorted(self.lent))
        self.attached = False

    @rule(in_use=st.none() | st.integers(0, 3))
    def sleep(self, in_use: int | None) -> None:
        had_memory = self.with_memory()
        self.slot_table.free_unused(in_use=in_use)
        for slot in had_memory - self.with_memory():
            assert not self.attached, "the publisher writes to it"
            assert slot != in_use
            self.contents[slot] = None

    @rule()
    def wake(self) -> None:
        self.slot_table.restore()
        assert self.with_memory() == set(range(len(self.contents)))

    def with_memory(self) -> set[int]:
        return {i for i, slot in enumerate(self.slot_table.slots) if slot.buffer.untyped_storage().nbytes()}

    @precondition(lambda self: self.lent and self.attached)
    @rule(data=st.data())
    def write_half(self, data: st.DataObject) -> None:
        self.contents[data.draw(st.sampled_from(sorted(self.lent)))] = None

    @precondition(lambda self: self.lent and self.attached)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lent)))
        self.published += 1
        self.contents[slot] = self.published
        self.slot_table.written()
        self.slot_table.ready(ready(slot, self.published))
        self.lent.remove(slot)

    @precondition(lambda self: self.attached)
    @rule()
    def ask_for_a_slot(self) -> None:
        self.slot_table.request()

    @rule()
    def forward_boundary(self) -> None:
        before = self.slot_table.newest_version
        taken = self.slot_table.take()
        assert self.slot_table.version == before
        assert (taken.version if taken else self.slot_table.version) == self.slot_table.version
        freed = self.slot_table.lend() if self.attached else []
        assert not self.lent & set(freed)
        self.lent |= set(freed)

    @rule(slot=st.integers(-1, 4), version=st.integers(0, 3))
    def bad_message(self, slot: int, version: int) -> None:
        """A slot that was not lent, or a version that is not newer, changes nothing."""
        if slot in self.lent and version > self.slot_table.newest_version:
            return
        states = list(self.slot_table.states)
        with pytest.raises(ProtocolError):
            self.slot_table.ready(ready(slot, version))
        assert self.slot_table.states == states

    @invariant()
    def the_live_slot_holds_a_whole_version_and_belongs_to_the_engine(self) -> None:
        slot_table = self.slot_table
        if slot_table.live is not None:
            assert self.contents[slot_table.live] == slot_table.version
            assert slot_table.live not in self.lent
        assert slot_table.states.count(SlotState.LIVE) == (slot_table.live is not None)
        assert slot_table.states.count(SlotState.READY) <= 1
        whole = {i for i, state in enumerate(slot_table.states) if state in (SlotState.LIVE, SlotState.READY)}
        assert whole | (self.lent if self.attached else set()) <= self.with_memory()
        assert {slot for slot, state in enumerate(slot_table.states) if state is SlotState.LENT} == self.lent


TestSlotHistory = SlotHistory.TestCase
TestSlotHistory.settings = settings(max_examples=200, stateful_step_count=40)


def test_another_layout_is_refused():
    slot_table = make_receiver(2)
    [slot] = slot_table.attach()
    with pytest.raises(ProtocolError, match="filled in layout"):
        slot_table.ready(ready(slot, 1, fingerprint="0" * 64))
    slot_table.ready(ready(slot, 1))


def test_with_one_slot_the_engine_hands_it_over_only_when_asked():
    slot_table = make_receiver(1)
    assert slot_table.attach() == []
    slot_table.take()
    assert slot_table.live == 0
    slot_table.request()
    slot_table.take()
    assert slot_table.live is None
    assert slot_table.lend() == [0]
    slot_table.ready(ready(0, 1))
    slot_table.take()
    assert (slot_table.live, slot_table.version) == (0, 1)


def test_the_latest_version_wins():
    slot_table = make_receiver(3)
    first, second = slot_table.attach()
    slot_table.ready(ready(first, 1))
    slot_table.ready(ready(second, 2))
    taken = slot_table.take()
    assert taken is not None
    assert (taken.slot, taken.version) == (second, 2)
    assert sorted(slot_table.lend()) == [0, first]


def test_the_only_slot_is_live_again_when_it_comes_back_unwritten():
    slot_table = make_receiver(1)
    for written in (False, True):
        slot_table.request()
        slot_table.take()
        assert slot_table.lend() == [0]
        if written:
            slot_table.written()
        assert slot_table.take_back(0) != written
        assert slot_table.versions == ([] if written else [0])
        if not written:
            with pytest.raises(ProtocolError, match="slot 0 is not lent"):
                slot_table.take_back(0)
    slot_table.ready(ready(0, 1))  # the publisher has it again
    slot_table.take()
    assert slot_table.versions == [1]


@pytest.mark.parametrize("lends", [True, False])
def test_the_only_slot_is_live_again_where_its_publisher_left_it_as_it_was(lends):
    """lends: the publisher may have been told that the slot is its own; else a pass still reads it."""
    slot_table = make_receiver(1)
    slot_table.request()
    slot_table.take()
    assert slot_table.lend(in_use=None if lends else 0) == ([0] if lends else [])
    slot_table.withdraw()
    assert (slot_table.live, slot_table.states, slot_table.versions) == (0, [SlotState.LIVE], [0])
    slot_table.request()  # and all goes on
    slot_table.take()
    assert (slot_table.live, slot_table.lend()) == (None, [0])


@pytest.mark.parametrize("how", ["in silence", "as it said", "by one before it"])
def test_the_only_slot_waits_for_the_next_publisher_where_somebody_wrote_to_it(how):
    slot_table = make_receiver(1)
    slot_table.request()
    slot_table.take()
    assert slot_table.lend() == [0]
    if how == "as it said":  # and what it announced was refused
        slot_table.written()
    elif how == "by one before it":
        assert slot_table.attach() == [0]
    slot_table.withdraw([0] if how == "in silence" else [])
    assert slot_table.live is None
    slot_table.ready(ready(0, 1))
    slot_table.take()
    assert (slot_table.live, slot_table.versions) == (0, [1])


def test_a_wish_for_the_only_slot_goes_with_its_publisher():
    slot_table = make_receiver(1)
    slot_table.request()
    slot_table.withdraw()
    slot_table.take()
    assert slot_table.live == 0
