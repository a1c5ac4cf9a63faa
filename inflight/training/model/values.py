"""Values of states: a causal language model with a head of one number, computed like the policy's log-probabilities.

B sequences, T tokens of a batch, F fed tokens.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import check_adapters, check_vocabulary, transformers_model, try_way, uncompiled
from inflight.training.model.forward_mode import Way, scoring_way
from inflight.training.model.head import without_softcap
from inflight.training.model.packing import has_states, pack_input, packed_attention
from inflight.weights.tensors import is_peft, unwrap


def value_model(model: nn.Module) -> nn.Module:
    """Return a copy of a causal language model of Transformers with a new head that gives one number per token, 0
    before training. The copy shares no weights with the model. Raises ValueError for a model with adapters or without
    output embeddings."""
    if is_peft(model):
        raise ValueError("the model has adapters: make the value model of its base, before get_peft_model(…)")
    inner: Any = unwrap(model)
    get_head = getattr(inner, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    if head is None:
        raise ValueError(f"{type(inner).__name__} has no output embeddings that a value head could replace")
    copied = copy.deepcopy(inner)
    config = copied.config.get_text_config()
    new = nn.Linear(head.weight.shape[1], 1, device=head.weight.device, dtype=head.weight.dtype)
    nn.init.zeros_(new.weight)
    nn.init.zeros_(new.bias)
    copied.set_output_embeddings(new)
    copied.config.tie_word_embeddings = config.tie_word_embeddings = False
    return copied.requires_grad_()


def token_values(module: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return the values f[T] of the states after each token of a batch, with gradient, on the module's device.

    module: called with input_ids i64[B, S], it returns f[B, S], f[B, S, 1], or an object with such `logits`, and the
    value at a position depends only on the tokens up to it. A model of Transformers is fed packed sequences if that
    gives the same results as each alone (`scoring_way`). A softcap in its configuration does not apply to values.
    Raises UnsupportedModelError for a model that attends to later positions, and ValueError for a token outside of its
    vocabulary, and for an output of another shape.
    """
    module = getattr(module, "_orig_mod", module)
    check_adapters(module)
    inner = transformers_model(module)
    check_vocabulary(inner, batch)
    get_head: Any = getattr(inner, "get_output_embeddings", lambda: None)
    way = scoring_way(inner, batch, _try_way if get_head() is None else try_way)
    with uncompiled(module, inner), without_softcap(inner) if isinstance(inner, PreTrainedModel) else nullcontext():
        return _compute(module, inner, batch, way, _values)


def _try_way(model: Any, batch: PackedBatch, way: Way) -> torch.Tensor:
    """Return the outputs f[T, …] of a model whose head is no language model's, such as one for token classification."""
    return _compute(model, model, batch, way, lambda out: out.logits)


def _compute(
    module: nn.Module, inner: nn.Module, batch: PackedBatch, way: Way, read: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Return the values f[T]. inner: the Transformers model inside the wrappers of `module`. read: converts an output
    of the module to the values f[B, S]."""
    device = next(module.parameters()).device
    if way in ("fused", "packed"):
        packed = pack_input(batch, device, states=has_states(inner))
        with packed_attention(inner) as packed_in_backward_too:
            values_1F = read(
                module(input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, packed=packed)
            )
            packed_in_backward_too(values_1F)
        return values_1F[0][packed.rows]
    batch = batch.to(device)
    options = {"use_cache": False} if hasattr(inner, "config") else {}
    if way == "alone":
        bounds = pairwise(batch.cu_seqlens.tolist())
        return torch.cat([read(module(input_ids=batch.input_ids[None, a:b], **options))[0] for a, b in bounds])
    rows, columns = batch.sequence_ids, batch.position_ids
    ids_BS = batch.input_ids.new_zeros(batch.num_sequences, int(columns.max()) + 1)
    ids_BS[rows, columns] = batch.input_ids  # Causality hides the padding on the right.
    return read(module(input_ids=ids_BS, **options))[rows, columns]


def _values(out: Any) -> torch.Tensor:
    """Return f[B, S] of a module's output, in fp32 or more precise."""
    values = out if isinstance(out, torch.Tensor) else out.logits
    values = values.squeeze(-1) if values.dim() == 3 else values
    if values.dim() != 2:
        raise ValueError(f"a critic's module gives one value per token, [B, S] or [B, S, 1], got {list(values.shape)}")
    return values.to(torch.promote_types(values.dtype, torch.float32))
