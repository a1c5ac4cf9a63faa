"""The attention layers of a model, found by running it."""

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.core.errors import UnsupportedModelError
from inflight.engine.attention.backend import LayerShape
from inflight.engine.attention.hook import record_calls
from inflight.models.twin import first_line


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """What each attention layer keeps per token, in the order in which they run, found by a pass over two tokens.

    Raises UnsupportedModelError, with their names, if some layers mix tokens without going through the attention
    interface (linear attention, Mamba, convolutions) or let tokens see later ones, or if the model cannot run packed
    at all.
    """
    name = type(model).__name__
    device = next(model.parameters()).device
    positions = torch.arange(2, device=device)[None]
    try:
        calls = record_calls(
            model, input_ids=torch.zeros_like(positions), position_ids=positions, logits_to_keep=positions[0, 1:]
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be run: {error}") from error
    except Exception as error:  # a foreign model may raise anything
        raise UnsupportedModelError(
            f"{name} cannot be run over packed sequences ({type(error).__name__}: {first_line(error)})"
        ) from error
    attending = {id(call.module) for call in calls}
    silent = _without_attention(model, attending)
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
