"""Whole objectives are their formulas (plain_objectives.py): presets, combinations, and parts of a batch."""

from dataclasses import replace
from functools import partial, wraps
from math import inf

import plain_objectives as plain
import pytest
import torch
from loss_batches import AGGREGATIONS, MAX_TOKENS, SEEDS, TRAINER_VERSION, Case, close, flat, make_case, sequences_of
from plain_objectives import PLAIN_PRESETS, Plain

from inflight.training.objective import corrections, surrogates, trust_regions
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import PRESETS, Objective
from inflight.training.objective.statistics import LossStats
from inflight.training.objective.tokens import DrawnTokens


def compare(objective: Objective, expected: Plain, case: Case) -> LossStats:
    scores = case.scores()
    loss, stats = loss_of_scores(objective, case.batch, scores)
    loss.backward()
    sequences = sequences_of(case)
    result = plain.evaluate(expected, sequences, case.batch.groups.tolist(), TRAINER_VERSION)
    assert loss.item() == pytest.approx(result.loss, rel=1e-6, abs=1e-9)
    assert close(scores.logprobs.grad, flat(result.gradient), rel=2e-6)
    assert stats.loss == loss.item()
    assert stats.num_clipped == (result.num_clipped if objective.clips == "hard" else None)
    if objective.entropy_weight:
        of_entropies = [
            -plain.aggregation_weight(expected.aggregation, sequences, case.batch.groups.tolist(), s, MAX_TOKENS)
            * expected.entropy_weight
            for s, sequence in enumerate(sequences)
            for _ in sequence
        ]
        assert close(scores.entropies.grad, of_entropies, rel=1e-6)
    return stats


def test_every_preset_has_a_restatement():
    assert PLAIN_PRESETS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_their_formulas(name):
    for seed in SEEDS:
        stats = compare(PRESETS[name], PLAIN_PRESETS[name], make_case(seed, copies=6))
        if PRESETS[name].clips == "hard":
            assert (stats.clipped == 0) if name in ("none", "dro") else (0 < stats.clipped < 1)


@pytest.mark.parametrize("bounds", [{"growth": 1.0}, {"growth": -0.5}, {"low": 1.0, "high": 0.1}, {"high": inf}])
def test_lag_clip_is_its_formula_with_other_bounds(bounds):
    expected = Plain(plain.uncorrected, partial(plain.lag_clip, **bounds), proximal="behavior")
    for seed in SEEDS:
        compare(Objective(surrogate=partial(surrogates.lag_clip, **bounds)), expected, make_case(seed, copies=6))


def test_lag_clip_is_ppo_clip_for_tokens_of_up_to_one_version_ago_and_wider_for_older_ones():
    case = make_case(2, copies=6)
    results = {}
    for name in ("lag_clip", "ppo_clip"):
        scores = case.scores()
        loss_of_scores(PRESETS[name], case.batch, scores)[0].backward()
        results[name] = scores.logprobs.grad
    lags = TRAINER_VERSION - case.batch.weight_versions[case.batch.loss_mask]
    assert set(lags.tolist()) == set(range(TRAINER_VERSION + 1))
    assert torch.equal(results["lag_clip"][lags <= 1], results["ppo_clip"][lags <= 1])
    opened = (results["lag_clip"] != 0) & (results["ppo_clip"] == 0)
    assert opened.any()
    assert (lags[opened] > 1).all()
    assert not ((results["lag_clip"] == 0) & (results["ppo_clip"] != 0)).any()


def test_bounds_that_grow_as_the_root_of_the_lag_clip_the_same_share_at_each_lag():
    """If versions move a token independently of each other, as the docstring of `lag_clip` derives."""
    random, n = torch.Generator().manual_seed(0), 40_000
    case, shares = make_case(0), {0.0: [], 0.5: [], 1.0: []}
    for lag in (1, 4, 16):
        moved = 0.2 * torch.randn(n, lag, generator=random, dtype=torch.float64).sum(1)
        batch = replace(case.batch, weight_versions=torch.zeros(n, dtype=torch.int64), trainer_version=lag)
        tokens = DrawnTokens(
            logprobs=(moved - 30).requires_grad_(),
            behavior=torch.full((n,), -30.0, dtype=torch.float64),
            proximal=torch.full((n,), -30.0, dtype=torch.float64),
            advantages=torch.ones(n, dtype=torch.float64),
            sequences=torch.zeros(n, dtype=torch.int64),
            num_sequences=1,
            proximal_policy="behavior",
            batch=replace(batch, input_ids=torch.zeros(n, dtype=torch.int64)),
            rows=torch.arange(n),
        )
        for growth, of_growth in shares.items():
            losses = surrogates.lag_clip(tokens, growth=growth)
            [gradient] = torch.autograd.grad(losses.sum(), tokens.logprobs)
            of_growth.append((gradient == 0).double().mean().item())
    assert shares[0.5] == pytest.approx([shares[0.5][0]] * 3, rel=0.05)
    assert shares[0.0][0] < 0.7 * shares[0.0][1] < 0.7 * shares[0.0][2]
    assert shares[1.0][0] > 2 * shares[1.0][1] > 4 * shares[1.0][2]


def test_only_sapo_and_vespo_clip_softly():
    assert [name for name, objective in PRESETS.items() if objective.clips != "hard"] == ["vespo", "sapo"]
    assert PRESETS["sapo"].clips == "soft"
    assert Objective(surrogate=partial(surrogates.sapo, positive=2.0)).clips == "soft"
    assert Objective(surrogate=lambda tokens: tokens.logprobs).clips == "unknown"
    assert Objective(surrogate=wraps(surrogates.sapo)(lambda tokens: tokens.logprobs)).clips == "unknown"
    with pytest.raises(ValueError, match=r"positive and negative must be finite and above 0, got 1\.0 and -1"):
        Objective(surrogate=partial(surrogates.sapo, negative=-1))
    with pytest.raises(ValueError, match="sapo bounds π_θ / π_p, which is always 1"):
        Objective(surrogate=surrogates.sapo, proximal="current")


@pytest.mark.parametrize("advantage", [1.0, -0.5])
def test_the_gradient_of_sapo_fades_with_distance(advantage):
    """At u = 1 it equals the gradient of −u A, and it falls to 0 with the distance."""
    log_ratios = torch.tensor([0.0, 0.1, 1.0, 2.5], dtype=torch.float64)
    case = make_case(0)
    tokens = replace(
        case.tokens(),
        logprobs=(log_ratios - 3).requires_grad_(),
        behavior=torch.full((4,), -3.0, dtype=torch.float64),
        proximal=torch.full((4,), -3.0, dtype=torch.float64),
        advantages=torch.full((4,), advantage, dtype=torch.float64),
        sequences=torch.zeros(4, dtype=torch.int64),
        num_sequences=1,
    )
    surrogates.sapo(tokens).sum().backward()
    weights = -tokens.logprobs.grad / advantage / log_ratios.exp()
    assert weights[0].item() == pytest.approx(1)
    assert (weights.diff() < 0).all()
    assert weights[-1] < 1e-3


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_objectives_with_everything_are_their_formulas(aggregation, kl):
    case = make_case(7)
    common = {
        "aggregation": aggregation,
        "max_tokens": MAX_TOKENS,
        "kl": kl,
        "kl_weight": 0.3,
        "drift_weight": 0.2,
        "entropy_weight": 0.02,
        "proximal": "recomputed",
    }
    stats = compare(
        Objective(
            correction=partial(corrections.sequence_truncate, cap=1.5, floor=0.2),
            surrogate=partial(surrogates.ppo_clip, low=0.1, high=0.3, dual=1.6),
            trust_regions=(partial(trust_regions.geometric_mask, low=0.9, high=2.0), trust_regions.opsm_mask),
            **common,
        ),
        Plain(
            correction=partial(plain.sequence_truncate, cap=1.5, floor=0.2),
            surrogate=partial(plain.ppo_clip, low=0.1, high=0.3, dual=1.6),
            trust_regions=(partial(plain.geometric_mask, low=0.9, high=2.0), plain.opsm_mask),
            **common,
        ),
        case,
    )
    kls = [plain.kl_term(kl, t)[0] * plain.bounded_exp(t.logprob - t.behavior) for s in sequences_of(case) for t in s]
    assert stats.reference_kl == pytest.approx(sum(kls) / len(kls))
    assert stats.entropy == pytest.approx(case.entropies.mean().item())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if not preset.ranks_tokens])
def test_losses_gradients_and_statistics_of_micro_batches_add_up(name, aggregation):
    case = make_case(1)
    objective = replace(
        PRESETS[name], aggregation=aggregation, max_tokens=MAX_TOKENS, kl_weight=0.1, entropy_weight=0.01
    )
    scores = case.scores()
    loss, stats = loss_of_scores(objective, case.batch, scores)
    loss.backward()
    place = torch.full_like(case.batch.input_ids, -1)
    place[case.batch.loss_mask] = torch.arange(len(case.logprobs))

    parts = case.batch.micro_batches(40)
    gradient, total, total_stats = torch.zeros_like(case.logprobs), 0.0, None
    for part in parts:
        own = case.scores(part)
        part_loss, part_stats = loss_of_scores(objective, part, own)
        part_loss.backward()
        gradient[place[part.input_ids[part.loss_mask]]] += own.logprobs.grad
        total += part_loss.item()
        total_stats = part_stats if total_stats is None else total_stats + part_stats
    assert len(parts) > 3
    assert total == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(gradient, scores.logprobs.grad, rtol=1e-12, atol=1e-15)
    assert total_stats.num_clipped == stats.num_clipped
    assert total_stats.loss == pytest.approx(stats.loss, rel=1e-12)
    for ours, whole in ((total_stats.ratios, stats.ratios), (total_stats.stale, stats.stale)):
        assert (ours.num_tokens, ours.min, ours.max) == (whole.num_tokens, whole.min, whole.max)
        assert (ours.mean, ours.ess, ours.kl) == pytest.approx((whole.mean, whole.ess, whole.kl), rel=1e-12)


def test_tokens_that_are_not_included_add_nothing_and_the_others_weigh_what_they_did():
    case, objective = make_case(3), replace(PRESETS["tis"], kl_weight=0.1, entropy_weight=0.01)
    included = torch.arange(len(case.batch.loss_mask)) % 3 != 0
    gradients = []
    for batch in (case.batch, replace(case.batch, included=included)):
        scores = case.scores()
        loss, _ = loss_of_scores(objective, batch, scores)
        loss.backward()
        gradients.append(torch.stack([scores.logprobs.grad, scores.entropies.grad]))
    assert torch.equal(gradients[1], gradients[0] * included[case.batch.loss_mask])


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.is_about_rewards_alone])
def test_a_batch_in_which_no_advantage_differs_from_0_has_no_gradient(name):
    case = make_case(2)
    case.batch.advantages.zero_()
    scores = case.scores()
    loss, stats = loss_of_scores(PRESETS[name], case.batch, scores)
    loss.backward()
    assert loss.item() == 0
    assert not scores.logprobs.grad.any()
    assert stats.num_clipped == (0 if PRESETS[name].clips == "hard" else None)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_micro_batch_without_a_drawn_token_adds_nothing(name, aggregation):
    case = make_case(0)
    empty = case.batch.select(range(case.batch.num_sequences - 3, case.batch.num_sequences))
    assert empty.num_drawn == 0
    assert empty.num_sequences == 3
    scores = case.scores(empty)
    objective = replace(PRESETS[name], aggregation=aggregation, max_tokens=MAX_TOKENS, kl_weight=0.1)
    loss, stats = loss_of_scores(objective, empty, scores)
    loss.backward()
    assert (loss.item(), stats.num_tokens, stats.clipped) == (0, 0, 0 if objective.clips == "hard" else None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: surrogates.ppo_clip(make_case(0).tokens(), dual=1.0), "dual must be greater than 1, got 1.0"),
        (lambda: Objective(kl="k4"), "unknown KL estimator 'k4'"),
        (lambda: Objective(aggregation="mean"), "unknown aggregation 'mean'"),
        (lambda: Objective(aggregation="constant"), "needs max_tokens"),
        (lambda: Objective(correction=corrections.token_mask), "nothing is left to correct.*proximal='current'"),
        (lambda: Objective(surrogate=surrogates.reinforce), "nothing corrects for tokens of older.*proximal='current'"),
        (lambda: Objective(proximal="old"), "unknown proximal policy 'old'"),
        (lambda: Objective(surrogate=surrogates.gmpo, proximal="current"), "gmpo bounds .* would never clip"),
        (
            lambda: Objective(surrogate=surrogates.lag_clip, proximal="loglinear"),
            "lag_clip bounds .*proximal='behavior'",
        ),
        (lambda: without_column("trainer_version", "lag_clip"), "version_lags needs trainer_version"),
        (lambda: without_column("proximal_logprobs", "decoupled_ppo"), "needs batch.proximal_logprobs"),
        (lambda: without_column("trainer_version", "loglinear_ppo"), "needs batch.trainer_version"),
    ],
)
def test_what_cannot_be_computed_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def without_column(name: str, preset: str) -> None:
    case = make_case(0)
    loss_of_scores(PRESETS[preset], replace(case.batch, **{name: None}), case.scores())
