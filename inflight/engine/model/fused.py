"""Known decoders, run with fused kernels over the slot's own weights.

A decoder is known if it consists of these parts: embedding; layers of attention and MLP with norms before them (Llama,
Qwen, Mistral, Phi-3, mixtures of experts), after them (OLMo 2) or both (Gemma), one after the other, from one norm
(Cohere), or alone (Nemotron-H); a norm; a head. A layer with a state per sequence can take the place of attention
(Qwen 3.5) or run next to it (Falcon-H1). A decoder is used only if its logits agree with the logits of the Transformers
model (`agreement.py`). Transformers runs all other models. Norms other than RMSNorm, and layers with a state other than
`DeltaNet`, run with their own code.

No weights are copied. q, k and v are adjacent in the slot, and so are gate and up, so that one product covers them. T
tokens, D head dimension, M rows that are drawn from, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from inflight_kernels import Norm as RMSNorm
from inflight_kernels import add_rms_norm, gated_activation, linear, rms_norm, rope_and_cache, unrounded_linear
from torch import nn
from transformers import PreTrainedModel

from inflight.core.decoder import ATTENTION, HEAD_NORMS, LAST_NORMS, LAYER_NORMS, MLP, MLPS, ROTATIONS
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import ForwardBatch
from inflight.engine.model.attention.hook import has_state, running
from inflight.engine.model.attention.latent import LatentHeads
from inflight.engine.model.delta_net import DeltaNet
from inflight.engine.model.layer_parts import (
    AnyNorm,
    AttentionOrder,
    LayerEnd,
    gate_of,
    inputs_per_layer,
    mlp_and_experts,
    norm_of,
    normed,
    value_norm,
    with_values,
)
from inflight.engine.model.products import Block, Product, UnknownPartError, part_of, product_of
from inflight.engine.model.rotation import Rotation, Rotations, latents_rotate_neighbours
from inflight.model_checks.mixers import names_in_forward

_DROPOUT = {"dropout", "residual_dropout", "functional", "nn", "training"}
_ACTIVATIONS = {"act_fn", "activation_fn", "F", "silu"}
_GATED_MLP = _DROPOUT | _ACTIVATIONS | {"chunk", *(name for names in MLP for name in names.names)}
"""Names in the code of a gated MLP. Others belong to something else, such as Gemma 3n's sparse gates."""


@dataclass(frozen=True, slots=True)
class _Attention:
    index: int
    keys_of: int
    """Index of the layer whose keys and values it attends to."""
    products: int
    """Number of products in `qkv`: queries, keys and values; 2 if values are made of keys, 1 for queries alone."""
    qkv: Product
    out: Product
    rotation: Rotation
    head_norms: tuple[RMSNorm, RMSNorm] | None
    """Norms of each query and key head (Qwen 3, Gemma 3)."""
    whole_norms: tuple[RMSNorm, RMSNorm] | None
    """Norms of all query heads together, and of all key heads (OLMo 2)."""
    value_norm: RMSNorm | None
    sinks: torch.Tensor | None
    key_scale: float
    """Factor on keys (Falcon-H1)."""
    gated_heads: int
    """Query heads that have a gate next to them in the product (Qwen 3.5), or 0."""
    gate: Block | None
    """Makes factors of the heads' outputs (AFMoE)."""

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
        qkv, gate = self.qkv(x), None if self.gate is None else self.gate(x)
        if self.gated_heads:
            queries, rest = qkv.tensor_split((2 * self.out.weight.shape[1],), 1)
            query, gate = queries.unflatten(1, (self.gated_heads, 2, -1)).unbind(2)
            gate = gate.sigmoid()
            qkv = torch.cat((query.flatten(1), rest), 1)
        if self.whole_norms is not None:
            q_norm, k_norm = self.whole_norms
            q_width, k_width = len(q_norm.weight), len(k_norm.weight)
            q, k, v = qkv.tensor_split((q_width, q_width + k_width), 1)
            qkv = torch.cat((rms_norm(q, q_norm), rms_norm(k, k_norm), v), 1)
        if self.value_norm is not None or self.products < 3:
            qkv = with_values(qkv, self.products, memory.keys[self.index][0, 0].numel(), self.value_norm)
        if self.key_scale != 1:
            q_width, k_width = self.out.weight.shape[1], memory.keys[self.index][0, 0].numel()
            qkv[:, q_width : q_width + k_width] *= self.key_scale
        rotation = self.rotation
        if rotation.order is not None:
            qkv = qkv[:, rotation.order]
        query = rope_and_cache(
            qkv,
            rotation.cos,
            rotation.sin,
            batch.positions,
            batch.cache_index[memory.group_of[self.index]],
            memory.keys[self.index],
            memory.values[self.index],
            self.head_norms,
        )
        if rotation.query_scale is not None:
            query = rotation.query_scale(query, batch.positions)
        attended = memory.backend.attend(self.keys_of, query, self.sinks)
        return self.out((attended if gate is None else attended * gate).flatten(1))


@dataclass(frozen=True, slots=True)
class _LatentAttention:
    index: int
    queries: tuple[Product, ...]
    """One product, or two with the norm between them."""
    query_norm: AnyNorm | None
    latent: Product
    latent_norm: AnyNorm
    heads: LatentHeads
    out: Product
    cos: torch.Tensor
    """f32[max_context, R / 2]"""
    sin: torch.Tensor
    neighbours: bool
    """Neighbouring numbers are rotated instead of halves. Both become halves."""

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
        query = self.queries[0](x)
        if self.query_norm is not None:
            query = self.queries[1](normed(query, self.query_norm))
        query = query.unflatten(1, (len(self.heads.keys_HPL), -1))
        latent, key = self.latent(x).tensor_split((self.heads.rank,), 1)
        plain = self.heads.keys_HPL.shape[1]
        cos, sin = self.cos[batch.positions][:, None], self.sin[batch.positions][:, None]
        query = torch.cat((query[..., :plain], self._rotated(query[..., plain:], cos, sin)), 2)
        latents = memory.keys[self.index].view(-1, self.heads.rank + key.shape[1])
        places = batch.cache_index[memory.group_of[self.index]]
        latents[places] = torch.cat((normed(latent, self.latent_norm), self._rotated(key[:, None], cos, sin)[:, 0]), 1)
        mixed = memory.backend.attend(self.index, self.heads.absorb(query), None)
        return self.out(self.heads.expand(mixed).flatten(1))

    def _rotated(self, x_THR: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x_THR.float()
        first, second = (x[..., ::2], x[..., 1::2]) if self.neighbours else x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_THR.dtype)


_Mixer = Callable[[torch.Tensor, ForwardBatch, KVMemory], torch.Tensor]


def _own_mixer(module: nn.Module, x: torch.Tensor, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
    """Compute a layer with a state per sequence by its own code."""
    return module(x[None])[0]


@dataclass(frozen=True, slots=True)
class _SideBySide:
    """A layer with a state and attention, with the same input (Falcon-H1)."""

    SCALES = ("ssm_out_multiplier", "attention_in_multiplier", "attn_out_multiplier")
    state: _Mixer
    attention: _Mixer
    state_scale: float
    input_scale: float
    attention_scale: float

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
        mixed = self.state(x, batch, memory) * self.state_scale
        return mixed + self.attention(x * self.input_scale, batch, memory) * self.attention_scale


@dataclass(frozen=True, slots=True)
class _Mlp:
    gate_up: Product
    down: Product
    activation: Literal["silu", "gelu_tanh"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated_activation(self.gate_up(x), self.activation))


def _own_mlp(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute an MLP of another kind, such as a mixture of experts, by its own code."""
    out = module(x[None])
    return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)


def _sum(parts: Sequence[Block], x: torch.Tensor) -> torch.Tensor:
    """Add up several MLPs with the same input (experts and a shared MLP)."""
    first, *others = (part(x) for part in parts)
    return sum(others, first)


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: AnyNorm | None
    attention: _Mixer
    """Attention, or the only part of the layer."""
    after_attention: AnyNorm | None = None
    before_mlp: AnyNorm | None = None
    mlp: Block | None = None
    after_mlp: AnyNorm | None = None
    parallel: bool = False
    """Attention and MLP have the same residual."""
    scale: float = 1.0
    """Factor on the outputs of attention and MLP."""
    end: LayerEnd | None = None

    def run(
        self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch, memory: KVMemory, own: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map the normed input and the residual to the output of the last block and the residual before it, if it is
        not added yet. x: [T, H], residual: [T, H], own: the input of this layer [T, P]."""
        attended = self._scaled(self.attention(x, batch, memory), self.after_attention)
        if self.mlp is None:
            return attended, residual
        if self.parallel:
            x = x if self.before_mlp is None else normed(residual, self.before_mlp)
            return attended + self._scaled(self.mlp(x), self.after_mlp), residual
        x, residual = _add(attended, residual, self.before_mlp)
        x = self._scaled(self.mlp(x), self.after_mlp)
        return (x, residual) if self.end is None else (self.end(x + residual, own), None)

    def _scaled(self, x: torch.Tensor, norm: AnyNorm | None) -> torch.Tensor:
        x = x if norm is None else normed(x, norm)
        return x if self.scale == 1 else x * self.scale


class FusedDecoder:
    """A decoder over the weights of one slot. Raises UnknownPartError if a part of the model is not known."""

    def __init__(self, model: PreTrainedModel, memory: KVMemory, max_context: int):
        self._memory = memory
        body = model.get_decoder()  # It can be inside a multimodal model.
        self._body = body
        modules = part_of(body, "layers", nn.ModuleList)
        self._embed = body.get_input_embeddings()
        rotations = Rotations(
            next((getattr(body, name) for name in ROTATIONS if hasattr(body, name)), None), max_context
        )
        order = AttentionOrder()
        self._layers = [_layer(module, rotations, order) for module in modules]
        self._norm = norm_of(part_of(body, next((name for name in LAST_NORMS if hasattr(body, name)), "norm")))
        self._head = product_of(part_of(model, "lm_head", nn.Linear))
        self._embed_scale = float(getattr(body, "embedding_multiplier", 1.0))
        if getattr(body.config, "mup_enabled", False):  # AFMoE
            self._embed_scale *= body.config.hidden_size**0.5
        self._logit_scale = _logit_scale(model)
        self._softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits [M, V] for a batch that the memory's backend has begun."""
        return self.logits(self.hidden(batch))

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [M, H] for the head."""
        residual = self._embed(batch.token_ids)
        if self._embed_scale != 1:
            residual = residual * self._embed_scale
        own = inputs_per_layer(self._body, batch.token_ids, residual)
        x = residual if (first := self._layers[0].before_attention) is None else normed(residual, first)
        with running(batch, self._memory):
            for index, layer in enumerate(self._layers):
                x, last = layer.run(x, residual, batch, self._memory, None if own is None else own[:, index])
                if index + 1 < len(self._layers):
                    x, residual = _add(x, last, self._layers[index + 1].before_attention)
        if len(batch.rows) < len(x):
            x, last = x[batch.rows], None if last is None else last[batch.rows]
        return _add(x, last, self._norm)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V] of hidden states [M, H]. On a GPU they are fp32, as in the trainer's loss: a logit of 16
        to 32, rounded to bf16, is off by 0.03 on average."""
        logits = unrounded_linear(hidden, self._head.weight, self._head.bias)  # adapters do not change the head
        if self._logit_scale != 1:
            logits = logits * self._logit_scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def _add(x: torch.Tensor, residual: torch.Tensor | None, norm: AnyNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(x + residual), x + residual). None: the residual is in x."""
    if isinstance(norm, RMSNorm):
        return add_rms_norm(x, residual, norm)
    total = x if residual is None else x + residual
    return (total if norm is None else norm(total)), total


# ---- from modules to parts ------------------------------------------------------------------------------------------


def _logit_scale(model: PreTrainedModel) -> float:
    """Return the factor between the head's output and the logits. Granite and MiniCPM 3 divide by `logits_scaling`,
    Granite Speech ignores it."""
    config = model.config.get_text_config()
    scaling = 1.0 if "GraniteSpeech" in type(model).__name__ else float(getattr(config, "logits_scaling", 1.0))
    scale = 1 / scaling if type(model).__name__.startswith(("Granite", "MiniCPM3")) else scaling
    return scale * float(getattr(model, "logit_scale", None) or 1.0) * float(getattr(config, "lm_head_multiplier", 1.0))


def _layer(layer: nn.Module, rotations: Rotations, order: AttentionOrder) -> _Layer:
    if getattr(layer, "residual_in_fp32", False):  # Mamba 2
        raise UnknownPartError(f"{type(layer).__name__} keeps residuals in fp32")
    if {name for name, _ in layer.named_children()} == {"norm", "mixer"}:  # Nemotron-H
        return _Layer(norm_of(part_of(layer, "norm")), _only_part(part_of(layer, "mixer"), rotations, order))
    known = {name for kind in LAYER_NORMS for name in kind.names}
    norms = {name: child for name, child in layer.named_children() if name.endswith("layernorm") or name in known}
    names = next((kind for kind in LAYER_NORMS if kind.match(norms.keys())), LAYER_NORMS[-1]).names
    if unknown := set(norms) - set(names):
        raise UnknownPartError(f"{type(layer).__name__} has {', '.join(sorted(unknown))}")
    before, after, before_mlp, after_mlp = (norm_of(norms[name]) if name in norms else None for name in names)
    attention = _mixers(layer, rotations, order)
    mlps = [_mlp(part) for name in MLPS if isinstance(part := getattr(layer, name, None), nn.Module)]
    mlp = _mlp(part_of(layer, "mlp")) if not mlps else mlps[0] if len(mlps) == 1 else partial(_sum, mlps)
    parallel = getattr(layer, "use_parallel_residual", not {after, before_mlp, after_mlp} - {None})
    if hasattr(layer, "post_feedforward_layernorm_2"):
        mlp, before_mlp = mlp_and_experts(layer, mlp), None
    scales = (getattr(layer, name, None) for name in ("residual_multiplier", "residual_scale"))  # the latter: MiniCPM 3
    scale = float(next((scale for scale in scales if isinstance(scale, (int, float))), 1.0))
    return _Layer(before, attention, after, before_mlp, mlp, after_mlp, bool(parallel), scale, LayerEnd.of(layer))


def _only_part(module: nn.Module, rotations: Rotations, order: AttentionOrder) -> _Mixer:
    if has_state(module) or hasattr(module, "head_dim"):
        return _mixer(module, rotations, order)
    mlp = _mlp(module)
    return lambda x, batch, memory: mlp(x)


def _mixers(layer: nn.Module, rotations: Rotations, order: AttentionOrder) -> _Mixer:
    with_state, attention = [child for child in layer.children() if has_state(child)], getattr(layer, "self_attn", None)
    if not with_state:
        return _mixer(part_of(layer, "self_attn"), rotations, order)
    if attention in (None, with_state[0]) and len(with_state) == 1:
        return _mixer(with_state[0], rotations, order)
    scales: list[Any] = [getattr(layer, name, None) for name in _SideBySide.SCALES]
    if len(with_state) > 1 or not isinstance(attention, nn.Module) or None in scales:
        raise UnknownPartError(f"{type(layer).__name__} has several parts that mix tokens")
    state = _mixer(with_state[0], rotations, order)
    return _SideBySide(state, _mixer(attention, rotations, order), *map(float, scales))


def _mixer(module: nn.Module, rotations: Rotations, order: AttentionOrder) -> _Mixer:
    if has_state(module):
        if (delta_net := DeltaNet.of(module)) is not None:
            return delta_net
        use_kernels(module)
        return partial(_own_mixer, module)
    if (heads := LatentHeads.of(module)) is not None:
        return _latent_attention(module, heads, rotations, order.of(module)[0])
    return _attention(module, rotations, order)


def _attention(module: nn.Module, rotations: Rotations, order: AttentionOrder) -> _Attention:
    head_dim = int(part_of(module, "head_dim", int))
    names = next((names for names in ATTENTION if hasattr(module, names.out)), ATTENTION[0])
    index, keys_of = order.of(module)
    if any(getattr(holder, "clip_qkv", None) is not None for holder in (module, getattr(module, "config", None))):
        raise UnknownPartError(f"{type(module).__name__} clips queries, keys and values (clip_qkv)")
    parts = (names.whole,) if hasattr(module, names.whole) else names.parts
    if keys_of != index:
        parts = parts[:1]
    elif getattr(module, parts[-1], module) is None:  # values are keys
        parts = parts[:2]
    products, out = [part_of(module, name, nn.Linear) for name in parts], part_of(module, names.out, nn.Linear)
    qkv = product_of(*products)
    is_gated = len(products) > 1 and products[0].out_features == 2 * out.in_features
    if len(products) > 1 and products[0].out_features != out.in_features and not is_gated:
        rows = f"{products[0].out_features} rows where {names.out} takes {out.in_features}"
        raise UnknownPartError(f"{type(module).__name__} has a {parts[0]} of {rows}")
    norms = _query_key_norms(module)
    per_head = norms is not None and norms[0].weight.shape == (head_dim,)
    q_width = out.in_features
    width = len(qkv.weight) - (q_width if is_gated else 0)
    rotation = rotations.of(module, head_dim=head_dim, q_width=q_width, width=width)
    if per_head and rotation.order is not None:
        raise UnknownPartError(f"{type(module).__name__} norms heads and rotates neighbouring numbers")
    return _Attention(
        index=index,
        keys_of=keys_of,
        products=3 if hasattr(module, names.whole) else len(parts),
        qkv=qkv,
        out=product_of(out),
        rotation=rotation,
        head_norms=norms if per_head else None,
        whole_norms=None if per_head else norms,
        value_norm=value_norm(module, head_dim),
        sinks=getattr(module, "sinks", None),
        key_scale=float(getattr(module, "key_multiplier", 1.0)),
        gated_heads=q_width // head_dim if is_gated else 0,
        gate=gate_of(module, q_width // head_dim),
    )


def _latent_attention(module: nn.Module, heads: LatentHeads, rotations: Rotations, index: int) -> _LatentAttention:
    parts = {name for name, _ in module.named_children()}
    names = ("q_a_proj", "q_b_proj") if "q_a_proj" in parts else ("q_proj",)
    known = {*names, "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    if unknown := parts - known - {"indexer"}:  # a gate, for example; all keys are chosen (`chooses_keys`)
        raise UnknownPartError(f"{type(module).__name__} has {', '.join(sorted(unknown))}")
    cos, sin = (table[:, : table.shape[1] // 2].contiguous() for table in rotations.tables_of(module))
    return _LatentAttention(
        index=index,
        queries=tuple(product_of(part_of(module, name, nn.Linear)) for name in names),
        query_norm=norm_of(part_of(module, "q_a_layernorm")) if len(names) == 2 else None,
        latent=product_of(part_of(module, "kv_a_proj_with_mqa", nn.Linear)),
        latent_norm=norm_of(part_of(module, "kv_a_layernorm")),
        heads=heads,
        out=product_of(part_of(module, "o_proj", nn.Linear)),
        cos=cos,
        sin=sin,
        neighbours=latents_rotate_neighbours(module),
    )


def _query_key_norms(module: nn.Module) -> tuple[RMSNorm, RMSNorm] | None:
    names = next((names for names in HEAD_NORMS if all(hasattr(module, name) for name in names)), None)
    if names is None:
        return None
    q_norm, k_norm = (norm_of(part_of(module, name)) for name in names)
    if not isinstance(q_norm, RMSNorm) or not isinstance(k_norm, RMSNorm):
        raise UnknownPartError(f"{type(getattr(module, names[0])).__name__} in place of an RMSNorm of queries")
    if q_norm[1:] != k_norm[1:]:  # all but the weights
        raise UnknownPartError(f"{type(module).__name__} normalises queries and keys in two ways")
    return q_norm, k_norm


def _mlp(module: nn.Module) -> Block:
    if (mlp := _gated_mlp(module)) is not None:
        return mlp
    use_kernels(module)
    return partial(_own_mlp, module)


def _gated_mlp(module: nn.Module) -> _Mlp | None:
    names_used = names_in_forward(type(module))
    function = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if function is None and "silu" in names_used:
        function = F.silu
    if names_used <= _GATED_MLP and (activation := _activation(function)) is not None:
        for parts, out in ((parts, names.out) for names in MLP for parts in ((names.whole,), names.parts)):
            linears: list[Any] = [getattr(module, name, None) for name in (*parts, out)]
            if all(isinstance(linear, nn.Linear) for linear in linears):
                return _Mlp(product_of(*linears[:-1]), product_of(linears[-1]), activation)
    return None


def _activation(function: Any) -> Literal["silu", "gelu_tanh"] | None:
    if function is None or (isinstance(function, nn.Module) and function.state_dict()):  # its weights can be on a GPU
        return None
    result = function(x := torch.linspace(-4, 4, 65))
    if torch.allclose(result, F.silu(x), atol=1e-6):
        return "silu"
    return "gelu_tanh" if torch.allclose(result, F.gelu(x, approximate="tanh"), atol=1e-6) else None


# ---- models that run as in Transformers -----------------------------------------------------------------------------


def use_kernels(model: nn.Module) -> Callable[[], None]:
    """Let the products, RMSNorms and gated MLPs inside a module that runs with Transformers' code use our kernels.
    Returns a function that restores it."""
    changed = [(module, part) for module in model.modules() if (part := _kernel_of(module)) is not None]
    for module, part in changed:
        module.forward = partial(_by_rows, part)

    def restore() -> None:
        for module, _ in changed:
            del module.forward

    return restore


def _by_rows(part: Block, x: torch.Tensor) -> torch.Tensor:
    """Map [..., K] to [..., N] by a function of rows."""
    return part(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def _kernel_of(module: nn.Module) -> Block | None:
    """Return what computes the same as a module for rows, or None."""
    if "forward" in vars(module):  # it computes from the states of sequences, for example
        return None
    if type(module) is nn.Linear:
        return partial(linear, weight=module.weight, bias=module.bias)
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    if isinstance(norm := norm_of(module), RMSNorm):
        return partial(rms_norm, norm=norm)
    try:
        return _gated_mlp(module)
    except UnknownPartError:  # its products stay two
        return None
