"""Norms, and parts of fused layers that few models have (Gemma 4).

Values can be normed keys. A layer can attend to the keys of an earlier layer, have experts next to its MLP and an input
besides the hidden states, and multiply its output by a scalar.

T tokens, D head dimension, H hidden size, N width of queries, keys and values together, P width of the input per layer.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from inflight_kernels import Norm, rms_norm
from torch import nn

from inflight.engine.model.products import Block, product_of
from inflight.model_checks.mixers import names_in_forward

AnyNorm = Norm | nn.Module
"""An RMSNorm with its own kernel, or a module of another kind, such as LayerNorm."""


class AttentionOrder:
    """Numbers the attention layers of a decoder in the order in which they run."""

    def __init__(self) -> None:
        self._indices = count()
        self._stored: dict[str | None, int] = {}

    def of(self, module: nn.Module) -> tuple[int, int]:
        """Return the index of the next layer, and the index of the layer whose keys and values it attends to. Raises
        KeyError if no earlier layer of its type shares its keys."""
        index, kind = next(self._indices), getattr(module, "layer_type", None)
        if getattr(module, "is_kv_shared_layer", False):
            return index, self._stored[kind]
        if getattr(module, "store_full_length_kv", False):
            self._stored[kind] = index
        return index, index


def gate_of(module: Any, heads: int) -> Block | None:
    """Return the function that makes the factors of the heads' outputs, [T, heads, 1 or D], or None."""
    gate = getattr(module, "gate_proj", getattr(module, "g_proj", None))
    if gate is None:
        return None
    product, is_softplus = product_of(gate), "softplus" in names_in_forward(type(module))

    def factors(x: torch.Tensor) -> torch.Tensor:
        y = product(x).unflatten(1, (heads, -1))
        return F.softplus(y.float()).to(y.dtype) if is_softplus else y.sigmoid()

    return factors


def value_norm(module: Any, head_dim: int) -> Norm | None:
    """Return the norm of each value head of an attention layer. It has no weight."""
    norm = getattr(module, "v_norm", None)
    return None if norm is None else Norm(module.q_norm.weight.new_ones(head_dim), norm.eps)


def with_values(qkv_TN: torch.Tensor, products: int, width: int, norm: Norm | None) -> torch.Tensor:
    """Return queries, keys and values [T, N] from the outputs of 3 products, of 2 (the values are the keys before their
    norm), or of 1 (the layer attends to the keys of another one, its own are zero). width: of the keys."""
    if products == 1:
        return F.pad(qkv_TN, (0, 2 * width))
    if norm is None:
        return qkv_TN
    values = rms_norm(qkv_TN[:, -width:].reshape(-1, len(norm.weight)), norm).view(-1, width)
    return torch.cat((qkv_TN if products == 2 else qkv_TN[:, :-width], values), 1)


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """The last steps of a layer: a block gated by the input per layer, and a scalar."""

    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    """Maps [T, H] and the input per layer [T, P] to [T, H], which is added."""
    scalar: torch.Tensor
    """[1]"""

    @classmethod
    def of(cls, layer: Any) -> "LayerEnd | None":
        """Return the end of a layer, or None if it has none."""
        if not isinstance(getattr(layer, "layer_scalar", None), torch.Tensor):
            return None
        if not hasattr(layer, "per_layer_input_gate"):
            return cls(None, layer.layer_scalar)
        gate, projection = product_of(layer.per_layer_input_gate), product_of(layer.per_layer_projection)
        norm, activation = norm_of(layer.post_per_layer_input_norm), layer.act_fn
        return cls(lambda x, input_TP: normed(projection(activation(gate(x)) * input_TP), norm), layer.layer_scalar)

    def __call__(self, x: torch.Tensor, input_TP: torch.Tensor | None) -> torch.Tensor:
        """Map the output of the MLP with its residual, [T, H], to the output of the layer, [T, H]."""
        if self.gated is not None and input_TP is not None:
            x = x + self.gated(x, input_TP)
        return x * self.scalar


def mlp_and_experts(layer: Any, mlp: Block) -> Block:
    """Return the sum of an MLP and of experts as a block of the residual [T, H]. Each has norms before and after it."""
    before, after = norm_of(layer.pre_feedforward_layernorm), norm_of(layer.post_feedforward_layernorm_1)
    first, last = norm_of(layer.pre_feedforward_layernorm_2), norm_of(layer.post_feedforward_layernorm_2)

    def block(x: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = layer.router(x)
        experts = layer.experts(normed(x, first), chosen, weights)
        return normed(mlp(normed(x, before)), after) + normed(experts, last)

    return block


def inputs_per_layer(body: Any, token_ids: torch.Tensor, embedded_TH: torch.Tensor) -> torch.Tensor | None:
    """Return the inputs of the layers of a decoder, [T, layers, P], or None if it has none."""
    if not getattr(body, "hidden_size_per_layer_input", None):
        return None
    return body.project_per_layer_inputs(embedded_TH[None], body.get_per_layer_inputs(token_ids[None], None))[0]


def normed(x: torch.Tensor, norm: AnyNorm) -> torch.Tensor:
    return rms_norm(x, norm) if isinstance(norm, Norm) else norm(x)


def norm_of(module: nn.Module) -> AnyNorm:
    """Return the RMSNorm that a module computes, identified by its output for random numbers in the dtype of its
    weight; or the module, if it is a norm of another kind."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return module
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(module).cpu()
    x, w = (torch.randn(n, len(weight), generator=generator).to(weight.dtype) for n in (7, 1))
    probe.weight = nn.Parameter(w[0], requires_grad=False)
    expected = probe(x)
    candidates = [Norm(w[0], eps, *kind) for kind in ((0.0, True), (0.0, False), (1.0, False))]
    errors = [float((rms_norm(x, norm).float() - expected.float()).abs().mean()) for norm in candidates]
    best = candidates[errors.index(min(errors))]
    if min(errors) > 1e-3 or getattr(module, "bias", None) is not None:
        return module
    return Norm(weight, eps, best.offset, best.cast_first)
