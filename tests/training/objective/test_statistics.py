"""Statistics of ratios are their formulas, for each class of tokens."""

from itertools import pairwise
from math import exp, inf, isnan

import pytest
import torch

from inflight.training.objective.statistics import LARGEST_LOG, RatioStats, ratio_sums


def test_sums_of_each_class_are_their_formulas():
    """Log-ratios so far apart that float32 would overflow are among them."""
    logs = torch.tensor([-100.0, -20.0, -0.25, 0.0, 2.0**-20, 0.5, 1.5, 100.0] * 3)
    classes = torch.arange(len(logs)) % 3
    sums = ratio_sums(logs, classes)
    assert sums.dtype == torch.float64
    for row, of_class in enumerate(sums):
        log = logs[classes == row].double()
        rho = log.exp()
        expected = [
            len(log),
            rho.sum() / rho.max(),
            (rho * rho).sum() / rho.max() ** 2,
            log.min(),
            log.max(),
            (rho - 1 - log).sum(),
            log.abs().sum(),
        ]
        torch.testing.assert_close(of_class, torch.tensor(expected, dtype=torch.float64), atol=0, rtol=1e-12)


def test_a_class_without_tokens_adds_nothing():
    sums = ratio_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert sums.tolist() == [[0, 0, 0, inf, -inf, 0, 0]] * 3
    none, some = RatioStats.from_sums(sums[0].tolist()), RatioStats.of(torch.tensor([0.5, -0.5]))
    assert none == RatioStats()
    assert isnan(none.mean)
    assert none.as_dict("ratio") == {}
    assert none + some == some


def test_statistics_of_parts_add_up():
    logs = torch.linspace(-2, 2, 11)
    whole, parts = RatioStats.of(logs), RatioStats.of(logs[:4]) + RatioStats.of(logs[4:])
    for name in ("num_tokens", "mean", "ess", "min", "max", "kl", "logprob_diff"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)


FAR = [
    ([-400.0, -500.0, -600.0, -700.0], 1 / 4),
    ([310.0, 400.0, 500.0, 600.0], 1 / 4),
    ([-301.0, -5000.0], 1 / 2),
    ([0.0, 0.0, -2000.0, -2000.0], 2 / 4),
    ([3000.0, 3000.0, 3000.0, -3000.0], 3 / 4),
    ([-400.0, -401.0], (1 + exp(-1)) ** 2 / (2 * (1 + exp(-2)))),
]


@pytest.mark.parametrize(("logs", "ess"), FAR)
def test_the_effective_sample_size_is_right_where_no_float_holds_the_ratios(logs, ess):
    """In one batch, and in micro-batches in any order."""
    of = torch.tensor(logs, dtype=torch.float64)
    assert RatioStats.of(of).ess == pytest.approx(ess, rel=1e-12)
    parts = [RatioStats.of(of[begin:end]) for begin, end in pairwise([0, 1, 1, len(logs)])]
    for order in (parts, parts[::-1]):
        assert sum(order, RatioStats()).ess == pytest.approx(ess, rel=1e-12)


def test_other_statistics_of_far_ratios_are_not_cut_and_stay_finite():
    far = RatioStats.of(torch.tensor([-5000.0, 400.0, 5000.0]))
    assert far.logprob_diff == pytest.approx(10400 / 3)
    assert far.min == 0
    assert far.max == exp(LARGEST_LOG)
    assert all(number < inf for number in far.as_dict("ratio").values())
    assert far.mean == pytest.approx(exp(LARGEST_LOG) / 3)
    assert RatioStats.of(torch.tensor([-400.0])).max == pytest.approx(exp(-400))


def test_equal_ratios_have_an_effective_sample_size_of_exactly_one():
    for log in (0.0, -350.0, 1000.0):
        parts = [RatioStats.of(torch.full((size,), log)) for size in (1, 7, 100)]
        assert sum(parts, RatioStats()).ess == 1
