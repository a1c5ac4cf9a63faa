"""Seconds of a run are counted once."""

from types import SimpleNamespace

import pytest

from inflight.core.errors import InflightError
from inflight.tools.bench.measured_run import MeasuredRun


@pytest.fixture
def run():
    status = SimpleNamespace(num_swaps=0, num_swaps_in_flight=0, seconds_by_state={})
    return MeasuredRun(SimpleNamespace(status=lambda: status, stream=SimpleNamespace(num_tokens=0)))


def test_a_step_that_was_skipped_ends_the_measurement(run):
    run.step(SimpleNamespace(step=1, num_skipped=0, finished_ns=1, staleness=None))
    with pytest.raises(InflightError, match="step 2 was skipped"):
        run.step(SimpleNamespace(step=2, num_skipped=1, finished_ns=2, staleness=None))


def test_the_wait_for_the_copy_is_no_part_of_training_though_it_lies_in_the_step(run):
    run._spans.update({"forward": 1.0, "backward": 2.0, "optimizer step": 3.0})
    run._spans.update({"wait for the publish copy": 2.5, "wait for rollouts": 4.0})
    told = run._trainer_s(12.0)
    assert told == {"trains": 3.5, "waits for rollouts": 4.0, "waits for the copy": 2.5, "other": 2.0}
    assert sum(told.values()) == pytest.approx(12.0)
