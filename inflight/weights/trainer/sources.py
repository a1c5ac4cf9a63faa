"""Sources of published weights. A model is classified once, and its kind selects the source."""

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from inflight.core.errors import InflightError, LayoutMismatchError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Welcome
from inflight.core.text import listed
from inflight.weights.comparison import EngineWeights
from inflight.weights.tensor_names import EngineNames
from inflight.weights.tensors import fill, layout_of, published_tensors, unwrap
from inflight.weights.trainer.peft_layers import is_of_peft


class WeightSource(ABC):
    """Tensors that are published under names of the engine."""

    device: torch.device
    adapters: bool = False
    """True if the tensors are adapters, False if they are weights. Read after `offer`, which can set it."""
    aliases: bool = False
    """True if tensors can arrive under other names than the engine's."""

    @abstractmethod
    def offer(self, welcome: Welcome) -> WeightLayout:
        """Return a layout that fits this engine, in the dtypes of the source. Raises LayoutMismatchError if none
        does."""

    def compare(self, engine: EngineWeights) -> bool | None:
        """Return whether the engine already has these tensors; None if unknown. Raises LayoutMismatchError if they
        would be wrong over the engine's weights."""
        return None

    def prepare(self) -> None:  # noqa: B027
        """Prepare for a `fill`. `publish()` calls it. Raises LayoutMismatchError if the model no longer fits."""

    def start(self, engine: tuple[WeightLayout, int] | InflightError) -> object:  # noqa: B027
        """Send other ranks the layout of the slots and the engine's version, or the error that ended the attempt."""

    @abstractmethod
    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy the current tensors into these views, cast to the dtypes of the views. For a publish of one adapter the
        views are the views of its tensors."""

    def publishes(self, tensors: Iterable[torch.Tensor]) -> bool | None:
        """Return whether some of these tensors are published; None if that is unknown."""
        return None

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step of this optimizer changes tensors of this source."""
        return False

    def adapters_changed_by(self, optimizer: torch.optim.Optimizer) -> Collection[str]:
        """Return the adapters that the next step of this optimizer changes; empty: all that is published."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Release other ranks. Nothing is copied later."""


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

    def named_for(self, engine: WeightLayout) -> "PublishedModel":
        """Return this model with the engine's names of its tensors, in the same order. If two tensors would get one
        name, all names stay."""
        names = EngineNames(spec.name for spec in engine.tensors)
        tensors = {names(name): tensor for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors) if len(tensors) == len(self.tensors) else self

    def has_changed(self) -> bool:
        """Return whether the model has other parameters or buffers now. New values do not count."""
        return not same_objects(self.objects, _objects(self.root))


def classify(model: nn.Module) -> PublishedModel:
    """Classify a model. Raises LayoutMismatchError for adapters on a model that is spread over ranks."""
    root = unwrap(model)
    has_adapters = "peft" in sys.modules and any(is_of_peft(module) for module in root.modules())
    # This shards FSDP2's parameters again that a forward pass has left whole.
    tensors = {} if has_adapters else published_tensors(root)
    objects = _objects(root)
    kind = "full"
    if any(is_in_zero(tensor) for tensor in objects):
        kind = "zero"
    elif any(isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1 for tensor in objects):
        kind = "fsdp"
    if has_adapters:
        if kind != "full":
            raise LayoutMismatchError(
                "adapters on a model that is spread over ranks cannot be published; shard the model without them, or "
                "train them on one rank"
            )
        kind = "peft"
    return PublishedModel(root, kind, tensors, objects)


def is_in_zero(tensor: torch.Tensor) -> bool:
    """Return whether ZeRO-3 holds a tensor. ZeRO-3 leaves it empty, also on a single rank."""
    return hasattr(tensor, "ds_id")


def same_objects(before: list, now: list) -> bool:
    """Compare objects by identity. `before` keeps its objects alive, so no new one has the same address."""
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _objects(root: nn.Module) -> list[torch.Tensor]:
    return [*root.parameters(), *root.buffers()]


class ModelSource(WeightSource):
    """A model whose tensors are whole in this process."""

    def __init__(self, model: PublishedModel):
        self._model = model
        self._engine_layout: WeightLayout | None = None
        self._layout: WeightLayout | None = None
        """The layout that was offered."""
        self.device = next(model.root.parameters()).device

    def offer(self, welcome: Welcome) -> WeightLayout:
        if absent := [name for name, tensor in self._model.tensors.items() if tensor.is_meta]:
            raise LayoutMismatchError(f"{listed(absent)}: on the meta device, without values, as offloading leaves it")
        self._engine_layout, self._model = welcome.layout, self._model.named_for(welcome.layout)
        self._layout = layout_of(self._model.tensors)
        return self._layout

    def compare(self, engine: EngineWeights) -> bool | None:
        return engine.begin_as(self._model.tensors.items())

    def prepare(self) -> None:
        if self._model.has_changed() or self._is_resized():
            model = classify(self._model.root)
            model = model.named_for(self._engine_layout) if self._engine_layout else model
            if model.kind != self._model.kind:
                raise LayoutMismatchError(
                    f"the model was {self._model.kind!r} when its publisher was made, and is {model.kind!r} now; make "
                    "a new publisher"
                )
            difference = self._layout and self._layout.difference(
                layout_of(model.tensors), ours="the model when its publisher was made", theirs="the model now"
            )
            if difference:
                raise LayoutMismatchError(f"the model has other tensors now: {difference}; make a new publisher")
            self._model = model

    def _is_resized(self) -> bool:
        """Return whether a parameter has another shape than offered. `resize_token_embeddings` keeps its object."""
        if self._layout is None or self._model.kind != "full":  # ZeRO-3 empties parameters
            return False
        shapes = {spec.name: spec.shape for spec in self._layout.tensors}
        return any(tensor.shape != shapes[name] for name, tensor in self._model.tensors.items())

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        fill(views, self._model.tensors)

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step of this optimizer changes the model. With ZeRO-3 any optimizer might: ZeRO-3 writes the
        parameters from separate copies."""
        return self._model.kind == "zero" or self.publishes(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        )

    def publishes(self, tensors: Iterable[torch.Tensor]) -> bool:
        ours = {id(tensor) for tensor in (*self._model.root.parameters(), *self._model.tensors.values())}
        return any(id(tensor) in ours for tensor in tensors)
