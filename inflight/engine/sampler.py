"""Draws one token per row and the log-probability that it had.

The distribution is softmax(logits / temperature) restricted to what top-k, top-p and min-p keep, applied in that order,
each to the renormalised result of the one before. A draw inverts the cumulative distribution at one uniform number
per row, a hash of (seed, position): which other rows are in the batch does not matter.

N rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from inflight.core.sampling import SamplingParams

_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function over u64[n] (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    x = (x + _GOLDEN).astype(_U64)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one sample of a group."""
    return int(mix64(np.array([(seed + sample * int(_GOLDEN)) % 2**64], _U64))[0])


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """f32[n] in [0, 1) with 24 random bits each, from seeds u64[n] and positions [n]."""
    bits = mix64(seeds ^ mix64(positions.astype(_U64)))
    return ((bits >> _U64(40)).astype(np.float64) / 2**24).astype(np.float32)


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: np.ndarray, positions: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row: (token ids i64[N], log-probabilities f32[N]), both on the logits' device.

    logits [N, V] of any float dtype; seeds u64[N]; positions [N], the index in its sequence of the token drawn.
    """
    device = logits.device
    temperatures = torch.tensor([1.0 if p.greedy else p.temperature for p in params], device=device)
    logits = logits.float()
    scaled_NV = (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]  # small temperatures do not overflow
    uniform_N = torch.from_numpy(uniforms(seeds, positions)).to(device)
    filtered = [i for i, p in enumerate(params) if p.filtered]
    if len(filtered) == len(params):
        return _draw_filtered(scaled_NV, params, uniform_N)
    tokens_N, logprobs_N = _draw_plain(scaled_NV, params, uniform_N)
    if filtered:
        rows = torch.tensor(filtered, device=device)
        tokens_N[rows], logprobs_N[rows] = _draw_filtered(
            scaled_NV[rows], [params[i] for i in filtered], uniform_N[rows]
        )
    return tokens_N, logprobs_N


def _draw_plain(
    scaled_NV: torch.Tensor, params: Sequence[SamplingParams], uniform_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_NV = torch.log_softmax(scaled_NV, -1)
    tokens_N = _invert_cdf(logprobs_NV.exp(), uniform_N)
    if any(p.greedy for p in params):
        greedy_N = torch.tensor([p.greedy for p in params], device=scaled_NV.device)
        tokens_N = torch.where(greedy_N, scaled_NV.argmax(-1), tokens_N)
    return tokens_N, logprobs_NV.gather(1, tokens_N[:, None])[:, 0]


def _draw_filtered(
    scaled_NV: torch.Tensor, params: Sequence[SamplingParams], uniform_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """With tokens sorted by probability every filter keeps a prefix, so the kept set is the shortest of them."""
    sorted_NV, order_NV = torch.sort(scaled_NV, dim=-1, descending=True, stable=True)
    kept_NV = kept_prefix(torch.softmax(sorted_NV, -1), params)
    logprobs_NV = torch.log_softmax(sorted_NV.masked_fill(~kept_NV, float("-inf")), -1)
    rank_N = _invert_cdf(logprobs_NV.exp(), uniform_N)
    return order_NV.gather(1, rank_N[:, None])[:, 0], logprobs_NV.gather(1, rank_N[:, None])[:, 0]


def kept_prefix(probs_NV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """bool[N, V]: which of the tokens, sorted by falling probability, survive top-k, top-p and min-p."""
    vocabulary, device = probs_NV.shape[1], probs_NV.device
    top_k_N = torch.tensor([p.top_k or vocabulary for p in params], device=device)
    top_p_N = torch.tensor([p.top_p for p in params], device=device)
    min_p_N = torch.tensor([p.min_p for p in params], device=device)
    kept_NV = torch.arange(vocabulary, device=device) < top_k_N[:, None]
    kept_probs_NV = probs_NV * kept_NV
    before_NV = kept_probs_NV.cumsum(-1) - kept_probs_NV
    kept_NV &= (before_NV < top_p_N[:, None] * kept_probs_NV.sum(-1, keepdim=True)) | (top_p_N[:, None] >= 1)
    kept_NV &= probs_NV >= min_p_N[:, None] * probs_NV[:, :1]
    kept_NV[:, 0] = True
    return kept_NV


def _invert_cdf(probs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform share of the total, so never one of weight 0."""
    cdf_NV = probs_NV.cumsum(-1)
    total_N = cdf_NV[:, -1]
    target_N = torch.minimum(uniform_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    tokens_N = torch.searchsorted(cdf_NV, target_N[:, None], right=True)[:, 0]
    return tokens_N.clamp_(max=probs_NV.shape[1] - 1)  # only a row of NaN gets here; its request ends with an error
