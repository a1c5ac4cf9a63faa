"""Tokens are drawn from the distribution that is recorded, whoever else is in the batch."""

import math
import random
from collections.abc import Sequence as Seq
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, make_model, run
from hypothesis import example, given
from hypothesis import strategies as st
from inflight_kernels import uniforms
from inflight_kernels.sampling import draw_reference
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.engine import Engine
from inflight.engine.sampler import Drawn, Sampler, _candidates, sample_seed
from inflight.engine.scheduler import Sequence

EOS = 7
BAN = -math.inf
MANY = 100_000

FILTERS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.4, top_k=12, top_p=0.8, min_p=0.05),
}
ADJUSTMENTS = {
    "repetition_penalty": SamplingParams(repetition_penalty=1.7),
    "small repetition_penalty": SamplingParams(repetition_penalty=0.6),
    "logit_bias": SamplingParams(logit_bias={3: 2.5, 11: BAN, 20: -1.0}),
    "min_tokens": SamplingParams(min_tokens=3, stop_token_ids=(9,)),
    "min_tokens that are drawn": SamplingParams(min_tokens=2, stop_token_ids=(9,)),
    "min_tokens and ignore_eos": SamplingParams(min_tokens=3, stop_token_ids=(9,), ignore_eos=True),
    "every step": SamplingParams(
        repetition_penalty=1.3,
        logit_bias={2: 1.5, 5: BAN},
        min_tokens=3,
        stop_token_ids=(9,),
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
    ),
}


def make_sequence(
    row: int, params: SamplingParams, *, prompt: Seq[int] = (1, 2, 3), tokens: Seq[int] = (), lane: int | None = None
) -> Sequence:
    """A sequence whose next token is scheduled, in a lane of its own."""
    return Sequence(
        request_id=row,
        group_id=row,
        sample=0,
        seed=row,
        prompt=list(prompt),
        params=params,
        max_tokens=params.max_tokens,
        tokens=list(tokens),
        num_pending=1,
        lane=row if lane is None else lane,
    )


def new_sampler(vocabulary: int, lanes: int) -> Sampler:
    return Sampler(vocabulary, frozenset({EOS}), torch.zeros(lanes, dtype=torch.int64))


def draw(logits: torch.Tensor, sequences: Seq[Sequence]) -> Drawn:
    return new_sampler(logits.shape[1], 1 + max(s.lane for s in sequences)).draw(logits, sequences)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def steps(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """Transformers' own processors, in the order that SamplingParams documents."""
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()}))
    ends = [*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]
    if params.min_tokens and ends:
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, ends, device="cpu"))
    if params.greedy:
        return chain
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain


def expected_logprobs(logits_V: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """f64[V]: log-probabilities of a sequence's next token, by Transformers."""
    ids = torch.tensor([sequence.token_ids()])
    scores = steps(sequence.params, len(sequence.prompt))(ids, logits_V.double()[None].clone())
    return torch.log_softmax(scores, -1)[0]


def entropy_of(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp() * logprobs.nan_to_num(neginf=0)).sum(-1)


def kept_by_row(drawn: Drawn) -> dict[int, list[int]]:
    if drawn.kept_counts is None:
        return {}
    pieces = drawn.kept_token_ids.split(drawn.kept_counts.tolist())
    return {row: piece.tolist() for row, piece in zip(drawn.kept_rows, pieces, strict=True)}


def kept_count(probs: np.ndarray, params: SamplingParams, slack: float) -> int:
    """How many of the tokens, f64[V] by falling probability, the filters keep if their bounds give way by `slack`."""
    probs = probs[: params.top_k or len(probs)]
    probs = probs / probs.sum()
    if params.top_p < 1:
        probs = probs[: max(1, (probs.cumsum() - probs < params.top_p + slack).sum())]
    return max(1, (probs >= params.min_p * probs[0] * (1 - slack)).sum())


def assert_chi_square(tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
    """Tokens are as frequent as their probabilities say; tokens that should come up less than five times are pooled."""
    expected = logprobs.exp() * len(tokens)
    counts = tokens.bincount(minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    there = expected > 0
    chi_square = ((counts - expected)[there] ** 2 / expected[there]).sum()
    degrees = there.sum().double() - 1
    assert torch.special.gammaincc(degrees / 2, chi_square / 2) > 1e-4


def draw_many(logits_V: torch.Tensor, params: SamplingParams, tokens: Seq[int] = (), *, count: int = MANY) -> Drawn:
    """Many draws from the same logits, with seeds 0, 1, …"""
    batch = 500
    sequences = [make_sequence(row, params, tokens=tokens) for row in range(batch)]
    drawn = []
    for first in range(0, count, batch):
        for row, sequence in enumerate(sequences):
            sequence.seed = first + row
        drawn.append(draw(logits_V.expand(batch, -1), sequences))
    return Drawn(torch.cat([d.tokens for d in drawn]), torch.cat([d.logprobs for d in drawn]))


# ---- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name):
    logits = randn(40, seed=2) * 2
    drawn = draw_many(logits, FILTERS[name])
    expected = expected_logprobs(logits, make_sequence(0, FILTERS[name]))
    torch.testing.assert_close(drawn.logprobs.double(), expected[drawn.tokens], atol=1e-5, rtol=0)
    assert_chi_square(drawn.tokens, expected)


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
    whole = torch.empty(200, vocabulary).scatter_(1, drawn.top_token_ids, drawn.top_logprobs)
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
    greedy = SamplingParams(temperature=0, top_k=1, top_p=0.1, return_entropy=True, top_logprobs=4, return_kept=True)
    sequences = [make_sequence(row, greedy if row % 2 else SamplingParams(top_k=2)) for row in range(6)]
    drawn = draw(logits, sequences)
    whole = torch.log_softmax(logits.double(), -1)[1::2]
    assert drawn.tokens[1::2].tolist() == logits[1::2].argmax(-1).tolist()
    assert drawn.tokens[5] == 4
    expected = whole.gather(1, drawn.tokens[1::2, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs[1::2].double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.entropies[1::2].double(), entropy_of(whole), atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.top_logprobs[1::2, :4].double(), whole.topk(4)[0], atol=1e-5, rtol=0)
    assert kept_by_row(drawn) == {}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}])
def test_a_tiny_temperature_is_almost_greedy_and_finite(filters):
    logits = randn(50, 30, seed=4) * 40
    params = SamplingParams(temperature=1e-6, return_entropy=True, **filters)
    drawn = draw(logits, [make_sequence(row, params) for row in range(50)])
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    assert torch.allclose(drawn.logprobs, torch.zeros(50))
    assert torch.allclose(drawn.entropies, torch.zeros(50))


# ---- what is recorded ------------------------------------------------------------------------------------------------

RECORDED = [
    SamplingParams(return_entropy=True, top_logprobs=5),
    SamplingParams(return_entropy=True, top_logprobs=9, top_p=0.8),
    SamplingParams(return_entropy=True, top_logprobs=3, top_k=6, temperature=0.7),
    SamplingParams(return_entropy=True, top_logprobs=8, min_p=0.2, temperature=1.5),
    SamplingParams(return_entropy=True, top_logprobs=2, repetition_penalty=1.4, logit_bias={0: BAN}),
    SamplingParams(return_entropy=True, top_logprobs=1, temperature=0),
]


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
        assert drawn.entropies[row].item() == pytest.approx(entropy_of(expected).item(), abs=1e-5)
        assert len(set(drawn.top_token_ids[row, :top].tolist())) == top
        recorded = drawn.top_logprobs[row, :top].double()
        torch.testing.assert_close(recorded, expected.topk(top)[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(recorded, expected[drawn.top_token_ids[row, :top]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [50, 3000])
@pytest.mark.parametrize("filters", FILTERS)
def test_asking_changes_no_draw(filters, vocabulary):
    logits = randn(40, vocabulary) * 3
    params = FILTERS[filters]
    asking = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        top_logprobs=4, return_entropy=True, return_kept=True,
    )  # fmt: skip
    quiet = draw(logits, [make_sequence(row, params) for row in range(40)])
    asked = draw(logits, [make_sequence(row, asking) for row in range(40)])
    assert torch.equal(asked.tokens, quiet.tokens)
    assert torch.equal(asked.logprobs, quiet.logprobs)
    assert (quiet.entropies, quiet.top_logprobs, quiet.kept_counts) == (None, None, None)


@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_kept_tokens_and_raw_logits_give_the_logprob_back(vocabulary):
    filters = [
        {"top_k": 6},
        {"top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 1.3},
        {"top_p": 0.9999},
    ]
    params = [SamplingParams(return_kept=row % 4 != 3, **filters[row % 5]) for row in range(100)]
    params[50:60] = [SamplingParams(return_kept=True)] * 10
    sequences = [make_sequence(row, p) for row, p in enumerate(params)]
    logits = randn(100, vocabulary, seed=6) * 3
    logits[::3] *= 0.1
    drawn = draw(logits, sequences)
    kept = kept_by_row(drawn)
    assert list(kept) == [row for row, p in enumerate(params) if p.return_kept and p.filtered]
    for row, token_ids in kept.items():
        scaled = logits[row].double() / params[row].temperature
        falling = torch.sort(torch.softmax(scaled, -1), descending=True)
        least, most = (kept_count(falling.values.numpy(), params[row], slack) for slack in (-1e-6, 1e-6))
        assert least <= len(token_ids) <= most
        assert set(token_ids) == set(falling.indices[: len(token_ids)].tolist())
        replayed = torch.log_softmax(scaled[token_ids], -1)
        token = token_ids.index(int(drawn.tokens[row]))
        assert replayed[token].item() == pytest.approx(drawn.logprobs[row].item(), abs=1e-5)


def test_a_banned_token_is_not_kept_and_adds_nothing_to_the_entropy():
    params = SamplingParams(top_k=4, logit_bias={0: BAN, 1: BAN, 2: BAN}, return_kept=True, return_entropy=True)
    logits, sequence = randn(1, 6), make_sequence(0, params)
    drawn = draw(logits, [sequence])
    assert sorted(kept_by_row(drawn)[0]) == [3, 4, 5]
    expected = entropy_of(expected_logprobs(logits[0], sequence)).item()
    assert drawn.entropies[0].item() == pytest.approx(expected, abs=1e-5)


# ---- rows beside each other ------------------------------------------------------------------------------------------


def assert_same_alone(logits: torch.Tensor, sequences: list[Sequence]) -> Drawn:
    """Every row draws the same token, with the same numbers, in its batch, alone, and in half of the batch."""
    together = draw(logits, sequences)
    rows = range(len(sequences))
    for companions in (*([row] for row in rows), rows[::2], rows[1::2][::-1]):
        drawn = draw(logits[list(companions)], [sequences[row] for row in companions])
        kept, all_kept = kept_by_row(drawn), kept_by_row(together)
        for at, row in enumerate(companions):
            params = sequences[row].params
            assert drawn.tokens[at] == together.tokens[row]
            assert drawn.logprobs[at] == together.logprobs[row]
            assert kept.get(at) == all_kept.get(row)
            if params.return_entropy:
                assert drawn.entropies[at] == together.entropies[row]
            if top := params.top_logprobs:
                assert torch.equal(drawn.top_logprobs[at, :top], together.top_logprobs[row, :top])
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
        {"top_p": 0.9, "return_kept": True},
        {"top_k": 10 * vocabulary, "return_kept": True},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 600},
        {"min_p": 0.001, "return_kept": True},
        {"return_entropy": True, "top_logprobs": 3},
    ]
    params = [SamplingParams(temperature=0.5 + row % 3, **filters[row % 7]) for row in range(56)]
    logits = randn(56, vocabulary, seed=8) * 5
    logits[1::2] *= 0.01
    drawn = assert_same_alone(logits, [make_sequence(row, p) for row, p in enumerate(params)])
    assert drawn.kept_counts.min() < 512 < drawn.kept_counts.max()


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
        drawn, fresh = sampler.draw(logits, drawing), draw(logits, drawing)
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
        drawn.append(int(sampler.draw(logits, [sequence]).tokens[0]))
        sequence.num_pending += 1
    assert drawn == [49, 48, 47, 46]


def test_a_penalty_forgets_who_had_the_lane_before():
    params = SamplingParams(temperature=0, repetition_penalty=100.0)
    sampler, logits = new_sampler(50, 1), torch.arange(50.0)[None] + 1
    for request in range(3):
        sequence = make_sequence(request, params, prompt=[request], lane=0)
        assert sampler.draw(logits, [sequence]).tokens.tolist() == [49]


def test_a_penalty_holds_when_a_preempted_sequence_comes_back_to_its_first_lane():
    params = SamplingParams(temperature=0, repetition_penalty=100.0)
    sampler, sequence = new_sampler(50, 2), make_sequence(0, params)
    logits = torch.arange(50.0)[None] + 1
    for lane in (0, 1, 0, 1):
        sequence.lane = lane
        sequence.tokens += sampler.draw(logits, [sequence]).tokens.tolist()
    assert sequence.tokens == [49, 48, 47, 46]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_drawn_tokens_are_left_in_their_lanes(filters):
    last_tokens = torch.full((10,), -1)
    sequences = [make_sequence(lane, SamplingParams(**filters)) for lane in (8, 2, 5)]
    drawn = Sampler(50, frozenset(), last_tokens).draw(randn(3, 50), sequences)
    assert last_tokens[[8, 2, 5]].tolist() == drawn.tokens.tolist()
    assert (last_tokens == -1).sum() == 7


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
        sequence.num_pending = pending
        expected = draw_reference(logits, torch.ones(1), torch.tensor([sequence.seed]), torch.tensor([5]))
        assert draw(logits, [sequence]).tokens == expected[0]


# ---- the kept prefix -------------------------------------------------------------------------------------------------


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


@given(rows=filtered_rows(), at_first=st.sampled_from([1, 3, 512]))
@example(rows=(torch.zeros(2, 28), [SamplingParams(top_p=0.06), SamplingParams(top_k=5, top_p=0.5)]), at_first=3)
def test_filters_keep_what_a_float64_restatement_keeps(rows, at_first):
    scores_FV, params = rows
    with mock.patch("inflight.engine.sampler._MANY", at_first):
        sorted_FK, order_FK, kept_FK = _candidates(scores_FV, params)
    assert torch.equal(sorted_FK, scores_FV.gather(1, order_FK))
    for row, p in enumerate(params):
        falling = np.sort(scores_FV[row].double().numpy())[::-1]
        probs = np.exp(falling - falling[0])
        probs /= probs.sum()
        count = int(kept_FK[row].sum())
        assert kept_count(probs, p, -1e-6) <= count <= kept_count(probs, p, 1e-6)
        assert kept_FK[row, :count].all()
        assert sorted_FK[row, :count].tolist() == falling[:count].tolist()
        assert len(set(order_FK[row].tolist())) == order_FK.shape[1]


# ---- rows without a distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_a_row_without_a_distribution_has_no_finite_logprob_and_leaves_the_others_alone(vocabulary):
    filters = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0}]
    params = [SamplingParams(**filters[row % 5], return_kept=True, top_logprobs=2) for row in range(60)]
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
    assert torch.equal(drawn.top_logprobs[whole], expected.top_logprobs[whole])
    assert ((drawn.tokens >= 0) & (drawn.tokens < vocabulary)).all()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "return_kept": True}, {"temperature": 0}])
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
        for row, (sequence, _) in enumerate(schedule.draws):
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


# ---- kernel and reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_kernel_and_reference_draw_the_same_but_at_a_boundary(vocabulary, dtype, monkeypatch):
    changes = [{}, {"temperature": 0.5}, {"temperature": 0}, {"logit_bias": {4: BAN}}, {"top_p": 0.9}]
    params = [SamplingParams(return_entropy=True, top_logprobs=3, **changes[row % 5]) for row in range(300)]
    sequences = [make_sequence(row, p) for row, p in enumerate(params)]
    logits = (randn(300, vocabulary, seed=9) * 3).to(dtype)
    drawn = draw(logits, sequences)
    monkeypatch.setattr("inflight.engine.sampler.draw", draw_reference)
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
    torch.testing.assert_close(drawn.entropies, reference.entropies, atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn.top_logprobs, reference.top_logprobs, atol=1e-5, rtol=1e-6)


# ---- through the engine ----------------------------------------------------------------------------------------------


@torch.no_grad()
def full_logits(model: torch.nn.Module, rollout) -> torch.Tensor:
    """f32[T, V]: logits before each drawn token, from one forward pass over prompt and answer."""
    ids = np.concatenate([rollout.prompt_token_ids, rollout.token_ids])
    return model(torch.from_numpy(ids).long()[None]).logits[0, len(rollout.prompt_token_ids) - 1 : -1]


def test_a_rollouts_kept_tokens_and_a_full_forward_give_its_logprobs_back(make_engine):
    filters = [{"top_k": 5}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.1, "temperature": 1.4}, {"top_p": 0.999}]
    params = [SamplingParams(return_kept=True, n=2, max_tokens=20, seed=i, **f) for i, f in enumerate(filters)]
    prompts = [Prompt([row + 1, 5, 9][: 1 + row % 3], params[row % 4]) for row in range(8)]
    prompts.append(Prompt([8, 8], SamplingParams(max_tokens=20, top_k=3)))
    rollouts = run(make_engine(), prompts, arrivals=[0, 1, 1, 4, 6, 6, 9, 12, 3])
    model = make_model("qwen3")
    for rollout in rollouts:
        offsets = rollout.kept_offsets
        assert (offsets is not None) == rollout.params.return_kept
        if offsets is None:
            continue
        assert len(offsets) == len(rollout.token_ids) + 1
        for step, logits_V in enumerate(full_logits(model, rollout)):
            kept = rollout.kept_token_ids[offsets[step] : offsets[step + 1]].tolist()
            replayed = torch.log_softmax(logits_V[kept].double() / rollout.params.temperature, -1)
            token = kept.index(rollout.token_ids[step])
            assert replayed[token].item() == pytest.approx(rollout.logprobs[step].item(), abs=1e-5)


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
    assert (quiet.entropies, quiet.top_token_ids, quiet.top_logprobs, quiet.kept_offsets) == (None, None, None, None)
    for rollout in (rollout for rollout in rollouts if rollout is not quiet):
        sequence = make_sequence(0, rollout.params, prompt=rollout.prompt_token_ids.tolist())
        for step, logits_V in enumerate(full_logits(model, rollout)):
            expected = expected_logprobs(logits_V, sequence)
            token = int(rollout.token_ids[step])
            top = rollout.top_token_ids[step].tolist()
            assert expected[token].item() == pytest.approx(rollout.logprobs[step].item(), abs=1e-5)
            assert entropy_of(expected).item() == pytest.approx(rollout.entropies[step].item(), abs=1e-5)
            assert len(top) == rollout.params.top_logprobs
            assert expected[top].tolist() == pytest.approx(rollout.top_logprobs[step].tolist(), abs=1e-5)
            assert rollout.top_logprobs[step, 0] == pytest.approx(expected.max().item(), abs=1e-5)
            sequence.tokens.append(token)


def test_a_pass_ahead_of_the_host_draws_the_same(make_engine, model_dir):
    params = [
        SamplingParams(max_tokens=20, seed=1, repetition_penalty=1.4, n=2),
        SamplingParams(max_tokens=20, seed=2, min_tokens=8, logit_bias={EOS: 4.0, 3: BAN}),
        SamplingParams(max_tokens=20, seed=3, top_p=0.9, return_entropy=True, top_logprobs=2, return_kept=True),
        SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(5, 6)),
    ]
    prompts = [Prompt([row + 1, 2, 3], params[row % 4]) for row in range(12)]
    arrivals = [0, 0, 1, 2, 4, 4, 4, 7, 9, 9, 12, 20]
    expected = run(make_engine(), prompts, arrivals=arrivals)
    options = EngineOptions(model=model_dir("qwen3"), device="cpu", max_sequences=8, max_context=128)
    with Engine(options, overlap=True) as ahead:
        rollouts = run(ahead, prompts, arrivals=arrivals)
    columns = ("token_ids", "logprobs", "entropies", "top_token_ids", "top_logprobs", "kept_offsets", "kept_token_ids")
    for rollout, other in zip(rollouts, expected, strict=True):
        assert rollout.finish_reason == other.finish_reason
        for column in columns:
            np.testing.assert_array_equal(getattr(rollout, column), getattr(other, column))


def test_what_a_rollout_tells_of_kept_tokens_does_not_depend_on_its_company(make_engine):
    ours = Prompt([1, 2], SamplingParams(return_kept=True, max_tokens=5, seed=1, ignore_eos=True))
    other = Prompt([1, 2], SamplingParams(return_kept=True, max_tokens=5, top_k=3, ignore_eos=True))
    [alone], [beside, _] = run(make_engine(), [ours]), run(make_engine(), [ours, other])
    assert alone.kept_offsets is None
    assert beside.kept_offsets is None
