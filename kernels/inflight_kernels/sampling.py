"""Draws one token per row from softmax(logits / temperature), with its log-probability.

A draw inverts the cumulative distribution at one uniform number per row, a hash of (seed, position). The other rows of
the batch have no effect. The vocabulary is cut into blocks. One pass over the logits sums the weights w = exp((logit −
row maximum) / temperature) of each block. The block sums decide the block of the draw, and only that block is summed
token by token.

M rows, V vocabulary, B blocks, W tokens in a block.
"""

import math

import torch
import torch.nn.functional as F

from inflight_kernels import _cpu

BLOCK = 1024  # tokens; below that, one block

# SplitMix64's constants (Steele, Lea and Flood 2014), as the i64 of the same bits.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return f32[M] in [0, 1) with 24 random bits each, from seeds i64[M] (the bits of a u64) and positions i64[M], on
    their device: the upper bits of mix64(seed ^ mix64(position)), mix64 the output function of SplitMix64 (Steele, Lea
    and Flood 2014, "Fast splittable pseudorandom number generators")."""
    return _shift(_mix64(seeds ^ _mix64(positions)), 40).float() / 2**24


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw one token per row: (tokens i64[M], log-probabilities f32[M], entropies f32[M] in nats or None).

    logits [M, V] of any float dtype; temperatures f32[M], where 0 takes the largest logit, the first of equals, and its
    log-probability (and entropy) at temperature 1; seeds i64[M]; positions i64[M], the index of the drawn token in its
    sequence. Tokens of weight 0 are not drawn. A row with a NaN or +inf, or with only −inf, has a log-probability of
    NaN and any token of the vocabulary. Raises ValueError if the shapes do not fit.
    """
    rows = logits.shape[:1]
    if logits.ndim != 2 or not logits.shape[1] or any(t.shape != rows for t in (temperatures, seeds, positions)):
        raise ValueError(
            f"expected logits [M, V > 0], temperatures [M], seeds [M] and positions [M], got {list(logits.shape)}, "
            f"{list(temperatures.shape)}, {list(seeds.shape)} and {list(positions.shape)}"
        )
    temperatures = temperatures.float().contiguous()
    if logits.is_cuda:
        from inflight_kernels import _sampling_triton

        return _sampling_triton.draw(logits, temperatures, seeds, positions, entropy, BLOCK)
    if _cpu.takes(logits):
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        entropies = torch.empty(rows, dtype=torch.float32) if entropy else None
        ran = _cpu.call(
            "draw", logits, logits.stride(0), logits.dtype == torch.bfloat16, *logits.shape, temperatures,
            uniforms(seeds, positions), tokens, logprobs, entropies,
        )  # fmt: skip
        if ran:
            return tokens, logprobs, entropies
    return draw_reference(logits, temperatures, seeds, positions, entropy=entropy)


def draw_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw as `draw` does, in plain PyTorch."""
    rows, vocabulary = logits.shape
    width = min(BLOCK, vocabulary)
    logits_MV = logits.float()
    peak_M1 = logits_MV.amax(-1, keepdim=True)
    greedy_M1 = (temperatures == 0)[:, None]
    temperature_M1 = temperatures[:, None].masked_fill(greedy_M1, 1.0)
    # In place from logits to weights, as fresh memory costs more than the arithmetic. The maximum is taken off before
    # the division, which could overflow; exp2 is four times as fast as exp.
    padded_MX = logits_MV.new_zeros(rows, vocabulary + -vocabulary % width)
    weights_MV = torch.sub(logits_MV, peak_M1, out=padded_MX[:, :vocabulary]).div_(temperature_M1 * math.log(2))
    log2_weights_MV = weights_MV.clamp(min=-1e4) if entropy else None  # finite, so that a weight of 0 adds nothing
    weights_MV.exp2_()
    weights_MBW = padded_MX.unflatten(1, (-1, width))
    cdf_MB = weights_MBW.sum(-1).cumsum(-1)
    total_M1 = cdf_MB[:, -1:]
    target_M1 = uniforms(seeds, positions)[:, None] * total_M1  # below the total, as the uniforms are ≤ 1 − 2⁻²⁴
    block_M1 = torch.searchsorted(cdf_MB, target_M1, right=True).clamp_(max=cdf_MB.shape[1] - 1)
    # Within the block: the first token whose cumulative weight exceeds the rest of the target. Rounding can make the
    # rest larger than the last cumulative weight.
    rest_M1 = target_M1 - F.pad(cdf_MB, (1, 0)).gather(1, block_M1)
    cdf_MW = weights_MBW[torch.arange(rows, device=logits.device), block_M1[:, 0]].cumsum(-1)
    rest_M1 = torch.minimum(rest_M1, torch.nextafter(cdf_MW[:, -1:], torch.zeros_like(rest_M1)))
    token_M1 = block_M1 * width + torch.searchsorted(cdf_MW, rest_M1, right=True)
    token_M1.clamp_(max=vocabulary - 1)  # only a row of NaN exceeds it
    if greedy_M1.any():
        token_M1 = torch.where(greedy_M1, logits_MV.argmax(-1, keepdim=True), token_M1)
    log_total_M1 = total_M1.log()
    logprob_M1 = (logits_MV.gather(1, token_M1) - peak_M1) / temperature_M1 - log_total_M1
    entropy_M = None
    if log2_weights_MV is not None:
        weighted_M1 = log2_weights_MV.mul_(weights_MV).sum(-1, keepdim=True) * math.log(2)
        entropy_M = (log_total_M1 - weighted_M1 / total_M1)[:, 0]
    return token_M1[:, 0], logprob_M1[:, 0], entropy_M


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right logically; the shift of i64 repeats the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
