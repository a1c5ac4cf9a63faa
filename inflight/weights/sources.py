"""What a publisher reads: a model in this process, or the part of this rank of one that is spread over several."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from inflight.core.errors import InflightError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Welcome
from inflight.weights.sharded import ShardGroup
from inflight.weights.tensors import fill, layout_of, published_tensors


@dataclass(frozen=True, slots=True)
class Offer:
    """What a publisher offers an engine: tensors of this layout, in the publisher's own dtypes."""

    layout: WeightLayout
    adapters: bool = False
    """Whether they are adapters, and not weights."""
    aliases: bool = False
    """Whether they may come under other names than the engine's."""


class Source(Protocol):
    """Tensors that are published under names that the engine knows."""

    device: torch.device

    def offer(self, welcome: Welcome) -> Offer:
        """What fits this engine. Raises LayoutMismatchError if nothing does."""
        ...

    def start(self, engine: tuple[WeightLayout, int] | InflightError) -> None:
        """The layout of the slots and the version that the engine has, or what kept the publisher from them."""

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy the tensors as they are now, cast to the dtypes of these views."""

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of this optimizer changes some of the tensors."""
        ...

    def close(self) -> None:
        """Nothing will be copied any more."""


class ModelSource:
    """A model of this process."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.device = next(model.parameters()).device

    def offer(self, welcome: Welcome) -> Offer:
        return Offer(layout_of(self._model))

    def start(self, engine: tuple[WeightLayout, int] | InflightError) -> None:
        """Nobody else is to know."""

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        fill(views, published_tensors(self._model))

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def close(self) -> None:
        """Nothing is held."""


class ShardedSource:
    """Rank 0 of a model that is spread over ranks; a ShardSender is on each of the others."""

    def __init__(self, model: nn.Module):
        self._group = ShardGroup(model)
        self._layout = layout_of(model)
        self.device = next(model.parameters()).device

    def offer(self, welcome: Welcome) -> Offer:
        return Offer(self._layout)

    def start(self, engine: tuple[WeightLayout, int] | InflightError) -> None:
        self._group.introduce(engine)

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        self._group.command(version)
        self._group.receive(views)

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._group.holds(optimizer)

    def close(self) -> None:
        self._group.command()
