"""What a swap costs the generator, and for how long it did what, by a clock that is set by hand."""

from types import SimpleNamespace

import pytest

from inflight.core.layout import WeightLayout
from inflight.engine.loop.clocks import StallClock, StateClock
from inflight.weights.engine.slot_table import SlotTable

WEIGHTS, ADAPTERS = (SlotTable(WeightLayout.build([]), []) for _ in range(2))


@pytest.fixture
def time(monkeypatch) -> SimpleNamespace:
    time = SimpleNamespace(ns=1000)
    monkeypatch.setattr("inflight.engine.loop.clocks.now_ns", lambda: time.ns)
    return time


def test_a_swap_costs_its_own_time_and_that_of_the_messages_before_it(time):
    clock = StallClock()
    clock.handled(WEIGHTS, since_ns=993)
    time.ns = 2000
    clock.handled(WEIGHTS, since_ns=1950)
    time.ns = 3000
    assert clock.swapped(WEIGHTS, began_ns=2990) == 7 + 50 + 10
    assert clock.swapped(WEIGHTS, began_ns=2990) == 10, "messages count once"


def test_sequences_that_wait_for_the_only_slot_count_from_when_they_began_to_wait(time):
    clock = StallClock()
    clock.wait(400)
    clock.wait(500)
    assert clock.swapped(WEIGHTS, began_ns=990) == 600
    clock.wait(400)
    clock.wait(None)
    assert clock.swapped(WEIGHTS, began_ns=990) == 10, "they went on in between"


def test_messages_about_adapters_do_not_count_for_a_swap_of_weights(time):
    clock = StallClock()
    clock.handled(ADAPTERS, since_ns=900)
    assert clock.swapped(WEIGHTS, began_ns=990) == 10
    assert clock.swapped(ADAPTERS, began_ns=990) == 110


def test_time_is_added_up_by_state_and_that_of_the_present_one_counts(time):
    time.ns = 0
    clock = StateClock("idle")
    for at_s, state in ((1, "generating"), (4, "generating"), (5, "waits for weights"), (7, "generating")):
        time.ns = at_s * 10**9
        clock.enter(state)
    time.ns = 10 * 10**9
    assert clock.seconds() == {"idle": 1.0, "generating": 7.0, "waits for weights": 2.0}
    assert clock.seconds() == {"idle": 1.0, "generating": 7.0, "waits for weights": 2.0}
