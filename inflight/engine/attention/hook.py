"""The engine's attention inside Transformers models, through `AttentionInterface`.

The model sees one row of packed tokens, [1, T]. Which sequences they belong to, and where keys and values go, is in
the ForwardBatch that is current while it runs. The n-th call of a pass belongs to the n-th attention layer. Which
layers there are is found by running the model (`probe_layers`).
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from inflight.core.errors import UnsupportedModelError
from inflight.engine.attention.backend import ForwardBatch, KVMemory, LayerShape
from inflight.models.masks import BOTH_SIDES, mask_note, noted
from inflight.models.twin import first_line

ATTENTION_NAME = "inflight"


@dataclass(slots=True)
class _Pass:
    batch: ForwardBatch
    memory: KVMemory
    calls: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call of attention asked for in a probe."""

    module: nn.Module
    shape: LayerShape
    sees_later: bool
    """Tokens attend to those behind them, as in an encoder."""


_current: ContextVar[_Pass | list[_Call] | None] = ContextVar("inflight_pass", default=None)
"""What calls of attention belong to: a pass, or a probe, whose calls are listed."""


def run_packed(model: nn.Module, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
    """The model's logits [M, V] for a batch that the memory's backend has begun."""
    token = _current.set(_Pass(batch, memory))
    try:
        logits = model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            logits_to_keep=batch.rows,
            use_cache=False,
        ).logits[0]
    finally:
        _current.reset(token)
    return logits if len(logits) == len(batch.rows) else logits[batch.rows]  # some models give all of them


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """What each attention layer keeps per token, in the order in which they run, found by a pass over two tokens.

    Raises UnsupportedModelError, with their names, if some layers mix tokens without going through the attention
    interface (linear attention, Mamba, convolutions) or let tokens see later ones, or if the model cannot run packed
    at all.
    """
    name = type(model).__name__
    positions = torch.arange(2, device=next(model.parameters()).device)[None]
    calls: list[_Call] = []
    token = _current.set(calls)
    # Transformers asks for masks only where an attention has a function for them. Ours notes what a mask would show.
    functions = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping  # where Transformers itself looks
    functions[ATTENTION_NAME] = mask_note
    try:
        model(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            logits_to_keep=positions[0, 1:],
            use_cache=False,
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be run: {error}") from error
    except Exception as error:  # a foreign model may raise anything
        raise UnsupportedModelError(
            f"{name} cannot be run over packed sequences ({type(error).__name__}: {first_line(error)})"
        ) from error
    finally:
        del functions[ATTENTION_NAME]
        _current.reset(token)
    silent = _without_attention(model, {id(call.module) for call in calls})
    if silent or not calls:
        named = ", ".join(f"{layer_name} ({_mixer_name(layer)})" for layer_name, layer in silent)
        raise UnsupportedModelError(
            f"{name} has layers that the engine cannot run: {named or 'all of them'}; "
            "it runs full and sliding attention that goes through the Transformers attention interface"
        )
    if any(call.sees_later for call in calls):
        raise UnsupportedModelError(
            f"{name} is no causal decoder: its tokens attend to those behind them, as in an encoder "
            "(BERT and its family attend to earlier tokens alone with is_decoder=true in config.json)"
        )
    return [call.shape for call in calls]


def _without_attention(model: PreTrainedModel, attending: set[int]) -> list[tuple[str, nn.Module]]:
    """The decoder's layers, with their names, in which no module of these ids lies. The decoder is, of the lists as
    long as the config's num_hidden_layers, the one that misses the fewest: towers for images have layers, too."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found: list[list[tuple[str, nn.Module]]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            layers = [(f"{name}.{index}", layer) for index, layer in enumerate(module)]
            found.append([pair for pair in layers if not any(id(part) in attending for part in pair[1].modules())])
    return min(found, key=len, default=[])


def _mixer_name(layer: nn.Module) -> str:
    """The class of the layer's first child that is not a norm or an MLP: what mixes its tokens."""
    for child in layer.children():
        name = type(child).__name__
        if not any(word in name for word in ("Norm", "MLP", "Dropout")):
            return name
    return type(layer).__name__


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls: query [1, Hq, T, D] → output [1, T, Hq, Dv]."""
    current = _current.get()
    if isinstance(current, list):
        note = noted(attention_mask, type(module).__name__)
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        shape = LayerShape(
            q_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            window=sliding_window if note is None else note or None,
            dtype=key.dtype,
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            softcap=softcap,
            sinks=s_aux is not None,
        )
        current.append(_Call(module, shape, note == BOTH_SIDES or (note is None and not causal)))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    if current is None:
        raise RuntimeError("the engine's attention runs inside run_packed")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} hands a mask of its own to its attention")
    layer = current.calls
    current.calls += 1
    memory = current.memory
    cache_index = current.batch.cache_index[memory.group_of[layer]]
    where = (cache_index // memory.block_size, cache_index % memory.block_size)
    memory.keys[layer][where] = key[0].transpose(0, 1)
    memory.values[layer][where] = value[0].transpose(0, 1)
    return memory.backend.attend(layer, query[0].transpose(0, 1), s_aux)[None], None


AttentionInterface.register(ATTENTION_NAME, attend)
