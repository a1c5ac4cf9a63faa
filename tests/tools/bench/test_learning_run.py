"""A publisher with a delay, and the busy share of a GPU. Tests of schedules check the versions of tokens."""

import pytest
import torch

from inflight.observability.trace_file import write
from inflight.tools.bench.learning_run import TRACED_STEPS, BusyMeter, LaggedPublisher


def test_a_lag_is_not_negative():
    with pytest.raises(ValueError, match="lag must be at least 0 versions, got -1"):
        LaggedPublisher(None, None, lag=-1)


class TracedEngine:
    """Records its traces. The trace has overlapping kernels of engine and trainer."""

    def __init__(self):
        self.events = []

    def trace(self, path):
        self.path = path
        self.events.append("begin")
        return self

    def close(self):
        def kernel(pid, ts, dur):
            return {"ph": "X", "cat": "kernel", "name": "gemm", "pid": pid, "tid": 7, "ts": ts, "dur": dur}

        names = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{name}, GPU 0"}}
            for pid, name in ((1, "inflight engine"), (2, "trainer"))
        ]
        work = [kernel(1, 0.0, 4e5), kernel(2, 3e5, 2e5)]
        write(self.path, {"otherData": {"seconds": 1.0}, "traceEvents": [*names, *work]})
        self.events.append("end")


@pytest.mark.parametrize("steps", [10, 2])
def test_the_busy_share_is_the_time_in_which_a_kernel_of_either_process_was_under_way(tmp_path, steps):
    engine = TracedEngine()
    meter = BusyMeter(engine, torch.device("cuda"), tmp_path, steps=steps)
    for step in range(1, steps + 1):
        meter.after(step)
        engine.events.append(step)
    assert meter.share() == pytest.approx(0.5)
    first = max(1, int(0.8 * steps))
    assert engine.events.index("begin") == first - 1
    assert engine.events.count("end") == 1
    assert engine.events.index("end") > engine.events.index(min(first + TRACED_STEPS, steps) - 1)


def test_on_a_cpu_nothing_is_traced(tmp_path):
    engine = TracedEngine()
    meter = BusyMeter(engine, torch.device("cpu"), tmp_path, steps=1)
    meter.after(1)
    assert meter.share() is None
    assert engine.events == []
