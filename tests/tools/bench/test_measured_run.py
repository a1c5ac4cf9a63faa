"""A measured run has only steps that train."""

from types import SimpleNamespace

import pytest

from inflight.core.errors import InflightError
from inflight.tools.bench.measured_run import MeasuredRun


@pytest.fixture
def run():
    status = SimpleNamespace(num_swaps=0, num_swaps_in_flight=0)
    return MeasuredRun(SimpleNamespace(status=lambda: status, stream=SimpleNamespace(num_tokens=0)))


def test_a_step_that_was_skipped_ends_the_measurement(run):
    run.step(SimpleNamespace(step=1, num_skipped=0, finished_ns=1, staleness=None))
    with pytest.raises(InflightError, match="step 2 was skipped"):
        run.step(SimpleNamespace(step=2, num_skipped=1, finished_ns=2, staleness=None))
