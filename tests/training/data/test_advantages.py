"""Advantages are relative to the group, and need rewards."""

import math

import numpy as np
import pytest

from inflight.training.data.advantages import group_advantages


def test_the_standard_deviation_is_that_of_the_samples_or_its_estimate():
    rewards = [[1.0, 0.0, 0.0, 4.0], [2.0, 5.0], [7.0]]
    for ddof in (0, 1):
        expected = [(r - np.mean(g)) / (np.std(g, ddof=ddof) + 1e-4) for g in rewards[:2] for r in g]
        assert group_advantages(rewards, ddof=ddof) == pytest.approx([*expected, 0.0])
    assert group_advantages(rewards, scale=False) == pytest.approx([-0.25, -1.25, -1.25, 2.75, -1.5, 1.5, 0.0])


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_a_reward_that_is_none_or_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=f"sample 1 of group 2 has reward {bad}"):
        group_advantages([[1.0], [0.0, 1.0], [1.0, bad]])
