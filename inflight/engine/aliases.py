"""Other names of a model's tensors: those of tied tensors, and those under which checkpoints hold them.

Transformers gives some tensors of a checkpoint other names when it loads them, and puts others together: the experts of
a layer become one tensor. What it does to a model's tensors when it saves them says which part of which tensor goes by
which name; it is run here on tensors without values, whose views tell where they begin and how they lie.
"""

import logging
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from inflight.core.layout import Alias
from inflight.weights.tensors import published_tensors

logger = logging.getLogger("inflight.engine")


def aliases_of(model: PreTrainedModel) -> list[Alias]:
    """All names of the model's tensors, and of parts of them, that are not those of its layout."""
    tensors = published_tensors(model)
    own = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    published = [(name, names[id(tensor)]) for name, tensor in every if id(tensor) in names]
    tied = [_alias(name, tensor, own[tensor]) for name, tensor in published if name != tensor]
    return tied + _in_checkpoints(model, own)


def _in_checkpoints(model: PreTrainedModel, own: dict[str, torch.Tensor]) -> list[Alias]:
    names = {id(tensor): name for name, tensor in own.items()}
    try:
        from transformers.core_model_loading import revert_weight_conversion

        with _Views():
            saved = revert_weight_conversion(model, own)
    except Exception as error:  # of whatever version of Transformers is installed
        logger.warning("weights can be published under the model's own names alone: %r", error)
        return []
    aliases = []
    for name, part in saved.items():
        tensor = names.get(id(part)) or names.get(id(part._base))  # none for what is put together of several tensors
        if name not in own and tensor is not None:
            aliases.append(_alias(name, tensor, part))
    return aliases


def _alias(name: str, tensor: str, part: torch.Tensor) -> Alias:
    return Alias(name, tensor, tuple(part.shape), part.stride(), int(part.storage_offset()))


class _Views(TorchFunctionMode):
    """What is split off a tensor stays a view of it: nothing is made contiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
