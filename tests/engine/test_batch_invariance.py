"""What a row draws and records is its own, whoever else is in the batch, alone and through the engine."""

import math

import numpy as np
import pytest
import torch
from full_forward import TOLERANCE
from sampler_cases import (
    ADJUSTMENTS,
    BAN,
    EOS,
    FILTERS,
    RECORDED,
    draw,
    draws_of,
    entropy_of,
    expected_logprobs,
    make_sequence,
    masks_by_row,
    new_sampler,
    randn,
)
from tiny_models import VOCABULARY, make_model, run

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.loop.sampler import Sampler, Samples
from inflight.engine.loop.sequence import Sequence

# ---- rows beside each other ------------------------------------------------------------------------------------------


def assert_same_alone(logits: torch.Tensor, sequences: list[Sequence]) -> Samples:
    """Every row draws the same token, with the same numbers, in its batch, alone, and in half of the batch."""
    together = draw(logits, sequences)
    rows = range(len(sequences))
    for companions in (*([row] for row in rows), rows[::2], rows[1::2][::-1]):
        drawn = draw(logits[list(companions)], [sequences[row] for row in companions])
        mask, all_masks = masks_by_row(drawn), masks_by_row(together)
        for at, row in enumerate(companions):
            params = sequences[row].params
            assert drawn.tokens[at] == together.tokens[row]
            assert drawn.logprobs[at] == together.logprobs[row]
            assert mask.get(at) == all_masks.get(row)
            if params.return_entropy:
                assert drawn.columns["entropies"][at] == together.columns["entropies"][row]
            if top := params.top_logprobs:
                assert torch.equal(drawn.columns["top_logprobs"][at, :top], together.columns["top_logprobs"][row, :top])
    return together


def test_rows_with_different_parameters_do_not_disturb_each_other():
    params = [*FILTERS.values(), *ADJUSTMENTS.values(), *RECORDED, SamplingParams(temperature=0)]
    params = [p for p in params if not 0 < p.top_k < 16]  # those: a test below
    logits = randn(3 * len(params), 50, seed=7) * 2
    sequences = [make_sequence(row, p, tokens=[row]) for row, p in enumerate(params * 3)]
    assert_same_alone(logits, sequences)


@pytest.mark.parametrize("vocabulary", [700, 3000])
def test_the_draw_of_a_row_does_not_depend_on_which_rows_are_beside_it(vocabulary):
    filters = [
        {"top_p": 0.9999},
        {"top_p": 0.9, "return_sampling_mask": True},
        {"top_k": 10 * vocabulary, "return_sampling_mask": True},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 600},
        {"min_p": 0.001, "return_sampling_mask": True},
        {"return_entropy": True, "top_logprobs": 3},
    ]
    params = [SamplingParams(temperature=0.5 + row % 3, **filters[row % 7]) for row in range(56)]
    logits = randn(56, vocabulary, seed=8) * 5
    logits[1::2] *= 0.01
    drawn = assert_same_alone(logits, [make_sequence(row, p) for row, p in enumerate(params)])
    sizes = [len(mask) for mask in masks_by_row(drawn).values()]
    assert min(sizes) < 512 < max(sizes)


def test_a_bfloat16_row_draws_the_same_beside_rows_that_need_float32():
    logits = (randn(30, 3000) * 3).bfloat16()
    params = [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(logit_bias={5: 1.0})]
    assert_same_alone(logits, [make_sequence(row, params[row % 3]) for row in range(30)])


@pytest.mark.parametrize(
    "params",
    [
        (SamplingParams(top_p=0.9), SamplingParams(top_p=0.999)),
        (SamplingParams(top_k=50), SamplingParams(top_k=200)),
        (SamplingParams(top_k=50), SamplingParams(top_p=0.9)),
    ],
)
def test_tied_tokens_are_drawn_the_same_in_any_company(params):
    logits = (randn(200, 5000) * 4).bfloat16()
    logits[1::2] *= 0.1
    assert_same_alone(logits, [make_sequence(row, params[row % 2]) for row in range(200)])


def test_the_logprob_of_a_small_top_k_is_the_same_in_any_company():
    params = (SamplingParams(top_k=5), SamplingParams(top_k=200))
    assert_same_alone(randn(200, 500) * 4, [make_sequence(row, params[row % 2]) for row in range(200)])


def test_a_sampler_that_drew_before_draws_as_a_new_one_does():
    params = [*FILTERS.values(), *ADJUSTMENTS.values()]
    sequences = [make_sequence(row, p, tokens=[4]) for row, p in enumerate(params)]
    sampler = new_sampler(50, len(sequences))
    for step in range(8):
        drawing = sequences[step % 3 :] if step > 3 else sequences  # others join and leave
        logits = randn(len(drawing), 50, seed=step) * 2
        drawn, fresh = sampler.sample(logits.clone(), draws_of(drawing)), draw(logits, drawing)
        assert torch.equal(drawn.tokens, fresh.tokens)
        assert torch.equal(drawn.logprobs, fresh.logprobs)
        for sequence, token in zip(drawing, drawn.tokens.tolist(), strict=True):
            sequence.tokens.append(token)


def test_a_penalty_counts_tokens_that_are_not_read_yet():
    params = SamplingParams(temperature=0, repetition_penalty=100.0)
    sequence, sampler = make_sequence(0, params), new_sampler(50, 1)
    logits = torch.arange(50.0)[None] + 1
    drawn = []
    for _ in range(4):
        drawn.append(int(sampler.sample(logits.clone(), draws_of([sequence])).tokens[0]))
        sequence.num_unread += 1
    assert drawn == [49, 48, 47, 46]


def test_a_penalty_forgets_who_had_the_lane_before():
    params = SamplingParams(temperature=0, repetition_penalty=100.0)
    sampler, logits = new_sampler(50, 1), torch.arange(50.0)[None] + 1
    for epoch, request in enumerate((0, 1, 2, 2)):  # an id that is used again, too
        sequence = make_sequence(request, params, prompt=[epoch] * (1 + epoch), batch_row=0)
        draws = draws_of([sequence])
        draws.cohort.entered[:] = epoch + 1
        assert sampler.sample(logits.clone(), draws).tokens.tolist() == [49]


def test_a_penalty_holds_when_a_preempted_sequence_comes_back_to_its_first_lane():
    params = SamplingParams(temperature=0, repetition_penalty=100.0)
    sampler, sequence = new_sampler(50, 2), make_sequence(0, params)
    logits = torch.arange(50.0)[None] + 1
    for batch_row in (0, 1, 0, 1):
        sequence.batch_row = batch_row
        sequence.tokens += sampler.sample(logits.clone(), draws_of([sequence])).tokens.tolist()
    assert sequence.tokens == [49, 48, 47, 46]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_drawn_tokens_are_left_in_their_lanes(filters):
    last_tokens = torch.full((10,), -1)
    sequences = [make_sequence(batch_row, SamplingParams(**filters)) for batch_row in (8, 2, 5)]
    drawn = Sampler(50, frozenset(), last_tokens).sample(randn(3, 50), draws_of(sequences))
    assert last_tokens[[8, 2, 5]].tolist() == drawn.tokens.tolist()
    assert (last_tokens == -1).sum() == 7


# ---- rows without a distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_a_row_without_a_distribution_has_no_finite_logprob_and_leaves_the_others_alone(vocabulary):
    filters = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0}]
    params = [SamplingParams(**filters[row % 5], return_sampling_mask=True, top_logprobs=2) for row in range(60)]
    sequences = [make_sequence(row, p) for row, p in enumerate(params)]
    logits = randn(60, vocabulary) * 3
    expected = draw(logits, sequences)
    broken = logits.clone()
    broken[10:15, 3] = math.nan
    broken[20:25] = -math.inf
    broken[30:35, 8] = math.inf
    broken[40:45] = math.nan
    drawn = draw(broken, sequences)
    whole = torch.tensor([row // 5 not in (2, 4, 6, 8) for row in range(60)])
    assert torch.equal(drawn.logprobs.isfinite(), whole)
    assert torch.equal(drawn.tokens[whole], expected.tokens[whole])
    assert torch.equal(drawn.logprobs[whole], expected.logprobs[whole])
    assert torch.equal(drawn.columns["top_logprobs"][whole], expected.columns["top_logprobs"][whole])
    assert ((drawn.tokens >= 0) & (drawn.tokens < vocabulary)).all()


@pytest.mark.medium
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "return_sampling_mask": True}, {"temperature": 0}])
def test_a_request_with_everything_banned_ends_with_an_error_and_hurts_nobody(make_engine, filters):
    neighbours = [
        Prompt([1, 2, 3], SamplingParams(max_tokens=12, seed=1, ignore_eos=True)),
        Prompt([4, 5], SamplingParams(max_tokens=12, seed=2, ignore_eos=True, top_p=0.9)),
    ]
    banned = SamplingParams(logit_bias=dict.fromkeys(range(VOCABULARY), BAN), max_tokens=12, **filters)
    alone = run(make_engine(), neighbours)
    first, bad, second = run(make_engine(), [neighbours[0], Prompt([9, 9], banned), neighbours[1]])
    assert bad.finish_reason == "error"
    for rollout, expected in zip((first, second), alone, strict=True):
        assert rollout.finish_reason == "length"
        assert rollout.token_ids.tolist() == expected.token_ids.tolist()
        assert rollout.logprobs.tolist() == expected.logprobs.tolist()


def test_a_row_of_nan_ends_with_an_error_and_hurts_nobody(make_engine, monkeypatch):
    params = [SamplingParams(max_tokens=12, seed=row, ignore_eos=True, top_k=20 * (row % 2)) for row in range(4)]
    prompts = [Prompt([row + 1, 2, 3], p) for row, p in enumerate(params)]
    expected = run(make_engine(), prompts)
    engine = make_engine()
    forward = engine.runner.forward

    def poisoned(schedule, slot):
        logits = forward(schedule, slot).clone()
        for row, sequence in enumerate(schedule.draws.cohort.sequences):
            if sequence.request_id in (1, 2) and len(sequence.tokens) == 5:
                logits[row, 11] = math.nan
        return logits

    monkeypatch.setattr(engine.runner, "forward", poisoned)
    rollouts = run(engine, prompts)
    assert [r.finish_reason for r in rollouts] == ["length", "error", "error", "length"]
    for row in (0, 3):
        assert rollouts[row].token_ids.tolist() == expected[row].token_ids.tolist()
        assert rollouts[row].logprobs.tolist() == expected[row].logprobs.tolist()
    for row in (1, 2):
        assert len(rollouts[row].token_ids) == 6
        assert rollouts[row].token_ids[:5].tolist() == expected[row].token_ids[:5].tolist()


# ---- through the engine ----------------------------------------------------------------------------------------------


@torch.no_grad()
def full_logits(model: torch.nn.Module, rollout) -> torch.Tensor:
    """f32[T, V]: logits before each drawn token, from one forward pass over prompt and answer."""
    ids = np.concatenate([rollout.prompt_token_ids, rollout.token_ids])
    return model(torch.from_numpy(ids).long()[None]).logits[0, len(rollout.prompt_token_ids) - 1 : -1]


def test_a_rollouts_sampling_mask_and_a_full_forward_give_its_logprobs_back(make_engine):
    filters = [{"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.1, "temperature": 1.4}, {"top_p": 0.999}]
    params = [SamplingParams(return_sampling_mask=True, n=2, max_tokens=20, seed=i, **f) for i, f in enumerate(filters)]
    prompts = [Prompt([row + 1, 5, 9][: 1 + row % 3], params[row % 4]) for row in range(8)]
    prompts.append(Prompt([8, 8], SamplingParams(max_tokens=20, top_k=3)))
    rollouts = run(make_engine(), prompts, arrivals=[0, 1, 1, 4, 6, 6, 9, 12, 3])
    model = make_model("qwen3")
    for rollout in rollouts:
        mask = rollout.sampling_mask
        assert (mask is not None) == rollout.params.return_sampling_mask
        if mask is None:
            continue
        left = mask.split()
        assert len(left) == len(rollout.token_ids)
        for step, logits_V in enumerate(full_logits(model, rollout)):
            ids = left[step].tolist()
            replayed = torch.log_softmax(logits_V[ids].double() / rollout.params.temperature, -1)
            token = ids.index(rollout.token_ids[step])
            assert replayed[token].item() == pytest.approx(rollout.logprobs[step].item(), abs=TOLERANCE)


def test_what_a_rollout_recorded_equals_transformers_over_a_full_forward(make_engine):
    changes = [
        {"repetition_penalty": 1.3, "temperature": 0.8},
        {"repetition_penalty": 1.2, "top_p": 0.9, "min_tokens": 10, "stop_token_ids": (50, 60)},
        {"logit_bias": {3: 4.0, 90: BAN, EOS: 2.0}, "min_tokens": 6, "top_k": 30},
        {"temperature": 0, "repetition_penalty": 1.5},
    ]
    params = [
        SamplingParams(n=2, max_tokens=24, seed=i, return_entropy=True, top_logprobs=i + 2, **c)
        for i, c in enumerate(changes)
    ]
    prompts = [Prompt([row + 1, 5, 9, 5], params[row % 4]) for row in range(8)]
    prompts.append(Prompt([8, 8], SamplingParams(max_tokens=24)))
    rollouts = run(make_engine(), prompts, arrivals=[0, 1, 1, 4, 6, 6, 9, 12, 2])
    model = make_model("qwen3")
    [quiet] = [rollout for rollout in rollouts if not rollout.params.top_logprobs]
    assert (quiet.columns, quiet.sampling_mask) == ({}, None)
    for rollout in (rollout for rollout in rollouts if rollout is not quiet):
        sequence = make_sequence(0, rollout.params, prompt=rollout.prompt_token_ids.tolist())
        for step, logits_V in enumerate(full_logits(model, rollout)):
            expected = expected_logprobs(logits_V, sequence)
            token = int(rollout.token_ids[step])
            top = rollout.columns["top_token_ids"][step].tolist()
            assert expected[token].item() == pytest.approx(rollout.logprobs[step].item(), abs=TOLERANCE)
            assert entropy_of(expected).item() == pytest.approx(
                rollout.columns["entropies"][step].item(), abs=TOLERANCE
            )
            assert len(top) == rollout.params.top_logprobs
            assert expected[top].tolist() == pytest.approx(
                rollout.columns["top_logprobs"][step].tolist(), abs=TOLERANCE
            )
            assert rollout.columns["top_logprobs"][step, 0] == pytest.approx(expected.max().item(), abs=TOLERANCE)
            sequence.tokens.append(token)


def test_a_pass_ahead_of_the_host_draws_the_same(make_engine, model_dir):
    params = [
        SamplingParams(max_tokens=20, seed=1, repetition_penalty=1.4, n=2),
        SamplingParams(max_tokens=20, seed=2, min_tokens=8, logit_bias={EOS: 4.0, 3: BAN}),
        SamplingParams(
            max_tokens=20, seed=3, top_p=0.9, return_entropy=True, top_logprobs=2, return_sampling_mask=True
        ),
        SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(5, 6)),
    ]
    prompts = [Prompt([row + 1, 2, 3], params[row % 4]) for row in range(12)]
    arrivals = [0, 0, 1, 2, 4, 4, 4, 7, 9, 9, 12, 20]
    expected = run(make_engine(), prompts, arrivals=arrivals)
    options = EngineOptions(model=model_dir("qwen3"), device="cpu", max_sequences=8, max_context=128)
    with Engine(options, overlap=True) as ahead:
        rollouts = run(ahead, prompts, arrivals=arrivals)
    for rollout, other in zip(rollouts, expected, strict=True):
        assert rollout.finish_reason == other.finish_reason
        np.testing.assert_array_equal(rollout.token_ids, other.token_ids)
        np.testing.assert_array_equal(rollout.logprobs, other.logprobs)
        np.testing.assert_equal(rollout.columns, other.columns)
        assert (rollout.sampling_mask is None) == (other.sampling_mask is None) == (rollout.params.top_p == 1)
        if other.sampling_mask is not None:
            np.testing.assert_array_equal(rollout.sampling_mask.token_ids, other.sampling_mask.token_ids)
            np.testing.assert_array_equal(rollout.sampling_mask.offsets, other.sampling_mask.offsets)


def test_whether_a_rollout_has_a_sampling_mask_does_not_depend_on_its_company(make_engine):
    ours = Prompt([1, 2], SamplingParams(return_sampling_mask=True, max_tokens=5, seed=1, ignore_eos=True))
    other = Prompt([1, 2], SamplingParams(return_sampling_mask=True, max_tokens=5, top_k=3, ignore_eos=True))
    [alone], [beside, _] = run(make_engine(), [ours]), run(make_engine(), [ours, other])
    assert alone.sampling_mask is None
    assert beside.sampling_mask is None
