"""Other names of a model's tensors: names of tied tensors, and names in checkpoints.

Transformers renames some tensors of a checkpoint when it loads them, and merges others: the experts of a layer become
one tensor. Its conversion for saving shows the checkpoint name of each part of each tensor. That conversion runs here
on tensors without values, and the resulting views have the offset and the strides of each part.
"""

import logging
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from inflight.core.layout import Alias
from inflight.weights.tensors import published_tensors
from inflight.weights.towers import towers_of

logger = logging.getLogger("inflight.engine")


def aliases_of(model: PreTrainedModel) -> list[Alias]:
    """Return all names of the model's tensors, and of parts of them, that are not in its layout."""
    own, names = _empty(model), {id(tensor): name for name, tensor in published_tensors(model).items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    published = [(name, names[id(tensor)]) for name, tensor in every if id(tensor) in names]
    tied = [_alias(name, tensor, own[tensor]) for name, tensor in published if name != tensor]
    return tied + checkpoint_aliases(model)


def checkpoint_aliases(model: PreTrainedModel) -> list[Alias]:
    """Return the names in checkpoints, of the model's tensors and of parts of them, that are not in its layout."""
    own = _empty(model)
    names = {id(tensor): name for name, tensor in own.items()}
    aliases = []
    for name, part in _saved(model, own).items():
        tensor = names.get(id(part)) or names.get(id(part._base))  # none for tensors that are joined from several
        if name not in own and tensor is not None:
            aliases.append(_alias(name, tensor, part))
    return aliases


def ignored_aliases(model: PreTrainedModel) -> list[Alias]:
    """Return all names of the tensors of a model's towers, as aliases of no tensor."""
    towers = towers_of(model)
    own = {n: torch.empty(t.shape, device="meta") for n, t in model.state_dict().items() if n in towers}
    return [Alias(name, "", (), (), 0) for name in {**own, **_saved(model, own)}]


def _saved(model: PreTrainedModel, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return these tensors under the names that they have in checkpoints."""
    try:
        from transformers.core_model_loading import revert_weight_conversion

        with _Views():
            return revert_weight_conversion(model, own)
    except Exception as error:  # depends on the installed version of Transformers
        logger.warning("weights can be published under the model's own names alone: %r", error)
        return {}


def _empty(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the published tensors of a model without values."""
    tensors = published_tensors(model)
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}


def _alias(name: str, tensor: str, part: torch.Tensor) -> Alias:
    return Alias(name, tensor, tuple(part.shape), part.stride(), int(part.storage_offset()))


class _Views(TorchFunctionMode):
    """Keeps parts that are split off a tensor as views of it: nothing is made contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
