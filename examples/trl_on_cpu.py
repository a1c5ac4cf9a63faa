"""CPU replacements of the CUDA functions that TRL's AsyncGRPOTrainer uses, for trying a run or an adapter without a
GPU.

    from trl_on_cpu import run_on_cpu

    run_on_cpu()              # once, before the trainer is made
    AsyncGRPOTrainer(…, args=AsyncGRPOConfig(use_cpu=True, bf16=False, …))

It replaces attention in a packed tree, for which TRL downloads FlashAttention 3, and the peak speed of the device.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def run_on_cpu() -> None:
    """Replace the two functions in this process, permanently."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *max_seqlens: int,
    causal: bool,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Replace FlashAttention's function of that name for causal attention, one sequence at a time: q [Tq, H, D] with k
    and v [Tk, Hkv, D] → [Tq, H, D]. The last query of a sequence is aligned with its last key. Raises
    NotImplementedError for a softcap."""
    assert causal
    if softcap:
        raise NotImplementedError("attention with a softcap is not implemented on a CPU")
    parts = []
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (q_begin, q_end), (k_begin, k_end) in bounds:
        num_keys, num_queries = k_end - k_begin, q_end - q_begin
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        mask = distance >= 0
        if window_size[0] >= 0:
            mask &= distance <= window_size[0]
        heads = (x.transpose(0, 1)[None] for x in (q[q_begin:q_end], k[k_begin:k_end], v[k_begin:k_end]))
        out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
