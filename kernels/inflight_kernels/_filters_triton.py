"""The Triton kernels of `filters`. For top-k, top-p and min-p one program per row searches the logit of the last token
that is left.

Logits of fp32 have the order of their bits, read as integers (`key_of`). A search over 32 bits decides two at a time:
each of 16 passes over the row counts the tokens, or sums their weights, above three bounds at once.
"""

import torch
import triton
import triton.language as tl

from inflight_kernels._launch import guarded

BLOCK = 2048
_UNITS = tl.constexpr(2.0**40)
_LOWEST = tl.constexpr(-(2**31))
_TRUE, _FALSE = tl.constexpr(True), tl.constexpr(False)


@triton.jit
def key_of(x):
    """Return the bits of an fp32 number as an i32 that is larger for a larger number, and 0 for −0."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of(x, peak, inverse):
    return tl.exp((x - peak) * inverse)


@triton.jit
def units_of(x, keys, peak, inverse, above, by_count: tl.constexpr):
    """Return the summands of a search: 1 for each token above this key, or its weight in units; 0 for other tokens."""
    units = tl.full(x.shape, 1, tl.int64) if by_count else (weight_of(x, peak, inverse) * _UNITS).to(tl.int64)
    return tl.where(keys > above, units, 0)


@triton.jit
def search(logits, peak, inverse, above, needed, V: tl.constexpr, BLOCK: tl.constexpr, by_count: tl.constexpr):
    """Return the largest key such that the tokens of this key and above, without those up to `above`, have `needed`
    units or more."""
    found = tl.cast(0, tl.int64)  # counted from the lowest key
    for level in range(16):
        step = tl.cast(1, tl.int64) << (30 - 2 * level)
        low = (found + step + _LOWEST).to(tl.int32)
        middle = (found + 2 * step + _LOWEST).to(tl.int32)
        high = (found + 3 * step + _LOWEST).to(tl.int32)
        from_low = tl.zeros((BLOCK,), tl.int64)
        from_middle = tl.zeros((BLOCK,), tl.int64)
        from_high = tl.zeros((BLOCK,), tl.int64)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < V, other=float("-inf"))
            keys = key_of(x)
            units = units_of(x, keys, peak, inverse, above, by_count)
            units = tl.where(columns < V, units, 0)
            from_low += tl.where(keys >= low, units, 0)
            from_middle += tl.where(keys >= middle, units, 0)
            from_high += tl.where(keys >= high, units, 0)
        found += tl.where(tl.sum(from_low, 0) >= needed, step, 0)
        found += tl.where(tl.sum(from_middle, 0) >= needed, step, 0)
        found += tl.where(tl.sum(from_high, 0) >= needed, step, 0)
    return (found + _LOWEST).to(tl.int32)


@triton.jit
def sums_of(logits, peak, inverse, key, V: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number and the units of tokens above a key, and the number and the units of one of this key."""
    count = tl.zeros((BLOCK,), tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    ties = tl.zeros((BLOCK,), tl.int64)
    units_of_tie = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < V
        x = tl.load(logits + columns, mask=inside, other=float("-inf"))
        keys = key_of(x)
        units = (weight_of(x, peak, inverse) * _UNITS).to(tl.int64)
        above = inside & (keys > key)
        tie = inside & (keys == key)
        count += tl.where(above, 1, 0)
        total += tl.where(above, units, 0)
        ties += tl.where(tie, 1, 0)
        units_of_tie = tl.maximum(units_of_tie, tl.where(tie, units, 0))
    return tl.sum(count, 0), tl.sum(total, 0), tl.sum(ties, 0), tl.max(units_of_tie, 0)


@triton.jit(do_not_specialize=["stride"])
def cut_kernel(logits, rows, temperatures, top_ks, top_ps, min_ps, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    logits += tl.load(rows + program).to(tl.int64) * stride
    inverse = 1.0 / tl.load(temperatures + program)
    top_k, top_p, min_p = tl.load(top_ks + program), tl.load(top_ps + program), tl.load(min_ps + program)

    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    is_bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < V, other=float("-inf"))
        is_bad |= ((x != x) | (x == float("inf"))).to(tl.int32)
        peaks = tl.maximum(peaks, x)
    peak = tl.max(peaks, 0)
    bad = tl.where(peak == float("-inf"), 1, tl.max(is_bad, 0)) != 0
    peak = tl.where(bad, 0.0, peak)

    last = tl.cast(_LOWEST, tl.int32)  # the key of the last token that is left
    num_ties = tl.cast(V, tl.int64)  # tokens of this key that are left
    if (top_k < V) & ~bad:
        last = search(logits, peak, inverse, last, top_k, V, BLOCK, _TRUE)
    if ((top_k < V) | (top_p < 1)) & ~bad:
        count, total, ties, units = sums_of(logits, peak, inverse, last, V, BLOCK)
        num_ties = tl.minimum(ties, tl.where(top_k < V, top_k - count, V))
        if top_p < 1:
            share = (total + num_ties * units).to(tl.float64) * top_p
            whole = share.to(tl.int64)
            needed = tl.maximum(whole + tl.where(share > whole.to(tl.float64), 1, 0), 1)
            if total >= needed:
                last = search(logits, peak, inverse, last, needed, V, BLOCK, _FALSE)
                count, total, ties, units = sums_of(logits, peak, inverse, last, V, BLOCK)
                num_ties = ties
            # As many of equal logits as it takes; a weight of no unit is removed below.
            num_ties = tl.minimum(num_ties, (needed - total + units - 1) // tl.maximum(units, 1))

    seen = tl.cast(0, tl.int64)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < V
        x = tl.load(logits + columns, mask=inside, other=float("-inf"))
        keys = key_of(x)
        weights = weight_of(x, peak, inverse)
        tie = (inside & (keys == last)).to(tl.int64)
        left = (keys > last) | ((tie > 0) & (seen + tl.cumsum(tie, 0) <= num_ties))
        left &= (weights >= min_p) & (weights > 0) & ~bad
        seen += tl.sum(tie, 0)
        tl.store(logits + columns, tl.where(left, x, float("-inf")), mask=inside)


@triton.jit
def penalize_kernel(logits, seen, rows, seen_rows, factors, logits_stride, seen_stride, V, BLOCK: tl.constexpr):
    at = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += tl.load(rows + at) * logits_stride
    seen += tl.load(seen_rows + at) * seen_stride
    factor = tl.load(factors + at)
    is_seen = tl.load(seen + columns, mask=columns < V, other=0) != 0
    x = tl.load(logits + columns, mask=is_seen, other=0.0)
    tl.store(logits + columns, tl.where(x > 0, tl.div_rn(x, factor), x * factor), mask=is_seen)


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, rows: torch.Tensor, seen_rows: torch.Tensor, factors: torch.Tensor
) -> None:
    if len(rows):
        vocabulary = logits.shape[1]
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        launch = guarded(penalize_kernel[(len(rows), triton.cdiv(vocabulary, block))])
        columns = [column.contiguous() for column in (rows, seen_rows, factors)]
        launch(logits, seen.view(torch.uint8), *columns, logits.stride(0), seen.stride(0), vocabulary, BLOCK=block)


def cut_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
) -> None:
    if len(rows):
        columns = [column.contiguous() for column in (rows, temperatures, top_ks, top_ps, min_ps)]
        launch = guarded(cut_kernel[(len(rows),)])
        vocabulary = logits.shape[1]
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        launch(logits, *columns, logits.stride(0), V=vocabulary, BLOCK=block, num_warps=8)
