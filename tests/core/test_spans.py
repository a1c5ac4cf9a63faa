"""Spans are added up by name for the thread that asks, while somebody records, and cost nothing else."""

import threading

import pytest

from inflight.core import spans
from inflight.core.errors import InflightError
from inflight.core.spans import added_up, span, start_adding_up, start_noting, stop_adding_up, stop_noting


@pytest.fixture
def adding_up(monkeypatch):
    now = [0]
    monkeypatch.setattr(spans, "now_ns", lambda: now[0])
    start_adding_up()
    yield now
    stop_adding_up()


def take(now: list[int], name: str, seconds: int) -> None:
    with span(name):
        now[0] += seconds * 10**9


def test_sums_begin_anew_when_they_were_asked_for(adding_up):
    take(adding_up, "forward", 2)
    take(adding_up, "forward", 3)
    take(adding_up, "backward", 4)
    other = threading.Thread(target=take, args=(adding_up, "score", 7))
    other.start()
    other.join()
    assert added_up() == {"forward": 5.0, "backward": 4.0}
    take(adding_up, "forward", 1)
    assert added_up() == {"forward": 1.0}


def test_sums_that_nobody_asks_for_are_not_kept(adding_up):
    def in_thread(*names: str) -> None:
        thread = threading.Thread(target=lambda: [take(adding_up, name, 1) for name in names])
        thread.start()
        thread.join()

    in_thread("before")
    assert len(spans._totals) == 1
    added_up()
    in_thread("copy 1", "copy 2")
    assert not spans._totals


def test_a_trace_and_sums_at_once(adding_up):
    start_noting()
    take(adding_up, "forward", 2)
    noted, _ = stop_noting()
    assert [(one.name, one.ended_ns - one.began_ns) for one in noted] == [("forward", 2 * 10**9)]
    assert added_up() == {"forward": 2.0}


def test_nothing_is_noted_where_nobody_asked():
    assert span("forward") is span("backward")
    assert added_up() == {}


def test_one_recorder_at_a_time(adding_up):
    with pytest.raises(InflightError, match="is being recorded already"):
        start_adding_up()
