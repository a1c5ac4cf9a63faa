"""A publisher that is late on purpose. What its tokens are of is tested with the schedules of training."""

import pytest

from inflight.bench.learning_run import LaggedPublisher


def test_a_lag_is_not_negative():
    with pytest.raises(ValueError, match="lag must be at least 0 versions, got -1"):
        LaggedPublisher(None, None, lag=-1)
