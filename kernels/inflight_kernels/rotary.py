"""From a fused QKV projection to rotated queries and a filled KV cache, in one pass.

Per head: RMSNorm if the model has one (Qwen 3, Gemma 3), then the rotation x · cos + rotate_half(x) · sin over the
first R dimensions (Su et al. 2021, "RoFormer", in the half-split form of Llama). As in Transformers cos and sin are
rounded to the dtype of x; the rotation itself is computed in fp32 and rounded once.
T tokens, Hq query heads, Hk KV heads, D head dimension, R of them rotated, P positions.
"""

import torch

from inflight_kernels import _cpu
from inflight_kernels._norm import Norm
from inflight_kernels.attention import is_layout_for_cpu
from inflight_kernels.tokenwise import rms_norm_reference


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
    """Rotate queries and keys, write keys and values into the cache → queries [T, Hq, D] in the dtype of qkv.

    qkv [T, (Hq + 2·Hk)·D] of any float dtype, its rows at any distance: all query heads, then all keys, then all
    values; Hk and D are dimensions of the caches. cos and sin f32[P, R], the second half of the columns repeating the
    first; positions i64[T] are rows of them. k_cache and v_cache [blocks, block size, Hk, D] with any strides and
    dtype; cache_index i64[T] are block · block size + index in the block, and a negative one writes nothing. norms are
    over each head of queries and of keys before the rotation, with weights [D]; apart from the weights they are the
    same. Raises ValueError if the shapes do not fit. Neither positions nor cache_index are checked against their range.
    """
    if k_cache.ndim != 4 or v_cache.shape != k_cache.shape:
        raise ValueError(
            "expected k_cache and v_cache [blocks, block size, Hk, D], "
            f"got {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    kv_heads, head_dim, rotated = *k_cache.shape[2:], cos.shape[-1]
    if qkv.ndim != 2 or qkv.shape[1] % head_dim or qkv.shape[1] <= 2 * kv_heads * head_dim:
        raise ValueError(
            f"expected qkv [T, (Hq + 2·{kv_heads})·{head_dim}] for a cache of {kv_heads} KV heads of dimension "
            f"{head_dim}, got {list(qkv.shape)}"
        )
    if cos.ndim != 2 or cos.shape != sin.shape or rotated % 2 or rotated > head_dim:
        raise ValueError(
            f"expected cos and sin [P, R] with R even and at most {head_dim}, got {list(cos.shape)} and "
            f"{list(sin.shape)}"
        )
    if positions.shape != qkv.shape[:1] or cache_index.shape != qkv.shape[:1]:
        raise ValueError(
            f"expected positions and cache_index [{qkv.shape[0]}], got {list(positions.shape)} and "
            f"{list(cache_index.shape)}"
        )
    weights = [norm.weight for norm in norms or ()]
    for weight in weights:
        if weight.shape != (head_dim,):
            raise ValueError(f"expected q_norm and k_norm [{head_dim}], got {list(weight.shape)}")
    if qkv.is_cuda:
        from inflight_kernels import _rotary_triton

        return _rotary_triton.rope_and_cache(qkv, cos, sin, positions, cache_index, k_cache, v_cache, norms)
    if _cpu.takes(qkv, k_cache.permute(0, 2, 3, 1), v_cache, *weights) and is_layout_for_cpu(k_cache, v_cache):
        q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q = torch.empty(len(qkv), q_heads, head_dim, dtype=qkv.dtype)
        rounding = norms[0][1:] if norms else (0.0, 0.0, True)
        ran = _cpu.call(
            "rope_and_cache", qkv, qkv.stride(0), q, qkv.dtype == torch.bfloat16, k_cache, v_cache,
            cos.float().contiguous(), sin.float().contiguous(), rotated, positions.contiguous(),
            cache_index.contiguous(), len(qkv), q_heads, kv_heads, head_dim, *(weights or (None, None)), *rounding,
        )  # fmt: skip
        if ran:
            return q
    return rope_and_cache_reference(qkv, cos, sin, positions, cache_index, k_cache, v_cache, norms)


def rope_and_cache_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache_index: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    """Compute the same in plain PyTorch."""
    kv_heads, head_dim = k_cache.shape[2:]
    q_THD, k_THD, v_THD = qkv.unflatten(1, (-1, head_dim)).tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    if norms is not None:
        q_THD, k_THD = rms_norm_reference(q_THD, norms[0]), rms_norm_reference(k_THD, norms[1])
    cos_T1R = cos[positions].to(qkv.dtype).float()[:, None]
    sin_T1R = sin[positions].to(qkv.dtype).float()[:, None]
    k_THD = _rotate(k_THD, cos_T1R, sin_T1R)
    kept = cache_index >= 0
    kept_index = cache_index[kept]
    where = (kept_index // k_cache.shape[1], kept_index % k_cache.shape[1])
    k_cache[where] = k_THD[kept].to(k_cache.dtype)
    v_cache[where] = v_THD[kept].to(v_cache.dtype)
    return _rotate(q_THD, cos_T1R, sin_T1R)


def _rotate(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    rotated = cos_T1R.shape[-1]
    out_THD = x_THD.clone(memory_format=torch.contiguous_format)
    x_THR = x_THD[..., :rotated].float()
    first, second = x_THR.chunk(2, dim=-1)
    out_THD[..., :rotated] = x_THR * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R
    return out_THD
