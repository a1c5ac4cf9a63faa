"""Ages are what their definitions say."""

import dataclasses

import msgspec
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


def test_ages_by_the_clock_of_each_adapter():
    meter = make_meter()  # versions 0, 1 and 3 changed everything
    for version, time_ms, adapter in ((4, 300, "a"), (5, 400, "b"), (6, 500, "b")):
        meter.published(version, time_ms * MS, [adapter])
    versions, adapters = np.array([4, 6, 5, 3, 6, 3]), np.array(["a", "a", "b", "b", None, None], object)
    lags = [
        int(6 - v - meter.foreign_versions(name, np.array([v]))[0]) for v, name in zip(versions, adapters, strict=True)
    ]
    assert lags == [0, 0, 1, 2, 0, 0]
    times = np.full(6, 600) * MS
    staleness = meter.consume(
        versions, times, consumed_ns=700 * MS, trainer_version=6, version_lag=np.array(lags), adapters=adapters
    )
    assert staleness.policy_age_ms.tolist() == [300, 300, 200, 350, 350, 350]
    assert staleness.weight_lag_ms.tolist() == [0, 0, 100, 200, 0, 0]
    assert staleness.version_lag.tolist() == lags
    meter.stepped(2, ["a"])
    assert meter.trainer_version == 7
    assert [int(meter.foreign_versions(name, np.array([6]))[0]) for name in ("a", "b", None)] == [0, 1, 1]
    again = StalenessMeter()
    again.restore(*meter.history(7))
    assert again.published_version == 7
    again.published(7, 800 * MS, ["b"])  # a number that is published again
    assert again.history(7)[1] == {4: ["a"], 5: ["b"], 6: ["b"], 7: ["b"]}
    again.published(5, 900 * MS)
    assert again.history(5)[1] == {4: ["a"]}


def test_a_swap_ends_with_the_first_token_of_its_version():
    meter = make_meter()
    meter.frame(make_frame(0, swap=Swap(3, 250 * MS, 2 * MS, 5)))
    assert (meter.num_swaps, meter.num_swaps_in_flight, meter.last_swap_ms) == (1, 1, None)
    meter.frame(make_frame(2, time_ns=262 * MS))
    meter.frame(make_frame(2, time_ns=299 * MS))
    assert meter.last_swap_ms == 12
    assert meter.summary()["swap_ms"]["p50"] == pytest.approx(12, rel=0.011)
    assert meter.summary()["stall_ms"]["p99"] == pytest.approx(2, rel=0.011)


def test_swaps_of_several_engines_are_apart_and_passes_of_older_versions_end_none():
    meter = make_meter()
    for engine_id, version in (("a", 3), ("b", 1)):
        meter.frame(made_by(engine_id, make_frame(0, swap=Swap(version, 250 * MS, 2 * MS, 5))))
    meter.frame(made_by("a", make_frame(2, time_ns=255 * MS), version=2))
    assert meter.last_swap_ms is None
    meter.frame(made_by("a", make_frame(2, time_ns=262 * MS), version=3))
    assert meter.last_swap_ms == 12
    meter.frame(made_by("b", make_frame(2, time_ns=280 * MS), version=1))
    assert meter.last_swap_ms == 30


def made_by(engine_id, frame, **changes):
    return dataclasses.replace(frame, header=msgspec.structs.replace(frame.header, engine_id=engine_id, **changes))


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
