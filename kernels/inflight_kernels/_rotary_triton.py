"""The Triton kernel of `rotary`, one program per token."""

from typing import Any

import torch
import triton
import triton.language as tl

from inflight_kernels._launch import guarded
from inflight_kernels._norm import Norm
from inflight_kernels._tokenwise_triton import weigh

next_power_of_2: Any = triton.next_power_of_2  # of an int or a constant of a kernel


@triton.jit
def rotated_heads(
    base, norm, cos, sin, eps, offset, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, CAST_FIRST: tl.constexpr
):
    """Return the heads at `base`, normed and rotated. A rotated dimension is combined with its partner at a distance of
    R / 2."""
    heads = tl.arange(0, next_power_of_2(HEADS))[:, None]
    dims = tl.arange(0, next_power_of_2(D))[None, :]
    partners = tl.where(dims < R // 2, dims + R // 2, dims - R // 2)
    dtype: tl.constexpr = base.dtype.element_ty
    x = tl.load(base + heads * D + dims, mask=(heads < HEADS) & (dims < D), other=0.0).to(tl.float32)
    partner = tl.load(base + heads * D + partners, mask=(heads < HEADS) & (dims < R), other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight = tl.load(norm + dims, mask=dims < D, other=0.0).to(tl.float32)
        x = weigh(x * scale, weight, offset, dtype, CAST_FIRST).to(tl.float32)
        weight = tl.load(norm + partners, mask=dims < R, other=0.0).to(tl.float32)
        partner = weigh(partner * scale, weight, offset, dtype, CAST_FIRST).to(tl.float32)
    return (x * cos + partner * sin).to(dtype)


@triton.jit
def store_heads(
    values,
    cache,
    place,
    stride_block,
    stride_index,
    stride_head,
    stride_dim,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
):
    heads = tl.arange(0, next_power_of_2(HEADS))[:, None].to(tl.int64)
    dims = tl.arange(0, next_power_of_2(D))[None, :].to(tl.int64)
    at = (place // BLOCK_SIZE) * stride_block + (place % BLOCK_SIZE) * stride_index
    at = at + heads * stride_head + dims * stride_dim
    written = tl.where(place >= 0, HEADS, 0)
    tl.store(cache + at, values.to(cache.dtype.element_ty), mask=(heads < written) & (dims < D))


@triton.jit
def rope_and_cache_kernel(
    qkv,
    cos,
    sin,
    positions,
    cache_index,
    k_cache,
    v_cache,
    q_norm,
    k_norm,
    q,
    stride_t,
    k_block,
    k_index,
    k_head,
    k_dim,
    v_block,
    v_index,
    v_head,
    v_dim,
    eps,
    offset,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAST_FIRST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(cache_index + token)
    position = tl.load(positions + token)
    dims = tl.arange(0, next_power_of_2(D))[None, :]
    dtype: tl.constexpr = qkv.dtype.element_ty
    # A dimension that is not rotated has cosine 1 and sine 0. The first half is rotated with −sin.
    cosine = tl.load(cos + position * R + dims, mask=dims < R, other=1.0).to(dtype).to(tl.float32)
    sine = tl.load(sin + position * R + dims, mask=dims < R, other=0.0).to(dtype).to(tl.float32)
    sine = tl.where(dims < R // 2, -sine, sine)

    base = qkv + token * stride_t
    rotated = rotated_heads(base, q_norm, cosine, sine, eps, offset, Q_HEADS, D, R, CAST_FIRST)
    heads = tl.arange(0, next_power_of_2(Q_HEADS))[:, None]
    tl.store(q + (token * Q_HEADS + heads) * D + dims, rotated, mask=(heads < Q_HEADS) & (dims < D))

    base += Q_HEADS * D
    rotated = rotated_heads(base, k_norm, cosine, sine, eps, offset, KV_HEADS, D, R, CAST_FIRST)
    store_heads(rotated, k_cache, place, k_block, k_index, k_head, k_dim, BLOCK_SIZE, KV_HEADS, D)

    base += KV_HEADS * D
    heads = tl.arange(0, next_power_of_2(KV_HEADS))[:, None]
    values = tl.load(base + heads * D + dims, mask=(heads < KV_HEADS) & (dims < D), other=0.0)
    store_heads(values, v_cache, place, v_block, v_index, v_head, v_dim, BLOCK_SIZE, KV_HEADS, D)


def rope_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache_index: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    tokens, (block_size, kv_heads, head_dim) = len(qkv), k_cache.shape[1:]
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q = torch.empty(tokens, q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    q_norm, k_norm = (norms[0].weight.contiguous(), norms[1].weight.contiguous()) if norms else (None, None)
    eps, offset, cast_first = norms[0][1:] if norms else (0.0, 0.0, True)
    size = next_power_of_2(q_heads) * next_power_of_2(head_dim)
    launch = guarded(rope_and_cache_kernel[(tokens,)])
    launch(
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        positions.contiguous(),
        cache_index.contiguous(),
        k_cache,
        v_cache,
        q_norm,
        k_norm,
        q,
        qkv.stride(0),
        *k_cache.stride(),
        *v_cache.stride(),
        eps,
        offset,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        R=cos.shape[1],
        BLOCK_SIZE=block_size,
        CAST_FIRST=cast_first,
        num_warps=min(max(size // 512, 1), 8),
    )
    return q
