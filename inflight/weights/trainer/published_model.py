"""Classifies a model for publishing. One pass finds all that sources need to know of it."""

import operator
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from inflight.core.errors import LayoutMismatchError
from inflight.weights.tensors import published_tensors, unwrap
from inflight.weights.trainer.peft_layers import is_of_peft


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model as a publisher reads it."""

    root: nn.Module
    """The model without wrappers such as DistributedDataParallel."""
    kind: Literal["full", "fsdp", "zero", "peft"]
    """full: each tensor is whole in this process. fsdp: DTensors are spread over ranks. zero: DeepSpeed ZeRO-3 spreads
    tensors over ranks. peft: layers have adapters. They are published alone or merged, as the engine needs them."""
    tensors: dict[str, torch.Tensor]
    """Parameters and persistent buffers by published name, tied tensors once. Empty for "peft"."""
    objects: list[torch.Tensor]
    """Parameters and buffers when the model was classified."""

    @property
    def is_sharded(self) -> bool:
        return self.kind in ("fsdp", "zero")

    @property
    def device(self) -> torch.device:
        return next(self.root.parameters()).device

    def has_changed(self) -> bool:
        """Return whether the model has other parameters or buffers now. New values do not count."""
        now = _objects(self.root)
        return len(now) != len(self.objects) or not all(map(operator.is_, now, self.objects))


def classify(model: nn.Module) -> PublishedModel:
    """Classify a model. Raises LayoutMismatchError for adapters on a model that is spread over ranks."""
    root = unwrap(model)
    objects = _objects(root)
    kind = "full"
    if any(is_in_zero(tensor) for tensor in objects):
        kind = "zero"
    elif any(isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1 for tensor in objects):
        kind = "fsdp"
    if "peft" in sys.modules and any(is_of_peft(module) for module in root.modules()):
        if kind != "full":
            raise LayoutMismatchError(
                "adapters on a model that is spread over ranks cannot be published; shard the model without them, or "
                "train them on one rank"
            )
        kind = "peft"
    return PublishedModel(root, kind, {} if kind == "peft" else published_tensors(root), objects)


def is_in_zero(tensor: torch.Tensor) -> bool:
    """Return whether ZeRO-3 holds a tensor. ZeRO-3 leaves it empty, also on a single rank."""
    return hasattr(tensor, "ds_id")


def _objects(root: nn.Module) -> list[torch.Tensor]:
    return [*root.parameters(), *root.buffers()]
