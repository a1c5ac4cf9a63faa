"""Rotary embeddings of a known decoder: tables for all positions, and how each attention layer applies them.

Models rotate the two halves of a head, or neighbouring numbers. Attention does not depend on the order of the numbers
in queries and keys. So heads with neighbouring numbers are reordered, and then the same kernel rotates all heads. D
head dimension, R rotated numbers of a head, T tokens, N width of queries, keys and values together.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation in one attention layer."""

    cos: torch.Tensor
    """f32[max_context, R]"""
    sin: torch.Tensor
    """f32[max_context, R]"""
    order: torch.Tensor | None
    """i64[N], order of the columns of queries, keys and values before the rotation. None: as they are."""
    query_scale: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    """Maps queries [T, H, D] and their positions i64[T] to scaled queries."""


class Rotations:
    """Rotations by layer type. The model's own module makes the tables for all positions at once. Without a module
    nothing is rotated (Granite 4 H)."""

    def __init__(self, module: nn.Module | None, max_context: int):
        self._module, self._max_context = module, max_context
        self._by_type = module is not None and "layer_type" in inspect.signature(module.forward).parameters
        self._made: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, attention: nn.Module, *, head_dim: int, q_width: int, width: int) -> Rotation:
        """Return the rotation of an attention layer. q_width and width: numbers of a token's queries, and of its
        queries, keys and values together."""
        cos, sin = self.tables_of(attention)
        order = None
        if _rotates_neighbours(attention):
            order = _halves_first(head_dim, cos.shape[1], (q_width + width) // 2, width).to(cos.device)
        if not _rotates(attention):
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        return Rotation(cos, sin, order, _query_scale(attention))

    def tables_of(self, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of an attention layer, f32[max_context, R]."""
        kind = None
        if self._by_type:
            kind = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None)
            kind = kind or attention.config.layer_types[attention.layer_idx]
        if kind not in self._made:
            self._made[kind] = self._tables(kind, next(attention.parameters()).device)
        return self._made[kind]

    def _tables(self, kind: str | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._module is None:
            return torch.ones(self._max_context, 2, device=device), torch.zeros(self._max_context, 2, device=device)
        positions = torch.arange(self._max_context, device=device)[None]
        extra = {"layer_type": kind} if self._by_type else {}
        made = self._module(torch.zeros(1, 1, device=device), positions, **extra)
        if isinstance(made, torch.Tensor):  # cos + i sin (DeepSeek V2)
            made = (made.real.repeat(1, 1, 2), made.imag.repeat(1, 1, 2))
        cos, sin = (table[0].float() for table in made)
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):  # each twice (Cohere)
            cos, sin = cos[:, ::2].repeat(1, 2), sin[:, ::2].repeat(1, 2)
        elif not torch.equal(cos[:, :half], cos[:, half:]):  # only the first half is given (gpt-oss)
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return cos.contiguous(), sin.contiguous()


def _rotates(attention: Any) -> bool:
    """Return whether a layer rotates queries and keys. Some models have layers without positions."""
    name = type(attention).__name__
    if name.startswith("Exaone"):
        return attention.sliding_window is None or attention.is_sliding
    if name.startswith("Afmoe"):
        return attention.is_local_attention
    if name.startswith("Cohere2"):
        return attention.sliding_window is not None
    return bool(getattr(attention, "use_rope", True))  # SmolLM 3


def latents_rotate_neighbours(attention: nn.Module) -> bool:
    """Return whether latent attention rotates neighbouring numbers. The configuration says it (DeepSeek V3), or the
    code has only such a function (DeepSeek V2, which multiplies complex numbers, and V3.2)."""
    code = sys.modules.get(type(attention).__module__)
    interleaves = getattr(getattr(attention, "config", None), "rope_interleave", None)
    if interleaves is not None:
        return bool(interleaves)
    return hasattr(code, "apply_rotary_emb") or hasattr(code, "apply_rotary_pos_emb_interleave")


def _rotates_neighbours(attention: nn.Module) -> bool:
    """Return whether the code of a layer rotates neighbouring numbers instead of the halves of a head."""
    code = sys.modules.get(type(attention).__module__)
    rotate_half = getattr(code, "rotate_half_llm", None) or getattr(code, "rotate_half", None)  # the former in GLM-4V
    if rotate_half is None:
        return False
    return torch.equal(rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([-2.0, 1.0, -4.0, 3.0]))


def _halves_first(head_dim: int, rotated: int, rotated_width: int, width: int) -> torch.Tensor:
    """Return the order i64[N] with even rotated numbers before odd ones in each head of queries and keys."""
    one = torch.cat([torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, head_dim)])
    heads = torch.arange(0, rotated_width, head_dim)[:, None] + one
    return torch.cat([heads.flatten(), torch.arange(rotated_width, width)])


def _query_scale(attention: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return a factor on queries that grows with their position (Ministral 3)."""
    rope: Any = getattr(getattr(attention, "config", None), "rope_parameters", None)
    beta = rope.get("llama_4_scaling_beta") if isinstance(rope, dict) else None
    if not beta:
        return None
    period = rope["original_max_position_embeddings"]

    def scale(query_THD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        factors = 1 + beta * torch.log(1 + torch.floor(positions_T / period))
        return query_THD * factors[:, None, None].to(query_THD.dtype)

    return scale
