"""Corrections, surrogates, trust regions, aggregations and KL estimates are their formulas (plain_objectives.py)."""

from dataclasses import replace
from math import inf

import plain_objectives as plain
import pytest
import torch
from loss_batches import AGGREGATIONS, MAX_TOKENS, SEEDS, TRAINER_VERSION, Case, close, flat, make_case, sequences_of
from plain_objectives import Token

from inflight.training.objective import corrections, surrogates, trust_regions
from inflight.training.objective.aggregation import token_weights
from inflight.training.objective.kl import kl_estimate
from inflight.training.objective.objective import loglinear_proximal
from inflight.training.objective.tokens import DrawnTokens

CORRECTIONS = [
    ("uncorrected", {}),
    ("token_truncate", {}),
    ("token_truncate", {"cap": 1.3, "floor": 0.8}),
    ("token_truncate", {"cap": inf}),
    ("token_mask", {}),
    ("token_mask", {"low": 0.9, "high": 1.1}),
    ("token_mask", {"low": 0.0, "high": inf}),
    ("sequence_truncate", {}),
    ("sequence_truncate", {"cap": 1.5, "floor": 0.5}),
    ("sequence_truncate", {"cap": inf}),
    ("sequence_mask", {}),
    ("sequence_mask", {"low": 0.0, "high": 3.0}),
    ("sequence_mask", {"low": 0.0, "high": inf}),
    ("vespo", {}),
    ("vespo", {"positive": (1.0, 0.5), "negative": (0.0, 4.0)}),
]


@pytest.mark.parametrize(("name", "bounds"), CORRECTIONS)
def test_corrections_are_their_formulas(name, bounds):
    met = []
    for seed in SEEDS:
        case = make_case(seed)
        weights = getattr(corrections, name)(case.tokens(), **bounds)
        expected = [row for sequence in sequences_of(case) for row in getattr(plain, name)(sequence, **bounds)]
        assert not weights.requires_grad
        assert close(weights, [weight for weight, _ in expected])
        met += [bounded for _, bounded in expected]
    unbounded = name in ("uncorrected", "vespo") or inf in bounds.values()
    assert unbounded is not any(met)
    assert not all(met)


SURROGATES = [
    ("reinforce", {}),
    ("ppo_clip", {}),
    ("ppo_clip", {"low": 0.1, "high": 0.28}),
    ("ppo_clip", {"dual": 1.5}),
    ("ppo_clip", {"low": 1.0, "high": inf, "dual": 3.0}),
    ("cispo", {"cap": 1.2}),
    ("cispo", {"cap": 1.5, "floor": 0.7}),
    ("cispo", {"cap": inf}),
    ("gspo", {}),
    ("gspo", {"low": 0.1, "high": 0.2}),
    ("gmpo", {}),
    ("gmpo", {"low": 0.02, "high": 0.7}),
]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("name", "bounds"), SURROGATES)
def test_surrogates_and_their_gradients_are_their_formulas(name, bounds, per_token):
    met = []
    for seed in SEEDS:
        case = make_case(seed, per_token_advantages=per_token)
        tokens = case.tokens()
        losses = getattr(surrogates, name)(tokens, **bounds)
        coefficients = torch.rand(len(losses), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        [gradient] = torch.autograd.grad((coefficients * losses).sum(), tokens.logprobs)
        expected, expected_gradient, rest = [], [], coefficients.tolist()
        for sequence in sequences_of(case):
            rows = getattr(plain, name)(sequence, **bounds)
            own, rest = rest[: len(rows)], rest[len(rows) :]
            expected += [loss for loss, _, _ in rows]
            met += [bounded for _, _, bounded in rows]
            for j in range(len(rows)):
                expected_gradient.append(sum(c * row[1][j] for c, row in zip(own, rows, strict=True)))
        assert close(losses, expected)
        assert close(gradient, expected_gradient)
    assert (name == "reinforce" or (name == "cispo" and inf in bounds.values())) is not any(met)
    assert not all(met)


TRUST_REGIONS = [
    ("geometric_mask", {}),
    ("geometric_mask", {"low": 0.999, "high": 1.002}),
    ("geometric_mask", {"low": 0.0, "high": inf}),
    ("binary_tv_mask", {}),
    ("binary_tv_mask", {"delta": 0.05}),
    ("binary_tv_mask", {"delta": 1.0}),
    ("binary_kl_mask", {}),
    ("binary_kl_mask", {"delta": 1e-3}),
    ("binary_kl_mask", {"delta": inf}),
    ("kpop_mask", {}),
    ("kpop_mask", {"delta": 1e-3}),
    ("kpop_mask", {"delta": inf}),
    ("opsm_mask", {}),
    ("opsm_mask", {"delta": 0.2}),
    ("opsm_mask", {"delta": inf}),
    ("m2po_mask", {}),
    ("m2po_mask", {"bound": 1e-3}),
    ("m2po_mask", {"bound": inf}),
    ("second_moment_mask", {}),
    ("second_moment_mask", {"bound": 1e-3}),
    ("second_moment_mask", {"bound": inf}),
]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("name", "bounds"), TRUST_REGIONS)
def test_trust_regions_keep_the_tokens_that_their_formulas_keep(name, bounds, per_token):
    kept = []
    for seed in SEEDS:
        case = make_case(seed, per_token_advantages=per_token)
        ours = getattr(trust_regions, name)(case.tokens(), **bounds)
        expected = flat(getattr(plain, name)(sequences_of(case), **bounds))
        assert ours.dtype == torch.bool
        assert ours.tolist() == expected
        kept += expected
    assert any(kept)
    assert (inf in bounds.values() or bounds.get("delta") == 1.0) is all(kept)


def test_second_moment_masks_leave_everything_out_where_no_token_is_within_the_bound():
    case = make_case(0)
    tokens = replace_logprobs(case, case.batch.behavior_logprobs[case.batch.loss_mask] - 0.5)
    assert not trust_regions.second_moment_mask(tokens, bound=0.2).any()
    assert torch.equal(trust_regions.m2po_mask(tokens, bound=0.2), tokens.advantages >= 0)  # of those that were pushed
    for mask in (trust_regions.m2po_mask, trust_regions.second_moment_mask):
        assert mask(tokens, bound=0.26).all()


def replace_logprobs(case: Case, logprobs: torch.Tensor) -> DrawnTokens:
    return replace(case, logprobs=logprobs).tokens()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_and_their_gradients_are_their_formulas(kind):
    case = make_case(0)
    tokens = case.tokens()
    estimates = kl_estimate(kind, tokens.logprobs, case.batch.reference_logprobs[case.batch.loss_mask])
    [gradient] = torch.autograd.grad(estimates.sum(), tokens.logprobs)
    expected = [plain.kl_term(kind, t) for sequence in sequences_of(case) for t in sequence]
    assert close(estimates, [estimate for estimate, _ in expected], rel=1e-9)
    assert close(gradient, [derivative for _, derivative in expected], rel=1e-9)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_aggregation_weights_are_their_formulas(kind):
    case = make_case(0)
    batch, sequences = case.batch, sequences_of(case)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ours = token_weights(kind, lengths, batch.groups, batch.totals, max_tokens=MAX_TOKENS).double()
    groups = batch.groups.tolist()
    drawn = [s for s, sequence in enumerate(sequences) if sequence]
    expected = [plain.aggregation_weight(kind, sequences, groups, s, MAX_TOKENS) for s in drawn]
    assert close(ours[drawn], expected, rel=1e-6)
    assert ours.isfinite().all()
    if kind != "constant":  # weights of a mean; a group without a token leaves a share of it empty
        share = len({groups[s] for s in drawn}) / len(set(groups)) if kind == "group" else 1.0
        share *= len(drawn) / len(sequences) if kind == "sequence" else 1.0
        assert (ours * lengths).sum().item() == pytest.approx(share, rel=1e-6)


def test_the_loglinear_proximal_policy_is_one_version_older_than_the_trainers():
    case = make_case(0)
    batch, drawn = case.batch, case.batch.loss_mask
    versions = batch.weight_versions[drawn]
    ours = loglinear_proximal(case.logprobs, batch.behavior_logprobs[drawn], TRAINER_VERSION - versions)
    expected = [plain.loglinear(t, TRAINER_VERSION) for sequence in sequences_of(case) for t in sequence]
    assert close(ours, expected, rel=1e-7)
    assert set(versions.tolist()) == set(range(TRAINER_VERSION + 1))
    newest = versions >= TRAINER_VERSION - 1
    assert torch.equal(ours[newest], batch.behavior_logprobs[drawn][newest])


def test_ratios_too_large_to_exponentiate_stay_finite():
    """log ρ beyond ±20 is cut there, and a ratio that was cut has no gradient of its own."""
    tokens = DrawnTokens(
        logprobs=torch.tensor([-1.0, -400.0, -1.0, -1.0], dtype=torch.float64).requires_grad_(),
        behavior=torch.tensor([-400.0, -1.0, -1.0, -30.0], dtype=torch.float64),
        proximal=torch.tensor([-400.0, -1.0, -1.0, -30.0], dtype=torch.float64),
        advantages=torch.tensor([-1.0, -1.0, -1.0, 1.0], dtype=torch.float64),
        sequences=torch.tensor([0, 1, 1, 2]),
        num_sequences=4,
    )
    rows = zip(
        *(c.tolist() for c in (tokens.logprobs, tokens.behavior, tokens.proximal, tokens.advantages)), strict=True
    )
    a, b, c, d = (Token(*row) for row in rows)
    for name in ("ppo_clip", "cispo", "gspo"):
        losses = getattr(surrogates, name)(tokens)
        [gradient] = torch.autograd.grad(losses.sum(), tokens.logprobs)
        expected = [getattr(plain, name)(sequence) for sequence in ([a], [b, c], [d])]
        assert close(losses, [loss for rows in expected for loss, _, _ in rows])
        assert close(gradient, [sum(row[1][j] for row in rows) for rows in expected for j in range(len(rows))])
        assert gradient.isfinite().all()
    drifted = replace(tokens, proximal=tokens.logprobs.detach())
    for correction in (corrections.token_truncate, corrections.sequence_truncate):
        weights = correction(drifted, cap=inf)
        assert weights.max().item() == pytest.approx(torch.tensor(20.0).double().exp().item())
        assert weights.min().item() > 0


def test_bounds_are_inside():
    """A ratio that equals a bound meets none: masks keep it, and a clipped ratio keeps its gradient."""
    two = torch.full((1,), 2.0, dtype=torch.float64).log()
    tokens = DrawnTokens(
        logprobs=two.clone().requires_grad_(),
        behavior=torch.zeros(1, dtype=torch.float64),
        proximal=two,
        advantages=torch.ones(1, dtype=torch.float64),
        sequences=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
    )
    exact = two.exp().item()
    for mask in (corrections.token_mask, corrections.sequence_mask):
        assert mask(tokens, low=exact, high=exact).tolist() == [exact]
    assert trust_regions.geometric_mask(tokens, low=exact, high=exact).all()
    moved = replace(tokens, proximal=tokens.behavior)
    losses = surrogates.ppo_clip(moved, high=exact - 1)
    [gradient] = torch.autograd.grad(losses.sum(), moved.logprobs)
    assert gradient.tolist() == [-exact]


@pytest.mark.parametrize("room", [0.0, 0.2, inf])
def test_a_ratio_of_exactly_one_keeps_its_gradient(room):
    case = make_case(0)
    tokens = replace(case.tokens(), proximal=case.logprobs)
    [gradient] = torch.autograd.grad(surrogates.ppo_clip(tokens, low=room, high=room).sum(), tokens.logprobs)
    assert torch.equal(gradient, -tokens.advantages)
