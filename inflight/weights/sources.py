"""What a publisher reads from a model of this process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from inflight.core.errors import InflightError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Welcome
from inflight.weights.comparison import EngineWeights
from inflight.weights.pace import Pace
from inflight.weights.tensors import fill, layout_of, published_tensors


class Offer(NamedTuple):
    """What a publisher offers to an engine: tensors of this layout, in the publisher's own dtypes."""

    layout: WeightLayout
    adapters: bool = False
    """True if they are adapters, and not weights."""
    aliases: bool = False
    """True if they may come under other names than the engine's."""


class Source(ABC):
    """Tensors that are published under names that the engine knows."""

    device: torch.device
    pace: Pace | None = None
    """How a copy is cut into pieces; None: not at all. It is for models that one process holds; other sources need not
    look at it."""

    @abstractmethod
    def offer(self, welcome: Welcome) -> Offer:
        """Return what fits this engine. Raises LayoutMismatchError if nothing does."""

    def compare(self, engine: EngineWeights) -> bool | None:
        """Return whether the engine computes with these tensors already; None if that is not known. Raises
        LayoutMismatchError if they would be wrong over the engine's weights."""
        return None

    def prepare(self) -> None:  # noqa: B027
        """Get ready for a `fill`; called by `publish()`. Raises LayoutMismatchError if the model no longer fits."""

    def start(self, engine: tuple[WeightLayout, int] | InflightError) -> object:  # noqa: B027
        """Tell other ranks the layout of the slots and the engine's version, or what kept the publisher from them."""

    @abstractmethod
    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy the tensors as they are now, cast to the dtypes of these views."""

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step of this optimizer changes tensors that may still be read."""
        return False

    def close(self) -> None:  # noqa: B027
        """Nothing will be copied any more."""


class ModelSource(Source):
    """A model of this process."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.device = next(model.parameters()).device

    def offer(self, welcome: Welcome) -> Offer:
        return Offer(layout_of(self._model))

    def compare(self, engine: EngineWeights) -> bool | None:
        return engine.begin_as(published_tensors(self._model).items())

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        fill(views, published_tensors(self._model), self.pace)

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
