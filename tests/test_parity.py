"""What the engine draws and records is what Transformers computes."""

import random

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCABULARY, make_model, run

from inflight.core.messages import Prompt
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams


def ragged_prompts(count: int, params: list[SamplingParams], seed: int = 0) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        Prompt([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))], params[index % len(params)])
        for index in range(count)
    ]


@torch.no_grad()
def full_forward_logprobs(model: torch.nn.Module, rollout: Rollout) -> np.ndarray:
    """Log-probabilities of the drawn tokens from one whole forward pass over prompt and answer."""
    ids = np.concatenate([rollout.prompt_token_ids, rollout.token_ids])
    logits = model(torch.from_numpy(ids).long()[None]).logits[0].double()
    logprobs = torch.log_softmax(logits / (rollout.params.temperature or 1.0), -1)
    start = len(rollout.prompt_token_ids) - 1
    return logprobs[torch.arange(start, len(ids) - 1), torch.from_numpy(rollout.token_ids).long()].numpy()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_logprobs_equal_a_full_forward(make_engine, name, device):
    model = make_model(name)
    model.set_attn_implementation("eager")
    params = [
        SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, n=n)
        for tokens, temperature, n in ((40, 1.0, 1), (3, 0.7, 2), (25, 1.3, 1), (11, 1.0, 3))
    ]
    prompts = ragged_prompts(24, params)
    arrivals = [random.Random(1).randrange(60) for _ in prompts]
    rollouts = run(make_engine(name, device=device), prompts, arrivals=arrivals)
    assert len(rollouts) == sum(prompt.params.n for prompt in prompts)
    worst = max(np.abs(full_forward_logprobs(model, r) - r.logprobs).max() for r in rollouts)
    assert worst < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_equals_generate(make_engine, name):
    model = make_model(name)
    prompts = ragged_prompts(12, [SamplingParams(max_tokens=30, temperature=0)], seed=3)
    rollouts = run(make_engine(name), prompts, arrivals=list(range(12)))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        assert rollout.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


def test_prompts_split_over_prefill_budgets_draw_the_same(make_engine):
    prompts = ragged_prompts(10, [SamplingParams(max_tokens=8, seed=5, ignore_eos=True)])
    whole = run(make_engine(max_prefill_tokens=8192), prompts)
    one_by_one = run(make_engine(max_prefill_tokens=1), prompts)
    assert [r.token_ids.tolist() for r in whole] == [r.token_ids.tolist() for r in one_by_one]


def test_same_seed_draws_the_same_tokens_in_any_company(make_engine):
    params = SamplingParams(max_tokens=40, seed=11, ignore_eos=True, n=2)
    prompt = Prompt([3, 1, 4, 1, 5], params)
    alone = run(make_engine(), [prompt])
    others = ragged_prompts(12, [SamplingParams(max_tokens=9, ignore_eos=True), SamplingParams(top_p=0.5)], seed=8)
    company = [*others[:6], prompt, *others[6:]]
    crowded = run(make_engine(), company, arrivals=[0, 0, 1, 3, 3, 5, 7, 7, 9, 11, 13, 20, 30])
    ours = [r for r in crowded if r.params.seed == 11]
    assert [r.token_ids.tolist() for r in ours] == [r.token_ids.tolist() for r in alone]
    assert alone[0].token_ids.tolist() != alone[1].token_ids.tolist()  # the samples of a group differ


def test_context_limit_ends_a_sample_with_length(make_engine):
    rollout = run(make_engine(max_context=16), [Prompt([1] * 10, SamplingParams(max_tokens=100, ignore_eos=True))])[0]
    assert (len(rollout.token_ids), rollout.finish_reason) == (6, "length")
