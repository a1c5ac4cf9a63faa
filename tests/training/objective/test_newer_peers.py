"""Geometric means, binary KLs, DRO, covariances and normalized weights equal TRL 1.16's own code and the formulas of
verl, AReaL and prime-rl, restated for padded batches in float64."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from loss_batches import Case, make_case, ours, pad, padded, sequence_advantages

from inflight.training.objective.bounds import bounded, ranks_tokens
from inflight.training.objective.corrections import token_truncate
from inflight.training.objective.loss import loss_of_scores
from inflight.training.objective.objective import PRESETS, Objective
from inflight.training.objective.surrogates import gmpo, ppo_clip, reinforce
from inflight.training.objective.tokens import DrawnTokens, exp_ratio
from inflight.training.objective.trust_regions import binary_kl_mask, kpop_mask

Result = tuple[torch.Tensor, torch.Tensor]


def agree(a: Result, b: Result) -> bool:
    """Whether losses and gradients are equal to float64's accuracy."""
    return torch.allclose(a[0], b[0], rtol=1e-9, atol=0) and torch.allclose(a[1], b[1], rtol=1e-9, atol=1e-15)


def drawn_mask(case: Case) -> torch.Tensor:
    """bool[B, T]"""
    return pad(case.batch, torch.ones_like(case.logprobs)) > 0


def theirs(case: Case, loss_of) -> Result:
    """Loss and gradient of a function of log π_θ, log π_b, A, all f64[B, T], and the mask of drawn tokens."""
    logprobs = case.logprobs.clone().requires_grad_()
    columns = padded(case, "behavior_logprobs"), padded(case, "advantages"), drawn_mask(case)
    loss = loss_of(pad(case.batch, logprobs), *columns)
    loss.backward()
    return loss.detach(), logprobs.grad


# GMPO


def without_empty(case: Case) -> Case:
    """TRL divides its metrics by the number of tokens of each sequence."""
    lengths = torch.bincount(case.batch.sequence_ids[case.batch.loss_mask], minlength=case.batch.num_sequences)
    chosen = torch.nonzero(lengths).flatten().tolist()
    batch = case.batch.select(chosen)
    totals = replace(batch.totals, num_sequences=len(chosen))
    scores = case.scores(batch)
    numbered = replace(batch, totals=totals, input_ids=torch.arange(len(batch.input_ids)))
    return Case(numbered, scores.logprobs.detach(), scores.entropies.detach())


@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.1, 0.3)])
def test_trl_gmpo_is_gmpo(bounds):
    trainer_class = pytest.importorskip("trl.experimental.gmpo", reason="the trl extra is not installed").GMPOTrainer
    case, (low, high) = without_empty(make_case(1)), bounds
    logprobs = case.logprobs.clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            pad(case.batch, logprobs),
            pad(case.batch, case.entropies),
            None,
        ),
        top_entropy_quantile=1.0,
        epsilon_low=low,
        epsilon_high=high,
        beta=0.0,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    mask = drawn_mask(case).long()
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": sequence_advantages(case),
        "old_per_token_logps": padded(case, "behavior_logprobs"),
    }
    loss = trainer_class._compute_loss(trainer, None, inputs)
    loss.backward()
    objective = replace(PRESETS["gmpo"], surrogate=partial(gmpo, low=low, high=high))
    expected = loss.detach(), logprobs.grad
    assert agree(ours(objective, case), expected)
    assert not agree(ours(replace(objective, surrogate=partial(gmpo, low=low, high=2 * high)), case), expected)


@pytest.mark.parametrize("seed", range(3))
def test_verl_geo_mean_is_gmpo(seed):
    """Its sequences without a token have a loss of 0, as ours."""

    def loss_of(logprobs, behavior, advantages, mask):
        signs = advantages.sign()
        logs = logprobs - behavior
        kept = signs * torch.minimum(signs * logs, signs * logs.clamp(-0.4, 0.4))
        lengths = mask.sum(-1).clamp(min=1)
        of_sequences = (advantages * mask).sum(-1) / lengths
        return -(of_sequences * ((kept * mask).sum(-1) / lengths).exp()).mean()

    case = make_case(seed)
    assert agree(ours(PRESETS["gmpo"], case), theirs(case, loss_of))


# Drift and divergences


def test_verl_and_tinker_dro_is_dro():
    def loss_of(logprobs, behavior, advantages, mask):
        gains = logprobs * advantages - 0.05 / 2 * (logprobs - behavior) ** 2
        return -gains[mask].mean()

    case = make_case(0, per_token_advantages=True)
    assert agree(ours(PRESETS["dro"], case), theirs(case, loss_of))
    assert not agree(ours(PRESETS["none"], case), theirs(case, loss_of))


def two_outcomes(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL of Bernoulli variables, by torch."""
    p, q = (torch.distributions.Bernoulli(probs=logs.exp().clamp(0, 1)) for logs in (log_p, log_q))
    return torch.distributions.kl_divergence(p, q)


@pytest.mark.parametrize("delta", [0.05, 0.002])
def test_verl_dppo_binary_kl_is_dppo_binary_kl_with_its_cap(delta):
    """verl truncates ratios at 20, and calls this `dppo_kl`. Our `dppo_kl` has the binary TV and a drift."""

    def loss_of(logprobs, behavior, advantages, mask):
        fixed = logprobs.detach()
        near = two_outcomes(behavior, fixed) <= delta
        kept = torch.where(advantages > 0, near | (fixed <= behavior), near | (fixed >= behavior))
        weights = (fixed - behavior).clamp(-20, 20).exp().clamp(max=20.0)
        return -(weights * kept * advantages * logprobs)[mask].mean()

    case = make_case(2, copies=8)
    objective = Objective(
        correction=partial(token_truncate, cap=20.0),
        surrogate=reinforce,
        proximal="current",
        trust_regions=(partial(binary_kl_mask, delta=delta),),
    )
    assert agree(ours(objective, case), theirs(case, loss_of))
    assert not agree(ours(replace(objective, trust_regions=()), case), theirs(case, loss_of))


@pytest.mark.parametrize("delta", [0.1, 0.01])
def test_kpop_of_areal_and_prime_rl_is_kpop(delta):
    """prime-rl's pull request 3283 has a drift of 0.001 besides."""

    def loss_of(logprobs, behavior, advantages, mask):
        fixed = logprobs.detach()
        kept = torch.maximum(two_outcomes(fixed, behavior), two_outcomes(behavior, fixed)) <= delta
        ratios = (logprobs - behavior).exp()
        policy = -(ratios.detach() * kept * advantages * logprobs)
        return (policy + 1e-3 * (logprobs - behavior) ** 2)[mask].mean()

    case = make_case(3, copies=8)
    objective = replace(PRESETS["kpop"], trust_regions=(partial(kpop_mask, delta=delta),), drift_weight=1e-3)
    assert agree(ours(objective, case), theirs(case, loss_of))
    assert not agree(ours(replace(objective, trust_regions=()), case), theirs(case, loss_of))


def test_binary_kls_are_finite_for_certain_tokens():
    case = make_case(0)
    n = len(case.logprobs)
    certain, rare = torch.zeros(n, dtype=torch.float64), torch.full((n,), -30.0, dtype=torch.float64)
    tokens = replace(case.tokens(), advantages=torch.ones(n, dtype=torch.float64))
    for mask in (binary_kl_mask, kpop_mask):
        assert mask(replace(tokens, logprobs=certain, behavior=certain)).all()
        assert mask(replace(tokens, logprobs=rare, behavior=rare)).all()
        assert not mask(replace(tokens, logprobs=certain, behavior=rare)).any()


# Parts that look at all tokens of a batch. These are custom parts, as docs/objectives.md shows them.


def covariances_of(tokens: DrawnTokens) -> torch.Tensor:
    logprobs = tokens.logprobs.detach()
    return (tokens.advantages - tokens.advantages.mean()) * (logprobs - logprobs.mean())


@ranks_tokens
@bounded(weight=0.0)
def kl_cov(tokens: DrawnTokens, *, share: float = 2e-4, weight: float = 1.0) -> torch.Tensor:
    covariances = covariances_of(tokens)
    largest = covariances.topk(min(max(int(share * len(covariances)), 1), len(covariances))).indices
    losses = -exp_ratio(tokens.log_ratios) * tokens.advantages
    return losses.index_add(0, largest, weight * tokens.log_ratios[largest].abs())


@ranks_tokens
def clip_cov_mask(tokens: DrawnTokens, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> torch.Tensor:
    covariances = covariances_of(tokens)
    candidates = torch.nonzero((covariances > low) & (covariances < high)).flatten()
    chosen = candidates[torch.randperm(len(candidates))[: max(int(share * len(covariances)), 1)]]
    return torch.ones_like(tokens.sequences, dtype=torch.bool).index_fill(0, chosen, False)


@ranks_tokens
def normalized(tokens: DrawnTokens, *, cap: float = 2.0) -> torch.Tensor:
    weights = token_truncate(tokens, cap=cap)
    return weights / weights.mean()


def verl_covariances(logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """f64[B, T]"""
    fixed = logprobs.detach()
    return (advantages - advantages[mask].mean()) * (fixed - fixed[mask].mean())


@pytest.mark.parametrize("share", [2e-4, 0.1])
def test_verl_kl_cov_is_a_custom_surrogate(share):
    def loss_of(logprobs, behavior, advantages, mask):
        logs = logprobs - behavior
        covariances = verl_covariances(logprobs, advantages, mask)
        least = covariances[mask].sort(descending=True).values[max(int(share * mask.sum()), 1) - 1]
        return (-logs.exp() * advantages + (covariances >= least) * logs.abs())[mask].mean()

    case = make_case(1, copies=8)
    objective = Objective(surrogate=partial(kl_cov, share=share))
    assert agree(ours(objective, case), theirs(case, loss_of))
    without = Objective(surrogate=partial(ppo_clip, low=1.0, high=math.inf))
    assert not agree(ours(without, case), theirs(case, loss_of))


def test_verl_clip_cov_is_a_custom_trust_region():
    """The same generator selects the same tokens. verl does not select tokens that PPO clips; here PPO clips none."""

    def loss_of(logprobs, behavior, advantages, mask):
        covariances = verl_covariances(logprobs, advantages, mask)
        candidates = torch.nonzero((covariances > 0.5) & (covariances < 5.0) & mask)
        torch.manual_seed(7)
        chosen = candidates[torch.randperm(len(candidates))[: max(int(0.02 * mask.sum()), 1)]]
        kept = torch.ones_like(logprobs)
        kept[chosen[:, 0], chosen[:, 1]] = 0
        return (-(logprobs - behavior).exp() * advantages * kept)[mask].mean()

    case = make_case(1, copies=8)
    without = Objective(surrogate=partial(ppo_clip, low=1.0, high=math.inf))
    objective = replace(without, trust_regions=(partial(clip_cov_mask, share=0.02, low=0.5),))
    expected = theirs(case, loss_of)
    torch.manual_seed(7)
    assert agree(ours(objective, case), expected)
    assert not agree(ours(without, case), expected)


def test_verl_weights_normalized_over_a_step_divide_its_gradient_by_one_number():
    """Also in micro-batches, if all divide by the mean over the step; not if each divides by its own mean."""

    def loss_of(logprobs, behavior, advantages, mask):
        weights = (logprobs.detach() - behavior).exp().clamp(max=2.0)
        return -(weights / weights[mask].mean() * advantages * logprobs)[mask].mean()

    case = make_case(2, copies=8)
    expected = theirs(case, loss_of)
    objective = Objective(correction=normalized, surrogate=reinforce, proximal="current")
    assert agree(ours(objective, case), expected)
    number = token_truncate(replace(case.tokens(), proximal=case.logprobs)).mean()
    assert number != pytest.approx(1, abs=0.01)

    def of_parts(chosen: Objective) -> torch.Tensor:
        drawn = case.batch.loss_mask
        gradient = torch.zeros(len(drawn), dtype=torch.float64)
        for part in case.batch.micro_batches(60):
            scores = case.scores(part)
            loss_of_scores(chosen, part, scores)[0].backward()
            gradient[part.input_ids[part.loss_mask]] = scores.logprobs.grad
        return gradient[drawn]

    assert torch.allclose(of_parts(PRESETS["tis"]) / number, expected[1], rtol=1e-9, atol=1e-15)
    assert not torch.allclose(of_parts(objective), expected[1], rtol=1e-3, atol=0)
