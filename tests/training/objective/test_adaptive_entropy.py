"""The weight of the entropy bonus follows the entropy as in the paper, and continues with a saved run."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bigram_run import VOCABULARY, Bigram, Run, score_tokens
from made_batches import make_batch
from train_steps import train_step

import inflight
from inflight.training.grpo import GRPOConfig, GRPOProgress
from inflight.training.objective.objective import Objective

TARGET, DELTA = 2.003, 0.02


@pytest.fixture(autouse=True)
def bigram(monkeypatch):
    monkeypatch.setattr("inflight.training.objective.loss.score_tokens", score_tokens)


def weight_of(**options):
    return inflight.AdaptiveEntropy(**{"target": TARGET, "delta": DELTA, "max_weight": 0.1} | options)


def run_with(weight, **options):
    return Run(model=Bigram(), objective=Objective(entropy_weight=weight), **{"steps": 6} | options)


def paper(entropies, target, delta, most):
    """Return the weight after each step. c rises by Δ if e < target and falls otherwise; the weight is c · 1{e ≤
    target}. The authors' code has the bounds."""
    coefficient, weights = np.float64(0.0), []
    for entropy in entropies:
        coefficient = coefficient + delta if entropy < target else coefficient - delta
        coefficient = np.clip(coefficient, 0.0, most)
        weights.append(float(coefficient * (entropy <= target)))
    return weights


def test_the_weight_is_that_of_the_paper():
    entropies = np.random.default_rng(0).uniform(0.1, 0.3, 400)
    entropies[::9] = 0.2  # exactly the target
    entropies[100:160] = 0.1  # to the upper bound
    for target, most in ((0.2, 0.005), (0.15, 0.002), (0.25, 1.0)):
        weight = inflight.AdaptiveEntropy(target=target, delta=1e-4, max_weight=most)
        expected, found = paper(entropies, target, 1e-4, most), []
        for entropy in entropies:
            weight.observe(float(entropy))
            found.append(float(weight))
        np.testing.assert_array_equal(found, expected)
        assert {0.0, most} < set(found) or most == 1


def test_each_step_trains_with_the_weight_that_the_steps_before_decide():
    run = run_with(weight_of())
    weights = [0.0, *paper([report.stats.entropy for report in run.reports[:-1]], TARGET, DELTA, 0.1)]
    assert [report.entropy_weight for report in run.reports] == weights
    assert [report.as_dict()["entropy_weight"] for report in run.reports] == weights
    assert set(weights) == {0.0, DELTA, 2 * DELTA}
    fixed = run_with(Given(weights))
    torch.testing.assert_close(run.gradients, fixed.gradients, rtol=0, atol=0)
    other = run_with(Given([*weights[:3], 0.0]))
    assert torch.equal(run.gradients[2], other.gradients[2])
    assert not torch.equal(run.gradients[3], other.gradients[3])


class Given(inflight.AdaptiveEntropy):
    """Weights that are known before."""

    def __init__(self, weights):
        super().__init__(target=1.0, max_weight=1.0)
        self.weights = iter(weights)
        self.observe(0.0)

    def observe(self, entropy):
        self.coefficient = next(self.weights, 0.0)


def test_a_fixed_weight_is_not_reported():
    assert "entropy_weight" not in run_with(0.01, steps=1).reports[0].as_dict()


def test_it_continues_where_a_run_was_saved():
    whole, run = run_with(weight_of()), SimpleNamespace(progress={})
    run_with(weight_of(), run=run, steps=4)
    run.progress = json.loads(json.dumps(run.progress))
    run.progress["grpo"]["in_flight"] = []
    [report] = run_with(weight_of(), run=run, steps=5).reports
    assert report.entropy_weight == whole.reports[4].entropy_weight == 2 * DELTA
    run.progress["grpo"] |= {"step": 0, "in_flight": [], "entropy_weight": None}  # saved with a fixed weight
    assert run_with(weight_of(coefficient=0.01), run=run, steps=1).reports[0].entropy_weight == 0.01


def test_a_state_of_numpys_numbers_is_saved_as_plain_ones():
    weight = inflight.AdaptiveEntropy(target=np.float64(0.2), delta=np.float64(0.001))
    weight.observe(np.float64(0.1))
    assert json.dumps(GRPOProgress(entropy_weight=weight.state_dict()).as_dict()["entropy_weight"]) == (
        '{"coefficient": 0.001, "is_active": true}'
    )


def test_a_step_without_a_token_in_the_loss_or_with_a_loss_that_is_not_finite_is_not_observed():
    """The mean of no token would be 0, below any target."""
    model, weight, batch = Bigram(), weight_of(coefficient=0.05), make_batch()
    batch.input_ids %= VOCABULARY
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config, before = GRPOConfig(objective=Objective(entropy_weight=weight)), weight.state_dict()
    nothing = replace(batch, included=torch.zeros_like(batch.loss_mask))
    assert train_step(model, optimizer, nothing, config).stats.num_tokens == 0
    assert weight.state_dict() == before
    train_step(model, optimizer, batch, config)
    assert (before := weight.state_dict())["coefficient"] != 0.05
    with torch.no_grad():
        model.table.fill_(math.nan)
    assert train_step(model, optimizer, batch, config).num_skipped == 1
    assert weight.state_dict() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "target must be finite and above 0"),
        ({"delta": -1e-4}, "delta must be finite and above 0"),
        ({"max_weight": math.inf}, "max_weight must be finite and above 0"),
        ({"coefficient": 0.2}, "coefficient must be between 0 and max_weight=0.1"),
    ],
)
def test_meaningless_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        weight_of(**options)
