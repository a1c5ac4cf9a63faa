"""Known decoders, run with fused kernels over the slot's own weights.

A decoder is known if it consists of these parts: embedding; layers of attention and MLP with RMSNorms before them
(Llama, Qwen, Mistral, Phi-3, mixtures of experts), after them (OLMo 2) or both (Gemma); a norm; a head. It is used only
if its logits agree with the logits of the Transformers model (`agreement.py`). Transformers runs all other models.

No weights are copied. q, k and v are adjacent in the slot, and so are gate and up, so that one product covers them. T
tokens, D head dimension, M rows that are drawn from, V vocabulary.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from inflight_kernels import Norm, add_rms_norm, gated_activation, linear, rms_norm, rope_and_cache, unrounded_linear
from torch import nn
from transformers import PreTrainedModel

from inflight.core.decoder import ATTENTION, LAYER_NORMS, MLP
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.adapters import Lora, lora_of, merge_lora
from inflight.engine.model.attention.backend import ForwardBatch


class UnknownPartError(Exception):
    """Some part of a model is not of a known kind. The message names it."""


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: Lora | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, self.weight, self.bias)
        if self.lora is not None:
            self.lora.add(y, x)
        return y


_Rope = tuple[torch.Tensor, torch.Tensor]
"""The cosines and the sines f32[max_context, R]."""


@dataclass(frozen=True, slots=True)
class _Attention:
    index: int
    qkv: _Linear
    out: _Linear
    rope: _Rope
    head_norms: tuple[Norm, Norm] | None
    """Norms of each query and key head (Qwen 3, Gemma 3)."""
    whole_norms: tuple[Norm, Norm] | None
    """Norms of all query heads together, and of all key heads (OLMo 2)."""
    sinks: torch.Tensor | None

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
        qkv = self.qkv(x)
        if self.whole_norms is not None:
            q_norm, k_norm = self.whole_norms
            q_width, k_width = len(q_norm.weight), len(k_norm.weight)
            q, k, v = qkv.tensor_split((q_width, q_width + k_width), 1)
            qkv = torch.cat((rms_norm(q, q_norm), rms_norm(k, k_norm), v), 1)
        query = rope_and_cache(
            qkv,
            *self.rope,
            batch.positions,
            batch.cache_index[memory.group_of[self.index]],
            memory.keys[self.index],
            memory.values[self.index],
            self.head_norms,
        )
        return self.out(memory.backend.attend(self.index, query, self.sinks).flatten(1))


@dataclass(frozen=True, slots=True)
class _Mlp:
    gate_up: _Linear
    down: _Linear
    activation: Literal["silu", "gelu_tanh"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated_activation(self.gate_up(x), self.activation))


@dataclass(frozen=True, slots=True)
class _Opaque:
    """An MLP of another kind, such as a mixture of experts, with its own code."""

    module: nn.Module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.module(x[None])
        return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: Norm | None
    attention: _Attention
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: _Mlp | _Opaque
    after_mlp: Norm | None


class FusedDecoder:
    """A decoder over the weights of one slot. Raises UnknownPartError if a part of the model is not known."""

    def __init__(self, model: PreTrainedModel, memory: KVMemory, max_context: int):
        self._memory = memory
        body = model.get_decoder()  # It can be inside a multimodal model.
        self._embed = _part(body, "embed_tokens", nn.Module)
        ropes = _Ropes(_part(body, "rotary_emb", nn.Module), max_context)
        self._layers = [_layer(module, ropes) for module in _part(body, "layers", nn.ModuleList)]
        self._norm = _norm(_part(body, "norm", nn.Module))
        self._head = _linear(_part(model, "lm_head", nn.Linear))
        self._softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits [M, V] for a batch that the memory's backend has begun."""
        return self.logits(self.hidden(batch))

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [M, H] for the head."""
        residual = self._embed(batch.token_ids)
        x = residual if (first := self._layers[0].before_attention) is None else rms_norm(residual, first)
        for index, layer in enumerate(self._layers):
            x = layer.attention(x, batch, self._memory)
            if layer.after_attention is not None:
                x = rms_norm(x, layer.after_attention)
            x, residual = _add(x, residual, layer.before_mlp)
            x = layer.mlp(x)
            if layer.after_mlp is not None:
                x = rms_norm(x, layer.after_mlp)
            if index + 1 < len(self._layers):
                x, residual = _add(x, residual, self._layers[index + 1].before_attention)
        return _add(x[batch.rows], residual[batch.rows], self._norm)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of hidden states [M, H]. On a GPU they are fp32, as in the trainer's loss: a logit of 16
        to 32, rounded to bf16, is off by 0.03 on average."""
        logits = unrounded_linear(hidden, self._head.weight, self._head.bias)  # adapters do not change the head
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def _add(x: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + residual), x + residual)."""
    if norm is None:
        total = x + residual
        return total, total
    return add_rms_norm(x, residual, norm)


# ---- from modules to parts ------------------------------------------------------------------------------------------


def _part(module: nn.Module, name: str, kind: type) -> Any:
    part = getattr(module, name, None)
    if not isinstance(part, kind):
        raise UnknownPartError(f"{type(module).__name__} has no {name}")
    return part


def _layer(layer: nn.Module, ropes: "_Ropes") -> _Layer:
    norms = {name: child for name, child in layer.named_children() if name.endswith("layernorm")}
    kind = next((kind for kind in LAYER_NORMS if kind.last in norms), LAYER_NORMS[-1])
    places = (kind.before_attention, kind.after_attention, kind.before_mlp, kind.after_mlp)
    if unknown := set(norms) - set(places):
        raise UnknownPartError(f"{type(layer).__name__} has {', '.join(sorted(unknown))}")
    before, after, before_mlp, after_mlp = (_norm(norms[name]) if name in norms else None for name in places)
    attention = _attention(_part(layer, "self_attn", nn.Module), ropes)
    return _Layer(before, attention, after, before_mlp, _mlp(_part(layer, "mlp", nn.Module)), after_mlp)


def _attention(module: nn.Module, ropes: "_Ropes") -> _Attention:
    head_dim = int(_part(module, "head_dim", int))
    names = next((names for names in ATTENTION if hasattr(module, names.out)), ATTENTION[0])
    parts = (names.whole,) if hasattr(module, names.whole) else names.parts
    products, out = [_part(module, name, nn.Linear) for name in parts], _part(module, names.out, nn.Linear)
    qkv = _linear(*products)
    if len(products) > 1 and products[0].out_features != out.in_features:  # gates next to the queries, for example
        rows = f"{products[0].out_features} rows where {names.out} takes {out.in_features}"
        raise UnknownPartError(f"{type(module).__name__} has a {parts[0]} of {rows}")
    norms = None
    if hasattr(module, "q_norm"):
        norms = _norm(_part(module, "q_norm", nn.Module)), _norm(_part(module, "k_norm", nn.Module))
        if norms[0][1:] != norms[1][1:]:  # all but the weights
            raise UnknownPartError(f"{type(module).__name__} normalises queries and keys in two ways")
    per_head = norms is not None and norms[0].weight.shape == (head_dim,)
    return _Attention(
        index=int(_part(module, "layer_idx", int)),
        qkv=qkv,
        out=_linear(out),
        rope=ropes.of(module),
        head_norms=norms if per_head else None,
        whole_norms=None if per_head else norms,
        sinks=getattr(module, "sinks", None),
    )


def _mlp(module: nn.Module) -> _Mlp | _Opaque:
    activation = _activation(getattr(module, "act_fn", None) or getattr(module, "activation_fn", None))
    if activation is not None:
        for parts, out in ((parts, names.out) for names in MLP for parts in ((names.whole,), names.parts)):
            linears: list[Any] = [getattr(module, name, None) for name in (*parts, out)]
            if all(isinstance(linear, nn.Linear) for linear in linears):
                return _Mlp(_linear(*linears[:-1]), _linear(linears[-1]), activation)
    return _Opaque(module)


def _activation(function: Any) -> Literal["silu", "gelu_tanh"] | None:
    if function is None:
        return None
    x = torch.linspace(-4, 4, 65)
    result = function(x)
    if torch.allclose(result, F.silu(x), atol=1e-6):
        return "silu"
    return "gelu_tanh" if torch.allclose(result, F.gelu(x, approximate="tanh"), atol=1e-6) else None


def _linear(*modules: nn.Linear) -> _Linear:
    """Return one product over weights that are adjacent in the slot."""
    for module in modules:
        if type(module) is not nn.Linear:
            raise UnknownPartError(f"{type(module).__name__} in place of a Linear")
    biases = [module.bias for module in modules if module.bias is not None]
    if biases and len(biases) < len(modules):
        raise UnknownPartError("some of the sibling projections have a bias, others not")
    weight = _cover([module.weight for module in modules])
    return _Linear(weight, _cover(biases) if biases else None, merge_lora([lora_of(module) for module in modules]))


def _cover(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the view [sum of rows, …] of tensors that are adjacent in memory."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            raise UnknownPartError("sibling projections do not lie side by side")
        end += tensor.nbytes
    shape = (sum(len(t) for t in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _norm(module: nn.Module) -> Norm:
    """Return the RMSNorm that a module computes, identified by its output for random numbers in the dtype of its
    weight."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        raise UnknownPartError(f"{type(module).__name__} in place of an RMSNorm")
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(module).cpu()
    x, w = (torch.randn(n, len(weight), generator=generator).to(weight.dtype) for n in (7, 1))
    probe.weight = nn.Parameter(w[0], requires_grad=False)
    expected = probe(x)
    candidates = [Norm(w[0], eps, *kind) for kind in ((0.0, True), (0.0, False), (1.0, False))]
    errors = [float((rms_norm(x, norm).float() - expected.float()).abs().mean()) for norm in candidates]
    best = candidates[errors.index(min(errors))]
    if min(errors) > 1e-3:
        raise UnknownPartError(f"{type(module).__name__} is no RMSNorm that is known")
    return Norm(weight, eps, best.offset, best.cast_first)


class _Ropes:
    """Rotary tables by layer type. The model's own module makes them for all positions at once."""

    def __init__(self, module: nn.Module, max_context: int):
        self._module, self._max_context = module, max_context
        self._by_type = "layer_type" in inspect.signature(module.forward).parameters
        self._made: dict[str | None, _Rope] = {}

    def of(self, attention: nn.Module) -> _Rope:
        kind = None
        if self._by_type:
            kind = getattr(attention, "layer_type", None) or getattr(attention, "attention_type", None)
        if kind not in self._made:
            device = next(attention.parameters()).device
            positions = torch.arange(self._max_context, device=device)[None]
            extra = {"layer_type": kind} if self._by_type else {}
            made = self._module(torch.zeros(1, 1, device=device), positions, **extra)
            cos, sin = (table[0].float() for table in made)
            half = cos.shape[-1] // 2
            if not torch.equal(cos[:, :half], cos[:, half:]):  # only the first half is given (gpt-oss)
                cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
            self._made[kind] = cos.contiguous(), sin.contiguous()
        cos, sin = self._made[kind]
        if getattr(attention, "use_rope", True):
            return cos, sin
        return torch.ones_like(cos), torch.zeros_like(sin)  # SmolLM 3 rotates in some layers only
