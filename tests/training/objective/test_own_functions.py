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
from train_steps import train_step

from inflight.training.grpo import GRPOConfig
from inflight.training.model.forward import token_logprobs
from inflight.training.objective import loss as loss_module
from inflight.training.objective.bounds import bounded, declares, needs_entropies, open_form, ranks_tokens, unbounded
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


# Inputs beyond log-probabilities


@bounded(cap=inf)
def truncate_by_lag(tokens: DrawnTokens, *, cap: float = 3.0) -> torch.Tensor:
    return exp_ratio(tokens.log_weights).clamp(max=1 + (cap - 1) / (1 + tokens.lags))


def aged_batch():
    """Tokens of several versions and ages, whose recorded log-probabilities differ from the model's."""
    model, batch = make_model("qwen3"), make_batch()
    with torch.no_grad():
        exact = token_logprobs(model, batch)
    drawn, n = batch.loss_mask, len(exact)
    batch.behavior_logprobs[drawn] = exact - torch.linspace(-1.5, 1.5, n)
    batch.weight_versions[drawn] = torch.arange(n) % 5 + 3
    batch.trainer_version = 6
    batch.sampled_at_ns[drawn] = 10**18 + torch.arange(n) * 1_000_000
    batch.taken_ns = 10**18 + n * 1_000_000
    batch.columns = {"surprise": torch.zeros(len(batch.input_ids))}
    batch.columns["surprise"][drawn] = torch.arange(n, dtype=torch.float32)
    return model, batch, n


def test_a_part_sees_the_lag_of_each_token():
    model, batch, n = aged_batch()
    objective = Objective(correction=truncate_by_lag, surrogate=reinforce, proximal="current")
    loss, stats = policy_loss(model, batch, objective=objective)
    lags = torch.tensor([max(0, 6 - (i % 5 + 3)) for i in range(n)])
    weights = torch.minimum(torch.linspace(-1.5, 1.5, n).double().exp(), 1 + 2 / (1 + lags.double()))
    with torch.no_grad():
        expected = -(weights * batch.advantages[batch.loss_mask] * token_logprobs(model, batch)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    clipped = (torch.linspace(-1.5, 1.5, n).double().exp() > 1 + 2 / (1 + lags.double())) & (
        batch.advantages[batch.loss_mask] != 0
    )
    assert stats.num_clipped == clipped.sum() > 0
    parts = batch.micro_batches(int(batch.cu_seqlens.diff().max()) + 1)
    assert len(parts) > 1
    in_parts = sum(policy_loss(model, part, objective=objective)[0].item() for part in parts)
    assert in_parts == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("left_out", [False, True])
def test_a_part_sees_age_group_and_columns_of_each_token(left_out):
    model, batch, n = aged_batch()
    if left_out:
        batch.included = batch.loss_mask.clone()
        batch.included[batch.drawn[::3]] = False
    seen = {}

    def note(tokens):
        if tokens.batch is not None:
            names = ("surprise", "weight_versions", "input_ids")
            seen.update({name: tokens.column(name) for name in names}, ages=tokens.ages_ms, groups=tokens.groups)
        return torch.ones_like(tokens.logprobs, dtype=torch.bool)

    policy_loss(model, batch, objective=Objective(trust_regions=(note,)))
    kept = torch.tensor([i for i in range(n) if not (left_out and i % 3 == 0)])
    rows = batch.drawn[kept]
    assert seen["surprise"].tolist() == kept.tolist()
    assert seen["ages"].tolist() == (n - kept).tolist()
    assert seen["weight_versions"].tolist() == (kept % 5 + 3).tolist()
    assert torch.equal(seen["input_ids"], batch.input_ids[rows])
    assert torch.equal(seen["groups"], batch.groups[batch.sequence_ids[rows]])


@pytest.mark.parametrize(
    ("part", "shapes"),
    [
        ({"surrogate": lambda tokens: (tokens.log_ratios.exp() * tokens.advantages).mean()}, r"\[\], .* \[\d+\]"),
        ({"surrogate": lambda tokens: tokens.logprobs[:, None]}, r"\[(\d+), 1\], .* \[\1, \1\]"),
        ({"trust_regions": (lambda tokens: tokens.advantages[:, None] > 0,)}, r"\[(\d+)\], .* \[\1, \1\]"),
    ],
    ids=["a mean", "a column", "a mask"],
)
def test_a_part_that_returns_another_shape_than_one_value_per_token_is_refused(part, shapes):
    model, batch, _ = aged_batch()
    with pytest.raises(ValueError, match=f"one value per token, .*: the surrogate has returned {shapes}"):
        policy_loss(model, batch, objective=Objective(**part))


def test_what_a_batch_lacks_is_named():
    model, batch, _ = aged_batch()
    for column in ("nothing", "reference_logprobs", "cu_seqlens", "rollouts"):
        objective = Objective(trust_regions=(lambda tokens, column=column: tokens.column(column) == 0,))
        with pytest.raises(ValueError, match=f"no column '{column}' .* recorded columns: surprise"):
            policy_loss(model, batch, objective=objective)
    aged = Objective(trust_regions=(lambda tokens: tokens.ages_ms < 5,))
    with pytest.raises(ValueError, match="taken_ns"):
        policy_loss(model, replace(batch, taken_ns=0), objective=aged)
    late = Objective(trust_regions=(lambda tokens: tokens.lags < 5,))
    with pytest.raises(ValueError, match="trainer_version"):
        policy_loss(model, replace(batch, trainer_version=None), objective=late)


@needs_entropies
def certain(tokens: DrawnTokens, *, most: float) -> torch.Tensor:
    assert not tokens.entropies.requires_grad
    return tokens.entropies < most


def test_entropies_are_computed_if_a_part_declares_that_it_needs_them(monkeypatch):
    model, batch, n = aged_batch()
    with torch.no_grad():
        entropies = loss_module.score_tokens(model, batch, entropy=True).entropies
    median = float(entropies.median())
    kept = entropies < median
    assert 0 < kept.sum() < n
    asked, score_tokens = [], loss_module.score_tokens

    def noted(*args, entropy):
        asked.append(entropy)
        return score_tokens(*args, entropy=entropy)

    monkeypatch.setattr(loss_module, "score_tokens", noted)
    objective = replace(PRESETS["none"], trust_regions=(partial(certain, most=median),))
    loss, stats = policy_loss(model, batch, objective=objective)
    with torch.no_grad():
        expected = -(batch.advantages[batch.loss_mask] * token_logprobs(model, batch))[kept].sum() / n
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert stats.entropy == pytest.approx(float(entropies.mean()), rel=1e-4)
    policy_loss(model, batch, objective=PRESETS["none"])
    assert asked == [True, False]
    with pytest.raises(ValueError, match="entropy=True"):
        loss_of_scores(objective, batch, score_tokens(model, batch))


class Slotted:
    __slots__ = ("needs_entropies", "ranks_tokens")

    def __call__(self, tokens):
        return tokens.log_weights


@pytest.mark.parametrize("declaration", [needs_entropies, ranks_tokens])
def test_objects_and_classes_can_be_declared_and_bound_methods_cannot(declaration):
    assert declares(declaration(Slotted()), declaration)
    assert declares(declaration(type("Derived", (Slotted,), {})), declaration)
    with pytest.raises(AttributeError):
        declaration(Truncate().open_form)
    assert not declares(Truncate.open_form, declaration)


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
