"""Tokens are drawn from the distribution that is recorded."""

import random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from inflight_kernels import Filters, uniforms
from inflight_kernels.sampling import draw_reference
from sampler_cases import (
    ADJUSTMENTS,
    BAN,
    EOS,
    FILTERS,
    RECORDED,
    assert_chi_square,
    draw,
    draw_many,
    draws_of,
    entropy_of,
    expected_logprobs,
    make_sequence,
    mask_size,
    masks_by_row,
    new_sampler,
    randn,
    steps,
)
from tiny_models import run

from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.sampler import Sampler, _candidates
from inflight.engine.loop.sequence import sample_seed

# ---- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name):
    logits = randn(40, seed=2) * 2
    drawn = draw_many(logits, FILTERS[name])
    expected = expected_logprobs(logits, make_sequence(0, FILTERS[name]))
    torch.testing.assert_close(drawn.logprobs.double(), expected[drawn.tokens], atol=1e-5, rtol=0)
    assert_chi_square(drawn.tokens, expected)


@pytest.mark.medium
@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_draws_follow_the_adjusted_distribution(name):
    logits, tokens = randn(40, seed=3) * 2, [4, 30]
    drawn = draw_many(logits, ADJUSTMENTS[name], tokens, count=20_000)
    expected = expected_logprobs(logits, make_sequence(0, ADJUSTMENTS[name], tokens=tokens))
    torch.testing.assert_close(drawn.logprobs.double(), expected[drawn.tokens], atol=1e-5, rtol=0)
    assert_chi_square(drawn.tokens, expected)


def test_the_steps_come_in_the_documented_order():
    vocabulary, rng = 60, random.Random(0)
    sequences = []
    for row in range(200):
        params = SamplingParams(
            repetition_penalty=rng.choice([1.0, 1.5, 0.7]),
            logit_bias={rng.randrange(vocabulary): rng.choice([3.0, -2.0, BAN]) for _ in range(rng.randint(0, 8))},
            min_tokens=rng.choice([0, 3, 9]),
            stop_token_ids=(rng.randrange(vocabulary),),
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=rng.choice([0, 10, 30]),
            top_p=rng.choice([1.0, 0.9, 0.6]),
            min_p=rng.choice([0.0, 0.03]),
            top_logprobs=vocabulary,
        )
        tokens = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 6))]
        sequences.append(make_sequence(row, params, prompt=[EOS, rng.randrange(vocabulary)], tokens=tokens))
    logits = randn(200, vocabulary) * 3
    drawn = draw(logits, sequences)
    whole = torch.empty(200, vocabulary).scatter_(1, drawn.columns["top_token_ids"], drawn.columns["top_logprobs"])
    expected = torch.stack([expected_logprobs(row, s) for row, s in zip(logits, sequences, strict=True)])
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(drawn.logprobs, whole.gather(1, drawn.tokens[:, None])[:, 0], atol=1e-6, rtol=0)


def test_another_order_of_the_steps_would_be_seen():
    params = SamplingParams(
        repetition_penalty=1.3, logit_bias={2: 1.5}, min_tokens=3, temperature=0.6, top_k=10, top_p=0.8, min_p=0.05
    )
    sequence = make_sequence(0, params, tokens=[4, 30])
    ids = torch.tensor([sequence.token_ids()])
    logits_SV = randn(100, 40, seed=8).double() * 2
    expected = torch.stack([expected_logprobs(logits_V, sequence) for logits_V in logits_SV])
    for first, second in ((0, 1), (1, 3), (3, 5), (4, 5)):  # min_tokens may come before or after the temperature
        chain = steps(params, len(sequence.prompt))
        chain[first], chain[second] = chain[second], chain[first]
        swapped = torch.cat([torch.log_softmax(chain(ids, logits_V[None].clone()), -1) for logits_V in logits_SV])
        assert not torch.allclose(swapped, expected, atol=1e-3)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=3)])
def test_a_token_of_probability_zero_is_never_drawn(params):
    logits = torch.tensor([BAN, BAN, 0.0, BAN, 1.0])
    tokens = draw_many(logits, params, count=20_000).tokens
    assert sorted(set(tokens.tolist())) == [2, 4]


def test_greedy_records_the_unfiltered_logprob_at_temperature_one():
    logits = randn(6, 30) * 2
    logits[5, [4, 9]] = 20.0
    greedy = SamplingParams(
        temperature=0, top_k=1, top_p=0.1, return_entropy=True, top_logprobs=4, return_sampling_mask=True
    )
    sequences = [make_sequence(row, greedy if row % 2 else SamplingParams(top_k=2)) for row in range(6)]
    drawn = draw(logits, sequences)
    whole = torch.log_softmax(logits.double(), -1)[1::2]
    assert drawn.tokens[1::2].tolist() == logits[1::2].argmax(-1).tolist()
    assert drawn.tokens[5] == 4
    expected = whole.gather(1, drawn.tokens[1::2, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs[1::2].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.columns["entropies"][1::2].double(), entropy_of(whole), atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.columns["top_logprobs"][1::2, :4].double(), whole.topk(4)[0], atol=1e-5, rtol=0)
    assert masks_by_row(drawn) == {}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}])
def test_a_tiny_temperature_is_almost_greedy_and_finite(filters):
    logits = randn(50, 30, seed=4) * 40
    params = SamplingParams(temperature=1e-6, return_entropy=True, **filters)
    drawn = draw(logits, [make_sequence(row, params) for row in range(50)])
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    assert torch.allclose(drawn.logprobs, torch.zeros(50))
    assert torch.allclose(drawn.columns["entropies"], torch.zeros(50))


# ---- what is recorded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("company", ["alone", "with others", "all asking"])
def test_entropies_and_top_logprobs_are_those_of_the_distribution_drawn_from(company, dtype):
    others = [SamplingParams(), SamplingParams(top_k=30), SamplingParams(temperature=0), SamplingParams(min_p=0.3)]
    silent = {"alone": [], "with others": others, "all asking": RECORDED}[company]
    sequences = [make_sequence(row, params) for row, params in enumerate([*silent, *RECORDED, *silent])]
    logits = (randn(len(sequences), 50, seed=5) * 2).to(dtype)
    drawn = draw(logits, sequences)
    for row in range(len(silent), len(silent) + len(RECORDED)):
        top = sequences[row].params.top_logprobs
        expected = expected_logprobs(logits[row], sequences[row])
        assert drawn.columns["entropies"][row].item() == pytest.approx(entropy_of(expected).item(), abs=1e-5)
        assert len(set(drawn.columns["top_token_ids"][row, :top].tolist())) == top
        recorded = drawn.columns["top_logprobs"][row, :top].double()
        torch.testing.assert_close(recorded, expected.topk(top)[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(recorded, expected[drawn.columns["top_token_ids"][row, :top]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [50, 3000])
@pytest.mark.parametrize("filters", FILTERS)
def test_asking_changes_no_draw(filters, vocabulary):
    logits = randn(40, vocabulary) * 3
    params = FILTERS[filters]
    asking = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        top_logprobs=4, return_entropy=True, return_sampling_mask=True,
    )  # fmt: skip
    quiet = draw(logits, [make_sequence(row, params) for row in range(40)])
    asked = draw(logits, [make_sequence(row, asking) for row in range(40)])
    assert torch.equal(asked.tokens, quiet.tokens)
    assert torch.equal(asked.logprobs, quiet.logprobs)
    assert quiet.columns == {}


@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_the_mask_and_raw_logits_give_the_logprob_back(vocabulary):
    filters = [
        {"top_k": 6},
        {"top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 1.3},
        {"top_p": 0.9999},
    ]
    params = [SamplingParams(return_sampling_mask=row % 4 != 3, **filters[row % 5]) for row in range(100)]
    params[50:60] = [SamplingParams(return_sampling_mask=True)] * 10
    sequences = [make_sequence(row, p) for row, p in enumerate(params)]
    logits = randn(100, vocabulary, seed=6) * 3
    logits[::3] *= 0.1
    drawn = draw(logits, sequences)
    masks = masks_by_row(drawn)
    assert list(masks) == [row for row, p in enumerate(params) if p.return_sampling_mask and p.filtered]
    for row, token_ids in masks.items():
        scaled = logits[row].double() / params[row].temperature
        falling = torch.sort(torch.softmax(scaled, -1), descending=True)
        least, most = (mask_size(falling.values.numpy(), params[row], slack) for slack in (-1e-6, 1e-6))
        assert least <= len(token_ids) <= most
        assert set(token_ids) == set(falling.indices[: len(token_ids)].tolist())
        replayed = torch.log_softmax(scaled[token_ids], -1)
        token = token_ids.index(int(drawn.tokens[row]))
        assert replayed[token].item() == pytest.approx(drawn.logprobs[row].item(), abs=1e-5)


def test_a_banned_token_is_not_in_the_mask_and_adds_nothing_to_the_entropy():
    params = SamplingParams(
        top_k=4, logit_bias={0: BAN, 1: BAN, 2: BAN}, return_sampling_mask=True, return_entropy=True
    )
    logits, sequence = randn(1, 6), make_sequence(0, params)
    drawn = draw(logits, [sequence])
    assert sorted(masks_by_row(drawn)[0]) == [3, 4, 5]
    expected = entropy_of(expected_logprobs(logits[0], sequence)).item()
    assert drawn.columns["entropies"][0].item() == pytest.approx(expected, abs=1e-5)


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_uniforms_depend_on_seed_and_position_and_fill_the_interval():
    seeds = torch.arange(100_000)
    u, v = (uniforms(seeds, torch.full_like(seeds, position)).numpy() for position in (3, 4))
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.01


def test_sample_seeds_are_the_numbers_of_splitmix64():
    assert sample_seed(0, 0) % 2**64 == 0xE220A8397B1DCDAF  # the first two of Vigna's splitmix64.c
    assert sample_seed(0, 1) % 2**64 == 0x6E789E6AA1B965F4
    assert len({sample_seed(seed, sample) for seed in (7, 2**62) for sample in range(1000)}) == 2000
    assert all(-(2**63) <= sample_seed(2**63 - 1, sample) < 2**63 for sample in range(100))


def test_the_position_of_a_draw_counts_prompt_drawn_and_pending_tokens():
    logits = torch.zeros(1, 1000)
    for prompt, tokens, pending in ((5, 0, 1), (2, 3, 1), (2, 1, 3)):
        sequence = make_sequence(0, SamplingParams(), prompt=[1] * prompt, tokens=[1] * tokens)
        sequence.num_unread = pending
        expected = draw_reference(logits, torch.ones(1), torch.tensor([sequence.seed]), torch.tensor([5]))
        assert draw(logits, [sequence]).tokens == expected[0]


# ---- the mask's prefix -----------------------------------------------------------------------------------------------


@st.composite
def filtered_rows(draw):
    vocabulary = draw(st.integers(1, 40))
    levels = st.integers(-8, 0).map(lambda level: level / 2)
    scores = st.one_of(levels, st.floats(-30, 0, width=32))
    rows = draw(st.lists(st.lists(scores, min_size=vocabulary, max_size=vocabulary), min_size=1, max_size=4))
    params = st.builds(
        SamplingParams,
        top_k=st.one_of(st.just(0), st.integers(1, vocabulary + 5)),
        top_p=st.one_of(st.just(1.0), st.floats(0.001, 1)),
        min_p=st.one_of(st.just(0.0), st.floats(1e-4, 1)),
    )
    return torch.tensor(rows), draw(st.lists(params, min_size=len(rows), max_size=len(rows)))


def filters_of(params, vocabulary):
    return Filters(
        torch.arange(len(params)),
        torch.ones(len(params)),
        torch.tensor([p.top_k or vocabulary for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params]),
    )


@pytest.mark.medium
@given(rows=filtered_rows(), at_first=st.sampled_from([1, 3, 512]))
@example(rows=(torch.zeros(2, 28), [SamplingParams(top_p=0.06), SamplingParams(top_k=5, top_p=0.5)]), at_first=3)
def test_filters_keep_what_a_float64_restatement_keeps(rows, at_first):
    scores_FV, params = rows
    with mock.patch("inflight.engine.loop.sampler._MANY", at_first):
        sorted_FK, order_FK, mask_FK = _candidates(scores_FV, filters_of(params, scores_FV.shape[1]))
    assert torch.equal(sorted_FK, scores_FV.gather(1, order_FK))
    for row, p in enumerate(params):
        falling = np.sort(scores_FV[row].double().numpy())[::-1]
        probs = np.exp(falling - falling[0])
        probs /= probs.sum()
        count = int(mask_FK[row].sum())
        assert mask_size(probs, p, -1e-6) <= count <= mask_size(probs, p, 1e-6)
        assert mask_FK[row, :count].all()
        assert sorted_FK[row, :count].tolist() == falling[:count].tolist()
        assert len(set(order_FK[row].tolist())) == order_FK.shape[1]


@pytest.mark.parametrize("vocabulary", [2000, 3000])
def test_a_top_k_of_all_tokens_or_more_is_no_filter(vocabulary):
    """Also with more logits than the config's vocabulary."""
    logits = randn(1, 3000)
    for top_p, min_p in ((1.0, 1e-9), (0.2, 0.0), (0.9, 0.0)):
        masks = [
            masks_by_row(new_sampler(vocabulary, 1).sample(logits.clone(), draws_of([make_sequence(0, params)])))
            for top_k in (0, 3000, 2**31 - 1)
            for params in [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, return_sampling_mask=True)]
        ]
        assert masks[0] == masks[1] == masks[2]
        assert len(masks[0][0]) == 3000 or top_p < 1


# ---- kernel and reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_kernel_and_reference_draw_the_same_but_at_a_boundary(vocabulary, dtype, monkeypatch):
    changes = [{}, {"temperature": 0.5}, {"temperature": 0}, {"logit_bias": {4: BAN}}, {"top_p": 0.9}]
    params = [SamplingParams(return_entropy=True, top_logprobs=3, **changes[row % 5]) for row in range(300)]
    sequences = [make_sequence(row, p) for row, p in enumerate(params)]
    logits = (randn(300, vocabulary, seed=9) * 3).to(dtype)
    drawn = draw(logits, sequences)
    monkeypatch.setattr("inflight.engine.loop.sampler.draw", draw_reference)
    reference = draw(logits, sequences)
    for row in (drawn.tokens != reference.tokens).nonzero()[:, 0].tolist():
        cdf = expected_logprobs(logits[row], sequences[row]).exp().cumsum(-1)
        uniform = uniforms(torch.tensor([sequences[row].seed]), torch.tensor([3]))
        low, high = sorted((int(drawn.tokens[row]), int(reference.tokens[row])))
        assert params[row].temperature > 0
        assert not params[row].filtered
        assert (cdf[low:high] - uniform).abs().max() < 1e-5
    same = drawn.tokens == reference.tokens
    assert same.sum() > 290
    torch.testing.assert_close(drawn.logprobs[same], reference.logprobs[same], atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.columns["entropies"], reference.columns["entropies"], atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.columns["top_logprobs"], reference.columns["top_logprobs"], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("banned", [((40, 50),), ((0, 3), (48, 50)), tuple((i, i + 1) for i in range(0, 50, 2))])
def test_banned_ids_are_never_drawn(banned, dtype):
    sampler = Sampler(50, frozenset(), torch.zeros(64, dtype=torch.int64), banned=banned)
    ids = [token for begin, end in banned for token in range(begin, end)]
    sequences = [make_sequence(row, SamplingParams(seed=row)) for row in range(64)]
    logits = torch.zeros(64, 50, dtype=dtype)
    logits[:, ids] = 30.0
    drawn = set(sampler.sample(logits, draws_of(sequences)).tokens.tolist())
    assert drawn
    assert not drawn & set(ids)


@pytest.mark.parametrize("temperature", [1e-6, 1e38])
@pytest.mark.parametrize("penalty", [1e-6, 1e6])
@pytest.mark.parametrize("bias", [-3.4e38, -1e30, 1e26])
def test_the_largest_and_smallest_parameters_leave_logits_finite(make_engine, temperature, penalty, bias):
    params = SamplingParams(
        max_tokens=3, ignore_eos=True, temperature=temperature, repetition_penalty=penalty, logit_bias={3: bias}
    )
    [rollout] = run(make_engine("qwen3"), [Prompt([1, 2, 3], params)])
    assert rollout.finish_reason == "length"
    assert np.isfinite(rollout.logprobs).all()
