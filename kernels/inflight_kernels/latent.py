"""Attention over a paged cache of latents, which all query heads share.

The cache keeps one vector per token: the key of every head. Its first Dv numbers are the value of every head, too.
Softmax((q · k) · scale), causal, with an optional sliding window.

T tokens, S sequences, H query heads, D length of a latent, L context length, R rows: queries of all heads.
"""

import torch

from inflight_kernels import _cpu
from inflight_kernels.attention import in_huge_pages

_MOST_SCORES = 2**26
"""Scores that are held at a time. They are fp32."""


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    *,
    value_dim: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend with query [T, H, D] → [T, H, value_dim], in the dtype of the query. Products and sums are fp32.

    cache [blocks, block size, D] with any strides; tables i32[S, B] on the device of the query; starts i32[S + 1]
    (sequence s has the queries starts[s] … starts[s + 1] − 1) and contexts i32[S] (tokens of s in the cache, its
    queries included), both on the CPU. window: a query sees the last `window` tokens, itself included. Sequences with
    one query are computed together, the others one by one. Raises ValueError if the shapes do not fit.

    The C kernel computes it for contiguous caches with blocks of 16 tokens, if its vectors (16 numbers or fewer) divide
    D and value_dim. A row of its result is the same, bit for bit, whatever the other sequences are. PyTorch computes
    all other cases.
    """
    if query.ndim != 3 or cache.ndim != 3 or query.shape[2] != cache.shape[2] or value_dim > cache.shape[2]:
        raise ValueError(
            f"expected query [T, H, D] and cache [blocks, block size, D] with D of at least {value_dim}, got "
            f"{list(query.shape)} and {list(cache.shape)}"
        )
    out = query.new_empty(*query.shape[:2], value_dim)
    if cache.shape[1] == _cpu.BLOCK and cache.is_contiguous() and _cpu.takes(query, cache):
        query = query.contiguous()
        ran = _cpu.call(
            "latent_attention", query, cache, out, query.dtype == torch.bfloat16, tables, tables.stride(0), starts,
            contexts, len(contexts), query.shape[1], query.shape[2], value_dim, scale, window or 0,
        )  # fmt: skip
        if ran:
            return out
    counts, lengths = (starts[1:] - starts[:-1]).tolist(), contexts.tolist()
    firsts = [
        0 if window is None else length - count + 1 - window for length, count in zip(lengths, counts, strict=True)
    ]
    single = [s for s, count in enumerate(counts) if count == 1]
    if single:
        rows = starts[single].to(query.device, torch.int64)
        latents = _gather(cache, tables[single], [firsts[s] for s in single], [lengths[s] for s in single])
        positions = [lengths[s] - 1 for s in single]
        out[rows] = _attend(query[rows], latents, positions, value_dim, scale, window).to(out.dtype)
    for s, count in enumerate(counts):
        if count == 1:
            continue
        latents = _gather(cache, tables[s : s + 1], [firsts[s]], [lengths[s]])
        step = max(1, _MOST_SCORES // (query.shape[1] * lengths[s]))
        for first in range(0, count, step):
            rows = slice(int(starts[s]) + first, int(starts[s]) + min(first + step, count))
            before = lengths[s] - count + first
            positions = list(range(before, before + rows.stop - rows.start))
            out[rows] = _attend(query[rows], latents, positions, value_dim, scale, window).to(out.dtype)
    return out


def empty_latents_for_cpu(blocks: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a cache [blocks, 16, dim] for the C kernel."""
    return in_huge_pages(blocks, _cpu.BLOCK, dim, dtype=dtype)


def _gather(cache: torch.Tensor, table_SB: torch.Tensor, firsts: list[int], lengths: list[int]) -> torch.Tensor:
    """Return f32[S, L, D], the latents of sequences from the first ones that are seen to the last ones; 0 elsewhere."""
    longest = max(lengths)
    latents_SLD = cache[table_SB[:, : -(-longest // cache.shape[1])].long()].flatten(1, 2)[:, :longest].float()
    if min(lengths) < longest or max(firsts) > 0:  # slots never written can contain NaN, and 0 · NaN is NaN
        first_S1, end_S1 = torch.tensor([firsts, lengths], device=cache.device)[..., None]
        key_L = torch.arange(longest, device=cache.device)
        latents_SLD[(key_L < first_S1) | (key_L >= end_S1)] = 0
    return latents_SLD


def _attend(
    query: torch.Tensor,
    latents_SLD: torch.Tensor,
    positions: list[int],
    value_dim: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend with query [C, H, D] → f32[C, H, Dv]: with S = C one query of each sequence, with S = 1 all of one."""
    heads = query.shape[1]
    q_SRD = query.float().reshape(len(latents_SLD), -1, query.shape[2])
    position_C1 = torch.tensor(positions, device=query.device)[:, None]
    key_L = torch.arange(latents_SLD.shape[1], device=query.device)
    hidden_CL = key_L > position_C1
    if window is not None:
        hidden_CL |= key_L <= position_C1 - window
    scores_SRL = (q_SRD @ latents_SLD.mT).mul_(scale)
    scores_CHL = scores_SRL.view(len(query), heads, -1).masked_fill_(hidden_CL[:, None], float("-inf"))
    weights_SRL = scores_CHL.softmax(-1).view_as(scores_SRL)
    return (weights_SRL @ latents_SLD[..., :value_dim]).view(len(query), heads, value_dim)
