"""Latent attention (DeepSeek-V2, arXiv 2405.04434) in the form in which the cache keeps latents.

A token has one latent c of L numbers and one rotated key r of R numbers. `kv_b_proj` makes from c the key K c and the
value V c of each head, and r continues every key. The engine keeps (c, r) in place of the keys and values of all heads.
It attends in the absorbed form: q · (K c) = (Kᵀ q) · c, and Σ w (V c) = V (Σ w c). So all heads read one key (c, r),
and c is the value.

K and V are views of `kv_b_proj`. A swap copies nothing, and the next pass reads the new weights.

T tokens, H heads, P numbers of a head that are not rotated, R rotated ones, W numbers of a head's value.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import nn


class LatentHeads(NamedTuple):
    """The matrices of all heads: the two halves of `kv_b_proj`."""

    keys_HPL: torch.Tensor
    values_HWL: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Return the heads of an attention module that expands latents by `expand_kv`. None for other modules, for
        heads with sinks, and if the projection is not a plain Linear without bias."""
        attention: Any = module
        product = getattr(module, "kv_b_proj", None)
        if not hasattr(module, "expand_kv") or hasattr(module, "sinks"):
            return None
        if type(product) is not nn.Linear or product.bias is not None:
            return None
        per_head = product.weight.unflatten(0, (-1, attention.qk_nope_head_dim + attention.v_head_dim))
        return cls(*per_head.split((attention.qk_nope_head_dim, attention.v_head_dim), 1))

    @property
    def rank(self) -> int:
        """L, the length of a latent."""
        return self.keys_HPL.shape[2]

    def absorb(self, query_THD: torch.Tensor) -> torch.Tensor:
        """Return queries [T, H, L + R] of latents, from queries [T, H, P + R] of keys."""
        plain_THP, rotated_THR = query_THD.tensor_split((self.keys_HPL.shape[1],), 2)
        absorbed_HTL = torch.bmm(plain_THP.transpose(0, 1), self.keys_HPL)
        return torch.cat((absorbed_HTL.transpose(0, 1), rotated_THR), 2)

    def expand(self, mixed_THL: torch.Tensor) -> torch.Tensor:
        """Return values [T, H, W] of all heads, from latents that attention has mixed."""
        return torch.bmm(mixed_THL.transpose(0, 1), self.values_HWL.mT).transpose(0, 1)
