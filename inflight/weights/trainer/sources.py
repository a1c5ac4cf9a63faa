"""Sources of published weights. A publisher copies from one; the kind of model decides which."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from inflight_kernels import copy_all

from inflight.core.errors import InflightError, LayoutMismatchError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Welcome
from inflight.weights.comparison import EngineWeights
from inflight.weights.tensors import CopyTensors, layout_of
from inflight.weights.trainer.published_model import PublishedModel, classify


class PublishedLayout(NamedTuple):
    """Tensors that a publisher offers to an engine, in the publisher's own dtypes."""

    layout: WeightLayout
    adapters: bool = False
    """True for adapters, False for weights."""
    aliases: bool = False
    """True if tensors can arrive under other names than the engine's."""


class WeightSource(ABC):
    """Tensors that are published under names of the engine."""

    device: torch.device
    copy: CopyTensors = staticmethod(copy_all)
    """Copies tensors of a model that one process holds. The publisher sets it; other sources can ignore it."""

    @abstractmethod
    def offer(self, welcome: Welcome) -> PublishedLayout:
        """Return a layout that fits this engine. Raises LayoutMismatchError if none does."""

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
        """Copy the current tensors into these views, cast to the dtypes of the views."""

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step of this optimizer changes tensors of this source."""
        return False

    def close(self) -> None:  # noqa: B027
        """Release other ranks. Nothing is copied later."""


class ModelSource(WeightSource):
    """A model whose tensors are whole in this process."""

    def __init__(self, model: PublishedModel):
        self._model = model
        self.device = model.device

    def offer(self, welcome: Welcome) -> PublishedLayout:
        return PublishedLayout(layout_of(self._model.tensors))

    def compare(self, engine: EngineWeights) -> bool | None:
        return engine.begin_as(self._model.tensors.items())

    def prepare(self) -> None:
        if self._model.has_changed():
            model = classify(self._model.root)
            if model.kind != self._model.kind:
                raise LayoutMismatchError(
                    f"the model was {self._model.kind!r} when its publisher was made, and is {model.kind!r} now; make "
                    "a new publisher"
                )
            self._model = model

    @torch.no_grad()
    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        tensors = self._model.tensors
        self.copy(list(views.values()), [tensors[name].detach() for name in views])

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(parameter) for parameter in self._model.root.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
