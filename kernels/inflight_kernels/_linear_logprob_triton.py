"""`linear_logprob` on a GPU, and its Triton kernels.

For rows over the whole vocabulary a program multiplies one tile of rows and vocabulary and reduces it to the maximum,
the sum of exponentials and their first moment. These are combined afterwards. Backward multiplies the tile again and
writes its gradient. Logits are always fp32. Their gradient is rounded to the dtype of the weights, before the product
that sums it up. For a row with a sampling mask a program reads only the needed rows of the weight, and gradients are
sums over such rows. Without atomic additions, results repeat.

N rows, of which K have a sampling mask; H hidden size, V vocabulary, C columns of one piece of it, E token ids in all
masks, of which a program reads BLOCK_S at a time.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels._launch import guarded
from inflight_kernels._sampling_mask import Head, Masks, Rows

ROWS = 8192
COLUMNS = 8192
"""Number of columns; ROWS · COLUMNS gradients of logits exist at a time."""
GROUP = tl.constexpr(16)
"""Row tiles that share a tile of the weight while it is in L2. About 130 programs run at a time, so that 16 row tiles
of 128 and 8 column tiles of 256 are about as many rows of either."""
BLOCK_S = tl.constexpr(16)
BLOCK_K = tl.constexpr(128)
"""Entries and columns that a program of a masked row reads at a time."""
LOWEST = tl.constexpr(-3.0e38)
"""Replaces the maximum of a row with only −∞, so that the difference of two −∞ never arises."""


@triton.jit
def fast_exp(x):
    """Return eˣ with two instructions. `tl.exp` has five, so that results below 2⁻¹²⁶ are right too."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def capped(z, SOFTCAP: tl.constexpr):
    # tanh(x) = 2 σ(2x) − 1
    return SOFTCAP * (2.0 * tl.sigmoid(z * (2.0 / SOFTCAP)) - 1.0)


@triton.jit
def tile_of_logits(
    hidden,
    weight,
    bias,
    stride_n,
    stride_v,
    num_rows,
    num_columns,
    H: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Return (rows, columns, logits). Beyond the edges the last row and column are repeated."""
    tiles_n, tiles_v = tl.cdiv(num_rows, BLOCK_N), tl.cdiv(num_columns, BLOCK_V)
    program = tl.program_id(0)
    group = program // (GROUP * tiles_v)
    group_size = min(tiles_n - group * GROUP, GROUP)
    inside = program % (GROUP * tiles_v)
    rows = (group * GROUP + inside % group_size) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = (inside // group_size) * BLOCK_V + tl.arange(0, BLOCK_V)
    hidden_N = hidden + tl.cast(tl.minimum(rows, num_rows - 1), tl.int64) * stride_n
    safe_columns = tl.minimum(columns, num_columns - 1)
    weight_V = weight + tl.cast(safe_columns, tl.int64) * stride_v
    z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, H, BLOCK_H):
        inner = start + tl.arange(0, BLOCK_H)
        if H % BLOCK_H == 0:
            hidden_NH = tl.load(hidden_N[:, None] + inner[None, :])
            weight_HV = tl.load(weight_V[None, :] + inner[:, None])
        else:
            hidden_NH = tl.load(hidden_N[:, None] + inner[None, :], mask=(inner < H)[None, :], other=0.0)
            weight_HV = tl.load(weight_V[None, :] + inner[:, None], mask=(inner < H)[:, None], other=0.0)
        z = tl.dot(hidden_NH, weight_HV, z, input_precision="ieee")
    if bias is not None:
        z += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    if SOFTCAP is not None:
        z = capped(z, SOFTCAP)
    return rows, columns, z


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def forward_kernel(
    hidden,
    weight,
    bias,
    tokens,
    temperatures,
    chosen,
    peaks,
    totals,
    moments,
    stride_n,
    stride_v,
    num_rows,
    num_columns,
    H: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows, columns, z = tile_of_logits(
        hidden, weight, bias, stride_n, stride_v, num_rows, num_columns, H, SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_H
    )
    mask = rows < num_rows
    z *= (1.0 / tl.load(temperatures + rows, mask=mask, other=1.0))[:, None]
    z = tl.where((columns < num_columns)[None, :], z, float("-inf"))
    begin = tl.min(columns, 0)
    token = tl.load(tokens + rows, mask=mask, other=-1)
    in_tile = (token >= begin) & (token < tl.minimum(begin + BLOCK_V, num_columns))
    hit = columns[None, :] == tl.where(in_tile, token, -1).to(tl.int32)[:, None]
    tl.store(chosen + rows, tl.sum(tl.where(hit, z, 0.0), 1), mask=in_tile)
    peak = tl.maximum(tl.max(z, 1), LOWEST)
    z -= peak[:, None]
    weights = fast_exp(z)
    out = tl.cast(begin // BLOCK_V, tl.int64) * num_rows + rows
    tl.store(peaks + out, peak, mask=mask)
    tl.store(totals + out, tl.sum(weights, 1), mask=mask)
    if moments is not None:
        tl.store(moments + out, tl.sum(tl.where(weights == 0.0, 0.0, weights * z), 1), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "begin"])
def grad_logits_kernel(
    hidden,
    weight,
    bias,
    tokens,
    temperatures,
    lses,
    grad_logprobs,
    entropies,
    grad_entropies,
    grad_logits,
    stride_n,
    stride_v,
    num_rows,
    num_columns,
    begin,
    H: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows, columns, z = tile_of_logits(
        hidden, weight, bias, stride_n, stride_v, num_rows, num_columns, H, SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_H
    )
    mask = rows < num_rows
    logprobs = z * (1.0 / tl.load(temperatures + rows, mask=mask, other=1.0))[:, None]
    logprobs -= tl.load(lses + rows, mask=mask, other=0.0)[:, None]
    grad_logprob = tl.load(grad_logprobs + rows, mask=mask, other=0.0)
    coefficient = tl.zeros_like(z) + grad_logprob[:, None]
    if grad_entropies is not None:
        entropy = tl.load(entropies + rows, mask=mask, other=0.0)
        coefficient += tl.load(grad_entropies + rows, mask=mask, other=0.0)[:, None] * (logprobs + entropy[:, None])
    probs = fast_exp(logprobs)
    hit = columns[None, :] + begin == tl.load(tokens + rows, mask=mask, other=-1)[:, None]
    grad = tl.where(hit, grad_logprob[:, None], 0.0) - tl.where(probs == 0.0, 0.0, probs * coefficient)
    if SOFTCAP is not None:
        grad *= 1.0 - (z / SOFTCAP) * (z / SOFTCAP)
    out = grad_logits + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out, grad.to(grad_logits.dtype.element_ty), mask=mask[:, None] & (columns < num_columns)[None, :])


def tiles(dtype: torch.dtype, capability: tuple[int, int], wide: bool) -> dict[str, Any]:
    """Return sizes of tiles, warps and stages for the products on a GPU of this compute capability. A softcap leaves
    too few registers for wide tiles in backward."""
    if dtype == torch.float32:
        # 64 rows and more would be computed in TF32 on sm_100 by Triton 3.6.
        return {"BLOCK_N": 32, "BLOCK_V": 128, "BLOCK_H": 32, "num_warps": 4, "num_stages": 3}
    # Four stages of a wide tile are 192 KiB. From sm_90 on a multiprocessor has 227 KiB, and runs one program in any
    # case.
    block_v, stages = (256, 4 if capability >= (9, 0) else 3) if wide else (128, 3)
    return {"BLOCK_N": 128, "BLOCK_V": block_v, "BLOCK_H": 64, "num_warps": 8, "num_stages": stages}


def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def dense_forward(
    hidden_NH: torch.Tensor, head: Head, tokens_N: torch.Tensor, temperatures_N: torch.Tensor, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, vocabulary = len(hidden_NH), len(head.weight_VH)
    constants = tiles(hidden_NH.dtype, capability_of(hidden_NH.device), wide=True)
    num_tiles = triton.cdiv(vocabulary, constants["BLOCK_V"])
    chosen_N = torch.full_like(temperatures_N, torch.nan)
    peaks, totals = temperatures_N.new_empty(2, num_tiles, rows)
    moments = temperatures_N.new_empty(num_tiles, rows) if entropy else None
    if rows:
        launch = guarded(forward_kernel[(triton.cdiv(rows, constants["BLOCK_N"]) * num_tiles,)])
        launch(
            hidden_NH,
            head.weight_VH,
            head.bias_V,
            tokens_N,
            temperatures_N,
            chosen_N,
            peaks,
            totals,
            moments,
            hidden_NH.stride(0),
            head.weight_VH.stride(0),
            rows,
            vocabulary,
            H=hidden_NH.shape[1],
            SOFTCAP=head.softcap,
            **constants,
        )
    peak_N = peaks.amax(0)
    shift = peaks.sub_(peak_N)
    scale = shift.exp()
    total_N = (totals * scale).sum(0)
    log_total_N = total_N.log()
    lse_N = peak_N + log_total_N
    entropies_N = None
    if moments is not None:
        entropies_N = log_total_N - totals.mul_(shift).add_(moments).mul_(scale).sum(0) / total_N
    return chosen_N - lse_N, lse_N, entropies_N


def grad_logits(hidden_NH: torch.Tensor, piece: Head, begin: int, rows: Rows) -> torch.Tensor:
    """Return the gradient [N, C] of the logits of the piece of the vocabulary from `begin` on, in the dtype of the
    weight."""
    num_rows, num_columns = len(hidden_NH), len(piece.weight_VH)
    grad_NC = piece.weight_VH.new_empty(num_rows, num_columns)
    constants = tiles(hidden_NH.dtype, capability_of(hidden_NH.device), wide=piece.softcap is None)
    grid = triton.cdiv(num_rows, constants["BLOCK_N"]) * triton.cdiv(num_columns, constants["BLOCK_V"])
    launch = guarded(grad_logits_kernel[(grid,)])
    launch(
        hidden_NH,
        piece.weight_VH,
        piece.bias_V,
        *rows[:4],
        rows.entropies if rows.grad_entropies is not None else None,
        rows.grad_entropies,
        grad_NC,
        hidden_NH.stride(0),
        piece.weight_VH.stride(0),
        num_rows,
        num_columns,
        begin,
        H=hidden_NH.shape[1],
        SOFTCAP=piece.softcap,
        **constants,
    )
    return grad_NC


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return total + a · b, summed in fp32: in the memory of the fp32 total, or without a total in new memory."""
    widened: Any = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    if total is None:
        return torch.mm(a, b, **widened)
    return torch.addmm(total, a, b, **widened, out=total)


# ---- rows with a sampling mask ---------------------------------------------------------------------------------------


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
    masks: Masks,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    logits_E = temperatures_K.new_empty(len(masks.token_ids))
    logprobs_K, lses_K = torch.empty_like(temperatures_K), torch.empty_like(temperatures_K)
    entropies_K = torch.empty_like(temperatures_K) if entropy else None
    launch = guarded(masked_kernel[(len(hidden_KH),)])
    launch(
        hidden_KH,
        head.weight_VH,
        head.bias_V,
        tokens_K,
        temperatures_K,
        masks.token_ids,
        masks.offsets,
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
    rows, width = len(offsets) - 1, table.shape[1]
    out = factors_E.new_empty(rows, width)
    launch = guarded(segment_sum_kernel[(rows, triton.cdiv(width, BLOCK_K.value))])
    launch(factors_E, table, index_E, offsets, out, table.stride(0), len(table), H=width)
    return out
