"""Sequences, filters and expected distributions for the tests of the sampler."""

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
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

from inflight.core.sampling import SamplingParams
from inflight.engine.loop.rows import is_plain
from inflight.engine.loop.sampler import Sampler, Samples
from inflight.engine.loop.sequence import Cohort, Draws, Sequence

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
RECORDED = [
    SamplingParams(return_entropy=True, top_logprobs=5),
    SamplingParams(return_entropy=True, top_logprobs=9, top_p=0.8),
    SamplingParams(return_entropy=True, top_logprobs=3, top_k=6, temperature=0.7),
    SamplingParams(return_entropy=True, top_logprobs=8, min_p=0.2, temperature=1.5),
    SamplingParams(return_entropy=True, top_logprobs=2, repetition_penalty=1.4, logit_bias={0: BAN}),
    SamplingParams(return_entropy=True, top_logprobs=1, temperature=0),
]


def make_sequence(
    row: int,
    params: SamplingParams,
    *,
    prompt: Seq[int] = (1, 2, 3),
    tokens: Seq[int] = (),
    batch_row: int | None = None,
) -> Sequence:
    """A sequence whose next token is scheduled, in a separate batch row."""
    return Sequence(
        request_id=row,
        group_id=row,
        sample=0,
        seed=row,
        prompt=list(prompt),
        params=params,
        max_tokens=params.max_tokens,
        tokens=list(tokens),
        num_unread=1,
        batch_row=row if batch_row is None else batch_row,
    )


def new_sampler(vocabulary: int, batch_rows: int) -> Sampler:
    return Sampler(vocabulary, frozenset({EOS}), torch.zeros(batch_rows, dtype=torch.int64))


def draws_of(sequences: Seq[Sequence]) -> Draws:
    """What a schedule says of sequences that draw after a chunk each."""
    params = [sequence.params for sequence in sequences]
    cohort = Cohort(
        epoch=0,
        sequences=list(sequences),
        appends=[s.tokens.append for s in sequences],
        rows=np.array([s.batch_row for s in sequences]),
        entered=np.ones(len(sequences), np.int64),
        request_ids=np.array([s.request_id for s in sequences], np.uint64),
        limits=np.array([len(s.prompt) + s.max_tokens for s in sequences]),
        stop_ids=np.full((1, len(sequences)), -1),
        watched=np.zeros(len(sequences), bool),
        seeds=np.array([s.seed for s in sequences], np.int64),
        temperatures=np.array([p.temperature for p in params], np.float32),
        special=[i for i, p in enumerate(params) if not is_plain(p)],
    )
    return Draws(cohort, np.arange(len(sequences)), np.array([s.length - 1 for s in sequences]))


def draw(logits: torch.Tensor, sequences: Seq[Sequence]) -> Samples:
    return new_sampler(logits.shape[1], 1 + max(s.batch_row for s in sequences)).sample(
        logits.clone(), draws_of(sequences)
    )


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


def masks_by_row(samples: Samples) -> dict[int, list[int]]:
    if "mask_counts" not in samples.columns:
        return {}
    pieces = samples.columns["mask_token_ids"].split(samples.columns["mask_counts"].tolist())
    return {row: piece.tolist() for row, piece in enumerate(pieces) if len(piece)}


def mask_size(probs: np.ndarray, params: SamplingParams, slack: float) -> int:
    """How many of the tokens, f64[V] by falling probability, the filters leave if their bounds give way by `slack`."""
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


def draw_many(logits_V: torch.Tensor, params: SamplingParams, tokens: Seq[int] = (), *, count: int = MANY) -> Samples:
    """Many draws from the same logits, with seeds 0, 1, …"""
    batch = 500
    sequences = [make_sequence(row, params, tokens=tokens) for row in range(batch)]
    drawn = []
    for first in range(0, count, batch):
        for row, sequence in enumerate(sequences):
            sequence.seed = first + row
        drawn.append(draw(logits_V.expand(batch, -1), sequences))
    return Samples(torch.cat([d.tokens for d in drawn]), torch.cat([d.logprobs for d in drawn]))
