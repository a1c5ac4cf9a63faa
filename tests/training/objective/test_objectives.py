"""What an objective refuses when it is made, the names of its statistics, and GSPO by token."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from loss_batches import make_case

from inflight.core.errors import NonFiniteLossError
from inflight.training.objective import corrections, surrogates, trust_regions
from inflight.training.objective.corrections import token_mask, token_truncate, uncorrected
from inflight.training.objective.kl import kl_estimate
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import PRESETS, Objective, resolve
from inflight.training.objective.statistics import LossStats, RatioStats
from inflight.training.objective.surrogates import cispo, gmpo, gspo, ppo_clip, reinforce
from inflight.training.objective.trust_regions import m2po_mask, opsm_mask, second_moment_mask

CLIPPED = {"correction": uncorrected, "proximal": "behavior"}


@pytest.mark.parametrize(
    "surrogate", [ppo_clip, cispo, gspo, gmpo, partial(ppo_clip, high=0.3), partial(cispo, cap=2.0)]
)
def test_clipping_that_would_never_clip_is_refused_with_what_to_set(surrogate):
    with pytest.raises(ValueError, match=r"would never clip.*proximal='behavior' to clip"):
        Objective(surrogate=surrogate, proximal="current")
    for proximal in ("recomputed", "loglinear"):
        Objective(surrogate=surrogate, proximal=proximal)
    Objective(surrogate=surrogate)


BAD_BOUNDS = [
    ("corrections", "token_truncate", {"cap": 1.0, "floor": 2.0}, "floor 2.0 and cap 1.0 leave no ratio"),
    ("corrections", "token_truncate", {"cap": 0.0}, "leave no ratio"),
    ("corrections", "token_mask", {"low": 5.0, "high": 0.5}, "low 5.0 and high 0.5 leave no ratio"),
    ("corrections", "token_mask", {"low": math.nan}, "leave no ratio"),
    ("corrections", "token_mask", {"high": -1.0, "low": -2.0}, "leave no ratio"),
    ("corrections", "sequence_truncate", {"cap": 1.0, "floor": 2.0}, "leave no ratio"),
    ("corrections", "sequence_mask", {"low": 2.0, "high": 0.5}, "leave no ratio"),
    ("corrections", "sequence_mask", {"low": math.inf}, "leave no ratio"),
    ("surrogates", "ppo_clip", {"low": -0.5, "high": 0.2}, r"clip ratios to \[1.5, 1.2\]"),
    ("surrogates", "ppo_clip", {"high": -2.0, "low": 3.0}, "would clip ratios"),
    ("surrogates", "ppo_clip", {"dual": math.nan}, "dual must be greater than 1"),
    ("surrogates", "cispo", {"cap": 1.0, "floor": 3.0}, "leave no ratio"),
    ("surrogates", "gspo", {"low": -4e-4, "high": 3e-4}, "would clip ratios"),
    ("surrogates", "gmpo", {"low": -0.1}, r"bounds of \|log u\|, at least 0; got -0.1 and 0.4"),
    ("surrogates", "lag_clip", {"low": -0.5, "high": 0.2}, r"clip ratios to \[1.5, 1.2\]"),
    ("surrogates", "lag_clip", {"growth": math.nan}, "growth must be finite, got nan"),
    ("trust_regions", "geometric_mask", {"low": 1.01, "high": 0.99}, "leave no ratio"),
    ("trust_regions", "binary_tv_mask", {"delta": -0.1}, "delta is a distance"),
    ("trust_regions", "binary_kl_mask", {"delta": -0.1}, "delta is a distance"),
    ("trust_regions", "kpop_mask", {"delta": math.nan}, "delta is a distance"),
    ("trust_regions", "opsm_mask", {"delta": math.nan}, "delta is a distance"),
    ("trust_regions", "m2po_mask", {"bound": -0.04}, "bound is a distance"),
    ("trust_regions", "second_moment_mask", {"bound": math.nan}, "bound is a distance"),
]


@pytest.mark.parametrize(("part", "name", "bounds", "message"), BAD_BOUNDS)
def test_bounds_that_nothing_could_keep_are_refused_when_made_and_when_called(part, name, bounds, message):
    modules = {"corrections": corrections, "surrogates": surrogates, "trust_regions": trust_regions}
    function = getattr(modules[part], name)
    settings = {
        "corrections": {"correction": partial(function, **bounds), "surrogate": reinforce, "proximal": "current"},
        "surrogates": {"surrogate": partial(function, **bounds), **CLIPPED},
        "trust_regions": {"trust_regions": (partial(function, **bounds),)},
    }[part]
    with pytest.raises(ValueError, match=message):
        function(make_case(0).tokens(), **bounds)
    with pytest.raises(ValueError, match=message):
        Objective(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_weight": -0.1}, "kl_weight must be finite and at least 0, got -0.1"),
        ({"kl_weight": math.nan}, "kl_weight must be finite"),
        ({"drift_weight": -1e-3}, "drift_weight must be finite and at least 0, got -0.001"),
        ({"entropy_weight": math.inf}, "entropy_weight must be finite"),
        ({"aggregation": "constant", "max_tokens": -3}, "needs max_tokens"),
        ({"kl": "k4"}, "unknown KL estimator 'k4'; choose k1, k2, k3, k3_clamped"),
    ],
)
def test_weights_and_names_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(**settings)


def test_options_that_a_function_has_not_are_told_when_the_objective_is_made():
    with pytest.raises(TypeError, match="unexpected keyword argument 'max'"):
        Objective(correction=partial(token_truncate, max=2.0), surrogate=reinforce, proximal="current")


def test_m2po_leaves_out_only_what_was_pushed_and_the_second_moment_mask_anything():
    for seed in range(5):
        tokens = make_case(seed, copies=8).tokens()
        rho, advantages = tokens.log_behavior_ratios, tokens.advantages
        pushed = ((advantages > 0) & (rho > 0)) | ((advantages < 0) & (rho < 0))
        m2po, second = m2po_mask(tokens), second_moment_mask(tokens)
        assert m2po[~pushed].all()
        assert not m2po.all()
        assert rho[pushed & m2po].square().mean() <= 0.04
        assert not second[~pushed].all()
        assert rho[second].square().mean() <= 0.04
        left_out = rho[pushed & ~m2po].square()
        assert left_out.min() >= rho[pushed & m2po].square().max()
        both = torch.cat([rho[pushed & m2po].square(), left_out.min()[None]])
        assert both.mean() > 0.04  # as few as possible


def gspo_token_by_hand(tokens, low: float, high: float) -> tuple[list[float], list[float]]:
    """GSPO-token in floats, sequence by sequence: (losses, derivative of their sum by each token's log-probability)."""
    losses, slopes = [], []
    for s in range(tokens.num_sequences):
        rows = (tokens.sequences == s).nonzero().flatten().tolist()
        log_ratio = sum((tokens.logprobs[t] - tokens.proximal[t]).item() for t in rows) / max(len(rows), 1)
        ratio = math.exp(log_ratio)
        for t in rows:
            advantage = tokens.advantages[t].item()
            gain, bounded = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
            losses.append(-min(gain, bounded))
            slopes.append(-gain if gain <= bounded else 0.0)
    return losses, slopes


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.2, 0.3), (math.inf, math.inf)])
def test_gspo_with_an_advantage_for_each_token_is_gspo_token(bounds, per_token):
    low, high = bounds
    for seed in range(3):
        tokens = make_case(seed, per_token_advantages=per_token).tokens()
        losses = gspo(tokens, low=low, high=high)
        [gradient] = torch.autograd.grad(losses.sum(), tokens.logprobs)
        expected, slopes = gspo_token_by_hand(tokens, low, high)
        torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_gspo_with_one_advantage_for_a_sequence_is_gspo():
    """Value and gradient of the mean over sequences of min(s A, clip(s) A)."""
    case = make_case(1)
    scores = case.scores()
    loss, _ = loss_of_scores(PRESETS["gspo"], case.batch, scores)
    loss.backward()
    tokens = case.tokens()
    drawn = case.batch.loss_mask
    log_ratios = tokens.logprobs - case.batch.behavior_logprobs[drawn]
    ratios = tokens.sequence_means(log_ratios).exp()
    advantages = tokens.sequence_means(tokens.advantages)
    gains = torch.minimum(ratios * advantages, ratios.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    expected = -gains.sum() / case.batch.totals.num_sequences
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(scores.logprobs.grad, tokens.logprobs.grad, rtol=1e-6, atol=1e-9)


def test_the_clamped_k3_is_k3_where_it_is_small_and_bounded_where_it_is_not():
    logprobs = torch.tensor([-1.0, -2.0, -1.5, -8.0, -120.0, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -3.0, -1.2, -1.0, -40.0], dtype=torch.float64)
    k3, clamped = (kl_estimate(kind, logprobs, reference) for kind in ("k3", "k3_clamped"))
    gradients = [torch.autograd.grad(estimate.sum(), logprobs)[0] for estimate in (k3, clamped)]
    assert torch.equal(k3[:3], clamped[:3])
    assert torch.equal(gradients[0][:3], gradients[1][:3])
    assert clamped[3:].tolist() == [10, 10, 10]
    assert gradients[1][3:].tolist() == [0, 0, 0]
    assert gradients[0][3] == pytest.approx(-897, rel=1e-3)


def test_statistics_are_numbers_under_flat_names():
    case = make_case(3)
    objective = replace(PRESETS["tis"], kl_weight=0.1, entropy_weight=0.01)
    _, stats = loss_of_scores(objective, case.batch, case.scores())
    numbers = stats.as_dict()
    assert all(type(number) in (int, float) and not math.isnan(number) for number in numbers.values())
    assert numbers["loss"] == stats.loss
    assert numbers["clipped"] == stats.clipped
    assert numbers["entropy"] == stats.entropy
    assert numbers["reference_kl"] == stats.reference_kl
    assert numbers["ratio/ess"] == stats.ess == stats.ratios.ess
    assert numbers["mismatch/kl"] == stats.mismatch.kl
    assert numbers["stale/logprob_diff"] == stats.stale.logprob_diff
    assert numbers["stale/num_tokens"] + numbers["mismatch/num_tokens"] == numbers["num_tokens"] == stats.num_tokens
    _, plain = loss_of_scores(
        PRESETS["none"], replace(case.batch, trainer_version=None), case.scores()._replace(entropies=None)
    )
    names = plain.as_dict().keys()
    assert {"loss", "num_tokens", "clipped", "ratio/mean"} <= names
    assert not any(name.startswith(("mismatch", "stale", "entropy", "reference")) for name in names)
    nothing = LossStats(0.0, RatioStats(), RatioStats(), RatioStats(), 0)
    assert nothing.as_dict() == {"loss": 0.0, "num_tokens": 0, "clipped": 0.0}


@pytest.mark.parametrize("seed", [0, 3])
def test_the_effective_sample_size_of_sequences_is_that_of_products_of_their_tokens_ratios(seed):
    """Also of parts that are added up, and whatever the correction bounds. Sequences without an advantage do not
    count."""
    case = make_case(seed)
    _, stats = loss_of_scores(PRESETS["tis"], case.batch, case.scores())
    products: dict[int, float] = {}
    drawn = case.batch.loss_mask
    sequences = case.batch.sequence_ids[drawn]
    with_advantage = set(sequences[case.batch.advantages[drawn] != 0].tolist())
    columns = (sequences, case.logprobs, case.batch.behavior_logprobs[drawn])
    for sequence, ours, behavior in zip(*(column.tolist() for column in columns), strict=True):
        if sequence in with_advantage:
            products[sequence] = products.get(sequence, 1.0) * math.exp(ours - behavior)
    weights = list(products.values())
    ess = math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
    assert stats.sequences.num_tokens == len(weights) < case.batch.num_sequences
    assert stats.sequences.ess == pytest.approx(ess, rel=1e-9)
    assert stats.as_dict()["sequence/ess"] == stats.sequences.ess < 0.9
    parts = [case.batch.select(list(range(i, case.batch.num_sequences, 2))) for i in (0, 1)]
    of_parts = [loss_of_scores(PRESETS["tis"], part, case.scores(part))[1] for part in parts]
    assert (of_parts[0] + of_parts[1]).sequences.ess == pytest.approx(ess, rel=1e-9)


def test_masks_and_presets_that_are_sound_still_are():
    for objective in PRESETS.values():
        replace(objective)
    replace(PRESETS["tis"], correction=partial(token_mask, low=1.0, high=1.0))
    Objective(trust_regions=(partial(opsm_mask, delta=0.0),))


def test_a_geometric_mask_masks_where_the_clipped_ratio_is_the_whole_one():
    """π_p is π_b there, so that π_p / π_b is always 1."""
    case = make_case(3)
    region = partial(trust_regions.geometric_mask, low=0.9, high=1.1)
    _, masked = loss_of_scores(Objective(trust_regions=(region,)), case.batch, case.scores())
    _, plain = loss_of_scores(Objective(), case.batch, case.scores())
    assert masked.num_clipped > plain.num_clipped
    behavior = replace(case.tokens(), proximal=case.tokens().behavior, proximal_policy="behavior")
    current = replace(case.tokens(), proximal=case.logprobs)
    assert torch.equal(region(behavior), region(current))
    assert 0 < region(behavior).sum() < len(case.logprobs)


@pytest.mark.parametrize("objective", [None, Objective(), Objective(kl_weight=0.0, aggregation="token")])
def test_the_default_objective_has_a_trust_region(objective):
    """A token that moved far the way in which its advantage pushes has no gradient."""
    assert resolve(objective) == PRESETS["ppo_clip"]
    case = make_case(3)
    scores = case.scores()
    loss, stats = loss_of_scores(resolve(objective), case.batch, scores)
    loss.backward()
    tokens = case.tokens()
    moved = tokens.log_behavior_ratios * tokens.advantages.sign()
    assert not scores.logprobs.grad[moved > 0.3].any()
    assert stats.num_clipped >= (moved > 0.3).sum() > 0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_log_probability_of_minus_infinity_is_refused_though_bounds_hide_it_from_the_loss(name):
    case = make_case(3)
    scores = case.scores()
    with torch.no_grad():
        scores.logprobs[1] = -math.inf
    with pytest.raises(NonFiniteLossError, match="has log-probability -inf under the trainer's model"):
        loss_of_scores(PRESETS[name], case.batch, scores)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("shift", [-30.0, 30.0])
def test_tokens_whose_ratio_is_beyond_what_is_exponentiated_count_as_clipped(name, shift):
    """Their gradient is 0 whichever way the advantage pushes."""
    case = make_case(3)
    scores = case.scores()
    with torch.no_grad():
        scores.logprobs.add_(shift)
    loss, stats = loss_of_scores(PRESETS[name], case.batch, scores)
    loss.backward()
    assert not scores.logprobs.grad.any()
    assert stats.num_clipped == (case.tokens().advantages != 0).sum()
