"""Distributions are percentiles of all values."""

import numpy as np
import pytest

from inflight.tools.bench.spread import percentiles, spread


def test_distributions_are_percentiles_of_all_values():
    steps = [np.arange(100.0 * i, 100.0 * (i + 1)) for i in range(10)]  # 0 … 999, in ten steps
    found = spread({"token_age_ms": steps, "stall_ms": [1.0, 2.0, 3.0, 4.0]})["distributions"]
    assert found["percentiles"] == [1, 5, 10, 25, 50, 75, 90, 95, 99]
    exact = np.percentile(np.arange(1000), [1, 5, 10, 25, 50, 75, 90, 95, 99])
    assert found["token_age_ms"] == pytest.approx(exact, rel=1e-3)
    assert found["stall_ms"][4] == 2.5


def test_a_measure_without_values_has_no_percentiles():
    assert spread({"swap_ms": []})["distributions"]["swap_ms"] == []
    assert percentiles([]) == {}
