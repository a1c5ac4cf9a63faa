"""For how long an engine did what."""

from inflight.engine import state_clock
from inflight.engine.state_clock import StateClock


def test_time_is_added_up_by_state_and_that_of_the_present_one_counts(monkeypatch):
    now = [0]
    monkeypatch.setattr(state_clock, "now_ns", lambda: now[0])
    clock = StateClock("idle")
    for at_s, state in ((1, "generating"), (4, "generating"), (5, "waits for weights"), (7, "generating")):
        now[0] = at_s * 10**9
        clock.enter(state)
    now[0] = 10 * 10**9
    assert clock.seconds() == {"idle": 1.0, "generating": 7.0, "waits for weights": 2.0}
    assert clock.seconds() == {"idle": 1.0, "generating": 7.0, "waits for weights": 2.0}
