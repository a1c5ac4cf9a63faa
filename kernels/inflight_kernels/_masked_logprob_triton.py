"""The Triton kernels of `linear_logprob` for rows with a sampling mask.

A program per row reads the rows of the weight that it needs; gradients are sums over such rows. There is no atomic
addition, so results repeat.

K rows, H hidden size, V vocabulary, E token ids in all masks, of which a program reads BLOCK_S at a time.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels._sampling_mask import Head, Split

BLOCK_S = tl.constexpr(16)
BLOCK_K = tl.constexpr(128)
"""Entries and columns that a program of a masked row reads at a time."""
LOWEST = tl.constexpr(-3.0e38)
"""Stands for the maximum of nothing but −∞, so that the difference of two −∞ never arises."""


@triton.jit
def fast_exp(x):
    """eˣ with two instructions. `tl.exp` has five, so that results below 2⁻¹²⁶ are right too."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def capped(z, SOFTCAP: tl.constexpr):
    # tanh(x) = 2 σ(2x) − 1
    return SOFTCAP * (2.0 * tl.sigmoid(z * (2.0 / SOFTCAP)) - 1.0)


@triton.jit
def masked_kernel(
    hidden,
    weight,
    bias,
    tokens,
    temperatures,
    token_ids,
    offsets,
    logits,
    logprobs,
    lses,
    entropies,
    stride_n,
    stride_v,
    V: tl.constexpr,
    H: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, temperature = tl.load(tokens + row), tl.load(temperatures + row)
    end = tl.load(offsets + row + 1)
    chosen = float("nan")
    peak = tl.cast(LOWEST, tl.float32)
    total, moment = 0.0, 0.0
    for start in range(tl.load(offsets + row), end, BLOCK_S):
        entries = start + tl.arange(0, BLOCK_S)
        ids = tl.load(token_ids + entries, mask=entries < end, other=-1)
        inside = (ids >= 0) & (ids < V)
        products = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
        for first in range(0, H, BLOCK_K):
            inner = first + tl.arange(0, BLOCK_K)
            hidden_K = tl.load(hidden + row * stride_n + inner, mask=inner < H, other=0.0).to(tl.float32)
            mask_SK = inside[:, None] & (inner < H)[None, :]
            weight_SK = tl.load(weight + ids[:, None] * stride_v + inner[None, :], mask=mask_SK, other=0.0)
            products += weight_SK.to(tl.float32) * hidden_K[None, :]
        z = tl.sum(products, 1)
        if bias is not None:
            z += tl.load(bias + ids, mask=inside, other=0.0).to(tl.float32)
        if SOFTCAP is not None:
            z = capped(z, SOFTCAP)
        z = tl.where(inside, z, float("nan"))  # an id outside the vocabulary: the row becomes NaN
        tl.store(logits + entries, z, mask=entries < end)
        z = tl.where(entries < end, z / temperature, float("-inf"))
        hit = (ids == token) & (entries < end)
        chosen = tl.where(tl.max(hit.to(tl.int32), 0) == 1, tl.sum(tl.where(hit, z, 0.0), 0), chosen)
        higher = tl.maximum(peak, tl.max(z, 0))
        scale = tl.exp(peak - higher)
        weights = tl.exp(z - higher)
        moment = scale * (moment + total * (peak - higher))
        moment += tl.sum(tl.where(weights == 0.0, 0.0, weights * (z - higher)), 0)
        total = total * scale + tl.sum(weights, 0)
        peak = higher
    lse = peak + tl.log(total)
    tl.store(logprobs + row, chosen - lse)
    tl.store(lses + row, lse)
    if entropies is not None:
        tl.store(entropies + row, tl.log(total) - moment / total)


@triton.jit(do_not_specialize=["table_rows"])
def segment_sum_kernel(factors, table, index, offsets, out, stride_t, table_rows, H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    end = tl.load(offsets + row + 1)
    total = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    for start in range(tl.load(offsets + row), end, BLOCK_S):
        entries = start + tl.arange(0, BLOCK_S)
        at = tl.load(index + entries, mask=entries < end, other=-1)
        factor = tl.load(factors + entries, mask=entries < end, other=0.0)
        mask_SK = ((at >= 0) & (at < table_rows))[:, None] & (columns < H)[None, :]
        values = tl.load(table + at[:, None] * stride_t + columns[None, :], mask=mask_SK, other=0.0)
        total += factor[:, None] * values.to(tl.float32)
    tl.store(out + row * H + columns, tl.sum(total, 0), mask=columns < H)


def masked_forward(
    hidden_KH: torch.Tensor,
    head: Head,
    tokens_K: torch.Tensor,
    temperatures_K: torch.Tensor,
    entropy: bool,
    split: Split,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(log-probabilities, logsumexps of scaled logits, entropies or None), each [K], and logits [E]."""
    assert split.token_ids is not None
    logits_E = temperatures_K.new_empty(len(split.token_ids))
    logprobs_K, lses_K = torch.empty_like(temperatures_K), torch.empty_like(temperatures_K)
    entropies_K = torch.empty_like(temperatures_K) if entropy else None
    launch: Any = masked_kernel[(len(hidden_KH),)]
    launch(
        hidden_KH,
        head.weight_VH,
        head.bias_V,
        tokens_K,
        temperatures_K,
        split.token_ids,
        split.offsets,
        logits_E,
        logprobs_K,
        lses_K,
        entropies_K,
        hidden_KH.stride(0),
        head.weight_VH.stride(0),
        V=len(head.weight_VH),
        H=hidden_KH.shape[1],
        SOFTCAP=head.softcap,
    )
    return logprobs_K, lses_K, entropies_K, logits_E


def segment_sum(
    factors_E: torch.Tensor, table: torch.Tensor, index_E: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """out[g] = Σ factors[e] · table[index[e]] over e from offsets[g] to offsets[g + 1], in fp32."""
    rows, width = len(offsets) - 1, table.shape[1]
    out = factors_E.new_empty(rows, width)
    launch: Any = segment_sum_kernel[(rows, triton.cdiv(width, BLOCK_K.value))]
    launch(factors_E, table, index_E, offsets, out, table.stride(0), len(table), H=width)
    return out
