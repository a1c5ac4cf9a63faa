"""Statistics of ratios are their formulas, for each class of tokens."""

from math import inf, isnan

import pytest
import torch

from inflight.training.objective.statistics import RatioStats, ratio_sums


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
            rho.sum(),
            (rho * rho).sum(),
            rho.min(),
            rho.max(),
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
