"""Functions of one's own are parts of an objective without a change to the library, and say what their bounds are."""

import functools
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import pytest
import torch
from loss_batches import make_case
from made_batches import make_batch
from tiny_models import make_model

from inflight.training.grpo import GRPOConfig, train_step
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.bounds import bounded, open_form, unbounded
from inflight.training.objective.corrections import token_truncate, uncorrected
from inflight.training.objective.loss import loss_of_scores, policy_loss
from inflight.training.objective.objective import PRESETS, Objective, resolve
from inflight.training.objective.statistics import LossStats
from inflight.training.objective.surrogates import ppo_clip, reinforce
from inflight.training.objective.tokens import DrawnTokens, exp_ratio


def near_mask(tokens: DrawnTokens, *, low: float = 0.5, high: float = 2.0) -> torch.Tensor:
    """A custom trust region: leaves out the tokens whose ratio ρ = π_θ / π_b has left [low, high]."""
    ratios = tokens.log_behavior_ratios.exp()
    return (ratios >= low) & (ratios <= high)


def test_a_trust_region_of_ones_own_takes_part_in_loss_gradient_and_statistics():
    model, batch = make_model("qwen3"), make_batch()
    with torch.no_grad():
        exact = token_logprobs(model, batch)
    drawn = batch.loss_mask
    batch.behavior_logprobs[drawn] = exact + torch.linspace(-1.5, 1.5, len(exact))
    objective = replace(PRESETS["none"], trust_regions=(partial(near_mask, high=3.0),))
    loss, stats = policy_loss(model, batch, objective=objective)
    loss.backward()

    by_hand = make_model("qwen3")
    logprobs, advantages = token_logprobs(by_hand, batch), batch.advantages[drawn]
    ratios = (exact - batch.behavior_logprobs[drawn]).exp()
    kept = (ratios >= 0.5) & (ratios <= 3.0)
    expected = -(advantages * logprobs)[kept].sum() / len(exact)
    expected.backward()
    assert 0 < kept.sum() < len(kept)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert stats.num_clipped == (~kept & (advantages != 0)).sum()
    assert stats.num_tokens == len(exact)


def test_grpo_trains_with_a_trust_region_of_ones_own():
    batch = make_batch()
    objective = Objective(trust_regions=(near_mask,))
    models = [make_model("qwen3") for _ in range(2)]
    for model, chosen in zip(models, (objective, "ppo_clip"), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = train_step(model, optimizer, batch, GRPOConfig(objective=chosen))
        assert update.stats.clipped > 0
    assert any(not torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


# Bounds that a function declares


@bounded(cap=inf)
def own_truncate(tokens, *, cap=2.0):
    return exp_ratio(tokens.log_weights).clamp(max=cap)


def undeclared(tokens, *, cap=2.0):
    return exp_ratio(tokens.log_weights).clamp(max=cap)


@dataclass(frozen=True)
class Truncate:
    """An object with settings, whose open form is the same object with others."""

    cap: float = 2.0

    def __call__(self, tokens):
        return exp_ratio(tokens.log_weights).clamp(max=self.cap)

    def open_form(self, tokens):
        return replace(self, cap=inf)(tokens)


class Trainer:
    scale = 1.0

    @bounded(cap=inf)
    def truncate(self, tokens, *, cap=2.0):
        return self.scale * exp_ratio(tokens.log_weights).clamp(max=cap)


def statistics(**parts) -> LossStats:
    case, weights = make_case(4), {"surrogate": reinforce, "proximal": "current"}
    return loss_of_scores(Objective(**(weights | parts)), case.batch, case.scores())[1]


SAME_AS_TOKEN_TRUNCATE = {
    "function": own_truncate,
    "partial": partial(own_truncate, cap=2.0),
    "partial of a partial": partial(partial(own_truncate, cap=7.0), cap=2.0),
    "partial that declares its own": partial(bounded(cap=inf)(partial(undeclared, cap=9.0)), cap=2.0),
    "lambda": bounded(cap=inf)(lambda tokens, cap=2.0: token_truncate(tokens, cap=cap)),
    "object": Truncate(),
    "method": Trainer().truncate,
    "partial of a method": partial(Trainer().truncate, cap=2.0),
}


@pytest.mark.parametrize("name", SAME_AS_TOKEN_TRUNCATE)
def test_a_function_of_ones_own_reports_what_the_built_in_one_of_its_formula_reports(name):
    built_in = statistics(correction=partial(token_truncate, cap=2.0))
    assert 0 < built_in.num_clipped < built_in.num_tokens
    assert statistics(correction=SAME_AS_TOKEN_TRUNCATE[name]) == built_in


def test_every_bound_of_a_function_is_open_in_its_open_form():
    tokens = make_case(4).tokens()
    bounds = {"low": 0.1, "high": 0.1, "dual": 1.2}
    ratios = exp_ratio(tokens.log_ratios)
    assert torch.equal(open_form(partial(ppo_clip, **bounds))(tokens), -ratios * tokens.advantages)
    for kept in bounds:  # each of them clips tokens that the others do not
        only = {"low": inf, "high": inf, "dual": None} | {kept: bounds[kept]}
        part = statistics(correction=uncorrected, surrogate=partial(ppo_clip, **only), proximal="behavior")
        whole = statistics(correction=uncorrected, surrogate=partial(ppo_clip, **bounds), proximal="behavior")
        assert 0 < part.num_clipped < whole.num_clipped


def test_options_that_are_no_bounds_stay_in_the_open_form():
    @bounded(cap=inf)
    def power(tokens, *, exponent=1.0, cap=2.0):
        return exp_ratio(exponent * tokens.log_weights).clamp(max=cap)

    tokens = make_case(4).tokens()
    expected = exp_ratio(0.5 * tokens.log_weights)
    assert torch.equal(open_form(partial(power, exponent=0.5, cap=1.1))(tokens), expected)


def test_infinite_defaults_and_functions_without_bounds_clip_nothing():
    @bounded(cap=inf)
    def open_by_default(tokens, *, cap=inf):
        return exp_ratio(tokens.log_weights).clamp(max=cap)

    @unbounded
    def squared(tokens):
        return tokens.advantages.square() * -tokens.logprobs

    assert statistics(correction=open_by_default, surrogate=squared).num_clipped == 0
    assert statistics(correction=partial(open_by_default, cap=2.0), surrogate=squared).num_clipped > 0


@functools.wraps(token_truncate)
def doubled(tokens, **bounds):
    return 2 * token_truncate(tokens, **bounds)


UNKNOWN = {
    "function": {"correction": undeclared},
    "partial": {"correction": partial(undeclared, cap=2.0)},
    "lambda": {"correction": lambda tokens: token_truncate(tokens, cap=2.0)},
    "wrapper, which copied the declaration of another function": {"correction": doubled},
    "surrogate": {"surrogate": lambda tokens: reinforce(tokens).clamp(max=1.0)},
    "known correction, unknown surrogate": {"correction": own_truncate, "surrogate": lambda t: reinforce(t)},
    "with a trust region, which is known": {"correction": undeclared, "trust_regions": (near_mask,)},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_declared_is_not_known_and_never_zero(name):
    stats, known = statistics(**UNKNOWN[name]), statistics()
    assert stats.num_clipped is None
    assert stats.clipped is None
    assert "clipped" not in stats.as_dict()
    assert (stats + known).clipped is None
    assert (known + stats).clipped is None
    assert stats.ratios == known.ratios


def test_bounds_that_a_function_refuses_are_refused_when_the_objective_is_made():
    @bounded(cap=inf)
    def positive(tokens, *, cap=2.0):
        if cap <= 0:
            raise ValueError(f"cap must be positive, got {cap}")
        return exp_ratio(tokens.log_weights).clamp(max=cap)

    with pytest.raises(ValueError, match="cap must be positive, got -1"):
        Objective(correction=partial(positive, cap=-1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'kap'"):
        Objective(correction=bounded(kap=inf)(lambda tokens, cap=2.0: token_truncate(tokens, cap=cap)))


# Names

ICEPOP = "own_schedule:ICEPOP"


def test_an_objective_is_given_itself_or_by_name():
    batch, model = make_batch(), make_model("qwen3")
    losses = [
        policy_loss(model, batch, **given)[0].item()
        for given in ({"objective": "icepop"}, {"objective": resolve("icepop")}, {"objective": ICEPOP}, {})
    ]
    assert losses[0] == losses[1] == losses[2] != losses[3]
    assert GRPOConfig(objective=ICEPOP) == GRPOConfig(objective="icepop") == replace(GRPOConfig(), objective="icepop")
    assert GRPOConfig() == GRPOConfig(objective="ppo_clip") == GRPOConfig(objective=Objective())


def test_other_names_and_things_are_refused():
    for make in (GRPOConfig, partial(policy_loss, make_model("qwen3"), make_batch())):
        with pytest.raises(TypeError, match="has no argument 'correction'; did you mean 'objective'"):
            make(correction="tis")
        with pytest.raises(ValueError, match=r"unknown objective 'tiss'; choose none, tis, .*, or give a custom one"):
            make(objective="tiss")
        with pytest.raises(ValueError, match="objective 'own_schedule:TWO_AHEAD' must be an Objective, got Schedule"):
            make(objective="own_schedule:TWO_AHEAD")
    with pytest.raises(ValueError, match="advantages 'own_schedule:TWO_AHEAD' must be a function of the groups"):
        GRPOConfig(advantages="own_schedule:TWO_AHEAD")
    with pytest.raises(ValueError, match="unknown advantages 'none'; choose grpo, "):
        GRPOConfig(advantages="none")
