"""`inflight bench host` times only the work of the host."""

import pytest

from inflight.engine.loop.requests import Requests
from inflight.engine.model.attention.backend import Places
from inflight.engine.model.fused import FusedDecoder
from inflight.tools.bench import host
from inflight.tools.bench.options import HostOptions


@pytest.mark.medium
@pytest.mark.parametrize("backlog", [0, 4])
def test_passes_are_timed_without_a_device(monkeypatch, backlog):
    places, submit, clock = Places.of, Requests.submit, [0]

    def slow(*args, **options):
        clock[0] += 10_000_000
        return places(*args, **options)

    def now_ns():
        clock[0] += 1
        return clock[0]

    def submit_to_no_device(*args):
        monkeypatch.setattr(FusedDecoder, "hidden", None)
        return submit(*args)

    monkeypatch.setattr(Requests, "submit", submit_to_no_device)
    monkeypatch.setattr(Places, "of", slow)
    monkeypatch.setattr(host.time, "perf_counter_ns", now_ns)
    result = host.measure(HostOptions(sequences=(8,), steps=4, prompt_tokens=(3, 40), backlog=backlog))
    [point] = result["points"]
    assert (point["sequences"], point["num_steps"]) == (8, 4)
    assert result["host_ms"]["p99"] >= result["host_ms"]["p50"] > 10
