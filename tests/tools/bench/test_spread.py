"""Distributions and parts are those of the values, in the order of time."""

import numpy as np
import pytest

from inflight.tools.bench.spread import percentiles, rates, spread


def test_distributions_are_those_of_all_values_and_parts_those_of_one_after_the_other():
    steps = [np.arange(100.0 * i, 100.0 * (i + 1)) for i in range(10)]  # 0 … 999, in ten steps
    found = spread({"token_age_ms": steps, "swap_ms": [3.0, 1.0, 2.0, 5.0, 4.0]})
    assert found["distributions"]["percentiles"] == [1, 5, 10, 25, 50, 75, 90, 95, 99]
    exact = np.percentile(np.arange(1000), [1, 5, 10, 25, 50, 75, 90, 95, 99])
    assert found["distributions"]["token_age_ms"] == pytest.approx(exact, rel=1e-3)
    assert found["parts"]["token_age_ms.p50"] == pytest.approx([99.5, 299.5, 499.5, 699.5, 899.5])
    assert found["parts"]["swap_ms.p99"] == [3.0, 1.0, 2.0, 5.0, 4.0]


def test_what_was_not_measured_has_no_percentiles_and_few_values_no_parts():
    found = spread({"swap_ms": [], "stall_ms": [1.0, 2.0, 3.0, 4.0]})
    assert found["distributions"]["swap_ms"] == found["parts"]["swap_ms.p50"] == found["parts"]["stall_ms.p50"] == []
    assert found["distributions"]["stall_ms"][4] == 2.5
    assert percentiles([]) == {}


def test_rates_are_what_was_counted_over_the_time_that_it_took():
    times, counts = [0.0, 1, 2, 3, 4, 5, 10], [0.0, 10, 20, 30, 40, 90, 190]
    assert rates(times, counts) == [10.0, 10.0, 10.0, 50.0, 20.0]  # the first part has two steps
    assert rates(times[:5], counts[:5]) == []
