"""Kernels of inflight: Triton on a GPU, C on a CPU with a compiler, and a plain PyTorch reference of each.

Importing this package needs no GPU, no Triton and no compiler. Only `linear_logprobs` and `selective_logprobs` compute
gradients. Results of the other functions have none, although inputs require them.
"""

from inflight_kernels._norm import Norm
from inflight_kernels.attention import paged_attention
from inflight_kernels.copy import BlockCopies, ScaledCopies, copy_all
from inflight_kernels.filters import Filters, Penalties, cut_logits, penalize
from inflight_kernels.latent import latent_attention
from inflight_kernels.linear_logprob import linear_logprobs, linear_logprobs_reference
from inflight_kernels.lora import add_lora
from inflight_kernels.page_lists import list_pages
from inflight_kernels.rotary import rope_and_cache
from inflight_kernels.sampling import draw, uniforms
from inflight_kernels.selective_logprob import selective_logprobs, selective_logprobs_reference
from inflight_kernels.tokenwise import (
    add_rms_norm,
    clamped_gate,
    gated_activation,
    grouped_linear,
    linear,
    mix_experts,
    rms_norm,
    sort_choices,
    unrounded_linear,
)

__all__ = [
    "BlockCopies",
    "Filters",
    "Norm",
    "Penalties",
    "ScaledCopies",
    "add_lora",
    "add_rms_norm",
    "clamped_gate",
    "copy_all",
    "cut_logits",
    "draw",
    "gated_activation",
    "grouped_linear",
    "latent_attention",
    "linear",
    "linear_logprobs",
    "linear_logprobs_reference",
    "list_pages",
    "mix_experts",
    "paged_attention",
    "penalize",
    "rms_norm",
    "rope_and_cache",
    "selective_logprobs",
    "selective_logprobs_reference",
    "sort_choices",
    "uniforms",
    "unrounded_linear",
]
