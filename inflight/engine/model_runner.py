"""Runs one packed forward pass of a schedule over the module of one slot."""

from collections.abc import Sequence as Seq

import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.core.errors import UnsupportedModelError
from inflight.engine.attention import ForwardBatch, record_layers, run_with_batch
from inflight.engine.kv_cache import KVCache, LayerShape
from inflight.engine.scheduler import Schedule


class ModelRunner:
    """Turns a schedule into tensors and tensors into logits. `modules[slot]` reads the weights of that slot."""

    def __init__(self, modules: Seq[nn.Module], cache: KVCache, device: torch.device):
        self._modules = list(modules)
        self._cache = cache
        self._device = device

    @torch.inference_mode()
    def forward(self, schedule: Schedule, slot: int) -> torch.Tensor:
        """Logits [N + P, V] for the token after the last one of each sequence, in the schedule's order."""
        decoding, joining = schedule.decoding, schedule.joining
        last_positions = [s.next_position - 1 for s in decoding]
        lengths = [len(s.prompt) for s in joining]
        token_ids = [s.tokens[-1] for s in decoding]
        positions = list(last_positions)
        ends = list(range(len(decoding)))
        for sequence, length in zip(joining, lengths, strict=True):
            token_ids += sequence.prompt
            positions += range(length)
            ends.append(len(token_ids) - 1)
        batch = ForwardBatch(
            cache=self._cache,
            decode_rows=self._tensor([s.row for s in decoding]),
            decode_positions=self._tensor(last_positions),
            prefill_rows=self._tensor([s.row for s in joining]),
            prefill_lengths=self._tensor(lengths),
            num_rows=decoding[-1].row + 1 if decoding else 0,
            longest_context=max(last_positions, default=-1) + 1,
            longest_prompt=max(lengths, default=0),
        )
        logits = run_with_batch(
            self._modules[slot],
            batch,
            input_ids=self._tensor([token_ids]),
            position_ids=self._tensor([positions]),
            logits_to_keep=self._tensor(ends),
        )
        return logits[0]

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer keeps per token, found by a forward pass over two tokens.

    Raises UnsupportedModelError, with their names, if some layers mix tokens without going through the attention
    interface (linear attention, Mamba, convolutions), or if the model cannot run packed at all.
    """
    device = next(model.parameters()).device
    positions = torch.arange(2, device=device)[None]
    try:
        recorded = record_layers(
            model, input_ids=torch.zeros_like(positions), position_ids=positions, logits_to_keep=positions[0, 1:]
        )
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run packed: {error}") from error
    layers = _decoder_layers(model)
    silent = [name for index, (name, _) in enumerate(layers) if index not in recorded]
    if silent or not recorded:
        named = ", ".join(f"{name} ({_mixer_name(layer)})" for name, layer in layers if name in silent)
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers that the engine cannot run: {named or 'all of them'}; "
            "it runs full and sliding attention that goes through the Transformers attention interface"
        )
    return [recorded[index] for index in range(len(recorded))]


def _decoder_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The longest list of equal length to the config's num_hidden_layers: the decoder's layers with their names."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [(f"{name}.{index}", layer) for index, layer in enumerate(module)]
    return []


def _mixer_name(layer: nn.Module) -> str:
    """The class of the layer's first child that is not a norm or an MLP: what mixes its tokens."""
    for child in layer.children():
        name = type(child).__name__
        if not any(word in name for word in ("Norm", "MLP", "Dropout")):
            return name
    return type(layer).__name__
