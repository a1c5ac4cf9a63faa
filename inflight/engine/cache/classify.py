"""Decides which kind of state each layer of a model has, and refuses models with a layer of no kind."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inflight.core.by_name import load_by_name
from inflight.core.errors import ModelLoadError, UnsupportedModelError
from inflight.core.text import first_line, listed
from inflight.engine.cache.kinds import LayerKind, LayerShape, StateTensor
from inflight.engine.cache.transformers_states import TRANSFORMERS_STATES
from inflight.engine.model.attention.hook import Call, attend_to_all_keys, keep_latents, record_calls, route
from inflight.engine.model.attention.latent import LatentHeads
from inflight.model_checks.lengths import chooses_keys
from inflight.model_checks.mixers import is_older, needs_newer_transformers, newer_transformers

_PAGED_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Names in the config's `layer_types` of layers with keys and values."""
_STATELESS_TYPES = ("mlp", "moe")
"""Names of layers that mix no tokens."""
_SPARSE_TYPE_BEFORE, _SPARSE_SINCE = "deepseek_sparse_attention", "5.18"
"""Name of sparse attention before this version of Transformers, without the attention interface."""
OUR_KINDS = (TRANSFORMERS_STATES,)
"""Kinds of layers with a state per sequence that need no name in `EngineOptions.layer_kinds`."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model by kind of state, in the order in which they run."""

    attention: list[LayerShape]
    """Keys and values of each attention layer."""
    states: list[tuple[StateTensor, ...]]
    """The state of each layer that keeps one per sequence."""


def load_kinds(names: Sequence[str]) -> list[LayerKind]:
    """Return the kinds of layers that `EngineOptions.layer_kinds` names, and then our own. Raises ModelLoadError."""
    kinds = []
    for name in names:
        try:
            kind = load_by_name(name)
        except Exception as error:  # a user's module may raise anything
            raise ModelLoadError(
                f"layer_kinds={name!r} cannot be imported in the engine ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(kind, LayerKind):
            raise ModelLoadError(f"layer_kinds={name!r} names a {type(kind).__name__}; it must name a LayerKind")
        kinds.append(kind)
    return [*kinds, *OUR_KINDS]


def check_layer_types(config: PretrainedConfig, kinds: Sequence[LayerKind] = OUR_KINDS) -> None:
    """Raise UnsupportedModelError if a text model's config names a layer of no kind, before its weights are loaded."""
    known = {*_PAGED_TYPES, *_STATELESS_TYPES, *(name for kind in kinds for name in kind.layer_types)}
    known |= {"indexed_attention"} if chooses_keys(config) else set()
    layer_types = getattr(config, "layer_types", None) or []
    bad = [f"layer {i}: {kind}" for i, kind in enumerate(layer_types) if kind not in known]
    if bad:
        way_out = f"it runs {', '.join(sorted(known))}"
        if _SPARSE_TYPE_BEFORE in layer_types and is_older(_SPARSE_SINCE):
            way_out = newer_transformers("layers with sparse attention", _SPARSE_SINCE)
        raise UnsupportedModelError(
            f"{config.model_type} has layers that the engine cannot run ({listed(bad, 6)}); {way_out}"
        )


@torch.inference_mode()
def classify_layers(model: PreTrainedModel, kinds: Sequence[LayerKind] = OUR_KINDS) -> Layers:
    """Return the layers of a model by kind, found by a pass over two tokens. kinds: kinds of layers with a state per
    sequence. Modules of these kinds compute from such states during passes from now on, modules with latent attention
    keep latents, and modules with sparse attention attend to all keys.

    Raises UnsupportedModelError, with their names, if some layers mix tokens without going through the attention
    interface (linear attention, Mamba, convolutions) or attend to later tokens, or if the model cannot run packed
    at all.
    """
    name = type(model).__name__
    for module in model.modules():
        if (kind := next((kind for kind in kinds if kind.detect(module)), None)) is not None:
            route(module, kind)
        elif needs_newer_transformers(module):
            raise UnsupportedModelError(
                f"{name} has layers that the engine cannot run: {type(module).__name__}; "
                + newer_transformers("layers with a state")
            )
        elif LatentHeads.of(module) is not None:
            keep_latents(module)
    try:
        attend_to_all_keys(model)
        calls = record_calls(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be run: {error}") from error
    except Exception as error:  # a foreign model may raise anything
        raise UnsupportedModelError(
            f"{name} cannot be run over packed sequences ({type(error).__name__}: {first_line(error)})"
        ) from error
    silent = _without_state(model, calls)
    if silent or not calls:
        named = ", ".join(f"{layer_name} ({_mixer_name(layer)})" for layer_name, layer in silent)
        raise UnsupportedModelError(
            f"{name} has layers that the engine cannot run: {named or 'all of them'}; "
            "it runs full and sliding attention that goes through the Transformers attention interface, and layers "
            "that keep their state in the cache of Transformers"
        )
    if any(call.sees_later for call in calls):
        raise UnsupportedModelError(
            f"{name} is no causal decoder: its tokens attend to later ones, as in an encoder "
            "(BERT and its family attend to earlier tokens alone with is_decoder=true in config.json)"
        )
    return Layers([call.shape for call in calls if call.shape], [call.state for call in calls if call.shape is None])


def _without_state(model: PreTrainedModel, calls: list[Call]) -> list[tuple[str, nn.Module]]:
    """Return the decoder's layers, with their names, in which no module made one of these calls. Of several lists with
    num_hidden_layers layers, such as a tower for images, the decoder has the fewest layers without a call."""
    called = {id(call.module) for call in calls}
    config = model.config.get_text_config()
    count, layer_types = getattr(config, "num_hidden_layers", None), getattr(config, "layer_types", None) or ()
    stateless = {index for index, layer_type in enumerate(layer_types) if layer_type in _STATELESS_TYPES}
    found: list[list[tuple[str, nn.Module]]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            layers = [(f"{name}.{index}", layer) for index, layer in enumerate(module) if index not in stateless]
            found.append([pair for pair in layers if not any(id(part) in called for part in pair[1].modules())])
    return min(found, key=len, default=[])


def _mixer_name(layer: nn.Module) -> str:
    """Return the class of the layer's first child that is not a norm or an MLP: the child that mixes tokens."""
    for child in layer.children():
        name = type(child).__name__
        if not any(word in name for word in ("Norm", "MLP", "Dropout")):
            return name
    return type(layer).__name__
