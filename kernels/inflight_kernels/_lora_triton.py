"""The Triton kernels of `lora`: from x to x · Aᵀ, and from there to y.

A program processes a block of rows, adapter by adapter. Its rows of one adapter, in any order, share a read of A and B.
A long row of x is cut into pieces. Each piece gives a partial sum, and the second kernel adds the partial sums.

T tokens, K inputs, N outputs, R rank, P rows of A over all parts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels._launch import guarded

PIECE: Any = 1024
BLOCK_K = tl.constexpr(64)
BLOCK_N: Any = 64


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x,
    a,
    adapters,
    shrunk,
    stride_x,
    stride_a,
    num_tokens,
    K: tl.constexpr,
    P: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    piece = tl.program_id(2)
    # TF32 holds every bit of a bf16 or fp16.
    precision: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"  # pyright: ignore[reportAssignmentType]
    out = shrunk + (piece.to(tl.int64) * num_tokens + rows[:, None]) * P + columns[None, :]
    left = tl.load(adapters + rows, mask=rows < num_tokens, other=-1)
    adapter = tl.cast(tl.max(left, 0), tl.int64)
    while adapter >= 0:
        hit = left == adapter
        weights = a + adapter * stride_a
        total = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
        for start in range(0, PIECE, BLOCK_K):
            inputs = piece * PIECE + start + tl.arange(0, BLOCK_K)
            mask_TK = hit[:, None] & (inputs < K)[None, :]
            x_TK = tl.load(x + rows[:, None] * stride_x + inputs[None, :], mask=mask_TK, other=0.0)
            mask_KP = (columns < P)[None, :] & (inputs < K)[:, None]
            a_KP = tl.load(weights + columns[None, :] * K + inputs[:, None], mask=mask_KP, other=0.0)
            total = tl.dot(x_TK.to(tl.float32), a_KP.to(tl.float32), total, input_precision=precision)
        tl.store(out, total, mask=hit[:, None] & (columns < P)[None, :])
        left = tl.where(hit, -1, left)
        adapter = tl.cast(tl.max(left, 0), tl.int64)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    y,
    b,
    adapters,
    shrunk,
    stride_y,
    stride_b,
    num_tokens,
    WIDTHS: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(2)
    # Three products of TF32 make one of fp32, nearly.
    precision: tl.constexpr = "ieee" if b.dtype.element_ty == tl.float32 else "tf32x3"  # pyright: ignore[reportAssignmentType]
    begin, end = 0, 0
    for p in tl.static_range(P // R):  # pyright: ignore[reportGeneralTypeIssues]
        begin += tl.where(p < part, WIDTHS[p], 0)
        end += tl.where(p <= part, WIDTHS[p], 0)
    begin += tl.program_id(1) * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    out = y + rows[:, None] * stride_y + columns[None, :]
    left = tl.load(adapters + rows, mask=rows < tl.where(begin < end, num_tokens, 0), other=-1)
    adapter = tl.cast(tl.max(left, 0), tl.int64)
    while adapter >= 0:
        hit = left == adapter
        weights = b + adapter * stride_b
        total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for start in range(0, R, BLOCK_R):
            ranks = start + tl.arange(0, BLOCK_R)
            mask = hit[:, None] & (ranks < R)[None, :]
            shrunk_TR = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for piece in range(PIECES):
                at = (piece * num_tokens + rows[:, None]) * P + part * R + ranks[None, :]
                shrunk_TR += tl.load(shrunk + at, mask=mask, other=0.0)
            mask_RN = (columns < end)[None, :] & (ranks < R)[:, None]
            b_RN = tl.load(weights + columns[None, :] * R + ranks[:, None], mask=mask_RN, other=0.0)
            total = tl.dot(shrunk_TR, b_RN.to(tl.float32), total, input_precision=precision)
        mask = hit[:, None] & (columns < end)[None, :]
        total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, total.to(y.dtype.element_ty), mask=mask)
        left = tl.where(hit, -1, left)
        adapter = tl.cast(tl.max(left, 0), tl.int64)


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    widths: Sequence[int],
    slots: torch.Tensor,
    small_tokens: int,
) -> None:
    tokens, inputs = x.shape
    ranks, rank = a.shape[1], b.shape[2]
    pieces = triton.cdiv(inputs, PIECE)
    if not tokens or not ranks:
        return
    slots = slots.contiguous()
    shrunk = torch.empty(pieces, tokens, ranks, dtype=torch.float32, device=x.device)
    block_t = 16 if tokens <= small_tokens else 32  # from 64 on, Triton 3.6 computes products of fp32 in TF32 on sm_100
    block_p = min(max(triton.next_power_of_2(ranks), 16), 32)
    launch = guarded(shrink_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(ranks, block_p), pieces)])
    launch(
        x,
        a,
        slots,
        shrunk,
        x.stride(0),
        a.stride(0),
        tokens,
        K=inputs,
        P=ranks,
        PIECE=min(PIECE, triton.next_power_of_2(inputs)),
        BLOCK_T=block_t,
        BLOCK_P=block_p,
    )
    block_n = BLOCK_N if x.dtype == torch.float32 else 2 * BLOCK_N  # products of fp32 take more registers
    launch = guarded(expand_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(max(widths), block_n), len(widths))])
    launch(
        y,
        b,
        slots,
        shrunk,
        y.stride(0),
        b.stride(0),
        tokens,
        WIDTHS=tuple(widths),
        P=ranks,
        R=rank,
        PIECES=pieces,
        BLOCK_T=block_t,
        BLOCK_R=min(max(triton.next_power_of_2(rank), 16), 32),
        BLOCK_N=block_n,
    )
