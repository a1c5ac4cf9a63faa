"""Attention of packed queries over a paged KV cache.

Each sequence's last queries are packed one after another; its keys and values are in blocks of the cache, in the order
of its block table. Softmax((q · k) · scale), causal, with an optional sliding window, soft cap c · tanh(s / c) (Gemma
2) and sinks: one more logit per head that takes weight and contributes no value (gpt-oss).

T tokens, S sequences, Hq query heads, Hk KV heads, G = Hq / Hk, D head dimension, L context length, B blocks.
"""

import contextlib
import math
import mmap

import torch
import torch.nn.functional as F

from inflight_kernels import _cpu

_REAL_BYTES = 32 * 2**20


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with query [T, Hq, D] → [T, Hq, Dv].

    k_cache [blocks, block size, Hk, D] and v_cache [blocks, block size, Hk, Dv] with any strides; tables i32[S, B] on
    the device of the query; starts i32[S + 1] (sequence s has the queries starts[s] … starts[s + 1] − 1) and contexts
    i32[S] (tokens of s in the cache, its queries included), both on the CPU. window: a query sees the last `window`
    tokens, itself included. sinks f32[Hq].

    The C kernel computes it over caches in the layout of `empty_cache_for_cpu`. For other caches PyTorch does,
    sequences with one query together and the others one by one.
    """
    out = query.new_empty(*query.shape[:2], v_cache.shape[-1])
    if is_layout_for_cpu(k_cache, v_cache) and _cpu.takes(query, v_cache):
        query = query.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        ran = _cpu.call(
            "paged_attention", query, k_cache, v_cache, out, query.dtype == torch.bfloat16, tables, tables.stride(0),
            starts, contexts, len(contexts), query.shape[1], k_cache.shape[2], query.shape[2], v_cache.shape[3], scale,
            softcap or 0.0, window or 0, sinks,
        )  # fmt: skip
        if ran:
            return out
    counts = (starts[1:] - starts[:-1]).tolist()
    lengths = contexts.tolist()
    single = [s for s, count in enumerate(counts) if count == 1]
    batches = [[s] for s, count in enumerate(counts) if count > 1]
    for batch in ([single] if single else []) + batches:
        count, longest = counts[batch[0]], max(lengths[s] for s in batch)
        used = -(-longest // k_cache.shape[1])
        rows_SC = torch.tensor([[int(starts[s]) + i for i in range(count)] for s in batch], device=query.device)
        context_S = torch.tensor([lengths[s] for s in batch], device=query.device)
        table_SB = tables[batch][:, :used].long()
        q_SHCD = query[rows_SC].transpose(1, 2)
        k_SHLD = k_cache[table_SB].flatten(1, 2)[:, :longest].transpose(1, 2)
        v_SHLD = v_cache[table_SB].flatten(1, 2)[:, :longest].transpose(1, 2)
        position_SC = context_S[:, None] - count + torch.arange(count, device=query.device)
        key_L = torch.arange(longest, device=query.device)
        seen_SCL = key_L <= position_SC[..., None]
        if window is not None:
            seen_SCL &= key_L > position_SC[..., None] - window
        unseen_SHLD = ~seen_SCL.any(1)[:, None, :, None]  # slots never written can contain NaN, and 0 · NaN is NaN
        k_SHLD, v_SHLD = k_SHLD.masked_fill(unseen_SHLD, 0), v_SHLD.masked_fill(unseen_SHLD, 0)
        if softcap is None and sinks is None:
            mixed_SHCD = F.scaled_dot_product_attention(
                q_SHCD, k_SHLD, v_SHLD, attn_mask=seen_SCL[:, None], scale=scale, enable_gqa=True
            )
        else:
            mixed_SHCD = _attend_in_fp32(q_SHCD, k_SHLD, v_SHLD, seen_SCL, scale, softcap, sinks)
        out[rows_SC] = mixed_SHCD.transpose(1, 2).to(out.dtype)
    return out


def _attend_in_fp32(
    q_SHCD: torch.Tensor,
    k_SHLD: torch.Tensor,
    v_SHLD: torch.Tensor,
    seen_SCL: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    group = q_SHCD.shape[1] // k_SHLD.shape[1]
    scores_SHCL = q_SHCD.float() @ k_SHLD.float().repeat_interleave(group, 1).transpose(-1, -2) * scale
    if softcap is not None:
        scores_SHCL = softcap * torch.tanh(scores_SHCL / softcap)
    scores_SHCL = scores_SHCL.masked_fill(~seen_SCL[:, None], float("-inf"))
    if sinks is not None:
        sink_SHC1 = sinks.float()[None, :, None, None].expand(*scores_SHCL.shape[:3], 1)
        scores_SHCL = torch.cat((scores_SHCL, sink_SHC1), -1)
    weights_SHCL = torch.softmax(scores_SHCL, -1)[..., : k_SHLD.shape[2]]
    return weights_SHCL @ v_SHLD.float().repeat_interleave(group, 1)


def empty_cache_for_cpu(
    blocks: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (k_cache, v_cache) in the layout of the C kernel: keys of a block and head are stored as [D, 16], so that
    the scores of 16 tokens are adjacent."""
    keys = in_huge_pages(blocks, kv_heads, key_dim, _cpu.BLOCK, dtype=dtype).permute(0, 3, 1, 2)
    values = in_huge_pages(blocks, kv_heads, _cpu.BLOCK, value_dim, dtype=dtype).transpose(1, 2)
    return keys, values


def in_huge_pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory for scattered writes: one page fault per 2 MiB instead of 4 KiB, if the system grants it, and
    none for the beginning, which is used first. The system allocates the rest on first use."""
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape))
    tensor[: _REAL_BYTES // dtype.itemsize].zero_()
    return tensor.view(shape)


def is_layout_for_cpu(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether two caches have the layout of `empty_cache_for_cpu`."""
    is_transposed = k_cache.shape[1] == _cpu.BLOCK and k_cache.permute(0, 2, 3, 1).is_contiguous()
    return is_transposed and v_cache.transpose(1, 2).is_contiguous()
