"""Tokens are drawn from the distribution that is recorded."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from inflight.core.sampling import SamplingParams
from inflight.engine.sampler import draw, mix64, sample_seed, uniforms

FILTERS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.4, top_k=12, top_p=0.8, min_p=0.05),
}


def reference_logprobs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Transformers' own warpers, in float64: log-probabilities of the filtered distribution, [V]."""
    warpers = LogitsProcessorList()
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), logits.double()[None] / params.temperature)
    return torch.log_softmax(scores, -1)[0]


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name):
    params, num_draws, vocabulary = FILTERS[name], 40_000, 40
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2)) * 2
    expected = reference_logprobs(logits, params)
    tokens, logprobs = draw(
        logits.expand(num_draws, -1), [params] * num_draws, np.arange(num_draws, dtype=np.uint64), np.zeros(num_draws)
    )
    assert torch.allclose(logprobs.double(), expected[tokens], atol=1e-5)
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    kept = expected > -torch.inf
    assert counts[~kept].sum() == 0
    expected_counts = expected[kept].exp() * num_draws
    common = expected_counts >= 5
    chi2 = ((counts[kept] - expected_counts)[common] ** 2 / expected_counts[common]).sum().item()
    degrees = int(common.sum()) - 1
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5 + 5  # five standard deviations of a chi-square variable


def test_rows_with_different_parameters_do_not_disturb_each_other():
    params = [*FILTERS.values(), SamplingParams(temperature=0)]
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(0)) * 2
    seeds = np.arange(len(params), dtype=np.uint64)
    positions = np.arange(len(params))
    tokens, logprobs = draw(logits, params, seeds, positions)
    for row in range(len(params)):
        token, logprob = draw(
            logits[row : row + 1], params[row : row + 1], seeds[row : row + 1], positions[row : row + 1]
        )
        assert (token[0], logprob[0]) == (tokens[row], logprobs[row])
    assert tokens[-1] == logits[-1].argmax()


def test_greedy_records_the_unfiltered_logprob_at_temperature_one():
    logits = torch.randn(1, 30)
    token, logprob = draw(logits, [SamplingParams(temperature=0, top_k=1)], np.zeros(1, np.uint64), np.zeros(1))
    assert torch.allclose(logprob, torch.log_softmax(logits, -1)[0, token])


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((20_000, 4), -torch.inf)
    logits[:, 2] = 0
    tokens, _ = draw(logits, [SamplingParams()] * 20_000, np.arange(20_000, dtype=np.uint64), np.zeros(20_000))
    assert (tokens == 2).all()


def test_uniforms_depend_on_seed_and_position_and_fill_the_interval():
    seeds = np.arange(100_000, dtype=np.uint64)
    u = uniforms(seeds, np.full(100_000, 3))
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(u, uniforms(seeds, np.full(100_000, 4)))[0, 1]) < 0.01
    assert len({sample_seed(7, sample) for sample in range(1000)}) == 1000


def test_mix64_is_splitmix64():
    assert int(mix64(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF  # first output of SplitMix64 seeded with 0


def test_a_tiny_temperature_is_almost_greedy_and_finite():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(4)) * 40
    tokens, logprobs = draw(
        logits, [SamplingParams(temperature=1e-6)] * 50, np.arange(50, dtype=np.uint64), np.zeros(50)
    )
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs, torch.zeros(50))
