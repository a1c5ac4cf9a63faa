"""Ages are what their definitions say."""

import numpy as np
import pytest
from made_frames import make_frame

from inflight.core.frames import Swap
from inflight.observability.staleness_meter import Histogram, StalenessMeter

MS = 1_000_000


def make_meter() -> StalenessMeter:
    meter = StalenessMeter()
    meter._published.clear()
    for version, time_ms in ((0, 0), (1, 100), (3, 250)):  # version 2 was overtaken by 3 before it was published
        meter.published(version, time_ms * MS)
    return meter


def test_ages_of_tokens():
    meter = make_meter()
    staleness = meter.consume(
        np.array([0, 0, 1, 3]),
        np.array([50, 130, 240, 300]) * MS,
        consumed_ns=400 * MS,
        trainer_version=3,
    )
    assert staleness.weight_lag_ms.tolist() == [0, 30, 0, 0]
    assert staleness.policy_age_ms.tolist() == [50, 130, 140, 50]
    assert staleness.token_age_ms.tolist() == [350, 270, 160, 100]
    assert staleness.version_lag.tolist() == [3, 3, 2, 0]
    assert meter.summary()["version_lag"] == {"p50": 2, "max": 3}
    assert meter.published_version == 3


def test_a_swap_ends_with_the_first_token_of_its_version():
    meter = make_meter()
    meter.frame(make_frame(0, swap=Swap(3, 250 * MS, 2 * MS, 5)))
    assert (meter.num_swaps, meter.num_swaps_in_flight, meter.last_swap_ms) == (1, 1, None)
    meter.frame(make_frame(2, time_ns=262 * MS))
    meter.frame(make_frame(2, time_ns=299 * MS))
    assert meter.last_swap_ms == 12
    assert meter.summary()["swap_ms"]["p50"] == pytest.approx(12, rel=0.011)
    assert meter.summary()["stall_ms"]["p99"] == pytest.approx(2, rel=0.011)


def test_a_histogram_gives_percentiles_to_a_percent():
    rng = np.random.default_rng(0)
    values = np.concatenate([np.exp(rng.normal(2, 3, 50_000)), np.zeros(30_000)])
    histogram = Histogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    for name, point in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert histogram.percentiles()[name] == pytest.approx(np.percentile(values, point), rel=0.012)
    zeros = Histogram()
    assert zeros.percentiles() == {}
    zeros.add([0.0, 0.0])
    assert zeros.percentiles()["p99"] == 0


def test_versions_that_were_announced_and_never_drawn_are_forgotten_when_numbers_go_back():
    meter = make_meter()
    meter.published(2, 600 * MS)
    staleness = meter.consume(np.array([1, 2]), np.array([650, 650]) * MS, consumed_ns=700 * MS, trainer_version=2)
    assert staleness.policy_age_ms.tolist() == [550, 50]
    assert staleness.weight_lag_ms.tolist() == [50, 0]
