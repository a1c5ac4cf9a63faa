"""How likely the engine says that prompts are is what a full forward pass of Transformers says."""

import random

import numpy as np
import pytest
import torch
from full_forward import TOLERANCE
from tiny_models import VOCABULARY, make_model, run

from inflight.core.errors import InvalidRequestError
from inflight.core.messages import Prompt
from inflight.core.rollout import PromptScores
from inflight.core.sampling import SamplingParams
from inflight.stream.assembler import Assembler

ASKED = SamplingParams(max_tokens=4, temperature=0.7, top_k=5, seed=0, ignore_eos=True, prompt_logprobs=3)
PLAIN = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)


def ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@torch.no_grad()
def check(model, rollout) -> None:
    """Compare a rollout's scores with a full forward pass over its prompt."""
    prompt = torch.from_numpy(rollout.prompt_token_ids).long()
    expected = model(prompt[None]).logits[0, :-1].double().log_softmax(-1)
    own = expected.gather(1, prompt[1:, None])
    scores = rollout.prompt_scores
    assert np.abs(own[:, 0].numpy() - scores.logprobs).max(initial=0) < TOLERANCE
    assert ((expected > own).sum(-1) + 1).tolist() == scores.ranks.tolist()
    top = expected.topk(rollout.params.prompt_logprobs)
    assert scores.top_logprobs.shape == scores.top_token_ids.shape == (len(prompt) - 1, rollout.params.prompt_logprobs)
    assert np.abs(top.values.numpy() - scores.top_logprobs).max(initial=0) < TOLERANCE
    assert top.indices.tolist() == scores.top_token_ids.tolist()


@pytest.mark.medium
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fused": False},
        {"max_prefill_tokens": 20},
        {"kv_cache_tokens": 128, "max_prefill_tokens": 9},
        {"overlap": True},
    ],
    ids=["fused", "unfused", "chunked", "preempted", "overlapped"],
)
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_scores_equal_a_full_forward(make_engine, name, options):
    model = make_model(name)
    model.set_attn_implementation("eager")
    engine = make_engine(name, **options)
    counts = SamplingParams(max_tokens=30, n=3, seed=2, ignore_eos=True, prompt_logprobs=0)
    prompts = [Prompt(ids(40, seed), (ASKED, PLAIN, counts)[seed % 3]) for seed in range(9)]
    rollouts = run(engine, [*prompts, Prompt([5], ASKED)], arrivals=[0, 0, 0, 1, 2, 3, 5, 8, 13, 14])
    assert len(rollouts) == 16
    for rollout in rollouts:
        if rollout.params.prompt_logprobs is None:
            assert rollout.prompt_scores is None
        else:
            check(model, rollout)
    assert (engine.scheduler.preemption.count > 0) == ("kv_cache_tokens" in options)


def test_nobody_draws_otherwise_because_a_neighbours_prompt_is_scored(make_engine):
    beside = [Prompt(ids(30, seed), PLAIN) for seed in range(3)]
    plain = run(make_engine(), beside)
    scored = run(make_engine(), [*beside, Prompt(ids(50), ASKED)], arrivals=[0, 0, 0, 1])[:3]
    assert [r.token_ids.tolist() for r in plain] == [r.token_ids.tolist() for r in scored]


def test_a_prompt_that_the_prefix_cache_holds_is_scored_all_the_same(make_engine):
    engine = make_engine()
    first, second, third = (run(engine, [Prompt(ids(40), params)])[0] for params in (ASKED, ASKED, PLAIN))
    assert second.prefix_tokens == 0
    assert second.prompt_scores.logprobs.tolist() == first.prompt_scores.logprobs.tolist()
    assert third.prefix_tokens == 32  # it takes over what they computed


def test_a_fork_is_scored_with_what_its_parent_drew(make_engine):
    engine, assembler = make_engine(), Assembler()
    engine.requests.submit([Prompt(ids(20), PLAIN)])
    for _ in range(8):
        assembler.add(engine.step())
    engine.requests.fork(0, 5, ASKED)
    groups = []
    while engine.has_work:
        if (frame := engine.step()) is not None:
            groups += assembler.add(frame)
    [fork] = [rollout for [rollout] in groups if rollout.forked_from]
    assert len(fork.prompt_token_ids) == 25
    check(make_model("qwen3"), fork)


def count_scored(engine) -> list[int]:
    """The list that has the number of tokens that each pass scores."""
    scored = []
    forward = engine.runner.forward

    def count(schedule, slot):
        scored.append(schedule.num_scored)
        return forward(schedule, slot)

    engine.runner.forward = count
    return scored


def test_a_pass_scores_an_eighth_of_its_budget(make_engine):
    """The logits of all of them are computed, which take memory."""
    engine = make_engine(max_prefill_tokens=64)
    scored = count_scored(engine)
    run(engine, [Prompt(ids(40, seed), ASKED) for seed in range(4)])
    assert max(scored) == 8
    assert sum(scored) == 4 * 39


def test_samples_that_find_no_room_do_not_score_the_prompt_again(make_engine):
    engine = make_engine(max_sequences=2)
    scored = count_scored(engine)
    params = SamplingParams(max_tokens=3, n=7, seed=1, ignore_eos=True, prompt_logprobs=2)
    rollouts = run(engine, [Prompt(ids(40), params)])
    assert len(rollouts) == 7
    assert sum(scored) == 39
    for rollout in rollouts:
        check(make_model("qwen3"), rollout)


def test_a_fork_of_a_scored_sample_shares_what_was_computed(make_engine):
    engine = make_engine()
    engine.requests.submit([Prompt(ids(40), SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=2))])
    for _ in range(12):
        engine.step()
        if engine.requests.unfinished[0].tokens:
            break
    scored = count_scored(engine)
    engine.requests.fork(0)
    while engine.has_work:
        engine.step()
    assert sum(scored) == 0


def test_scores_of_logits_that_are_not_finite_are_known():
    scores = PromptScores.unknown(2, 1)
    assert not scores.known
    scores.ranks[:] = 1
    assert np.isnan(scores.logprobs).all()
    assert scores.known


def test_what_cannot_be_is_refused_by_name(make_engine):
    for wrong in (-1, 129):
        with pytest.raises(ValueError, match=rf"prompt_logprobs must be None or in \[0, 128\], got {wrong}"):
            SamplingParams(prompt_logprobs=wrong)
    engine = make_engine()
    most = engine.vocab_size
    if most < 128:
        with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
            engine.requests.submit([Prompt([1], SamplingParams(prompt_logprobs=most + 1))])
